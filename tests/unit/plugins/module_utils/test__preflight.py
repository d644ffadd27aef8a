"""Preflight: hosts as they are, judged for the servers they are to run."""

from __future__ import annotations

import dataclasses
import os
import socket

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _host
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import GpuProcess, parse_gpus
from ansible_collections.gpufleet.sglang.plugins.module_utils._preflight import Wanted, collect, gpu_problems
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result, SubprocessRunner
from hosts import TCP_HEADER, UUIDS, smi, tcp_line

LDCONFIG = (
    "3 libs found\n\tlibcuda.so.1 (libc6,x86-64) => {0}\n\tlibnvidia-ml.so.1 (libc6,x86-64) => {0}\n"
    "\tlibc.so.6 (libc6,x86-64) => /lib/libc.so.6\n"
)


@pytest.fixture
def host(tmp_path, runner):
    """A healthy host with eight GPUs; what a test changes before it looks counts."""
    for folder in ("net", "1", "self", "driver/nvidia", "dev/shm", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "net/tcp").write_text(TCP_HEADER)
    (tmp_path / "1/comm").write_text("systemd\n")
    (tmp_path / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 524288 kB\n")
    (tmp_path / "self/cgroup").write_text("0::/user.slice/a.scope\n")
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open  580.95.05  Release\n")
    (tmp_path / "libcuda.so.580.95.05").write_text("")
    (tmp_path / "libcuda.so.1").symlink_to(tmp_path / "libcuda.so.580.95.05")
    for name in ("gcc", "g++"):
        (tmp_path / "bin" / name).write_text("")
        (tmp_path / "bin" / name).chmod(0o755)
    runner.on("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", stdout="")
    runner.on("nvidia-smi", stdout=smi())
    runner.on("-p", stdout=LDCONFIG.format(tmp_path / "libcuda.so.1"))
    runner.on("systemctl", stdout="systemd 252 (252.39-1~deb12u1)\n+PAM\n")
    runner.on_call("-c", answer=lambda argv: Result(0, "".join(f"{path} ok\n" for path in argv[3:])))
    return _host.Host(runner, str(tmp_path), str(tmp_path / "dev"), str(tmp_path / "cgroup"), str(tmp_path / "bin"))


def codes(host, **wanted):
    return [item.code for item in collect(host, Wanted(**wanted))[1]]


def test_a_healthy_host(host):
    facts, findings = collect(host, Wanted())
    assert findings == []
    assert len(facts["gpus"]) == 8
    assert facts["gpus_checked"] is True
    assert facts["driver"]["module_version"] == "580.95.05"
    assert facts["driver"]["libcuda"]["version"] == "580.95.05"
    assert facts["memory"] == {"total_mib": 65536, "available_mib": 512, "cgroup_limit_mib": None}
    assert facts["systemd"] == {"pid1": True, "version": 252}
    assert facts["tools"]["nvcc"] is None
    assert [node["state"] for node in facts["device_nodes"]] == ["ok"] * 11


def test_device_cpu_asks_no_driver_and_says_so(host, runner):
    facts, findings = collect(host, Wanted(device="cpu", gpus=["0"]))
    assert (facts["gpus_checked"], facts["gpus"], "driver" in facts) == (False, [], False)
    assert [item.code for item in findings] == ["memory_low"]
    assert not runner.commands("nvidia-smi")


def test_no_systemd_no_compiler(host, tmp_path):
    (tmp_path / "1/comm").write_text("bash\n")
    assert codes(dataclasses.replace(host, search_path="/nonexistent")) == ["no_systemd", "no_compiler"]


def test_a_driver_updated_without_a_reboot(host, tmp_path):
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX  570.10  Release\n")
    _facts, findings = collect(host, Wanted())
    assert [item.code for item in findings] == ["driver_mismatch", "driver_mismatch"]
    assert "570.10" in findings[0].message
    assert "580.95.05" in findings[0].message


def test_ports_and_who_holds_them(host, tmp_path):
    lines = [tcp_line("0100007F", 30000, 11), tcp_line("00000000", 30003, 12), tcp_line("0100007F", 9000, 13)]
    (tmp_path / "net/tcp").write_text(TCP_HEADER + "".join(lines))
    for pid, inode, unit in ((10, 11, "sglang@0.service"), (20, 12, "nginx.service"), (30, 13, "x.service")):
        (tmp_path / f"{pid}/fd").mkdir(parents=True)
        (tmp_path / f"{pid}/fd/3").symlink_to(f"socket:[{inode}]")
        (tmp_path / f"{pid}/cmdline").write_bytes(b"program\0")
        (tmp_path / f"{pid}/cgroup").write_text(f"0::/system.slice/{unit}\n")
    findings = collect(host, Wanted(ports=[9000]))[1]
    assert [item.message for item in findings] == [
        "port 30003 of GPU 3 is taken by pid 20 (program, nginx.service) on 0.0.0.0",
        "port 9000 is taken by pid 30 (program, x.service)",
    ]
    assert findings[0].gpu == 3


def test_a_real_foreign_listener(host, runner):
    with socket.create_server(("127.0.0.1", 0)) as server:
        real = dataclasses.replace(host, proc="/proc")
        port = server.getsockname()[1]
        found = collect(real, Wanted(device="cpu", gpus=["0"], base_port=port))[1]
    (taken,) = [item for item in found if item.code == "port_taken"]
    assert f"pid {os.getpid()}" in taken.message


@pytest.mark.parametrize(
    ("process", "codes_", "severity"),
    [
        (GpuProcess(9, "sglang::scheduler", "sglang@1.service", 80000), [], None),
        (GpuProcess(9, "sglang::scheduler", "sglang@2.service", 80000), ["gpu_busy"], "error"),
        (GpuProcess(9, "python", "session-3.scope", 5000), ["gpu_busy"], "error"),
        (GpuProcess(9, "python", None, None), ["gpu_busy"], "error"),
        (GpuProcess(9, "Xorg", "gdm.service", 200), ["gpu_busy"], "warning"),
    ],
)
def test_processes_on_a_gpu(process, codes_, severity):
    gpu = dataclasses.replace(parse_gpus(smi(count=2))[1], processes=[process])
    findings = gpu_problems([gpu], set())
    assert [item.code for item in findings] == codes_
    if findings:
        assert findings[0].severity == severity
        assert findings[0].gpu == 1
        assert f"pid 9 ({process.command}, {process.unit or 'no unit'})" in findings[0].message


def test_memory_in_use_by_nobody_visible():
    gpus = parse_gpus(smi(count=2, used=40000))
    assert [(item.code, item.gpu) for item in gpu_problems(gpus, {0})] == [("gpu_memory_in_use", 1)]


def test_unequal_gpus():
    (finding,) = gpu_problems(parse_gpus(smi(memory=[97887, 97887, 49140])), set())
    assert (finding.code, finding.severity) == ("gpu_memory_unequal", "warning")
    assert "GPU 2 49140 MiB" in finding.message


def test_an_old_gpu():
    gpu = dataclasses.replace(parse_gpus(smi(count=1))[0], compute_cap="7.0")
    assert [item.code for item in gpu_problems([gpu], set())] == ["gpu_too_old"]


def test_a_gpu_that_is_not_wanted_may_be_busy(tmp_path, host, runner):
    text = f"{UUIDS[7]}, 99, python, 80000\n"
    runner.rules.insert(
        0, (("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory",), lambda argv: Result(0, text))
    )
    assert codes(host, gpus=["0", "1"]) == []
    assert codes(host) == ["gpu_busy"]


def test_hung_driver_and_wrong_ports_are_said_together(host, runner):
    runner.rules.insert(0, (("nvidia-smi",), lambda argv: Result(124)))
    assert codes(host, gpus=["0"], base_port=29000) == ["nvidia_smi_hung"]
    assert codes(host, device="cpu", gpus=["0"], base_port=100) == ["port_range", "memory_low"]


def test_disks(tmp_path):
    host = _host.Host(SubprocessRunner())
    (disk,) = _host.disks(host, [str(tmp_path / "a/b/c")])
    assert disk["exists"] == str(tmp_path)
    assert disk["free_mib"] > 0
    assert disk["hung"] is False
    assert _host.disks(host, []) == []


@pytest.mark.parametrize(
    ("rc", "out", "extra", "expected"),
    [
        (0, "/x\t/\t100\t1000\n", {}, []),
        (0, "/x\t/\t100\t1000\n", {"min_free_mib": 200}, ["disk_full"]),
        (0, "/x\t/\t100\t1000\n", {"min_free_mib": 200, "unless": "/proc/self/stat"}, []),
        (0, "/x\t/\t100\t1000\n", {"min_free_mib": 200, "unless": "/nonexistent"}, ["disk_full"]),
        (124, "", {}, ["disk_hung"]),
        (1, "", {"min_free_mib": 200}, []),
    ],
)
def test_disk_problems(host, runner, rc, out, extra, expected):
    runner.rules.insert(0, (("-c",), lambda argv: Result(rc, out if "statvfs" in argv[2] else "")))
    assert codes(host, device="cpu", gpus=["0"], paths=[{"path": "/x", **extra}]) == [*expected, "memory_low"]


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a.slice/b.scope\n", {"a.slice/memory.max": "1073741824", "a.slice/b.scope/memory.max": "max"}, 1024),
        ("0::/a.slice/b.scope\n", {"a.slice/memory.max": "max"}, None),
        ("0::/\n", {"memory.max": "2147483648"}, 2048),
        ("5:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "1073741824"}, 1024),
        ("5:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_memory_limits(tmp_path, runner, cgroup, files, limit):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (tmp_path / "cg" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cg" / name).write_text(text)
    host = _host.Host(runner, str(tmp_path), cgroup=str(tmp_path / "cg"))
    assert _host.cgroup_limit(host) == limit


def test_a_python_shim_that_does_not_run_has_no_version(tmp_path):
    for name, text in (("python3.12", "#!/bin/sh\nexit 127\n"), ("python3", "#!/bin/sh\necho 3.11.2\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    found = _host.pythons(_host.Host(SubprocessRunner(), search_path=str(tmp_path)))
    assert [(item["name"], item["version"]) for item in found] == [("python3.12", None), ("python3", "3.11.2")]


@pytest.mark.parametrize(
    ("rc", "out", "known", "paths"),
    [
        (0, "\tlibc.so.6 (libc6) => /lib/libc.so.6\n", True, [None, None]),
        (127, "", False, [None, None]),
        (
            0,
            "\tlibcuda.so.1 (libc6,x86-64) => /a/libcuda.so.1\n\tlibcuda.so.1 (libc6) => /b/libcuda.so.1\n",
            True,
            ["/a/libcuda.so.1", None],
        ),
    ],
)
def test_driver_libraries(runner, rc, out, known, paths):
    found = _host.driver_libraries(_host.Host(runner.on("-p", rc=rc, stdout=out)))
    assert [item["known"] for item in found.values()] == [known, known]
    assert [item["path"] for item in found.values()] == paths


def test_the_version_is_in_the_name_of_the_file_that_is_linked_to(tmp_path, runner):
    (tmp_path / "libnvidia-ml.so.580.95.05").write_text("")
    (tmp_path / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.95.05")
    text = f"\tlibnvidia-ml.so.1 (libc6,x86-64) => {tmp_path}/libnvidia-ml.so.1\n"
    found = _host.driver_libraries(_host.Host(runner.on("-p", stdout=text)))
    assert found["libnvidia-ml.so.1"]["version"] == "580.95.05"
