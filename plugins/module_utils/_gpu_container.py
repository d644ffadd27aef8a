# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""GPUs passed into a container: what keeps them from working, each with the line or the command that repairs it.

An open() tells causes apart that look the same from nvidia-smi ("Failed to initialize NVML: Unknown Error"): ENOENT is
a node that was not passed in, EPERM the device cgroup, EACCES the node's owner and mode, ENXIO a number that no driver
has any more, EIO a GPU that the driver cannot bring up.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import ERROR, WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpu_container_conf import (
    CONTROL,
    UVM,
    UVM_TOOLS,
    allow_line,
    dev_line,
    major_of,
    mount_line,
    parse_majors,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import kernel_module_version
from ansible_collections.gpufleet.sglang.plugins.module_utils._host import Host

NOFILE = 65536  # what a server needs at the least; the unit asks for more
SHM_MIB_PER_SERVER = (
    64  # Docker's default for a whole container, with which two engines already get in each other's way
)
SERVER_MIB = 2048  # RAM of one engine without its weights, measured: 2.0 GB


@dataclass(frozen=True)
class Node:
    """A device node as it lies in /dev: the number of its driver, and its permission bits."""

    major: int
    mode: int = 0o666


@dataclass(frozen=True)
class Place:
    """Where this is: a machine, or a container and how it is held."""

    container: str = ""  # as systemd-detect-virt names it; '' on a machine
    vmid: str = ""
    cgroup_v1: bool = False
    user_namespace: bool = False  # unprivileged: root here is nobody special outside
    module: str = ""  # version of the loaded kernel module
    majors: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)  # hard limits of PID 1

    @property
    def loaded(self) -> bool:
        """Say whether the kernel shows a driver."""
        return bool(self.module) or major_of("nvidia0", self.majors) is not None

    @property
    def lxc(self) -> bool:
        """Say whether a line in Proxmox's configuration is what helps."""
        return self.container.startswith("lxc")

    @property
    def conf(self) -> str:
        """Return the file on the Proxmox host."""
        return f"/etc/pve/lxc/{self.vmid or '<vmid>'}.conf"

    def into_conf(self, *lines: str) -> str:
        """Return the remedy that is these lines."""
        text = " and ".join(f"'{line}'" for line in lines)
        how = "and restart the container (playbooks/proxmox_gpu.yml knows the lines for GPUs)"
        return f"Put {text} into {self.conf} on the Proxmox host {how}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a module's result."""
        return {
            "type": self.container,
            "unprivileged": self.user_namespace,
            "device_cgroup": "v1" if self.cgroup_v1 else "v2",
            "majors": dict(self.majors),
        }


def look(host: Host, paths: Sequence[str], vmid: str = "") -> Place:
    """Look where this is; opens nothing, so nothing can hang."""
    done = host.runner.run(["systemd-detect-virt", "--container"], timeout=10.0)
    said = done.stdout.strip()
    nodes = {}
    for path in paths:
        try:
            state = os.stat(path)
        except OSError:
            continue
        if stat.S_ISCHR(state.st_mode):
            nodes[path] = Node(os.major(state.st_rdev), stat.S_IMODE(state.st_mode))
    majors = parse_majors(_read(f"{host.proc}/devices"))
    uid_map = _read(f"{host.proc}/self/uid_map").split()
    return Place(
        container=said if said not in ("", "none") else "",
        vmid=vmid,
        cgroup_v1="devices" in _read(f"{host.proc}/self/cgroup").replace(":", ",").split(","),
        user_namespace=bool(uid_map) and uid_map[:3] != ["0", "0", "4294967295"],
        module=kernel_module_version(host.proc),
        majors={name: number for name, number in majors.items() if name.startswith("nvidia")},
        nodes=nodes,
        limits=parse_limits(_read(f"{host.proc}/1/limits")),
    )


def parse_limits(text: str) -> dict[str, str]:
    """Read the hard limits out of /proc/PID/limits."""
    found = {}
    for line in text.splitlines()[1:]:
        cells = line[26:].split()  # the name takes the first 26 columns
        if len(cells) >= 2:
            found[line[:26].strip()] = cells[1]
    return found


