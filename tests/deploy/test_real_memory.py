"""The real engine's memory against the plan, where the fraction binds; then what it leaves open.

Runs last: one slot stays.
"""

from __future__ import annotations

import json
import re

import outside
import pytest

SECRET = "hf_ThisIsTheSecretOfTheTest"
ALONE = {
    "sglang_server_gpus": ["0"],
    "sglang_server_max_total_tokens": None,
    "sglang_server_secret_environment": {"HF_TOKEN": SECRET},
}
CAME_OUT = re.compile(r"GPU 0: KV tokens (\d+) \(foretold (\d+), ([\d.]+) % off\)")


@pytest.fixture(scope="module")
def alone(fleet):
    """One slot, so that nobody else takes memory while it measures; the others leave the plan."""
    asked = {**ALONE, "sglang_server_mem_fraction_static": 0.12}
    return fleet.play("deploy", "-vvv", "--diff", extra=asked, timeout=300)


@pytest.mark.parametrize("fraction", [0.15, 0.2, 0.25])
def test_the_engine_gets_what_the_plan_foretold(fleet, alone, fraction):
    asked = {**ALONE, "sglang_server_mem_fraction_static": fraction}
    if fraction == 0.15:
        shown = fleet.play("deploy", "--check", extra=asked)
        assert re.search(r"SLOT +TOTAL +FREE +WEIGHTS +FRACTION .*KV TOKENS", shown.output), shown.output
        assert re.search(rf"0 .* GiB +{fraction} .* mem_fraction_static ", shown.output)
    run = fleet.play("deploy", extra=asked, timeout=300)
    real, foretold, _gap = CAME_OUT.search(run.output).groups()
    info = json.loads(fleet.http(30000, "/server_info")[1])
    assert info["max_total_num_tokens"] == int(real)
    gap = abs(int(real) - int(foretold)) / int(real) * 100
    before = [line for _when, line in run.lines if "GiB" in line]
    print(f"fraction {fraction}: {foretold} foretold, {real} real, {gap:.1f} % off, {run.seconds:.0f} s; {before}")
    assert gap <= 5
    assert "% allowed" not in run.output


def test_a_gap_above_the_limit_is_said(fleet, alone):
    asked = {**ALONE, "sglang_server_mem_fraction_static": 0.25, "sglang_server_memory_gap": 0.0001}
    run = fleet.play("deploy", extra=asked)
    assert run.changed == 0
    assert "% allowed): its memory was not what the plan saw" in run.output


def test_nothing_of_the_engine_listens_beyond_loopback(fleet, alone):
    outside.nothing_listens_beyond_loopback(fleet, [0])


def test_its_unit_files_and_processes_are_private(fleet, alone):
    outside.units_score(fleet, [0])
    outside.files_are_private(fleet)
    outside.no_process_dumps_core(fleet, [0])


def test_a_secret_is_seen_by_nobody(fleet, alone):
    outside.secret_is_nowhere(fleet, SECRET, alone.output, [0])


def test_a_killed_server_comes_back_with_its_file_store(fleet, alone):
    pid = fleet.pids([0])[0]
    fleet.sh("systemctl kill --signal=SIGKILL sglang@0")
    fleet.wait(lambda: fleet.pids([0])[0] not in (0, pid) and fleet.answers(30000), 120, "it answers again")
    outside.nothing_listens_beyond_loopback(fleet, [0])
