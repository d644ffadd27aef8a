"""GPU containers: texts as real machines have them, and the line or command each finding ends in."""

from __future__ import annotations

import dataclasses
import os
import stat

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _gpu_container as container
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpu_container import Node, Place
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import open_nodes
from ansible_collections.gpufleet.sglang.plugins.module_utils._host import Host
from ansible_collections.gpufleet.sglang.plugins.module_utils._preflight import Wanted, collect
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result, SubprocessRunner
from hosts import TCP_HEADER, smi

MAJORS = {"nvidia": 195, "nvidiactl": 195, "nvidia-modeset": 195, "nvidia-uvm": 508, "nvidia-caps": 511}
LXC = Place(container="lxc", vmid="200", module="580.95.05", majors=MAJORS)
HALF = Place("lxc", module="580.95.05", majors={"nvidia": 195})
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max open files            1024                 4096                 files
Max locked memory         8388608              8388608              bytes
"""


def at(path, major=195, mode=0o666, **changes):
    values = {"container": "lxc", "vmid": "200", "module": "580.95.05", "majors": MAJORS, **changes}
    return Place(nodes={path: Node(major, mode)}, **values)


@pytest.mark.parametrize(
    ("path", "state", "place", "code", "line"),
    [
        (
            "/dev/nvidia3",
            "missing",
            LXC,
            "device_node_missing",
            "'lxc.mount.entry: /dev/nvidia3 dev/nvidia3 none bind,optional,create=file' and "
            "'lxc.cgroup2.devices.allow: c 195:* rwm' into /etc/pve/lxc/200.conf",
        ),
        (
            "/dev/nvidia-uvm",
            "denied",
            at("/dev/nvidia-uvm", 508),
            "device_node_denied",
            "'lxc.cgroup2.devices.allow: c 508:* rwm' into /etc/pve/lxc/200.conf",
        ),
        (
            "/dev/nvidiactl",
            "denied",
            at("/dev/nvidiactl", cgroup_v1=True, vmid=""),
            "device_node_denied",
            "'lxc.cgroup.devices.allow: c 195:* rwm' into /etc/pve/lxc/<vmid>.conf",
        ),
        (
            "/dev/nvidia-uvm",
            "no_device",
            at("/dev/nvidia-uvm", 235),
            "device_node_stale",
            "'lxc.cgroup2.devices.allow: c 508:* rwm'",
        ),
        ("/dev/nvidia0", "forbidden", at("/dev/nvidia0"), "device_node_forbidden", "devN: /dev/nvidia0,mode=0666"),
        ("/dev/nvidia0", "ok", at("/dev/nvidia0", mode=0o660), "device_node_mode", "'chmod 0666 /dev/nvidia0'"),
        ("/dev/nvidia0", "5 Input/output error", at("/dev/nvidia0"), "device_node_error", "RmInitAdapter"),
        ("/dev/nvidia0", "16 Device or resource busy", at("/dev/nvidia0"), "device_node_error", "'dmesg'"),
        (
            "/dev/nvidia3",
            "no_node",
            LXC,
            "device_node_no_node",
            "on the Proxmox host ('nvidia-modprobe -c=3'), and restart",
        ),
        ("/dev/nvidiactl", "no_node", Place(), "device_node_no_node", "make the node here ('nvidia-modprobe -u -c=0')"),
        ("/dev/nvidia0", "hung", at("/dev/nvidia0"), "device_node_hung", "on the Proxmox host"),
        ("/dev/nvidia0", "unknown", LXC, "device_node_unknown", "the node before it"),
        (
            "/dev/nvidia0",
            "no_device",
            at("/dev/nvidia0"),
            "device_node_no_device",
            "Xid in 'dmesg' on the Proxmox host",
        ),
        ("/dev/nvidia-uvm", "missing", Place(majors=MAJORS), "device_node_missing", "'nvidia-modprobe -u -c=0'"),
        ("/dev/nvidia5", "missing", Place(majors=MAJORS), "device_node_missing", "'nvidia-modprobe -c=5'"),
        ("/dev/nvidia5", "missing", Place("docker", majors=MAJORS), "device_node_missing", "this docker container"),
        ("/dev/nvidia5", "denied", Place("systemd-nspawn"), "device_node_denied", "DeviceAllow=/dev/nvidia5 rw"),
        ("/dev/nvidia5", "denied", Place(), "device_node_denied", "DeviceAllow=/dev/nvidia5 rw"),
    ],
)
def test_what_an_open_means(path, state, place, code, line):
    (finding,) = container.node_problems({path: state}, place)
    assert (finding.code, line in finding.remedy) == (code, True), finding
    assert path in finding.message


@pytest.mark.parametrize("place", [LXC, Place(), at("/dev/nvidia0"), at("/dev/nvidia-uvm", 235)])
def test_a_node_that_opens_is_no_finding(place):
    assert container.node_problems({"/dev/nvidia0": "ok", "/dev/nvidia-uvm": "ok"}, place) == []


def test_nobody_but_a_debugger_needs_uvm_tools():
    findings = container.node_problems({"/dev/nvidia-uvm-tools": "missing", "/dev/nvidia-uvm": "missing"}, LXC)
    assert [item.severity for item in findings] == ["warning", "error"]


@pytest.mark.parametrize(
    ("place", "state", "codes", "command"),
    [
        (LXC, "missing", [], ""),
        (Place("lxc"), "missing", ["driver_not_loaded"], "on the Proxmox host: 'modprobe nvidia-uvm'"),
        (Place(), "missing", ["driver_not_loaded"], "Load it here"),
        (HALF, "missing", ["uvm_not_loaded"], "'nvidia-modprobe -u -c=0' on the Proxmox host"),
        (HALF, "ok", [], ""),
        (Place("lxc", module="580.95.05"), "missing", [], ""),  # /proc/devices hidden: nothing is known against it
        (Place("docker"), "ok", [], ""),  # a sandbox that shows nothing, and works
    ],
)
def test_a_driver_that_is_not_loaded(place, state, codes, command):
    findings = container.driver_problems(place, {"/dev/nvidia-uvm": state})
    assert [item.code for item in findings] == codes
    assert all(command in item.remedy for item in findings)


@pytest.mark.parametrize(
    ("total", "limit", "shared", "servers", "codes", "line"),
    [
        (65536, None, 32768, 8, [], ""),
        (65536, 8192, 32768, 8, ["memory_low"], "'memory: 32768'"),
        (8192, None, 4096, 8, ["memory_low"], "'memory: 32768'"),
        (None, None, 4096, 8, [], ""),
        (
            65536,
            None,
            64,
            8,
            ["shm_small"],
            "'lxc.mount.entry: tmpfs dev/shm tmpfs nosuid,nodev,size=2048m,create=dir 0 0'",
        ),
        (65536, None, None, 1, ["shm_small"], "size=1024m"),
    ],
)
def test_room(total, limit, shared, servers, codes, line):
    memory = {"total_mib": total, "cgroup_limit_mib": limit}
    findings = container.room_problems(LXC, memory, shared, servers)
    assert [item.code for item in findings] == codes
    assert all(line in item.remedy for item in findings)


@pytest.mark.parametrize(
    ("unprivileged", "limits", "lines"),
    [
        (True, LIMITS, ["lxc.prlimit.nofile: 1048576", "lxc.prlimit.memlock: unlimited"]),
        (False, LIMITS, []),  # systemd raises them for its units
        (True, LIMITS.replace("4096 ", "1048576 ").replace("8388608 ", "unlimited "), []),
        (True, "", []),
    ],
)
def test_limits(unprivileged, limits, lines):
    place = Place("lxc", "200", user_namespace=unprivileged, limits=container.parse_limits(limits))
    findings = container.room_problems(place, {}, 4096, 8)
    assert [any(line in item.remedy for line in lines) for item in findings] == [True] * len(lines)


def test_look_reads_what_is_there(tmp_path, runner):
    for folder in ("driver/nvidia", "self", "1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "devices").write_text(
        "Character devices:\n  1 mem\n195 nvidia\n508 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
    )
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open  580.95.05  Release\n")
    (tmp_path / "self/uid_map").write_text("         0     100000      65536\n")
    (tmp_path / "self/cgroup").write_text("12:devices:/x\n0::/\n")
    (tmp_path / "1/limits").write_text(LIMITS)
    place = container.look(Host(runner.on("systemd-detect-virt", stdout="lxc\n"), str(tmp_path)), ["/dev/null"], "200")
    assert place == Place(
        "lxc",
        "200",
        cgroup_v1=True,
        user_namespace=True,
        module="580.95.05",
        majors={"nvidia": 195, "nvidia-uvm": 508},
        nodes={"/dev/null": Node(1, 0o666)},
        limits={"Max cpu time": "unlimited", "Max open files": "4096", "Max locked memory": "8388608"},
    )
    assert place.to_dict()["type"] == "lxc"


def test_look_at_this_very_machine():
    place = container.look(Host(SubprocessRunner()), ["/dev/null", "/nonexistent"])
    assert set(place.nodes) == {"/dev/null"}
    assert place.nodes["/dev/null"].major == os.major(os.stat("/dev/null").st_rdev) == 1
    assert place.limits["Max open files"].isdigit()


def test_a_real_node_whose_number_no_driver_has(tmp_path):
    """The kernel's own answer, ENXIO: what is left of nvidia-uvm's node after a boot has given it another number."""
    path = tmp_path / "nvidia-uvm"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(507, 0))
    except PermissionError:
        pytest.skip("making a device node needs root outside a user namespace")
    states = open_nodes(SubprocessRunner(), [str(path)])
    if states[str(path)] == "denied":
        pytest.skip("this container's own device cgroup answers first")
    assert states == {str(path): "no_device"}
    place = container.look(Host(SubprocessRunner()), [str(path)])
    found = dataclasses.replace(place, container="lxc", majors=MAJORS)
    (finding,) = container.node_problems(states, found)
    assert finding.code == "device_node_stale"
    assert "carries the number 507, but its driver has 508 now" in finding.message


def test_everything_that_is_wrong_with_a_container_is_said_at_once(tmp_path, runner):
    """The usual one: nvidia-smi says no more than an unknown error."""
    for folder in ("net", "1", "self", "driver/nvidia/gpus/0000:01:00.0", "driver/nvidia/gpus/0000:02:00.0", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "net/tcp").write_text(TCP_HEADER)
    (tmp_path / "1/comm").write_text("systemd\n")
    (tmp_path / "meminfo").write_text("MemTotal: 2097152 kB\n")
    (tmp_path / "devices").write_text("Character devices:\n195 nvidia\n508 nvidia-uvm\n")
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open  580.95.05  Release\n")
    for minor, bus in enumerate(("0000:01:00.0", "0000:02:00.0")):
        text = f"Model: \t\t NVIDIA RTX\nGPU UUID: \t GPU-????????-????\nDevice Minor: \t {minor}\n"
        (tmp_path / f"driver/nvidia/gpus/{bus}/information").write_text(text)
    runner.on("nvidia-smi", rc=255, stdout="Failed to initialize NVML: Unknown Error\n")
    runner.on("systemd-detect-virt", stdout="lxc\n")
    said = {"nvidiactl": "1 Operation not permitted", "nvidia-uvm": "2 No such file or directory"}
    runner.on_call(
        "-c",
        answer=lambda argv: Result(0, "".join(f"{path} {said.get(path.split('/')[-1], 'ok')}\n" for path in argv[3:])),
    )
    for path in ("libcuda.so.570.10", "libnvidia-ml.so.580.95.05"):
        (tmp_path / path).write_text("")
    runner.on(
        "-p",
        stdout=f"\tlibcuda.so.1 (libc6) => {tmp_path}/libcuda.so.570.10\n"
        f"\tlibnvidia-ml.so.1 (libc6) => {tmp_path}/libnvidia-ml.so.580.95.05\n",
    )
    host = Host(runner, str(tmp_path), "/dev", str(tmp_path / "cgroup"), str(tmp_path / "bin"))
    facts, findings = collect(host, Wanted(gpus=["0", "1"], vmid="200", config_dir=str(tmp_path)))
    assert [item.code for item in findings] == [
        "nvidia_smi_failed",
        "device_node_denied",
        "device_node_missing",
        "driver_mismatch",
        "memory_low",
        "no_compiler",
    ]
    assert [node["path"] for node in facts["device_nodes"]] == [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia0",
        "/dev/nvidia1",
        "/dev/nvidia-uvm-tools",
    ]
    assert "NVIDIA-Linux-x86_64-580.95.05.run" in findings[3].remedy
    assert "570.10" in findings[3].message


def test_the_fields_of_smi_and_its_health_are_told_apart(tmp_path, runner):
    """Where a rule answers every question alike, the second answer is none."""
    runner.on("nvidia-smi", stdout=smi(count=1))
    facts, _findings = collect(Host(runner, str(tmp_path), "/dev", str(tmp_path)), Wanted(config_dir=str(tmp_path)))
    assert facts["gpu_health"] == {}
