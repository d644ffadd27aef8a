# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Controller side of sglang_units: render the templates, call the module, say what is going on meanwhile."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._render import RenderError, render, server_files
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._stall import Stalls

display = Display()

SLICE_SECONDS = 5.0


class ActionModule(ActionBase):
    """Render, install, start; wait in slices until systemd has done its jobs."""

    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the action; the result is the module's, with invocations added."""
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        args = dict(self._task.args)
        state = args.get("state", "started")
        if state == "started" and args.get("unit_template"):
            try:
                args.update(self._rendered(args))
            except RenderError as exc:
                raise AnsibleActionFail(str(exc)) from exc
        args.pop("secret_environment", None)
        if state == "drained":
            return {**result, **self._drain(args, task_vars)}
        if state == "absent":
            # Nothing is lost: requests are answered before the files go.
            stopped = self._call({**args, "state": "stopped"}, task_vars)
            if stopped.get("failed"):
                return {**result, **stopped}
            self._settle(stopped, args, task_vars)
            removed = self._call(args, task_vars)
            removed["changed"] = removed.get("changed", False) or stopped.get("changed", False)
            return {**result, **removed}
        done = self._call(args, task_vars)
        if not done.get("failed") and not self._task.check_mode:
            done["invocations"] = self._settle(done, args, task_vars)
        return {**result, **done}

    def _rendered(self, args: dict[str, Any]) -> dict[str, Any]:
        """Render every wanted server and the target."""
        templates = {
            name: self._find_needle("templates", args[name])
            for name in ("unit_template", "environment_template", "target_template")
        }
        variables = {**args.get("variables", {}), "config_dir": args.get("config_dir", "/etc/sglang")}
        variables["target"] = args.get("target", "sglang.target")
        rendered: dict[str, Any] = {}
        secrets: dict[str, str] = {}
        for instance in args.get("instances", []):
            if args.get("units") and instance["unit"] not in args["units"]:
                continue
            files, secret, digest = server_files(
                instance,
                templates["unit_template"],
                templates["environment_template"],
                variables,
                args.get("secret_environment") or {},
            )
            rendered[instance["unit"]] = {"files": files, "digest": digest}
            secrets[instance["unit"]] = secret
        target = render(templates["target_template"], variables)
        rendered[""] = {
            "files": [{"path": f"/etc/systemd/system/{variables['target']}", "content": target, "mode": "0644"}]
        }
        return {"rendered": rendered, "rendered_secrets": secrets}

    def _call(self, args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        called: dict[str, Any] = self._execute_module(
            module_name="gpufleet.sglang.sglang_units", module_args=args, task_vars=task_vars
        )
        return called

    def _drain(self, args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        """Take servers out of service and wait in slices; one line when it begins, and per slice with requests left."""
        host = task_vars.get("inventory_hostname", "")
        begun = time.monotonic()
        stalls = Stalls(_stall_timeout(args))
        while True:
            told = self._call({**args, "begun": time.monotonic() - begun, "slice_seconds": SLICE_SECONDS}, task_vars)
            if told.get("failed") or self._task.check_mode:
                return told
            left = {unit: count for unit, count in told["requests"].items() if count}
            now = time.monotonic()
            waited = f"{now - begun:.0f} s"
            # those that stand still are left to their own stop, which is cut short for them
            still = stalls.still(told["signs"], now)
            if told["drained"] or (left and set(left) <= set(still)):
                rest = f"; still at work, their own stop waits for them: {_counts(left)}" if left else ""
                if told["requests"]:
                    display.display(f"{host}: out of service after {waited}: {', '.join(told['requests'])}{rest}")
                return told
            display.display(f"{host}: waiting for requests: {_counts(left) or 'none left'} ({waited})")

    def _settle(self, done: dict[str, Any], args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, str]:
        """Wait for the jobs that a call queued, one line per change; returns InvocationID by unit started."""
        actions = {item["unit"]: item["action"] for item in done.get("units", []) if item["action"] != "none"}
        if not actions or self._task.check_mode:
            return {}
        host = task_vars.get("inventory_hostname", "")
        for item in done["units"]:
            if item["action"] != "none":
                display.display(f"{host} GPU {item['gpu']} {item['unit']}: {item['action']} ({item['reason']})")
        invocations: dict[str, str] = {}
        before = {unit: done["before"].get(unit, "") for unit in actions}
        begun = time.monotonic()
        stalls = Stalls(_stall_timeout(args))
        stalled: list[str] = []
        while True:
            told = self._call(
                {
                    "state": "settled",
                    "instances": args.get("instances", []),
                    "config_dir": args.get("config_dir", "/etc/sglang"),
                    "before": before,
                    "actions": actions,
                    "stalled": stalled,
                    "slice_seconds": SLICE_SECONDS,
                },
                task_vars,
            )
            if told.get("failed"):
                raise AnsibleError(f"{host}: {told.get('msg')}")
            invocations.update(told["invocations"])
            before = {unit: before[unit] for unit in told["pending"]}
            waited = time.monotonic() - begun
            if told["settled"]:
                return invocations
            if waited > int(args.get("settle_timeout", 420)):
                raise AnsibleActionFail(
                    f"{host}: systemd has not finished with {', '.join(told['pending'])} after {waited:.0f} s;"
                    f" see: systemctl list-jobs; journalctl -u {told['pending'][0]}"
                )
            stalled = stalls.still(told["signs"], time.monotonic())
            for unit in stalled:
                display.display(f"{host} {unit}: no sign of progress for {stalls.limit:.0f} s while it stops: killed")
            display.display(f"{host}: waiting for systemd: {', '.join(told['pending'])} ({waited:.0f} s)")


def _stall_timeout(args: dict[str, Any]) -> float:
    return float(args.get("stall_timeout", 60))


def _counts(left: dict[str, int]) -> str:
    return ", ".join(f"{unit} {count}" for unit, count in left.items())
