# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait in slices for kernels that are built: a module cannot print while it runs, this can between two of its runs."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._lost import over_losses

SLICE = 5.0  # s a run of the module lasts
HEARTBEAT = 30.0  # s of silence
INTERNAL = ("watch_state", "progress")

display = Display()


class ActionModule(ActionBase):
    """Runs the module of the same name again and again until nothing is left to wait for."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module's documentation."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        host = task_vars.get("inventory_hostname", "")
        args = {key: value for key, value in self._task.args.items() if key not in ("slice_seconds", "watch_state")}
        watch: dict[str, Any] = {}
        began = spoke = time.monotonic()
        while True:
            result = self._slice({**args, "slice_seconds": SLICE, "watch_state": watch}, task_vars, host)
            now = time.monotonic()
            lines = [str(line) for line in result.get("progress") or []]
            if not lines and "watch_state" in result and now - spoke >= HEARTBEAT:
                lines = [f"kernels are being built for {now - began:.0f} s"]
            for line in lines:
                display.display(f"{host}: {line}")
                spoke = now
            if result.get("failed") or not result.get("watch_state"):
                return {key: value for key, value in result.items() if key not in INTERNAL}
            watch = result["watch_state"]

    def _slice(self, args: dict[str, Any], task_vars: dict[str, Any], host: str) -> dict[str, Any]:
        """Run one slice."""
        name = "gpufleet.sglang.flashinfer_jit_warm"
        return over_losses(
            lambda: self._execute_module(module_name=name, module_args=args, task_vars=task_vars),
            self._connection,
            lambda text: display.display(f"{host}: {text}"),
        )
