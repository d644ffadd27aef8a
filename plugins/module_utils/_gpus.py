# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""GPUs as the driver shows them: nvidia-smi, device nodes, the kernel module's version."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import NOT_FOUND, TIMED_OUT, Result, Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import unit_of_pid

FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "memory.used",
    "compute_cap",
    "driver_version",
    "mig.mode.current",
    "persistence_mode",
    "pci.bus_id",
)
_REQUIRED = ("index", "uuid", "name", "memory.total")
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
_OPEN = """
import os, stat, sys
for path in sys.argv[1:]:
    try:
        node = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        print(path, "ok" if stat.S_ISCHR(os.fstat(node).st_mode) else "no_node", flush=True)
        os.close(node)
    except OSError as exc:
        print(path, exc.errno, exc.strerror, flush=True)
"""


@dataclass(frozen=True)
class GpuProcess:
    """A compute process on a GPU; memory is None where the driver does not tell."""

    pid: int
    command: str
    unit: str | None = None
    used_mib: int | None = None
    orphan: bool = False  # a part of an engine whose server is gone


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in MiB, None or '' where the driver does not tell."""

    index: int
    uuid: str | None
    name: str
    memory_total_mib: int | None = None
    memory_free_mib: int | None = None
    memory_used_mib: int | None = None
    compute_cap: str = ""
    driver_version: str = ""
    mig: bool = False
    persistence: bool | None = None
    pci_bus_id: str = ""
    processes: list[GpuProcess] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a module's result."""
        return asdict(self)


@dataclass(frozen=True)
class KernelGpu:
    """A GPU as the kernel module lists it; in a container these are all GPUs of the machine, passed in or not."""

    bus_id: str
    minor: int | None
    uuid: str = ""


def kernel_gpus(proc: str = "/proc") -> list[KernelGpu]:
    """Return the GPUs of /proc/driver/nvidia/gpus, in the order of their bus."""
    found = []
    for folder in sorted(Path(f"{proc}/driver/nvidia/gpus").glob("*")):
        try:
            text = (folder / "information").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        # the driver fills the UUID in when the GPU is first used; until then it is question marks
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", text, re.MULTILINE)
        found.append(
            KernelGpu(folder.name.lower(), int(minor.group(1)) if minor else None, uuid.group(1) if uuid else "")
        )
    return found


def gpu_from_dict(data: Mapping[str, Any]) -> Gpu:
    """Build a Gpu from a module's result."""
    return Gpu(**{**data, "processes": [GpuProcess(**item) for item in data.get("processes") or []]})


def query(runner: Runner, timeout: float = 30.0) -> tuple[list[Gpu], list[Finding]]:
    """Ask nvidia-smi for the GPUs."""
    done, fields = ask(runner, FIELDS, _REQUIRED, timeout)
    gpus = parse_gpus(done.stdout, fields)
    if done.rc != 0 or not gpus:
        return gpus, [smi_problem(done, timeout)]
    return gpus, []


def one_by_one(
    runner: Runner, kernel: Sequence[KernelGpu], timeout: float = 10.0
) -> tuple[list[Gpu], dict[KernelGpu, str]]:
    """Ask for each GPU of the kernel alone: one that fell off the bus makes nvidia-smi fail for all of them.

    Returns the GPUs that answer, and why the others do not.
    """
    gpus: list[Gpu] = []
    lost = {}
    for item in kernel:
        done, fields = ask(runner, FIELDS, _REQUIRED, timeout, only=[item.bus_id])
        found = parse_gpus(done.stdout, fields) if done.rc == 0 else []
        gpus += found
        if not found:
            lost[item] = smi_problem(done, timeout).message
    return sorted(gpus, key=lambda gpu: gpu.index), lost


def ask(
    runner: Runner,
    fields: Sequence[str],
    required: Sequence[str],
    timeout: float = 30.0,
    option: str = "gpu",
    only: Sequence[str] = (),
) -> tuple[Result, list[str]]:
    """Run nvidia-smi --query-OPTION; fields that an older driver does not know are left out and asked again without.

    only: bus ids or UUIDs of the GPUs to ask for, instead of all.
    """
    left = list(fields)
    while True:
        argv = ["nvidia-smi", f"--query-{option}={','.join(left)}", "--format=csv,noheader,nounits"]
        argv += [f"--id={','.join(only)}"] if only else []
        done = runner.run(argv, timeout=timeout)
        unknown = _UNKNOWN_FIELD.search(done.stdout + done.stderr)
        if not unknown or unknown.group(1) not in left or unknown.group(1) in required:
            return done, left
        left.remove(unknown.group(1))


