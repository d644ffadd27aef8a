#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Go back to an earlier release, keep the host's history, remove releases that nobody needs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_releases
short_description: Go back to an earlier release, keep a history, remove old releases
version_added: 0.2.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Every configuration that answered is kept by release (O(gpufleet.sglang.sglang_units#module:state=known_good)),
    so going back needs neither a network nor the variables of then.
options:
  state:
    description:
      - V(rolled_back) chooses the release to go back to and makes its plan the host's (C(plan.json)). The servers are
        then restarted with O(gpufleet.sglang.sglang_units#module:from_release).
      - V(recorded) adds an entry to C(history.jsonl) in O(config_dir) when the installed configurations are not those
        of the last entry.
      - V(pruned) removes releases beyond the O(keep) that were used last. One that a unit or a process uses, and the
        one that V(rolled_back) would choose, always stay.
    type: str
    choices: [rolled_back, recorded, pruned]
    required: true
  config_dir:
    description: Folder of the configuration.
    type: path
    default: /etc/sglang
  releases_dir:
    description: Folder of the releases.
    type: path
    default: /opt/sglang/releases
  release:
    description: The release to go back to; the one used last before the present one when empty.
    type: str
    default: ''
  keep:
    description: How many releases stay; V(0) keeps all.
    type: int
    default: 3
  what:
    description: What was done, for the history.
    type: str
    default: deploy
  why:
    description: Why, for the history.
    type: str
    default: ''
  servers:
    description: The servers' figures, as M(gpufleet.sglang.sglang_health) returns them, for the history.
    type: list
    elements: dict
    default: []
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: What would be removed or recorded is returned.
"""

EXAMPLES = r"""
- name: Go back to the release before
  gpufleet.sglang.sglang_releases:
    state: rolled_back

- name: Keep two releases
  gpufleet.sglang.sglang_releases:
    state: pruned
    keep: 2
"""

RETURN = r"""
release:
  description: The release that was gone back to.
  returned: O(state=rolled_back)
  type: str
plan:
  description: Its plan, with the servers that answered under it.
  returned: O(state=rolled_back)
  type: dict
removed_units:
  description: Always empty - a rollback leaves servers alone that the earlier release did not have.
  returned: O(state=rolled_back)
  type: list
  elements: str
removed:
  description: The releases that were removed.
  returned: O(state=pruned)
  type: list
  elements: str
entry:
  description: The entry that was added.
  returned: O(state=recorded), when something was new
  type: dict
lines:
  description: The newest figures beside those of the release before, one line per GPU.
  returned: O(state=recorded)
  type: list
  elements: str
"""

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _history, _hostlock, _kept
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import (
    FileError,
    FileSpec,
    file_changes,
    write_files,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import PlanFileError, read_plan
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner

ARGUMENTS = {
    "state": {"type": "str", "choices": ["rolled_back", "recorded", "pruned"], "required": True},
    "config_dir": {"type": "path", "default": "/etc/sglang"},
    "releases_dir": {"type": "path", "default": "/opt/sglang/releases"},
    "release": {"type": "str", "default": ""},
    "keep": {"type": "int", "default": 3},
    "what": {"type": "str", "default": "deploy"},
    "why": {"type": "str", "default": ""},
    "servers": {"type": "list", "elements": "dict", "default": []},
}


def rolled_back(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Choose a release and make its plan the host's."""
    config_dir = params["config_dir"]
    name = _kept.previous(config_dir, params["release"])
    plan = _kept.kept_plan(config_dir, name)
    if not Path(plan.release.python).exists():
        raise _kept.KeptError(f"release {name} is not on this host any more: {plan.release.python} is gone")
    changes = file_changes([FileSpec(str(Path(config_dir) / "plan.json"), plan.to_json(), 0o600)])
    if changes and not check_mode:
        write_files([change.spec for change in changes])
    return {"changed": bool(changes), "release": name, "plan": plan.to_dict(), "removed_units": []}


def recorded(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Add an entry when other configurations are installed than at the last one."""
    config_dir = params["config_dir"]
    plan = read_plan(str(Path(config_dir) / "plan.json"))
    entries = _history.read(config_dir)
    installed = {"release": plan.release.name, "config": _history.configurations(config_dir)}
    if entries and {key: entries[-1].get(key) for key in installed} == installed:
        return {"changed": False, "lines": []}
    holder, _seen = _hostlock.look()
    entry = {
        **installed,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "what": params["what"],
        "why": params["why"],
        "who": holder.who if holder else "",
        "from": holder.where if holder else "",
        "previous": entries[-1].get("release") if entries else None,
        "servers": _history.figures(params["servers"], _history.memory_mib(SubprocessRunner(), plan)),
    }
    if not check_mode:
        _history.append(config_dir, entry)
    return {"changed": True, "entry": entry, "lines": _history.beside([*entries, entry])}


def pruned(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Remove what nobody needs."""
    config_dir, releases_dir = params["config_dir"], params["releases_dir"]
    needed = _history.in_use(releases_dir, config_dir)
    try:
        needed.add(read_plan(str(Path(config_dir) / "plan.json")).release.name)
        needed.add(_kept.previous(config_dir))
    except (_kept.KeptError, PlanFileError):
        pass  # nothing to go back to
    made = _history.made_here(releases_dir)
    names = _history.to_prune(made, _kept.kept_releases(config_dir), needed, params["keep"])
    for name in names if not check_mode else ():
        _history.prune(releases_dir, config_dir, name)
    return {"changed": bool(names), "removed": names}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    act = {"rolled_back": rolled_back, "recorded": recorded, "pruned": pruned}[module.params["state"]]
    try:
        result = act(module.params, module.check_mode)
    except (_kept.KeptError, FileError, PlanFileError) as exc:
        module.fail_json(msg=str(exc))
    except OSError as exc:
        module.fail_json(msg=f"{exc.filename}: {exc.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
