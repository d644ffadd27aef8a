# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Which servers a host gets: GPUs by index or UUID, their overrides, their ports and units."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._flags import SETTINGS
from ansible_collections.gpufleet.sglang.plugins.module_utils._gone import Gone, is_gone, missed
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import Gpu
from ansible_collections.gpufleet.sglang.plugins.module_utils._ports import Listener, describe, holders

INSTANCE_KEYS = ("gpu", "port", "host", "served_model_name", "environment", "extra_args", *SETTINGS)
TORCH_STORE = range(22000, 30000)  # torch.distributed's store picks a free port here when none is set


@dataclass(frozen=True)
class Slot:
    """One server to be: a GPU (a number on device cpu), where it listens, what differs from the fleet."""

    gpu: int
    unit: str
    host: str
    port: int
    uuid: str | None = None
    mig: bool = False
    name: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)


def unit_of_gpu(gpu: int) -> str:
    """Return the unit of a GPU's server."""
    return f"sglang@{gpu}.service"


def find_gpu(wanted: object, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU with this index or UUID (whole, or a beginning only one GPU has)."""
    text = str(wanted).strip()
    if text.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(text)), None)
    if not text.startswith("GPU-") or len(text) < 8:
        return None
    found = [gpu for gpu in gpus if gpu.uuid and gpu.uuid.lower().startswith(text.lower())]
    return found[0] if len(found) == 1 else None


def chosen_gpus(
    device: str, wanted: Sequence[object], gpus: Sequence[Gpu], gpus_known: bool, gone: Sequence[Gone] = ()
) -> tuple[list[Gpu], list[Finding]]:
    """Turn sglang_server_gpus into GPUs, in their order; [] means all the host has.

    gpus_known is false when nvidia-smi could not be asked: then nothing is said about GPUs that it does not list.
    """
    if device == "cpu":
        return _cpu_slots(wanted)
    if not wanted:
        if not gpus and gpus_known:
            return [], [
                Finding("no_gpu", "the host has no GPU", "Pass the GPUs in, or set sglang_server_device to cpu")
            ]
        return list(gpus), []
    chosen: list[Gpu] = []
    findings: list[Finding] = []
    wanted = [item for item in wanted if not is_gone(item, gone)]
    named: dict[int, object] = {}
    for item in wanted:
        gpu = find_gpu(item, gpus)
        if gpu is None:
            if gpus_known:
                have = ", ".join(f"{each.index} ({each.uuid})" for each in gpus) or "none"
                text = f"sglang_server_gpus names {item}, which is not a GPU of this host; it has {have}"
                findings.append(Finding("gpu_unknown", text, "Correct sglang_server_gpus"))
            continue
        if gpu.index in named:
            text = f"sglang_server_gpus names GPU {gpu.index} ({gpu.uuid}) twice: as {named[gpu.index]} and as {item}"
            findings.append(Finding("gpu_twice", text, "Keep one of them", gpu=gpu.index))
            continue
        named[gpu.index] = item
        chosen.append(gpu)
    return chosen, findings


def resolve(
    device: str,
    wanted: Sequence[object],
    instances: Sequence[Mapping[str, Any]],
    base_port: object,
    host: str,
    gpus: Sequence[Gpu],
    gpus_known: bool,
    gone: Sequence[Gone] = (),
) -> tuple[list[Slot], list[Finding]]:
    """Return the slots of a host, by GPU index, with everything that is wrong in how they were asked for.

    A GPU that is gone gets no slot; what the inventory says of it stays right.
    """
    chosen, findings = chosen_gpus(device, wanted, gpus, gpus_known, gone)
    findings += [item.finding() for item in missed(wanted, gone)]
    kept = [item for item in instances if not is_gone(item.get("gpu"), gone)]
    overrides, wrong = _overrides(device, kept, chosen, gpus_known)
    findings.extend(wrong)
    first = as_port(base_port)
    if first is None:
        findings.append(Finding("bad_port", f"sglang_server_base_port is {base_port!r}: it must be a whole number"))
    slots = []
    for gpu in sorted(chosen, key=lambda item: item.index):
        own = overrides.get(gpu.index, {})
        port: int | None = (first or 0) + gpu.index
        if own.get("port") is not None:
            port = as_port(own["port"])
            if port is None:
                text = f"port of GPU {gpu.index} is {own['port']!r}: it must be a whole number"
                findings.append(Finding("bad_port", text, gpu=gpu.index))
        if port is None or (first is None and own.get("port") is None):
            continue
        slots.append(
            Slot(
                gpu.index, unit_of_gpu(gpu.index), str(own.get("host") or host), port, gpu.uuid, gpu.mig, gpu.name, own
            )
        )
    return slots, findings


def port_problems(slots: Sequence[Slot], listeners: Sequence[Listener]) -> list[Finding]:
    """Check the slots' ports among themselves, against their limits and against who holds them now."""
    findings: list[Finding] = []
    by_port: dict[int, list[Slot]] = {}
    for slot in slots:
        by_port.setdefault(slot.port, []).append(slot)
    for port, same in sorted(by_port.items()):
        if len(same) > 1:
            who = " and ".join(f"GPU {slot.gpu}" for slot in same)
            findings.append(
                Finding(
                    "port_twice", f"port {port} is given to {who}", "Give each its own port in sglang_server_instances"
                )
            )
    outside = [slot for slot in slots if not 1024 <= slot.port <= 65535]
    if outside:
        listed = ", ".join(f"port {slot.port} of GPU {slot.gpu}" for slot in outside)
        findings.append(
            Finding("port_range", f"{listed}: outside 1024-65535", "Change sglang_server_base_port or port")
        )
    inside = [slot for slot in slots if slot.port in TORCH_STORE]
    if inside:
        ports = ", ".join(str(slot.port) for slot in inside)
        text = f"ports {ports} lie in 22000-29999, where torch picks its stores' ports: a server may find its own taken"
        findings.append(Finding("port_torch_range", text, "Use ports from 30000 on", WARNING))
    for slot in slots:
        for holder in holders(listeners, slot.host, slot.port):
            if holder.unit != slot.unit:
                text = f"port {slot.port} of GPU {slot.gpu} is taken by {describe(holder)}"
                remedy = "Stop that process, or give the GPU another port in sglang_server_instances"
                if holder.unit in {other.unit for other in slots}:
                    remedy = "That is a server of this fleet: run the stop playbook before its port goes to another"
                findings.append(Finding("port_taken", text, remedy, gpu=slot.gpu))
    return findings


def _cpu_slots(wanted: Sequence[object]) -> tuple[list[Gpu], list[Finding]]:
    if not wanted:
        return [], [
            Finding("no_slots", "device cpu has no GPUs to count", "List the slots in sglang_server_gpus, as [0, 1]")
        ]
    slots: dict[int, Gpu] = {}
    findings = []
    for item in wanted:
        text = str(item).strip()
        if not text.isdigit():
            findings.append(
                Finding("gpu_unknown", f"sglang_server_gpus names {item}: on device cpu a slot is a number from 0")
            )
        elif int(text) in slots:
            findings.append(
                Finding("gpu_twice", f"sglang_server_gpus names slot {text} twice", "Keep one", gpu=int(text))
            )
        else:
            slots[int(text)] = Gpu(int(text), None, "cpu")
    return list(slots.values()), findings


def _overrides(
    device: str, instances: Sequence[Mapping[str, Any]], chosen: Sequence[Gpu], gpus_known: bool
) -> tuple[dict[int, Mapping[str, Any]], list[Finding]]:
    found: dict[int, Mapping[str, Any]] = {}
    findings: list[Finding] = []
    for number, item in enumerate(instances):
        where = f"sglang_server_instances[{number}]"
        for key in item:
            if key not in INSTANCE_KEYS:
                near = difflib.get_close_matches(str(key), INSTANCE_KEYS, n=1)
                findings.append(
                    Finding(
                        "unknown_setting",
                        f"{where} has {key}, which is not a setting",
                        f"Did you mean {near[0]}" if near else "",
                    )
                )
        if item.get("gpu") is None:
            findings.append(Finding("instance_without_gpu", f"{where} does not say which gpu it is for"))
            continue
        gpu = find_gpu(item["gpu"], chosen)
        if gpu is None:
            if gpus_known or device == "cpu":
                text = f"{where} is for GPU {item['gpu']}, which gets no server"
                findings.append(
                    Finding("instance_unknown_gpu", text, "Correct its gpu, or add the GPU to sglang_server_gpus")
                )
            continue
        if gpu.index in found:
            findings.append(
                Finding("instance_twice", f"{where} is for GPU {gpu.index} again", "Merge the two", gpu=gpu.index)
            )
            continue
        found[gpu.index] = item
    return found, findings


def as_port(value: object) -> int | None:
    """Return a whole number, None when it is not one."""
    if isinstance(value, bool):
        return None
    text = str(value).strip()
    return int(text) if text.lstrip("-").isdigit() else None
