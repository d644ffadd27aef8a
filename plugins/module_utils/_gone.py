# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""GPUs that had a server here and are gone: they are named, and the others go on under the numbers they had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import Gpu, device_nodes, open_nodes
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner

_LOST = {"missing": "does not exist", "no_device": "has no device behind it", "no_node": "is no device node"}


@dataclass(frozen=True)
class Gone:
    """A GPU that a server was rolled out for and that is not usable any more."""

    gpu: int
    uuid: str
    why: str

    def finding(self) -> Finding:
        """Say so; it stops nothing by itself, for the other GPUs have servers to be managed."""
        text = f"GPU {self.gpu} ({self.uuid}) had a server and is gone: {self.why}"
        remedy = (
            "Look for NVRM and Xid in the kernel log, bring it back and deploy again; to go on without it for good,"
            " name the others in sglang_server_gpus"
        )
        return Finding("gpu_gone", text, remedy, WARNING, self.gpu)


def settle(
    gpus: Sequence[Gpu], rolled_out: Mapping[int, str | None], broken: Mapping[str, str] | None = None
) -> tuple[list[Gpu], list[Gone]]:
    """Return the usable GPUs under the numbers that their servers have, and those that are gone.

    The driver counts what is there: when one of eight is gone, those behind it move up by one. Their servers keep
    their units and ports, so a UUID that has a server keeps its number. A new GPU in the place of one that is gone
    replaces it. rolled_out: UUID by GPU of the rendered servers; broken: why, by UUID, for GPUs that are listed but
    cannot be opened.
    """
    broken = broken or {}
    number = {uuid: gpu for gpu, uuid in rolled_out.items() if uuid}
    usable = [gpu for gpu in gpus if gpu.uuid not in broken]
    if not any(gpu.uuid in number for gpu in usable):  # the first deploy, or other GPUs altogether
        return list(gpus), []
    there = {gpu.uuid for gpu in usable}
    lost = {gpu: uuid for uuid, gpu in number.items() if uuid not in there}
    taken = set(number.values())
    settled = []
    for gpu in usable:
        index = number.get(gpu.uuid or "")
        if index is None:
            moved = gpu.index in taken and gpu.index not in lost
            index = next(i for i in range(len(taken) + 1) if i not in taken) if moved else gpu.index
            lost.pop(index, None)
            taken.add(index)
        settled.append(replace(gpu, index=index))
    gone = [Gone(gpu, uuid, broken.get(uuid, "the driver does not list it")) for gpu, uuid in sorted(lost.items())]
    return sorted(settled, key=lambda gpu: gpu.index), gone


def broken_nodes(
    runner: Runner, gpus: Sequence[Gpu], rolled_out: Mapping[int, str | None], proc: str = "/proc", dev: str = "/dev"
) -> dict[str, str]:
    """Return why, by UUID, for the GPUs with a server whose device node has gone while the driver still lists them."""
    ours = [gpu for gpu in gpus if gpu.uuid and gpu.uuid in rolled_out.values()]
    if not ours:
        return {}
    nodes = device_nodes(ours, proc, dev)[-len(ours) :]
    states = open_nodes(runner, nodes)
    return {
        str(gpu.uuid): f"{node} {_LOST[states[node]]}" for gpu, node in zip(ours, nodes) if states.get(node) in _LOST
    }


def missed(wanted: Sequence[object], gone: Sequence[Gone]) -> list[Gone]:
    """Return those that the inventory still asks for; [] asks for all."""
    return [item for item in gone if not wanted or any(is_gone(each, [item]) for each in wanted)]


def is_gone(wanted: object, gone: Sequence[Gone]) -> bool:
    """Say whether an index or a UUID (whole, or its beginning) means one of the GPUs that are gone."""
    text = str(wanted).strip()
    if text.isdigit():
        return int(text) in {item.gpu for item in gone}
    whole = text.startswith("GPU-") and len(text) >= 8
    return whole and any(item.uuid.lower().startswith(text.lower()) for item in gone)
