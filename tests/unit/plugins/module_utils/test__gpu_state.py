"""ECC, Xid, MIG, persistence and the order of GPUs."""

from __future__ import annotations

import dataclasses

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _gpu_state as state
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import KernelGpu, kernel_gpus, parse_gpus
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result
from hosts import UUIDS, smi

HOST = "on the Proxmox host"
XID_79 = "[  812.1] NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_31 = "[  900.0] NVRM: Xid (PCI:0000:02:00): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault"
XID_48 = "[ 1000.0] NVRM: Xid (PCI:0000:01:00.0): 48, pid=1, name=x, DBE (double bit error)"


def gpus(count=2, **changes):
    return [dataclasses.replace(gpu, **changes) for gpu in parse_gpus(smi(count=count))]


@pytest.mark.parametrize(
    ("rows", "pages", "ecc", "codes"),
    [
        ("0, 0", "[N/A]", "0", []),
        ("No, No", "No", "0", []),
        ("1, 0", "[N/A]", "0", [("gpu_ecc", "warning", "waiting to be mapped out")]),
        ("Yes, No", "[N/A]", "0", [("gpu_ecc", "warning", "waiting to be mapped out")]),
        ("0, 1", "[N/A]", "0", [("gpu_ecc", "error", "no spare memory rows")]),
        ("[N/A], [N/A]", "Yes", "[N/A]", [("gpu_ecc", "warning", "waiting to be mapped out")]),
        ("0, 0", "[N/A]", "3", [("gpu_ecc", "warning", "3 uncorrectable memory errors")]),
    ],
)
def test_memory_errors(runner, rows, pages, ecc, codes):
    def answer(argv):
        if "remapped" in argv[1]:
            return Result(0, f"{UUIDS[0]}, {rows}\n")
        return Result(0, f"{UUIDS[0]}, Enabled, {ecc}, {pages}, Default\n")

    told = state.health(runner.on_call("nvidia-smi", answer=answer))
    findings = state.state_problems(gpus(1), told, HOST)
    assert [(item.code, item.severity) for item in findings] == [code[:2] for code in codes]
    for item, code in zip(findings, codes):
        assert code[2] in item.message
        assert item.gpu == 0


def test_what_a_driver_does_not_know_is_left_out(runner):
    def answer(argv):
        if "remapped" in argv[1]:
            return Result(1, "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n")
        if "retired_pages.pending" in argv[1]:
            return Result(2, 'Field "retired_pages.pending" is not a valid field to query.\n')
        return Result(0, f"{UUIDS[0]}, Enabled, 0, Prohibited\n")

    told = state.health(runner.on_call("nvidia-smi", answer=answer))
    assert told[UUIDS[0]]["ecc.mode.current"] == "Enabled"
    assert [item.code for item in state.state_problems(gpus(1), told, HOST)] == ["gpu_compute_mode"]


def test_persistence_is_said_once_and_mig_per_gpu():
    findings = state.state_problems(gpus(2, persistence=False, mig=True), {}, HOST)
    assert [item.code for item in findings] == ["gpu_persistence", "gpu_mig", "gpu_mig"]
    assert "GPU 0, 1" in findings[0].message
    assert f"'nvidia-smi -i 1 -mig 0' {HOST}" in findings[2].remedy
    assert state.state_problems(gpus(2, persistence=None), {}, HOST) == []


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("", []),
        (XID_79, [(1, "79")]),
        (XID_31, []),  # a program's own fault
        (f"{XID_79}\n{XID_31}\n{XID_48}", [(0, "48"), (1, "79")]),
        (XID_79.replace("0000:02", "0000:77"), []),  # another container's GPU
    ],
)
def test_xids(log, found):
    findings = state.xid_problems(log, gpus(2), HOST)
    assert [(item.gpu, f"): {number}," in item.message) for item, (_gpu, number) in zip(findings, found)] == [
        (gpu, True) for gpu, _number in found
    ]
    assert len(findings) == len(found)


def test_a_kernel_log_that_may_not_be_read_is_not_an_empty_one(runner):
    assert (
        state.kernel_log(runner.on("dmesg", rc=1, stderr="dmesg: read kernel buffer failed: Operation not permitted"))
        is None
    )


@pytest.mark.parametrize(
    ("rendered", "kernel", "changes", "codes"),
    [
        ({0: UUIDS[0], 1: UUIDS[1]}, [KernelGpu("0000:01:00.0", 0, UUIDS[0])], {}, []),
        ({0: UUIDS[1]}, [], {}, ["gpu_order_changed"]),
        ({0: "GPU-gone"}, [], {}, ["gpu_order_changed"]),
        ({0: "0"}, [], {}, []),
        ({}, [KernelGpu("0000:01:00.0", 0, UUIDS[1])], {}, ["gpu_uuid"]),
        ({}, [], {"uuid": "GPU-same"}, ["gpu_uuid_twice"]),
    ],
)
def test_order(rendered, kernel, changes, codes):
    assert [item.code for item in state.order_problems(gpus(2, **changes), kernel, rendered)] == codes


def test_indexes_that_do_not_follow_the_bus():
    first, second = gpus(2)
    swapped = [
        dataclasses.replace(first, pci_bus_id=second.pci_bus_id),
        dataclasses.replace(second, pci_bus_id=first.pci_bus_id),
    ]
    assert [item.code for item in state.order_problems(swapped, [], {})] == ["gpu_order"]


def test_where_an_index_has_gone_is_said():
    (finding,) = state.order_problems(gpus(2), [], {0: UUIDS[1]})
    assert f"for {UUIDS[1]}, which is index 1 now" in finding.message


def test_what_the_servers_were_given(tmp_path):
    (tmp_path / "0.env").write_text(f"HOME=/x\nCUDA_VISIBLE_DEVICES={UUIDS[0]}\n")
    (tmp_path / "1.env").write_text(f'CUDA_VISIBLE_DEVICES="{UUIDS[1]}"\n')
    (tmp_path / "other.env").write_text("CUDA_VISIBLE_DEVICES=7\n")
    assert state.rendered_gpus(str(tmp_path)) == {0: UUIDS[0], 1: UUIDS[1]}
    assert state.rendered_gpus("/nonexistent") == {}


def test_the_kernels_own_list(tmp_path):
    folder = tmp_path / "driver/nvidia/gpus/0000:00:06.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 38\nGPU UUID: \t GPU-e96966d9-8404-a4e7-1f9a-1b74912f9b48\n"
        "Bus Location: \t 0000:00:06.0\nDevice Minor: \t 0\nGPU Excluded:\t No\n"
    )
    assert kernel_gpus(str(tmp_path)) == [KernelGpu("0000:00:06.0", 0, "GPU-e96966d9-8404-a4e7-1f9a-1b74912f9b48")]
