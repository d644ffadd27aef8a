# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Controller side of sglang_lock: who asks, and whether a holder on this controller is still alive."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._run import is_alive, this_run

display = Display()


class ActionModule(ActionBase):
    """Asks once; when a run of this controller holds the lock and is gone, once more to take it over."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module's documentation."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        me = this_run()
        args = {**self._task.args, **me}
        result: dict[str, Any] = self._execute_module(
            module_name="gpufleet.sglang.sglang_lock", module_args=args, task_vars=task_vars
        )
        holder = result.get("holder") or {}
        ours = bool(me["controller"]) and holder.get("controller") == me["controller"]
        if result.get("failed") and ours and not is_alive(str(holder.get("run"))):
            args["alive"] = {holder["run"]: False}
            result = self._execute_module(
                module_name="gpufleet.sglang.sglang_lock", module_args=args, task_vars=task_vars
            )
        if result.get("taken_over"):
            host = task_vars.get("inventory_hostname", "")
            display.display(f"{host}: the lock of a run that is gone was taken over: {result['taken_over']}")
        return result
