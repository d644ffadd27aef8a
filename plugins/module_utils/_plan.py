# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Inventory and facts become the plan: the one place where ports, paths, flags and environments are decided."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _model
from ansible_collections.gpufleet.sglang.plugins.module_utils._environment import (
    TORCH_STORE,
    base_environment,
    check_environment,
    published_environment,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding, errors, warnings
from ansible_collections.gpufleet.sglang.plugins.module_utils._flags import (
    SETTINGS,
    UNIQUE,
    Flag,
    companions,
    extra_flags,
    nearest,
    settings_flags,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._gone import Gone, is_gone, missed
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import Gpu
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance, Plan, Release
from ansible_collections.gpufleet.sglang.plugins.module_utils._options import EngineOptions
from ansible_collections.gpufleet.sglang.plugins.module_utils._ports import Listener
from ansible_collections.gpufleet.sglang.plugins.module_utils._slots import (
    Slot,
    find_gpu,
    port_problems,
    resolve,
    unit_of_gpu,
)

_OFFLINE = ("1", "on", "true", "yes")


@dataclass(frozen=True)
class PlanSettings:
    """What the user asked for, as the role's variables say it."""

    name: str  # inventory_hostname
    model: str
    venv: str
    release: str
    version: str = ""  # of the engine that is to be, for its spelling while it is not installed yet
    device: str = "cuda"
    gpus: Sequence[object] = ()
    instances: Sequence[Mapping[str, Any]] = ()
    base_port: object = 30000
    host: str = "127.0.0.1"
    served_model_name: str = ""
    canary: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    config_dir: str = "/etc/sglang"
    state_dir: str = "/var/lib/sglang"
    cache_dir: str = "/var/cache/sglang"
    kernels_dir: str = ""  # of published kernels; "" where servers may compile
    unit_dir: str = "/etc/systemd/system"


@dataclass(frozen=True)
class PlanFacts:
    """What the host is like now."""

    gpus: Sequence[Gpu] = ()
    gpus_known: bool = True  # nvidia-smi has answered
    gone: Sequence[Gone] = ()  # GPUs that have a server and are not there any more
    findings: Sequence[Finding] = ()  # of the collection itself
    listeners: Sequence[Listener] = ()
    model: Mapping[str, Any] = field(default_factory=dict)  # _model.inspect()
    cuda_home: str | None = None  # of toolkit.json


def build_plan(
    settings: PlanSettings, facts: PlanFacts, options: EngineOptions | None
) -> tuple[Plan, list[Finding], list[Finding]]:
    """Return the plan, what stands in its way and what is worth knowing; it is only valid without problems.

    Pure: the same input gives the same plan. options None means that the engine is not installed yet.
    """
    found: list[Finding] = [*facts.findings]
    slots, wrong = resolve(
        settings.device,
        settings.gpus,
        settings.instances,
        settings.base_port,
        settings.host,
        facts.gpus,
        facts.gpus_known,
        facts.gone,
    )
    found.extend(wrong)
    found.extend(port_problems(slots, facts.listeners))
    found.extend(_path_problems(settings))
    canary, wrong = _canary(settings, slots, facts.gone)
    found.extend(wrong)
    if options is None:
        text = "the engine's option list is not there yet: flags are spelled by the version's name and were not checked"
        found.append(Finding("flags_unchecked", text, "The deploy checks them once the engine is installed", WARNING))

    fleet_flags, wrong = _flags(settings, settings.settings, settings.extra_args, options, "sglang_server_", None)
    found.extend(wrong)
    fleet_environment, wrong = check_environment(settings.environment, "sglang_server_")
    found.extend(wrong)
    instances = []
    flags_by_slot = []
    for slot in slots:
        flags, environment, wrong = _own(settings, slot, options, fleet_flags, fleet_environment)
        found.extend(wrong)
        flags_by_slot.append((slot, flags))
        instances.append(_instance(settings, facts, slot, options, flags, environment, slot.gpu == canary))
    found.extend(_shared_values(flags_by_slot))
    found.extend(_model_findings(settings, facts, flags_by_slot, instances))
    found.extend(_gpu_warnings(slots))

    version = options.version if options else ""
    release = Release(settings.release, settings.venv, f"{settings.venv}/bin/python", version)
    plan = Plan(settings.name, settings.device, settings.model, release, instances)
    unique = list(dict.fromkeys(found))
    return plan, errors(unique), warnings(unique)


def removed_units(
    plan: Plan, applied: Iterable[Instance], wanted_gpus: Sequence[object] = (), gone: Sequence[Gone] = ()
) -> list[str]:
    """Return the units that an earlier rollout rendered and the plan no longer has, by GPU.

    The unit of a GPU that is gone, and that the inventory still asks for, stays.
    """
    wanted = {item.unit for item in plan.instances} | {unit_of_gpu(item.gpu) for item in missed(wanted_gpus, gone)}
    return [item.unit for item in sorted(applied, key=lambda item: item.gpu) if item.unit not in wanted]


def describe(plan: Plan, gpus: Sequence[Gpu]) -> list[str]:
    """Return one line per instance for people."""
    names = {gpu.index: gpu.name for gpu in gpus}
    lines = []
    for item in plan.instances:
        what = (
            f"slot {item.gpu}"
            if plan.device == "cpu"
            else f"GPU {item.gpu} ({names.get(item.gpu, 'unknown')}, {item.uuid or 'no UUID'})"
        )
        lines.append(f"{what}: {item.unit} on {item.host}:{item.port}{', canary' if item.canary else ''}")
    return lines


def _flags(
    plan: PlanSettings,
    settings: Mapping[str, Any],
    extra: Mapping[str, Any],
    options: EngineOptions | None,
    where: str,
    gpu: int | None,
) -> tuple[list[Flag], list[Finding]]:
    found = [
        Finding("unknown_setting", f"{where}{name} is not a setting{nearest(name, list(SETTINGS))}", gpu=gpu)
        for name in settings
        if name not in SETTINGS
    ]
    flags, wrong = settings_flags(settings, options, where, gpu, plan.version)
    extra_list, extra_wrong = extra_flags(extra, flags, options, where, gpu)
    flags = [*flags, *extra_list]
    return [*flags, *companions(flags)], [*found, *wrong, *extra_wrong]


def _own(
    settings: PlanSettings,
    slot: Slot,
    options: EngineOptions | None,
    fleet_flags: list[Flag],
    fleet_environment: dict[str, str],
) -> tuple[list[Flag], dict[str, str], list[Finding]]:
    """Apply a slot's overrides; what is wrong with the fleet's own values has been said already."""
    where = f"sglang_server_instances, GPU {slot.gpu}: "
    own = {name: slot.overrides[name] for name in SETTINGS if name in slot.overrides}
    extra = slot.overrides.get("extra_args") or {}
    found: list[Finding] = []
    for name in ("extra_args", "environment"):
        if not isinstance(slot.overrides.get(name) or {}, dict):
            found.append(Finding("bad_value", f"{where}{name} must be a dictionary", gpu=slot.gpu))
            return fleet_flags, fleet_environment, found
    flags = fleet_flags
    if own or extra:
        merged = {**settings.settings, **own}
        flags, wrong = _flags(
            settings,
            {name: merged[name] for name in merged if name in SETTINGS},
            {**settings.extra_args, **extra},
            options,
            where,
            slot.gpu,
        )
        fleet_wrong = {
            _essence(item)
            for item in _flags(settings, settings.settings, settings.extra_args, options, where, slot.gpu)[1]
        }
        found.extend(item for item in wrong if _essence(item) not in fleet_wrong)
    environment, wrong = check_environment(slot.overrides.get("environment") or {}, where, slot.gpu)
    dropped = {name for name, value in (slot.overrides.get("environment") or {}).items() if value is None}
    merged_environment = {
        **{name: value for name, value in fleet_environment.items() if name not in dropped},
        **environment,
    }
    return flags, merged_environment, [*found, *wrong]


def _essence(finding: Finding) -> tuple[str, str]:
    return finding.code, finding.message


def _instance(
    settings: PlanSettings,
    facts: PlanFacts,
    slot: Slot,
    options: EngineOptions | None,
    flags: Sequence[Flag],
    environment: Mapping[str, str],
    canary: bool,
) -> Instance:
    visible = None
    if settings.device != "cpu":
        visible = slot.uuid if slot.uuid and not slot.mig else str(slot.gpu)
    served = str(slot.overrides.get("served_model_name") or settings.served_model_name or "")
    base = base_environment(
        device=settings.device,
        venv=settings.venv,
        state_dir=settings.state_dir,
        cache_dir=settings.cache_dir,
        cuda_home=facts.cuda_home if settings.device != "cpu" else None,
        gpu=visible,
        offline=_model.kind_of(settings.model) == _model.FOLDER,
    )
    if any(flag.name in ("nccl-port", "dist-init-addr") for flag in flags):
        base.pop(TORCH_STORE)  # it would win over them
    merged = {**base, **environment}
    if settings.kernels_dir:
        merged.update(published_environment(settings.kernels_dir, settings.state_dir, merged.get("PYTHONPATH", "")))
    return Instance(
        gpu=slot.gpu,
        unit=slot.unit,
        host=slot.host,
        port=slot.port,
        argv=[
            *_launcher(settings.venv, options),
            *_fixed(settings, slot, served),
            *(word for flag in flags for word in flag.argv()),
        ],
        environment=merged,
        environment_file=f"{settings.config_dir}/{slot.gpu}.env",
        unit_file=f"{settings.unit_dir}/{slot.unit}",
        uuid=slot.uuid,
        canary=canary,
        served_model_name=served,
    )


def _launcher(venv: str, options: EngineOptions | None) -> list[str]:
    if options is not None and not options.launch_server and options.serve:
        return [f"{venv}/bin/sglang", "serve"]
    return [f"{venv}/bin/python", "-m", "sglang.launch_server"]


def _fixed(settings: PlanSettings, slot: Slot, served: str) -> list[str]:
    words = ["--model-path", settings.model]
    if served:
        words += ["--served-model-name", served]
    words += ["--host", slot.host, "--port", str(slot.port)]
    return [*words, "--device", "cpu"] if settings.device == "cpu" else words


def _canary(settings: PlanSettings, slots: Sequence[Slot], gone: Sequence[Gone]) -> tuple[int | None, list[Finding]]:
    if not slots:
        return None, []
    gpus = [Gpu(slot.gpu, slot.uuid, slot.name) for slot in slots]
    if not settings.canary or is_gone(settings.canary, gone):
        first = find_gpu(settings.gpus[0], gpus) if settings.gpus else None
        return (first or gpus[0]).index, []
    chosen = find_gpu(settings.canary, gpus)
    if chosen is None:
        have = ", ".join(str(slot.gpu) for slot in slots)
        text = f"sglang_server_canary names {settings.canary}, which gets no server; those that do: {have}"
        return None, [Finding("canary_unknown", text, "Correct sglang_server_canary")]
    return chosen.index, []


def _path_problems(settings: PlanSettings) -> list[Finding]:
    found = []
    for name in ("venv", "config_dir", "state_dir", "cache_dir", "unit_dir"):
        value = str(getattr(settings, name))
        if not re.fullmatch(r"/[^\s:\"'\\]*", value):
            text = f"{name} is {value!r}: it must be an absolute path without blanks, colons or quotes"
            found.append(Finding("bad_path", text, f"Correct sglang_server_{name}"))
    if any(char.isspace() for char in settings.host) or not settings.host:
        found.append(Finding("bad_value", f"sglang_server_host is {settings.host!r}: it must be an address"))
    return found


def _shared_values(flags_by_slot: Sequence[tuple[Slot, list[Flag]]]) -> list[Finding]:
    seen: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for slot, flags in flags_by_slot:
        for flag in flags:
            if flag.name in UNIQUE:
                seen.setdefault((flag.name, flag.values), []).append(slot.gpu)
    return [
        Finding(
            "flag_shared",
            f"--{name} {' '.join(values)} is the same for GPUs {', '.join(map(str, gpus))}: only one would start",
            "Leave it out, or give each its own in sglang_server_instances",
        )
        for (name, values), gpus in seen.items()
        if len(gpus) > 1
    ]


def _model_findings(
    settings: PlanSettings,
    facts: PlanFacts,
    flags_by_slot: Sequence[tuple[Slot, list[Flag]]],
    instances: Sequence[Instance],
) -> list[Finding]:
    if not settings.model:
        return [Finding("model_missing", "sglang_server_model is empty", "Give a folder on the host or a hub id")]
    formats = {
        next((f.values[0] for f in flags if f.name == "load-format" and f.values), "") for _slot, flags in flags_by_slot
    }
    offline = any(item.environment.get("HF_HUB_OFFLINE", "").lower() in _OFFLINE for item in instances)
    facts_of_model = dict(facts.model) or {
        "path": settings.model,
        "kind": _model.kind_of(settings.model),
        "state": "missing",
    }
    return _model.problems(facts_of_model, formats or {""}, offline)


def _gpu_warnings(slots: Sequence[Slot]) -> list[Finding]:
    found = []
    for slot in slots:
        if slot.mig:
            text = f"GPU {slot.gpu} is in MIG mode: its server is given the index, and sees the first MIG slice only"
            found.append(Finding("gpu_mig", text, "Switch MIG off on GPUs that serve whole models", WARNING, slot.gpu))
    return found
