# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait in slices: a module cannot print while it runs, this can between two of its runs."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.gpufleet.sglang.plugins.module_utils._health import failure_message
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._lost import over_losses
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._progress import Progress

SLICE = 5.0  # s a run of the module lasts; longer only for an answer that is on its way
INTERNAL = ("watch_state", "done")

display = Display()


class ActionModule(ActionBase):
    """Runs the module of the same name once, or again and again until nothing is left to wait for."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module's documentation."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        host = task_vars.get("inventory_hostname", "")
        args = {key: value for key, value in self._task.args.items() if key not in ("slice_seconds", "watch_state")}
        if self._task.check_mode or not _true(args.get("wait")):
            return _finish(self._module(args, task_vars), host)
        progress = Progress(time.monotonic())
        result = self._wait(args, task_vars, host, progress)
        if _true(args.get("retry_transient")):
            result = self._retry(result, args, task_vars, host, progress)
        if any(server["state"] != "ready" for server in result["servers"]):
            result["failed"] = True
            result.setdefault("msg", failure_message(result["servers"]))
        return result

    def _retry(
        self, result: dict[str, Any], args: dict[str, Any], task_vars: dict[str, Any], host: str, progress: Progress
    ) -> dict[str, Any]:
        """Start once more, one by one, what failed for a reason that passes; everything else stays as it is."""
        for at, server in enumerate(result["servers"]):
            found = server.get("diagnosis") or {}
            if server["state"] == "ready" or found.get("retry") != "auto":
                continue
            display.display(f"{host} GPU {server['gpu']} {server['unit']}: started once more ({found['code']})")
            again = self._restart(server["unit"], task_vars)
            waited = self._wait({**args, "units": [server["unit"]], "invocations": again}, task_vars, host, progress)
            result["changed"] = True
            if waited["servers"]:
                result["servers"][at] = {**waited["servers"][0], "retried": found["code"]}
        return result

    def _restart(self, unit: str, task_vars: dict[str, Any]) -> dict[str, str]:
        """Restart a unit; returns its InvocationID by its name."""
        systemctl = "ansible.builtin.command"
        for words in (["reset-failed", unit], ["restart", unit]):
            self._execute_module(
                module_name=systemctl, module_args={"argv": ["systemctl", *words]}, task_vars=task_vars
            )
        told = self._execute_module(
            module_name=systemctl,
            module_args={"argv": ["systemctl", "show", "--property=InvocationID", "--value", unit]},
            task_vars=task_vars,
        )
        found = str(told.get("stdout", "")).strip()
        return {unit: found} if found else {}

    def _wait(self, args: dict[str, Any], task_vars: dict[str, Any], host: str, progress: Progress) -> dict[str, Any]:
        """Run slices until nothing is left to wait for."""
        state: Mapping[str, Any] = {}
        while True:
            given = {**args, "slice_seconds": SLICE, "watch_state": state}
            result = over_losses(
                functools.partial(self._module, given, task_vars),
                self._connection,
                lambda text: display.display(f"{host}: {text}"),
            )
            if result.get("failed") or "watch_state" not in result:
                return _finish(result, host)
            state, done = result["watch_state"], result["done"]
            result = _finish(result, host)
            for line in progress.update(result["servers"], time.monotonic()):
                display.display(line)
            if done:
                return result

    def _module(self, args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = self._execute_module(
            module_name="gpufleet.sglang.sglang_health", module_args=args, task_vars=task_vars
        )
        return told


def _finish(result: dict[str, Any], host: str) -> dict[str, Any]:
    """Take out what only slices need, and call the host what the inventory calls it."""
    kept = {key: value for key, value in result.items() if key not in INTERNAL}
    kept["servers"] = [{**server, "host": host} for server in kept.get("servers") or []]
    kept.setdefault("changed", False)
    return kept


def _true(value: Any) -> bool:
    return value is not None and boolean(value, strict=False)
