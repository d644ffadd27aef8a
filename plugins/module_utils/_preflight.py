# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Preflight: what was seen on the host, judged for the servers it is to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _gpu_container, _gpu_state, _gpus, _host
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import ERROR, WARNING, Finding, errors
from ansible_collections.gpufleet.sglang.plugins.module_utils._gone import Gone, broken_nodes, settle
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import Gpu
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import read_applied
from ansible_collections.gpufleet.sglang.plugins.module_utils._ports import Listener, holders, listeners
from ansible_collections.gpufleet.sglang.plugins.module_utils._slots import Slot, port_problems, resolve, unit_of_gpu

TOLERATED_MIB = 1024  # a foreign process with less than this on a GPU is named, but stops nothing
CPU_SERVER_MIB = 1600  # a server on device cpu, measured


@dataclass(frozen=True)
class Wanted:
    """What preflight is asked to look at."""

    device: str = "cuda"
    gpus: Sequence[object] = ()
    instances: Sequence[Mapping[str, Any]] = ()
    base_port: object = 30000
    host: str = "127.0.0.1"
    ports: Sequence[int] = ()
    config_dir: str = "/etc/sglang"
    paths: Sequence[Mapping[str, Any]] = ()  # path, min_free_mib, unless (a file that makes the space unneeded)
    vmid: str = ""  # of the LXC container on Proxmox, for the name of its configuration


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of a host and what went wrong in asking for them."""

    gpus: list[Gpu] = field(default_factory=list)
    known: bool = False  # nvidia-smi has answered
    checked: bool = False  # false on device cpu
    findings: list[Finding] = field(default_factory=list)
    gone: list[Gone] = field(default_factory=list)


def look_at_gpus(
    host: _host.Host, device: str, timeout: float = 30.0, *, config_dir: str = "", wanted: Sequence[object] = ()
) -> GpuFacts:
    """Ask the driver for the GPUs and their processes; nothing is asked on device cpu.

    config_dir: where the servers' files lie; GPUs that have a server keep its number. wanted: sglang_server_gpus.
    """
    if device == "cpu":
        return GpuFacts()
    gpus, findings = _gpus.query(host.runner, timeout)
    lost: dict[_gpus.KernelGpu, str] = {}
    if [item.code for item in findings] == ["nvidia_smi_failed"]:
        each, lost = _gpus.one_by_one(host.runner, _gpus.kernel_gpus(host.proc), min(timeout, 10.0))
        gpus, findings, lost = (each, [], lost) if each else (gpus, findings, {})
    known = not findings
    if gpus:
        gpus, more = _gpus.with_processes(host.runner, gpus, host.proc, timeout, alone=bool(lost))
        findings = [*findings, *more]
    rolled_out = {gpu: item.uuid for gpu, item in read_applied(config_dir).items()} if config_dir and known else {}
    broken = broken_nodes(host.runner, gpus, rolled_out, host.proc, host.dev)
    broken.update({item.uuid: why for item, why in lost.items() if item.uuid})
    gpus, gone = settle(gpus, rolled_out, broken)
    # a container sees in /proc the GPUs that were not passed in, too
    here = {item: why for item, why in lost.items() if Path(f"{host.dev}/nvidia{item.minor}").exists()}
    return GpuFacts(gpus, known, True, [*findings, *_never_served(here, gone, wanted)], gone)


def _never_served(lost: Mapping[_gpus.KernelGpu, str], gone: Sequence[Gone], wanted: Sequence[object]) -> list[Finding]:
    """Name the GPUs that do not answer and never had a server; where every GPU is wanted that stops the deploy."""
    told = {item.uuid for item in gone}
    remedy = "Look for NVRM and Xid in the kernel log; to go on without it, name the others in sglang_server_gpus"
    return [
        Finding("gpu_lost", f"the GPU at {item.bus_id} does not answer: {why}", remedy, WARNING if wanted else ERROR)
        for item, why in lost.items()
        if item.uuid not in told and (item.uuid or not gone)  # without a UUID it is one of those that are gone
    ]


def collect(host: _host.Host, wanted: Wanted, timeout: float = 30.0) -> tuple[dict[str, Any], list[Finding]]:
    """Look at everything, then judge it: returns the facts and the findings."""
    seen = look_at_gpus(host, wanted.device, timeout, config_dir=wanted.config_dir, wanted=wanted.gpus)
    sockets = listeners(host.proc)
    facts: dict[str, Any] = {
        "device": wanted.device,
        "gpus_checked": seen.checked,
        "gpus": [gpu.to_dict() for gpu in seen.gpus],
        "listeners": [item.to_dict() for item in sockets],
        "disks": _host.disks(host, [str(item["path"]) for item in wanted.paths]),
        "memory": _host.memory(host),
        "shared_memory_mib": _host.shared_memory_mib(host),
        "tools": _host.tools(host),
        "systemd": _host.systemd(host),
        "pythons": _host.pythons(host),
    }
    slots, findings = resolve(
        wanted.device, wanted.gpus, wanted.instances, wanted.base_port, wanted.host, seen.gpus, seen.known, seen.gone
    )
    findings = [*seen.findings, *findings]
    if seen.checked:
        chosen = [gpu for gpu in seen.gpus if gpu.index in {slot.gpu for slot in slots}]
        more, wrong = _container(host, wanted, seen, chosen, complete=not errors(findings), timeout=timeout)
        facts.update(more)
        findings.extend(wrong)
        findings.extend(gpu_problems(chosen, _running(slots, sockets)))
        count = len(slots) or len(wanted.gpus)
        place = more["container"]
        findings.extend(_gpu_container.room_problems(place, facts["memory"], facts["shared_memory_mib"], count))
        facts["container"] = place.to_dict()
    findings.extend(port_problems(slots, sockets))
    findings.extend(_extra_ports(wanted, slots, sockets))
    findings.extend(_disk_problems(wanted, facts["disks"]))
    findings.extend(_host_problems(wanted.device, facts, slots, sockets))
    return facts, list(dict.fromkeys(findings))


def gpu_problems(gpus: Sequence[Gpu], running: set[int]) -> list[Finding]:
    """Judge the chosen GPUs: foreign processes, memory taken by nobody visible, unequal sizes, age."""
    findings: list[Finding] = []
    for gpu in gpus:
        where = f"GPU {gpu.index} ({gpu.name}, {gpu.uuid or 'no UUID'})"
        ours = unit_of_gpu(gpu.index)
        for process in gpu.processes:
            if process.unit == ours:
                continue
            used = "an unknown amount" if process.used_mib is None else f"{process.used_mib} MiB"
            text = f"{where} is used by pid {process.pid} ({process.command}, {process.unit or 'no unit'}) with {used}"
            small = process.used_mib is not None and process.used_mib < TOLERATED_MIB
            remedy = "Stop that process, or leave the GPU out of sglang_server_gpus"
            findings.append(Finding("gpu_busy", text, remedy, WARNING if small else "error", gpu.index))
        if not gpu.processes and (gpu.memory_used_mib or 0) >= TOLERATED_MIB and gpu.index not in running:
            text = f"{where} has {gpu.memory_used_mib} of {gpu.memory_total_mib} MiB in use by no process visible here"
            remedy = "Look from the machine outside this container, or for a process that died without freeing it"
            findings.append(Finding("gpu_memory_in_use", text, remedy, WARNING, gpu.index))
        if gpu.compute_cap and _capability(gpu.compute_cap) < (7, 5):
            text = f"{where} has compute capability {gpu.compute_cap}, and SGLang's kernels need 7.5 or more"
            findings.append(Finding("gpu_too_old", text, "Leave it out of sglang_server_gpus", gpu=gpu.index))
    sizes = {gpu.index: gpu.memory_total_mib for gpu in gpus if gpu.memory_total_mib}
    if sizes and max(sizes.values()) > 1.05 * min(sizes.values()):
        listed = ", ".join(f"GPU {index} {size} MiB" for index, size in sizes.items())
        text = f"the GPUs have unequal memory: {listed}"
        remedy = "Settings that fit one may not fit another: set them per GPU in sglang_server_instances"
        findings.append(Finding("gpu_memory_unequal", text, remedy, WARNING))
    return findings


def _capability(text: str) -> tuple[int, ...]:
    parts = tuple(int(part) for part in text.split(".") if part.isdigit())
    return parts or (99,)


def _running(slots: Sequence[Slot], sockets: Sequence[Listener]) -> set[int]:
    """Return the GPUs whose own unit holds a port: what their memory holds is ours."""
    units = {item.unit for item in sockets}
    return {slot.gpu for slot in slots if slot.unit in units}


def _container(
    host: _host.Host, wanted: Wanted, seen: GpuFacts, chosen: Sequence[Gpu], *, complete: bool, timeout: float
) -> tuple[dict[str, Any], list[Finding]]:
    """Look at how the GPUs got here (device nodes, cgroup, driver) and at the state they are in."""
    kernel = _gpus.kernel_gpus(host.proc)
    paths = _gpus.device_nodes(chosen, host.proc, host.dev)
    if not complete:  # a GPU that is wanted is not seen: one of the kernel's may not have been passed in
        paths += [f"{host.dev}/nvidia{gpu.minor}" for gpu in kernel if gpu.minor is not None]
    paths = list(dict.fromkeys([*paths, f"{host.dev}/nvidia-uvm-tools"]))
    place = _gpu_container.look(host, paths, wanted.vmid)
    nodes = _gpus.open_nodes(host.runner, paths)
    findings = _gpu_container.driver_problems(place, nodes)
    # Without a driver every node is missing too: its absence is the one thing to say.
    if not any(item.code == "driver_not_loaded" for item in findings):
        findings += _gpu_container.node_problems(nodes, place)
    driver, wrong = _driver(host, seen.gpus, place)
    findings += wrong
    where = _gpu_container.outside(place)
    told = _gpu_state.health(host.runner, timeout) if chosen and seen.known else {}
    log = _gpu_state.kernel_log(host.runner) if chosen else None
    findings += _gpu_state.state_problems(chosen, told, where)
    findings += _gpu_state.xid_problems(log or "", chosen, where)
    findings += _gpu_state.order_problems(seen.gpus, kernel, _gpu_state.rendered_gpus(wanted.config_dir))
    facts = {
        "container": place,
        "driver": driver,
        "device_nodes": [{"path": path, "state": state} for path, state in nodes.items()],
        "gpu_health": told,
        "kernel_log_read": log is not None,
    }
    return facts, findings


def _driver(host: _host.Host, gpus: Sequence[Gpu], place: _gpu_container.Place) -> tuple[dict[str, Any], list[Finding]]:
    """Compare the kernel module's version with what the driver's programs and libraries here have."""
    module = place.module
    libraries = _host.driver_libraries(host)
    smi = next((gpu.driver_version for gpu in gpus if gpu.driver_version), "")
    findings = []
    others = {"nvidia-smi": smi, **{str(item["path"]): item["version"] or "" for item in libraries.values()}}
    for name, version in others.items():
        if module and version and version != module:
            text = f"the loaded kernel module is version {module}, {name} is version {version}"
            remedy = "Reboot after a driver update"
            if place.container:
                installer = f"sh NVIDIA-Linux-x86_64-{module}.run --no-kernel-modules"
                remedy = f"Install the host's version in this container: '{installer}'"
            findings.append(Finding("driver_mismatch", text, remedy))
    for name, item in libraries.items():
        if item["known"] and not item["path"]:
            code = "libcuda_missing" if name.startswith("libcuda") else "libnvidia_ml_missing"
            text = f"the loader knows no {name}: programs do not find the driver"
            findings.append(Finding(code, text, "Install the driver's libraries, then run ldconfig", WARNING))
    library, management = libraries.values()
    return {
        "module_version": module or None,
        "smi_version": smi or None,
        "libcuda": library,
        "libnvidia_ml": management,
    }, findings


def _extra_ports(wanted: Wanted, slots: Sequence[Slot], sockets: Sequence[Listener]) -> list[Finding]:
    units = {slot.unit for slot in slots}
    findings = []
    for port in wanted.ports:
        for holder in holders(sockets, wanted.host, port):
            if holder.unit not in units:
                who = f"pid {holder.pid} ({holder.command or 'unknown command'}, {holder.unit or 'no unit'})"
                findings.append(Finding("port_taken", f"port {port} is taken by {who}", "Stop it, or use another port"))
    return findings


def _disk_problems(wanted: Wanted, disks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    findings = []
    for item, disk in zip(wanted.paths, disks):
        need = int(item.get("min_free_mib") or 0)
        unless = item.get("unless")
        if disk["hung"]:
            text = f"{disk['path']} does not answer: its mount hangs"
            findings.append(Finding("disk_hung", text, "Repair or remove the mount"))
        elif disk["free_mib"] is not None and disk["free_mib"] < need and not (unless and _exists(str(unless))):
            text = f"{disk['exists']} has {disk['free_mib']} MiB free for {disk['path']}, which needs {need} MiB"
            findings.append(Finding("disk_full", text, "Free space there, or choose another place"))
    return findings


def _exists(path: str) -> bool:
    return Path(path).exists()


def _host_problems(
    device: str, facts: Mapping[str, Any], slots: Sequence[Slot], sockets: Sequence[Listener]
) -> list[Finding]:
    findings = []
    if not facts["systemd"]["pid1"]:
        text = "systemd is not PID 1 on this host"
        findings.append(
            Finding("no_systemd", text, "The servers are systemd units: use a host or container that boots systemd")
        )
    missing = [name for name in ("gcc", "g++") if not facts["tools"][name]]
    if device != "cpu" and missing:
        text = f"{' and '.join(missing)} not on the PATH: kernels that are compiled at run time need a host compiler"
        findings.append(Finding("no_compiler", text, "Install gcc and g++", WARNING))
    available = facts["memory"]["available_mib"]
    new = [slot for slot in slots if slot.gpu not in _running(slots, sockets)]
    if device == "cpu" and available is not None and len(new) * CPU_SERVER_MIB > available:
        text = (
            f"{len(new)} new servers need about {len(new) * CPU_SERVER_MIB} MiB of RAM, {available} MiB are available"
        )
        findings.append(Finding("memory_low", text, "List fewer slots in sglang_server_gpus", WARNING))
    return findings
