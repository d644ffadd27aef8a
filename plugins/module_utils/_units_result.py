# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""From sglang_units' options to servers, and from what was done to its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible_collections.gpufleet.sglang.plugins.module_utils import _drain, _kept
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileSpec
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import COMPILERS, cgroup_pids, names_of, show
from ansible_collections.gpufleet.sglang.plugins.module_utils._units import Fleet, Outcome, Server, UnitsError


def servers_from(
    instances: Sequence[Instance],
    units: Sequence[str],
    rendered: Mapping[str, Any],
    secrets: Mapping[str, str],
    config_dir: str,
) -> list[Server]:
    """Join instances with what was rendered for them; units limits them ([] = all).

    Raises UnitsError for a unit that no instance has.
    """
    known = {item.unit for item in instances}
    unknown = [unit for unit in units if unit not in known]
    if unknown:
        raise UnitsError(f"not in the plan: {', '.join(unknown)}; it has {', '.join(sorted(known)) or 'no unit'}")
    servers = []
    for item in instances:
        if units and item.unit not in units:
            continue
        data = rendered.get(item.unit, {})
        files = [FileSpec(spec["path"], spec["content"], int(spec["mode"], 8)) for spec in data.get("files", [])]
        if secrets.get(item.unit):
            files.append(FileSpec(f"{config_dir}/{item.gpu}.secrets", secrets[item.unit], 0o600, secret=True))
        servers.append(Server(item.unit, item.gpu, tuple(files), data.get("digest", ""), item))
    return servers


def servers_of_release(config_dir: str, release: str, units: Sequence[str]) -> list[Server]:
    """Return the servers of a kept release, as they answered; units limits them ([] = all). Raises UnitsError."""
    servers = []
    for item in _kept.kept_plan(config_dir, release).instances:
        if units and item.unit not in units:
            continue
        files, digest = _kept.kept_files(config_dir, release, item)
        servers.append(Server(item.unit, item.gpu, tuple(files), digest, item))
    missing = sorted(set(units) - {server.unit for server in servers})
    if missing:
        raise UnitsError(f"never answered under release {release}: {', '.join(missing)}")
    return servers


def shared_files(rendered: Mapping[str, Any]) -> list[FileSpec]:
    """Return the files that belong to no single unit (the target)."""
    return [
        FileSpec(spec["path"], spec["content"], int(spec["mode"], 8)) for spec in rendered.get("", {}).get("files", [])
    ]


def wait_settled(
    fleet: Fleet,
    instances: Sequence[Instance],
    before: Mapping[str, str],
    actions: Mapping[str, str],
    seconds: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> dict[str, Any]:
    """Wait up to seconds for every unit's job; returns settled (all are), pending and InvocationID by unit.

    Of those that are being stopped it returns the signs of life as well.
    """
    end = clock() + seconds
    while True:
        done = fleet.settled(before, actions)
        pending = sorted(set(before) - set(done))
        if not pending or clock() >= end:
            ids = {unit: state.invocation_id for unit, state in done.items() if actions.get(unit) != "stop"}
            signs = _signs(fleet, [item for item in instances if item.unit in pending])
            return {"settled": not pending, "pending": pending, "invocations": ids, "signs": signs}
        sleep(0.2)


def _signs(fleet: Fleet, instances: Sequence[Instance]) -> dict[str, str | None]:
    """Return what changes while a server that is being stopped works off its requests; None while it compiles."""
    states = show(fleet.runner, [item.unit for item in instances])
    found: dict[str, str | None] = {}
    for item in instances:
        if states[item.unit].active_state == "deactivating":
            compiling = COMPILERS & names_of(cgroup_pids(states[item.unit].control_group))
            found[item.unit] = None if compiling else _drain.sign_in(_drain.load_of(item))
    return found


def outcome_result(outcome: Outcome, servers: Sequence[Server]) -> dict[str, Any]:
    """Turn an outcome into the module's result."""
    gpus = {server.unit: server.gpu for server in servers}
    diff = [change.diff for change in outcome.changes]
    diff += [
        {"before_header": path, "after_header": path, "before": "present\n", "after": ""} for path in outcome.removed
    ]
    acts = [f"{item.unit}: {item.action} ({item.reason})" for item in outcome.decisions if item.action != "none"]
    if acts:
        diff.append({"prepared": "\n".join(acts) + "\n"})
    return {
        "changed": outcome.changed,
        "diff": diff,
        "files": [change.spec.path for change in outcome.changes] + outcome.removed,
        "units": [
            {"unit": item.unit, "gpu": gpus[item.unit], "action": item.action, "reason": item.reason}
            for item in outcome.decisions
        ],
        "enabled": outcome.enabled,
        "known_good": outcome.known_good,
        "restored": outcome.restored,
        "disabled": outcome.disabled,
        "before": outcome.before,
    }
