"""nvidia-smi and device nodes, as they answer on healthy and on broken hosts."""

from __future__ import annotations

import os
import stat
import time

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _gpus
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result, SubprocessRunner
from hosts import UUIDS, smi


def test_eight_gpus(runner):
    gpus, findings = _gpus.query(runner.on("nvidia-smi", stdout=smi()))
    assert findings == []
    assert [gpu.index for gpu in gpus] == list(range(8))
    assert gpus[3] == _gpus.Gpu(
        index=3,
        uuid=UUIDS[3],
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        memory_total_mib=97887,
        memory_free_mib=97883,
        memory_used_mib=4,
        compute_cap="12.0",
        driver_version="580.95.05",
        mig=False,
        persistence=True,
        pci_bus_id="00000000:04:00.0",
    )
    assert _gpus.gpu_from_dict(gpus[3].to_dict()) == gpus[3]


def test_a_real_h200():
    line = (
        "0, GPU-d88ae72a-a315-b2b5-471e-023b73e1019d, NVIDIA H200, 143771, 139558, 3599, 9.0, 580.159.04, "
        "Disabled, Enabled, 00000000:00:06.0\n"
    )
    (gpu,) = _gpus.parse_gpus(line)
    assert (gpu.memory_total_mib, gpu.memory_used_mib, gpu.compute_cap) == (143771, 3599, "9.0")


def test_fields_that_do_not_apply_are_unknown_not_zero():
    line = "0, GPU-x, NVIDIA GB10, [N/A], [N/A], [Not Supported], [N/A], 580.95.05, [N/A], N/A, 0000000F:01:00.0\n"
    (gpu,) = _gpus.parse_gpus(line)
    assert (gpu.memory_total_mib, gpu.memory_free_mib, gpu.memory_used_mib) == (None, None, None)
    assert (gpu.compute_cap, gpu.mig, gpu.persistence) == ("", False, None)


def test_fields_an_old_driver_does_not_know_are_asked_without(runner):
    def answer(argv):
        if "compute_cap" in argv[1]:
            return Result(2, 'Field "compute_cap" is not a valid field to query.\n')
        return Result(0, "0, GPU-x, Tesla T4, 15360, 15000, 360, 450.80.02, [N/A], Disabled, 00000000:3B:00.0\n")

    gpus, findings = _gpus.query(runner.on_call("nvidia-smi", answer=answer))
    assert findings == []
    assert (gpus[0].name, gpus[0].compute_cap, gpus[0].driver_version) == ("Tesla T4", "", "450.80.02")
    assert len(runner.calls) == 2


def test_a_required_field_that_is_not_known_does_not_loop(runner):
    gpus, findings = _gpus.query(runner.on("nvidia-smi", rc=2, stdout='Field "uuid" is not a valid field to query.\n'))
    assert (gpus, findings[0].code, len(runner.calls)) == ([], "nvidia_smi_failed", 1)


@pytest.mark.parametrize(
    ("rc", "out", "code"),
    [
        (124, "", "nvidia_smi_hung"),
        (127, "", "nvidia_smi_missing"),
        (
            127,
            "nvidia-smi: error while loading shared libraries: libnvidia-ml.so.1: cannot open shared object file\n",
            "libnvidia_ml_missing",
        ),
        (12, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", "libnvidia_ml_missing"),
        (
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n",
            "driver_mismatch",
        ),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "nvidia_smi_failed"),
        (15, "Unable to determine the device handle for GPU0000:01:00.0: Unknown Error\n", "nvidia_smi_failed"),
        (0, "No devices were found\n", "no_gpu"),
        (0, "", "no_gpu"),
    ],
)
def test_what_a_failed_nvidia_smi_means(runner, rc, out, code):
    gpus, (finding,) = _gpus.query(runner.on("nvidia-smi", rc=rc, stdout=out))
    assert (gpus, finding.code, finding.severity) == ([], code, "error")
    assert finding.remedy


def test_a_gpu_that_fell_off_does_not_hide_the_others(runner):
    text = smi(count=2) + "Unable to determine the device handle for GPU2: 0000:03:00.0: Unknown Error\n"
    gpus, findings = _gpus.query(runner.on("nvidia-smi", rc=15, stdout=text))
    assert [gpu.index for gpu in gpus] == [0, 1]
    assert findings[0].code == "nvidia_smi_failed"


def test_a_hung_nvidia_smi_is_a_problem_and_not_a_hang(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nsleep 60\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = time.monotonic()
    gpus, (finding,) = _gpus.query(SubprocessRunner(), timeout=0.3)
    assert time.monotonic() - started < 30  # it sleeps for 60
    assert (gpus, finding.code) == ([], "nvidia_smi_hung")


def test_processes_lie_on_their_gpu_with_their_unit(runner, tmp_path):
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cgroup").write_text("0::/system.slice/system-sglang.slice/sglang@1.service\n")
    text = f"{UUIDS[1]}, 77, sglang::scheduler, 84000\n{UUIDS[1]}, 78, python, with, commas, [N/A]\n"
    gpus = _gpus.parse_gpus(smi(count=2))
    seen, findings = _gpus.with_processes(runner.on("nvidia-smi", stdout=text), gpus, str(tmp_path))
    assert findings == []
    assert seen[0].processes == []
    assert seen[1].processes == [
        _gpus.GpuProcess(77, "sglang::scheduler", "sglang@1.service", 84000),
        _gpus.GpuProcess(78, "python, with, commas", None, None),
    ]


def test_processes_that_cannot_be_asked_for(runner):
    gpus = _gpus.parse_gpus(smi(count=1))
    seen, (finding,) = _gpus.with_processes(runner.on("nvidia-smi", rc=124), gpus)
    assert (seen, finding.code) == (gpus, "gpu_processes_unknown")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\n", "580.95.05"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183  Sun May 12\nGCC version: gcc 12.2.0\n", "535.183"),
        ("nonsense", ""),
    ],
)
def test_kernel_module_version(tmp_path, text, version):
    folder = tmp_path / "driver" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(text)
    assert _gpus.kernel_module_version(str(tmp_path)) == version
    assert _gpus.kernel_module_version(str(tmp_path / "none")) == ""


def test_the_node_of_a_gpu_carries_its_minor_number(tmp_path):
    folder = tmp_path / "driver/nvidia/gpus/0000:02:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: x\nDevice Minor: \t 5\n")
    nodes = _gpus.device_nodes(_gpus.parse_gpus(smi(count=2)), str(tmp_path), "/dev")
    assert nodes == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia5"]


def test_nodes_are_really_opened(tmp_path):
    file, missing = tmp_path / "file", tmp_path / "missing"
    file.write_text("")
    states = _gpus.open_nodes(SubprocessRunner(), ["/dev/null", str(file), str(missing)])
    assert states == {"/dev/null": "ok", str(file): "no_node", str(missing): "missing"}


@pytest.mark.parametrize(
    ("rc", "out", "expected"),
    [
        (0, "/dev/a ok\n/dev/b 1 Operation not permitted\n", ["ok", "denied"]),
        (0, "/dev/a 13 Permission denied\n/dev/b 19 No such device\n", ["forbidden", "no_device"]),
        (0, "/dev/a 5 Input/output error\n/dev/b ok\n", ["5 Input/output error", "ok"]),
        (124, "/dev/a ok\n", ["ok", "hung"]),
        (1, "", ["unknown", "unknown"]),
    ],
)
def test_nodes_that_do_not_open(runner, rc, out, expected):
    states = _gpus.open_nodes(runner.on("-c", rc=rc, stdout=out), ["/dev/a", "/dev/b"])
    assert list(states.values()) == expected
