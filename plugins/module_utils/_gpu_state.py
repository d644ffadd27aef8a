# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The state GPUs are in before a server starts: persistence, MIG, ECC, Xid, and whether an index means the same GPU."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_rules import HARDWARE_XID, xids
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import ERROR, WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import Gpu, KernelGpu, ask
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner

FIELDS = ("uuid", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "retired_pages.pending", "compute_mode")
ROWS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
_XID_LINE = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\).*")


def health(runner: Runner, timeout: float = 30.0) -> dict[str, dict[str, str]]:
    """Ask for ECC and remapped rows, by UUID; what a GPU or its driver does not tell is left out."""
    found: dict[str, dict[str, str]] = {}
    for option, wanted in (("gpu", FIELDS), ("remapped-rows", ROWS)):
        done, fields = ask(runner, wanted, wanted[:1], timeout, option)
        for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
            if len(row) == len(fields) and row[0].startswith("GPU-"):
                told = {name: cell.strip() for name, cell in zip(fields[1:], row[1:])}
                found.setdefault(row[0], {}).update({k: v for k, v in told.items() if v and v[0] != "[" and v != "N/A"})
    return found


def kernel_log(runner: Runner, timeout: float = 20.0) -> str | None:
    """Return what the kernel said, None where this container may not read it."""
    done = runner.run(["dmesg"], timeout=timeout)
    return done.stdout if done.rc == 0 else None


def state_problems(gpus: Sequence[Gpu], told: Mapping[str, Mapping[str, str]], where: str) -> list[Finding]:
    """Judge persistence, MIG and memory errors; where says on which machine a command has to be run."""
    findings = []
    lazy = [gpu.index for gpu in gpus if gpu.persistence is False]
    if lazy:
        which = ", ".join(map(str, lazy))
        text = f"persistence is off on GPU {which}: each first use brings it up anew, and its settings are lost"
        remedy = f"Run 'systemctl enable --now nvidia-persistenced' (or 'nvidia-smi -pm 1') {where}"
        findings.append(Finding("gpu_persistence", text, remedy, WARNING))
    for gpu in gpus:
        name = f"GPU {gpu.index} ({gpu.name}, {gpu.uuid or 'no UUID'})"
        if gpu.mig:
            text = f"{name} is in MIG mode: a server sees its first slice only, not the whole GPU"
            findings.append(
                Finding("gpu_mig", text, f"Run 'nvidia-smi -i {gpu.index} -mig 0' {where}", WARNING, gpu.index)
            )
        for text, remedy, severity in _memory_errors(gpu, told.get(gpu.uuid or "", {}), where):
            findings.append(Finding("gpu_ecc", f"{name} {text}", remedy, severity, gpu.index))
        if told.get(gpu.uuid or "", {}).get("compute_mode") == "Prohibited":
            text = f"{name} is in compute mode Prohibited: no CUDA program can use it"
            findings.append(
                Finding("gpu_compute_mode", text, f"Run 'nvidia-smi -i {gpu.index} -c 0' {where}", gpu=gpu.index)
            )
    return findings


def _memory_errors(gpu: Gpu, told: Mapping[str, str], where: str) -> list[tuple[str, str, str]]:
    reset = f"Stop what uses it, then run 'nvidia-smi -i {gpu.index} --gpu-reset' {where}, or reboot"
    found = []
    count = told.get("ecc.errors.uncorrected.volatile.total", "")
    if count.isdigit() and int(count):
        found.append((f"has had {count} uncorrectable memory errors since the driver was loaded", reset, WARNING))
    pending = [told.get("remapped_rows.pending", ""), told.get("retired_pages.pending", "")]
    if any(value in ("1", "Yes") for value in pending):
        found.append(("has bad memory waiting to be mapped out", reset, WARNING))
    if told.get("remapped_rows.failure") in ("1", "Yes"):
        text = "has no spare memory rows left to map a bad one out"
        found.append((text, "Replace the GPU, and leave it out of sglang_server_gpus until then", ERROR))
    return found


