# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Show what the hosts of a play found out about their servers; runs on the controller alone."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._report import collect, summary, table, to_json

ARGUMENTS = {
    "results": {"type": "str", "default": "sglang_health"},
    "hosts": {"type": "list", "elements": "str"},
    "servers": {"type": "list", "elements": "dict"},
    "table": {"type": "bool", "default": True},
    "width": {"type": "int", "default": 120},
    "json_file": {"type": "path"},
}

display = Display()


class ActionModule(ActionBase):
    """Formats, prints and writes; changes nothing on any host and fails for no missing figure."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """See the module's documentation."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        _checked, args = self.validate_argument_spec(ARGUMENTS)
        here = task_vars.get("inventory_hostname", "")
        if args["servers"] is not None:
            rows = collect([here], {here: {"servers": args["servers"]}})
        else:
            hosts = args["hosts"]
            if hosts is None:
                hosts = list(task_vars.get("ansible_play_hosts_all") or [here])
            rows = collect(hosts, _results(task_vars, hosts, args["results"]), task_vars.get("ansible_play_hosts"))
        text = table(rows, args["width"])
        if args["table"]:
            display.display(text)
        if args["json_file"] and not self._task.check_mode:
            try:
                _write(args["json_file"], to_json(rows))
            except OSError as exc:
                raise AnsibleActionFail(f"cannot write {args['json_file']}: {exc.strerror}") from exc
        return {"changed": False, "rows": rows, "table": text.splitlines(), "summary": summary(rows)}


def _results(task_vars: dict[str, Any], hosts: list[str], name: str) -> dict[str, Any]:
    """Fetch the registered variable of every host, where there is one."""
    hostvars = task_vars.get("hostvars")
    found = {}
    for host in hosts:
        try:
            found[host] = hostvars[host].get(name) if hostvars is not None else None
        except KeyError:  # not in the inventory
            found[host] = None
    return found


def _write(path: str, text: str) -> None:
    """Write a file whole or not at all; a device or a pipe is written to as it is."""
    try:
        special = not stat.S_ISREG(os.stat(path).st_mode)  # may be /dev/stdout
    except FileNotFoundError:
        special = False
    if special:
        Path(path).write_text(text, encoding="utf-8")
        return
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
