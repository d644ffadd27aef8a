# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The plan's data: what every stage after the plan reads, and nobody derives again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SCHEMA = 1


class PlanFileError(Exception):
    """plan.json is missing, unreadable or of another schema; the message names the file and the remedy."""


@dataclass(frozen=True)
class Instance:
    """One server of the plan: a GPU (or, on device cpu, a slot), its unit, its port and its command."""

    gpu: int  # index by nvidia-smi, or the slot's number on device cpu
    unit: str  # sglang@<gpu>.service
    host: str  # address the server binds
    port: int
    argv: list[str]  # ExecStart, first element an absolute path
    environment: dict[str, str]  # the whole environment file, without secrets
    environment_file: str  # <config_dir>/<gpu>.env
    unit_file: str  # /etc/systemd/system/sglang@<gpu>.service
    uuid: str | None = None  # GPU-...; None on device cpu
    canary: bool = False
    served_model_name: str = ""

    @property
    def probe_host(self) -> str:
        """The address to reach the server at from its own host: a wildcard bind is probed on loopback."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)


@dataclass(frozen=True)
class Release:
    """The engine a plan was made for."""

    name: str
    venv: str
    python: str  # <venv>/bin/python
    version: str  # of sglang, "" when it is not installed yet (check mode)


@dataclass(frozen=True)
class Plan:
    """Everything one host is to run."""

    host: str  # inventory_hostname
    device: str  # cuda | cpu
    model: str
    release: Release
    instances: list[Instance] = field(default_factory=list)
    target: str = "sglang.target"
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as plan.json holds it."""
        return asdict(self)

    def to_json(self) -> str:
        """Return the text of plan.json; equal plans give equal bytes."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"


def instance_from_dict(data: Mapping[str, Any]) -> Instance:
    """Build an Instance from module arguments or plan.json; raises PlanFileError when a key is missing or unknown."""
    try:
        return Instance(**data)
    except TypeError as exc:
        raise PlanFileError(f"not an instance of a plan: {exc}") from exc


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """Build a Plan from plain data; raises PlanFileError when it is not one of this schema."""
    if data.get("schema") != SCHEMA:
        raise PlanFileError(f"schema {data.get('schema')!r}, expected {SCHEMA}: run the deploy again to write it anew")
    try:
        return Plan(
            **{
                **data,
                "release": Release(**data["release"]),
                "instances": [instance_from_dict(item) for item in data["instances"]],
            }
        )
    except (KeyError, TypeError) as exc:
        raise PlanFileError(f"not a plan: {exc}") from exc


def read_plan(path: str) -> Plan:
    """Read plan.json; raises PlanFileError naming the file."""
    try:
        return plan_from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as exc:
        raise PlanFileError(f"{path}: {exc.strerror}: nothing has been deployed here yet") from exc
    except (ValueError, PlanFileError) as exc:
        raise PlanFileError(f"{path}: {exc}") from exc


def applied_file(config_dir: str, gpu: int) -> Path:
    """Return the path of the instance as it was last rendered: it changes and is restored with the unit."""
    return Path(config_dir) / f"{gpu}.json"


def read_applied(config_dir: str) -> dict[int, Instance]:
    """Return the rendered instances by GPU; a file that is not one is left out."""
    found = {}
    for path in Path(config_dir).glob("[0-9]*.json"):
        if not path.stem.isdigit():
            continue
        try:
            found[int(path.stem)] = instance_from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, PlanFileError):
            continue
    return dict(sorted(found.items()))


def with_applied(plan: Plan, applied: Mapping[int, Instance]) -> Plan:
    """Return the plan with what really lies on the host.

    plan.json says what is wanted. After a rollout that stopped half way, or restored a server, some
    units still run what an earlier plan said; whoever looks at servers must look at those ports.
    """
    planned = {item.gpu: item for item in plan.instances}
    merged = {
        **planned,
        **{gpu: replace(item, canary=gpu in planned and planned[gpu].canary) for gpu, item in applied.items()},
    }
    return replace(plan, instances=[merged[gpu] for gpu in sorted(merged)])