def driver_problems(place: Place, states: Mapping[str, str]) -> list[Finding]:
    """Say that the kernel, which a container shares with its host, has no driver or only half of one.

    What opens is there, whatever /proc tells: sandboxes show neither /proc/driver nor all of /proc/devices.
    """
    if any(state == "ok" for path, state in states.items() if path.endswith(UVM)):
        return []
    where = "on the Proxmox host" if place.lxc else "on the machine outside" if place.container else "here"
    if not place.loaded and "ok" not in states.values():
        text = "the kernel has no NVIDIA driver loaded (no /proc/driver/nvidia/version, nothing of it in /proc/devices)"
        remedy = (
            f"Load it {where}: 'modprobe nvidia-uvm' (nvidia comes with it); install the driver there if there is none"
        )
        return [Finding("driver_not_loaded", text, remedy)]
    if place.majors and UVM not in place.majors:
        text = f"the kernel has the NVIDIA driver {place.module} but not nvidia-uvm, without which CUDA does not start"
        boot = "for every boot: 'echo nvidia-uvm > /etc/modules-load.d/nvidia-uvm.conf'"
        remedy = f"Run 'nvidia-modprobe -u -c=0' {where}, and {boot}"
        return [Finding("uvm_not_loaded", text, remedy)]
    return []


def node_problems(states: Mapping[str, str], place: Place) -> list[Finding]:
    """Say what is wrong with the device nodes, each with its line."""
    findings = []
    for path, state in states.items():
        node = place.nodes.get(path)
        tools = path.endswith(UVM_TOOLS)  # only debuggers and profilers use it
        severity = WARNING if tools else ERROR
        now = major_of(path, place.majors)
        if node and now is not None and node.major != now and state != "ok":
            text = f"{path} carries the number {node.major}, but its driver has {now} now: the number changed at a boot"
            findings.append(Finding("device_node_stale", text, _stale(place, path, node.major, now), severity))
        elif state != "ok":
            code, text, remedy = _node_problem(path, state, place)
            findings.append(Finding(f"device_node_{code}", f"{path} {text}", remedy, severity))
        elif node and node.mode & 0o006 != 0o006 and not tools:
            text = f"{path} has mode {node.mode:04o}: it opens for root, and the servers do not run as root"
            remedy = f"Run 'chmod 0666 {path}' {outside(place)}"
            if place.lxc:
                remedy += f", or pass it in with '{dev_line('N', path)}' (Proxmox 8.1 or newer)"
            findings.append(Finding("device_node_mode", text, remedy, WARNING))
    return findings


def _node_problem(path: str, state: str, place: Place) -> tuple[str, str, str]:
    """Return code, what is wrong and its remedy for one node."""
    number, _space, said = state.partition(" ")
    if state == "missing":
        return "missing", "does not exist (ENOENT)", _pass_in(place, path)
    if state == "no_node":
        text = "is a file and no device node: a bind mount with create=file leaves one where the host has no such node"
        again = ", and restart the container" if place.container else ""
        return "no_node", text, f"Remove the file, make the node {outside(place)} ('{_make(path)}'){again}"
    if state == "denied":
        return "denied", "may not be opened (EPERM: the device cgroup forbids it)", _allow(place, path)
    if state == "forbidden":
        text = "may not be opened (EACCES: its owner and mode)"
        remedy = f"Run 'chmod 0666 {path}' {outside(place)}"
        if place.lxc:
            remedy += f", or pass it in with '{dev_line('N', path)}' (Proxmox 8.1 or newer)"
        return "forbidden", text, remedy
    if state == "no_device":
        text = "has no device behind it (ENXIO or ENODEV)"
        return "no_device", text, f"The GPU or its driver is gone: look for NVRM and Xid in 'dmesg' {outside(place)}"
    if state == "hung":
        remedy = f"The driver is stuck: look for NVRM and Xid in 'dmesg' {outside(place)}; a reboot frees it"
        return "hung", "hangs on open", remedy
    if state == "unknown":
        text = "was not reached: the open before it stopped the check"
        return "unknown", text, "Repair the node before it first"
    if number == "5":
        text = f"cannot be opened: EIO, {said}: the driver cannot bring this GPU up"
        remedy = f"Look for 'NVRM: RmInitAdapter failed' or Xid in 'dmesg' {outside(place)}; reset the GPU or reboot"
        return "error", text, remedy
    return "error", f"cannot be opened: {said or state}", f"Look for NVRM in 'dmesg' {outside(place)}"


