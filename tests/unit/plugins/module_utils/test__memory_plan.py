"""The memory plan of a host: whose memory is whose, what is worth a warning, and how it came out."""

from __future__ import annotations

import dataclasses
import json

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _memory_plan
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import Gpu, GpuProcess, with_processes
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance, Plan, Release
from ansible_collections.gpufleet.sglang.plugins.module_utils._memory import Room
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result
from test__memory import NEXT, QWEN3, write

FREE = 97200


def instance(gpu, *flags, canary=False):
    return Instance(
        gpu, f"sglang@{gpu}.service", "127.0.0.1", 30000 + gpu, ["/v/bin/sglang", *flags], {}, "", "", canary=canary
    )


def plan(folder, *instances, device="cuda"):
    return Plan("h", device, str(folder), Release("r", "/v", "/v/bin/python", "0.5.23"), list(instances))


def foresee(folder, rooms, *flags, device="cuda"):
    built = plan(folder, *(instance(gpu, *flags, canary=gpu == 0) for gpu in rooms), device=device)
    return _memory_plan.foresee(built, rooms, "0.5.23")


OURS = GpuProcess(5, "python", "sglang@0.service", 80000)


@pytest.mark.parametrize(
    ("processes", "used", "free", "expected", "holders"),
    [
        ([], 0, 97200, 97200, 0),
        ([OURS], 80100, 17100, 97100, 0),  # our own running server counts as free
        ([dataclasses.replace(OURS, used_mib=None)], 80100, 17100, 97200, 0),
        ([OURS, GpuProcess(6, "train", "x.service", 9000)], 89000, 8200, 88200, 1),
        ([GpuProcess(7, "sglang::scheduler", None, 9000, True)], 9000, 88200, 88200, 1),
        ([], 9000, None, 97887 - 9000, 0),
    ],
)
def test_what_a_server_finds(processes, used, free, expected, holders):
    gpu = Gpu(0, "GPU-1", "RTX", 97887, free, used, processes=processes)
    room = _memory_plan.gpu_rooms([gpu], [instance(0), instance(1)])
    assert list(room) == [0]
    assert (room[0].total, room[0].free, len(room[0].holders)) == (97887, expected, holders)


def test_holders_are_named_with_unit_and_orphans():
    processes = [GpuProcess(6, "train", "x.service", None), GpuProcess(7, "sglang::scheduler", None, 9000, True)]
    room = _memory_plan.gpu_rooms([Gpu(0, "GPU-1", "RTX", 97887, 1000, processes=processes)], [instance(0)])[0]
    assert room.holders == (
        "pid 6 (train, x.service) an unknown amount",
        "pid 7 (sglang::scheduler, no unit, orphan) 9000 MiB",
    )


@pytest.mark.parametrize(
    ("title", "parent", "expected"),
    [("sglang::scheduler", 1, True), ("sglang::scheduler", 44, False), ("python train.py", 1, False)],
)
def test_orphans_are_told_by_their_title_and_parent(tmp_path, title, parent, expected):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/status").write_text(f"Name:\tx\nPPid:\t{parent}\n")
    (tmp_path / "7/cmdline").write_bytes(title.encode() + b"\0")
    (tmp_path / "7/cgroup").write_text("0::/\n")

    class Smi:
        def run(self, argv, **_more):
            return Result(0, "GPU-1, 7, python, 100\n", "")

    gpus, _found = with_processes(Smi(), [Gpu(0, "GPU-1", "RTX")], str(tmp_path))
    assert [process.orphan for process in gpus[0].processes] == [expected]


def test_a_cpus_room_is_what_the_engine_reads(tmp_path):
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    for number, unit in ((5, "sglang@0.service"), (6, "sglang@1.service"), (7, "cron.service")):
        (proc / str(number)).mkdir(parents=True)
        (proc / f"{number}/cgroup").write_text(f"0::/system.slice/{unit}\n")
        (proc / f"{number}/smaps_rollup").write_text(
            "00-ff ---p\nPss: 1 kB\nPss_File: 9 kB\nPss_Anon: 1048000 kB\nPss_Shmem: 576 kB\n"
        )
    (proc / "meminfo").write_text("MemTotal: 25165824 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n")
    for node in (0, 1):
        (sys / f"devices/system/node/node{node}").mkdir(parents=True)
        (sys / f"devices/system/node/node{node}/cpulist").write_text("0\n" if node == 0 else "\n")
    rooms = _memory_plan.cpu_rooms([instance(0), instance(1)], str(proc), str(sys))
    assert (rooms[0].total, rooms[0].free) == (24576, 16384 + 2 * 1024)
    (sys / "devices/system/node/node1/cpulist").write_text("1\n")
    (sys / "fs/cgroup").mkdir(parents=True)
    (sys / "fs/cgroup/memory.max").write_text(f"{8 << 30}\n")
    (sys / "fs/cgroup/memory.current").write_text(f"{3 << 30}\n")
    rooms = _memory_plan.cpu_rooms([instance(0)], str(proc), str(sys))
    assert (rooms[0].total, rooms[0].free) == (4096, (5120 + 1024) / 2)


def test_slots_share_the_hosts_memory(tmp_path):
    write(tmp_path, QWEN3, a=("BF16", 1 << 20))
    rooms = {gpu: Room(24105, 22000, "cpu") for gpu in range(2)}
    told, found, _unknown = foresee(tmp_path, rooms, "--mem-fraction-static", "0.5", device="cpu")
    assert found == []
    assert told[1].kv_tokens < told[0].kv_tokens * 0.6
    rooms = {gpu: Room(24105, 22000, "cpu") for gpu in range(8)}
    _told, found, _unknown = foresee(tmp_path, rooms, "--mem-fraction-static", "0.7", device="cpu")
    assert [(item.code, item.severity, item.gpu) for item in found] == [("memory_shared", "warning", None)]
    assert found[0].message.startswith("slots 3, 4, 5, 6, 7 find no memory left")


