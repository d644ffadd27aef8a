# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Which servers a call is about: those of its arguments, or those of the plan as it lies on the host."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._health import short
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import (
    Instance,
    PlanFileError,
    instance_from_dict,
    read_applied,
    read_plan,
    with_applied,
)

INSTANCE_DEFAULTS: dict[str, Any] = {
    "host": "127.0.0.1",
    "argv": [],
    "environment": {},
    "environment_file": "",
    "unit_file": "",
}


@dataclass(frozen=True)
class Chosen:
    """The servers a call is about, and what is to be said about the choice."""

    instances: list[Instance]
    host: str
    message: str = ""


def select(plan: str, given: Sequence[Mapping[str, Any]] | None, units: Sequence[str] | None) -> Chosen:
    """Take the servers from the arguments or from the plan's file; a plan that is not there has none.

    Raises PlanFileError when the file cannot be read or a wanted unit is not in it.
    """
    host = socket.gethostname()
    if given is not None:
        instances = [_instance(item) for item in given]
    elif not Path(plan).exists():
        return Chosen([], host, f"{plan} does not exist: nothing has been deployed on this host")
    else:
        read = with_applied(read_plan(plan), read_applied(str(Path(plan).parent)))
        instances, host = read.instances, read.host
    if units is not None:
        known = {short(item.unit) for item in instances}
        unknown = sorted({short(unit) for unit in units} - known)
        if unknown:
            raise PlanFileError(f"not in the plan: {', '.join(unknown)}; it has {', '.join(sorted(known)) or 'none'}")
        wanted = {short(unit) for unit in units}
        instances = [item for item in instances if short(item.unit) in wanted]
    return Chosen(instances, host)


def _instance(data: Mapping[str, Any]) -> Instance:
    lacking = [key for key in ("gpu", "unit", "port") if data.get(key) in (None, "")]
    if lacking:
        raise PlanFileError(f"an entry of instances lacks {', '.join(lacking)}: {dict(data)}")
    unit = str(data["unit"])
    full = unit if unit.endswith(".service") else f"{unit}.service"
    return instance_from_dict({**INSTANCE_DEFAULTS, **data, "port": int(data["port"]), "unit": full})