def xid_problems(log: str, gpus: Sequence[Gpu], where: str) -> list[Finding]:
    """Name the GPUs with a hardware Xid in the kernel log since boot, the last of each; applications' do not count."""
    last: dict[str, str] = {}
    for hit in _XID_LINE.finditer(log):
        if any(number in HARDWARE_XID for number in xids(hit.group())):
            last[hit["bus"].lower()] = " ".join(hit.group().split())[:200]
    findings = []
    for gpu in gpus:
        for bus, line in last.items():
            if gpu.pci_bus_id and _bus(gpu.pci_bus_id) == _bus(bus):
                text = f"GPU {gpu.index} ({gpu.name}) has had a hardware fault since the kernel booted: {line}"
                remedy = f"If it was not reset since: 'nvidia-smi -i {gpu.index} --gpu-reset' {where}, or reboot"
                findings.append(Finding("gpu_xid", text, remedy, WARNING, gpu.index))
    return findings


def _bus(bus_id: str) -> tuple[int, ...]:
    """Return domain, bus and device as numbers: nvidia-smi gives the domain eight digits, the kernel four."""
    return tuple(int(part, 16) for part in bus_id.split(".")[0].split(":"))


def order_problems(gpus: Sequence[Gpu], kernel: Sequence[KernelGpu], rendered: Mapping[int, str]) -> list[Finding]:
    """Say where an index does not, or not any more, mean what it seems to; rendered is what each server was given."""
    findings = []
    for gpu in gpus:
        before = rendered.get(gpu.index, "")
        if before.startswith("GPU-") and gpu.uuid and before != gpu.uuid:
            moved = next(
                (f", which is index {item.index} now" for item in gpus if item.uuid == before), ", which is not here"
            )
            text = f"index {gpu.index} is {gpu.uuid} now; its server was made for {before}{moved}"
            remedy = (
                "A GPU was added, taken out or passed in anew: name GPUs by UUID in sglang_server_gpus, or deploy again"
            )
            findings.append(Finding("gpu_order_changed", text, remedy, WARNING, gpu.index))
    twice = sorted({gpu.uuid for gpu in gpus if gpu.uuid and sum(item.uuid == gpu.uuid for item in gpus) > 1})
    for uuid in twice:
        findings.append(
            Finding("gpu_uuid_twice", f"two GPUs say they are {uuid}", "Give each GPU into the container once")
        )
    buses = [_bus(gpu.pci_bus_id) for gpu in gpus if gpu.pci_bus_id]
    if buses != sorted(buses):
        text = (
            "nvidia-smi's indexes do not follow the PCI bus, by which CUDA counts here (CUDA_DEVICE_ORDER=PCI_BUS_ID)"
        )
        findings.append(Finding("gpu_order", text, "Name the GPUs by UUID in sglang_server_gpus", WARNING))
    known = {_bus(item.bus_id): item.uuid for item in kernel if item.uuid}
    for gpu in gpus:
        uuid = known.get(_bus(gpu.pci_bus_id), "") if gpu.pci_bus_id else ""
        if uuid and gpu.uuid and uuid != gpu.uuid:
            text = f"GPU {gpu.index} is {gpu.uuid} for nvidia-smi and {uuid} for the kernel module"
            findings.append(Finding("gpu_uuid", text, "Reboot the machine: its driver's views differ", gpu=gpu.index))
    return findings


def rendered_gpus(config_dir: str) -> dict[int, str]:
    """Return the GPU each server was last given, from the environment files the deploy writes."""
    found = {}
    for path in Path(config_dir).glob("*.env"):
        if path.stem.isdigit():
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            match = re.search(r"^CUDA_VISIBLE_DEVICES=\"?([^\"\n]+)", text, re.MULTILINE)
            if match:
                found[int(path.stem)] = match.group(1)
    return found