def parse_gpus(text: str, fields: Sequence[str] = FIELDS) -> list[Gpu]:
    """Read nvidia-smi's CSV; a line that is not a GPU (a warning, an error) is passed over."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(fields):
            continue
        values = {name: _value(cell) for name, cell in zip(fields, row)}
        index = _int(values.get("index"))
        if index is None:
            continue
        persistence = values.get("persistence_mode")
        gpus.append(
            Gpu(
                index=index,
                uuid=values.get("uuid"),
                name=values.get("name") or "unknown",
                memory_total_mib=_int(values.get("memory.total")),
                memory_free_mib=_int(values.get("memory.free")),
                memory_used_mib=_int(values.get("memory.used")),
                compute_cap=values.get("compute_cap") or "",
                driver_version=values.get("driver_version") or "",
                mig=(values.get("mig.mode.current") or "").lower() == "enabled",
                persistence=None if persistence is None else persistence.lower() == "enabled",
                pci_bus_id=(values.get("pci.bus_id") or "").lower(),
            )
        )
    return sorted(gpus, key=lambda gpu: gpu.index)


def smi_problem(done: Result, timeout: float) -> Finding:
    """Say what a failed nvidia-smi means."""
    said = " ".join((done.stderr.strip() or done.stdout.strip()).split())[:300]
    if done.rc == TIMED_OUT:
        return Finding(
            "nvidia_smi_hung",
            f"nvidia-smi did not answer within {timeout:g} s",
            "A GPU has fallen off the bus or the driver hangs: look for NVRM and Xid in the kernel log, then reboot",
        )
    if "libnvidia-ml" in said:
        return Finding(
            "libnvidia_ml_missing",
            f"nvidia-smi does not find the driver's library: {said}",
            "Install the driver's libraries (in a container: of the host's version), then run ldconfig",
        )
    if done.rc == NOT_FOUND:
        return Finding(
            "nvidia_smi_missing",
            "nvidia-smi is not on this host",
            "Install the NVIDIA driver (in a container: its userland tools), or set sglang_server_device to cpu",
        )
    if "version mismatch" in said.lower():
        return Finding(
            "driver_mismatch",
            f"nvidia-smi says: {said}",
            "The loaded kernel module and the driver's libraries are of different versions: reboot the host, "
            "and in a container install the host's driver version",
        )
    if done.rc == 0:
        return Finding("no_gpu", "nvidia-smi lists no GPU", "Pass the GPUs in, or set sglang_server_device to cpu")
    return Finding(
        "nvidia_smi_failed", f"nvidia-smi failed with rc {done.rc}: {said}", "Make nvidia-smi work on this host first"
    )


def with_processes(
    runner: Runner, gpus: Sequence[Gpu], proc: str = "/proc", timeout: float = 30.0, *, alone: bool = False
) -> tuple[list[Gpu], list[Finding]]:
    """Add the compute processes to the GPUs they are on, each with its unit; alone asks for no other GPU."""
    fields = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
    only = [gpu.uuid for gpu in gpus if gpu.uuid] if alone else []
    done, _fields = ask(runner, fields, fields, timeout, "compute-apps", only)
    if done.rc != 0:
        finding = smi_problem(done, timeout)
        return list(gpus), [
            replace(finding, code="gpu_processes_unknown", message=f"processes on the GPUs: {finding.message}")
        ]
    found: dict[str, list[GpuProcess]] = {}
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        if len(row) < 4:
            continue
        pid = _int(row[1])
        if pid is None:
            continue
        # a process name may hold commas
        command = ", ".join(row[2:-1]).strip()
        used = _int(_value(row[-1]))
        process = GpuProcess(pid, command, unit_of_pid(pid, proc), used, _is_orphan(pid, command, proc))
        found.setdefault(row[0], []).append(process)
    return [replace(gpu, processes=found.get(gpu.uuid or "", [])) for gpu in gpus], []


def _is_orphan(pid: int, command: str, proc: str) -> bool:
    """Say whether a process is an engine's child that init has inherited: nothing will ever stop it."""
    try:
        status = Path(f"{proc}/{pid}/status").read_text(encoding="utf-8", errors="replace")
        title = Path(f"{proc}/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return "sglang::" in f"{command} {title}" and bool(re.search(r"^PPid:\s*1$", status, re.MULTILINE))


def kernel_module_version(proc: str = "/proc") -> str:
    """Return the version of the loaded NVIDIA kernel module, '' when none is."""
    try:
        text = Path(f"{proc}/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else ""


def device_nodes(gpus: Sequence[Gpu], proc: str = "/proc", dev: str = "/dev") -> list[str]:
    """Return the device nodes the servers need; a GPU's node carries its minor number, which need not be its index."""
    nodes = [f"{dev}/nvidiactl", f"{dev}/nvidia-uvm"]
    for gpu in gpus:
        minor = str(gpu.index)
        try:
            folder = Path(f"{proc}/driver/nvidia/gpus/{gpu.pci_bus_id[-12:]}/information")
            match = re.search(r"Device Minor:\s*(\d+)", folder.read_text(encoding="utf-8", errors="replace"))
            minor = match.group(1) if match else minor
        except OSError:
            pass
        nodes.append(f"{dev}/nvidia{minor}")
    return nodes


def open_nodes(runner: Runner, paths: Sequence[str], timeout: float = 20.0) -> dict[str, str]:
    """Really open the nodes, in a process that may hang; returns 'ok' or what stands against it, by path."""
    done = runner.run([sys.executable, "-c", _OPEN, *paths], timeout=timeout)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    states = {}
    for path in paths:
        if path not in said:
            states[path] = "hung" if done.rc == TIMED_OUT else "unknown"
        elif said[path] == "ok":
            states[path] = "ok"
        else:
            code = said[path].split(" ", 1)[0]
            states[path] = {"1": "denied", "13": "forbidden", "2": "missing", "6": "no_device", "19": "no_device"}.get(
                code, said[path]
            )
    return states


def _value(cell: str) -> str | None:
    text = cell.strip()
    return None if not text or (text.startswith("[") and text.endswith("]")) or text == "N/A" else text


def _int(text: str | None) -> int | None:
    match = re.fullmatch(r"(\d+)(?:\s*MiB)?", (text or "").strip())
    return int(match.group(1)) if match else None