def outside(place: Place) -> str:
    """Say where a command has to be run that a container cannot."""
    return "on the Proxmox host" if place.lxc else "on the machine outside the container" if place.container else "here"


def _pass_in(place: Place, path: str) -> str:
    if place.lxc:
        now = major_of(path, place.majors)
        lines = [mount_line(path)] + ([] if now is None else [allow_line(now, place.cgroup_v1)])
        return place.into_conf(*lines)
    make = _make(path)
    if place.container:
        outer = f"where it is missing outside too, '{make}' makes it there"
        return f"Pass the node into this {place.container} container; {outer}"
    return f"Run '{make}', which makes the node"


def _make(path: str) -> str:
    minor = path.rsplit("nvidia", 1)[-1] or "0"
    return "nvidia-modprobe -u -c=0" if UVM in path or path.endswith(CONTROL) else f"nvidia-modprobe -c={minor}"


def _allow(place: Place, path: str) -> str:
    node = place.nodes.get(path)
    number = major_of(path, place.majors) if node is None else node.major
    if place.lxc and number is not None:
        return place.into_conf(allow_line(number, place.cgroup_v1))
    if place.container:
        what = "its number" if number is None else f"c {number}:*"
        return f"Allow {what} in the device rules of this {place.container} container (systemd: DeviceAllow={path} rw)"
    return f"A unit or cgroup around this process forbids it: allow it there (systemd: DeviceAllow={path} rw)"


def _stale(place: Place, path: str, old: int, now: int) -> str:
    if place.lxc:
        line = allow_line(now, place.cgroup_v1)
        return place.into_conf(line) + f"; a line for {old} can go"
    again = f"Remove {path} and run 'nvidia-modprobe -u -c=0' {outside(place)}"
    return f"{again}; then restart the container" if place.container else again


def room_problems(
    place: Place, memory: Mapping[str, int | None], shared_mib: int | None, servers: int
) -> list[Finding]:
    """Judge RAM, /dev/shm and limits of a container for the servers it is to run."""
    findings = []
    total = min((mib for mib in (memory.get("total_mib"), memory.get("cgroup_limit_mib")) if mib), default=None)
    need = servers * SERVER_MIB
    if total is not None and total < need:
        text = f"{servers} servers need at least {need} MiB of RAM beside the weights they read, {total} MiB are here"
        remedy = (
            place.into_conf(f"memory: {2 * need}")
            if place.lxc
            else "Give it more, or list fewer GPUs in sglang_server_gpus"
        )
        findings.append(Finding("memory_low", text, remedy, WARNING))
    shm = max(servers, 1) * SHM_MIB_PER_SERVER
    if shared_mib is None or shared_mib < shm:
        seen = "missing" if shared_mib is None else f"{shared_mib} MiB"
        text = f"/dev/shm is {seen}, and {servers} servers may need {shm} MiB or more in it"
        size = max(1024, 4 * shm)
        line = f"lxc.mount.entry: tmpfs dev/shm tmpfs nosuid,nodev,size={size}m,create=dir 0 0"
        remedy = (
            place.into_conf(line)
            if place.lxc
            else f"Run 'mount -o remount,size={size}m /dev/shm' (Docker: --shm-size={size}m)"
        )
        findings.append(Finding("shm_small", text, remedy, WARNING))
    return [*findings, *_limit_problems(place)]


def _limit_problems(place: Place) -> list[Finding]:
    """In a user namespace nobody can raise a hard limit above PID 1's, whatever the unit says; else systemd can."""
    findings = []
    files, locked = place.limits.get("Max open files", ""), place.limits.get("Max locked memory", "")
    if not place.user_namespace:
        return []
    if files.isdigit() and int(files) < NOFILE:
        text = f"no process here may open more than {files} files, and this container cannot raise that itself"
        line = "lxc.prlimit.nofile: 1048576"
        findings.append(Finding("limit_nofile", text, _limit(place, line), WARNING))
    if locked.isdigit():
        size = f"{int(locked) // 1024} KiB of memory"
        text = f"no process here may lock more than {size}, and this container cannot raise that itself"
        findings.append(Finding("limit_memlock", text, _limit(place, "lxc.prlimit.memlock: unlimited"), WARNING))
    return findings


def _limit(place: Place, line: str) -> str:
    return place.into_conf(line) if place.lxc else "Raise it where the container is started"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