def test_weights_that_do_not_fit_stop_the_plan(tmp_path):
    write(tmp_path, QWEN3, a=("BF16", 60 << 30))
    rooms = {0: Room(97887, FREE), 6: Room(97887, FREE - 35000, holders=("pid 6 (train, x.service) 35000 MiB",))}
    _told, found, _unknown = foresee(tmp_path, rooms, "--mem-fraction-static", "0.85")
    wrong = [item for item in found if item.severity == "error"]
    assert [(item.code, item.gpu) for item in wrong] == [("memory_too_small", 6)]
    assert "60.0 GiB" in wrong[0].message and "pid 6 (train, x.service)" in wrong[0].message


def test_a_gpu_that_has_less_is_named_and_the_others_are_not(tmp_path):
    write(tmp_path, QWEN3, a=("BF16", 1 << 30))
    rooms = {gpu: Room(97887, FREE - (9216 if gpu == 6 else 0)) for gpu in range(8)}
    told, found, _unknown = foresee(tmp_path, rooms, "--mem-fraction-static", "0.85")
    assert [(item.code, item.gpu) for item in found] == [("memory_less", 6)]
    assert "GPU 6 has 9.0 GiB less than the others" in found[0].message
    assert f"{told[6].kv_tokens} KV tokens instead of {told[0].kv_tokens}" in found[0].message
    assert told[6].kv_tokens < told[0].kv_tokens


def test_a_strategy_that_costs_concurrency_is_named(tmp_path):
    write(tmp_path, NEXT, a=("BF16", 60 << 30))
    flags = ["--mem-fraction-static", "0.85", "--max-running-requests", "40"]
    told, found, _unknown = foresee(tmp_path, {0: Room(97887, FREE)}, *flags)
    by_code = {item.code: item for item in found}
    assert set(by_code) == {"memory_strategy", "memory_requests"}
    got = told[0].max_running_requests
    text = f"extra_buffer costs concurrency: {got} requests at once (5 state slots each) instead of 40 with no_buffer"
    assert text in by_code["memory_strategy"].message
    assert f"max_running_requests is 40, and state slots allow {got}" in by_code["memory_requests"].message
    told, found, _unknown = foresee(
        tmp_path, {0: Room(97887, FREE)}, *flags, "--mamba-radix-cache-strategy", "no_buffer"
    )
    assert (told[0].max_running_requests, found) == (40, [])


def test_a_cap_above_the_memory_and_too_little_for_graphs_are_named(tmp_path):
    write(tmp_path, QWEN3, a=("BF16", 1 << 30))
    flags = ["--mem-fraction-static", "0.97", "--max-total-tokens", "900000000"]
    _told, found, _unknown = foresee(tmp_path, {0: Room(97887, FREE)}, *flags)
    assert [item.code for item in found] == ["memory_tokens", "memory_graphs"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(["--speculative-algorithm", "EAGLE"], "speculative draft"), (["--kv-cache-dtype", "nvfp4"], "nvfp4")],
)
def test_what_is_not_known_is_said_once(tmp_path, flags, reason):
    write(tmp_path, QWEN3, a=("BF16", 1 << 30))
    told, found, unknown = foresee(tmp_path, {0: Room(97887, FREE), 1: Room(97887, FREE)}, *flags)
    assert (told, found, len(unknown)) == ([], [], 1)
    assert reason in unknown[0]


def test_a_model_that_is_not_there_yet(tmp_path):
    _told, _found, unknown = foresee("org/name", {0: Room(97887, FREE)})
    assert unknown == ["no memory plan: the files of org/name are not on the host yet"]


def test_the_table_has_a_row_per_server(tmp_path):
    write(tmp_path, NEXT, a=("BF16", 60 << 30))
    rooms = {0: Room(97887, FREE, holders=("pid 6 (x, y) 1 MiB",)), 1: Room(97887, FREE)}
    told, _found, _unknown = foresee(tmp_path, rooms)
    lines = _memory_plan.table(told, "cuda")
    assert lines[0].split()[:4] == ["GPU", "TOTAL", "FREE", "WEIGHTS"]
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]
    assert "(engine)" in lines[1] and f"state slots ({told[0].state_slots}, 5 each)" in lines[1]
    assert lines[3] == "GPU 0: held by pid 6 (x, y) 1 MiB"
    assert _memory_plan.table([], "cuda") == []
    json.dumps([item.to_dict() for item in told])


def test_the_engines_own_figures_stand_beside_the_forecast():
    told = [{"gpu": gpu, "kv_tokens": 1000, "max_running_requests": 64} for gpu in range(4)]
    servers = [
        {"gpu": 0, "state": "ready", "kv_tokens": 1020, "max_running_requests": 64},
        {"gpu": 1, "state": "ready", "kv_tokens": 500, "max_running_requests": 37},
        {"gpu": 2, "state": "failed", "kv_tokens": None},
    ]
    result = _memory_plan.beside(told, servers, 10)
    assert [(row["gpu"], row["gap_percent"]) for row in result["rows"]] == [(0, 2.0), (1, 100.0)]
    assert len(result["findings"]) == 1
    assert result["findings"][0].startswith("GPU 1: 500 KV tokens, and 1000 were foretold (100 % off, 10 % allowed)")
    assert result["lines"][0] == "GPU 0: KV tokens 1020 (foretold 1000, 2 % off), requests at once 64 (foretold 64)"
