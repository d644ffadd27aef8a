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
    asked = {**ALONE, "sglang_server_mem_fraction_static": 0.2}
    return fleet.play("deploy", "-vvv", "--diff", extra=asked, timeout=300)


def told(run) -> int:
    """The KV tokens that a run's table foretells for slot 0."""
    row = next(text for _when, text in run.lines if re.search(r"^\W*0 +[\d.]+ GiB ", text))
    return int(re.search(r"GiB +(\d+) +mem_fraction_static ", row).group(1))


def tokens(fleet) -> int:
    return json.loads(fleet.http(30000, "/server_info")[1])["max_total_num_tokens"]


@pytest.mark.parametrize("fraction", [0.25, 0.35, 0.45])
def test_the_engine_gets_what_the_plan_foretold(fleet, alone, fraction):
    """Within 5 %. Neighbours on a shared machine take and free memory in the half minute between: three tries."""
    asked = {**ALONE, "sglang_server_mem_fraction_static": fraction}
    run = fleet.play("deploy", extra=asked, timeout=300)
    foretold, real = told(run), tokens(fleet)
    assert CAME_OUT.search(run.output).groups()[:2] == (str(real), str(foretold))
    tries = [(foretold, real)]
    while abs(foretold - real) > 0.05 * real and len(tries) < 3:
        foretold, pid = told(fleet.play("deploy", "--check", extra=asked)), fleet.pids([0])[0]
        fleet.sh("systemctl restart sglang@0")
        fleet.wait(lambda pid=pid: fleet.pids([0])[0] != pid and fleet.answers(30000), 120, "it answers")
        real = tokens(fleet)
        tries.append((foretold, real))
    listed = ", ".join(f"{one} foretold, {two} real: {abs(one - two) / two * 100:.1f} %" for one, two in tries)
    print(f"fraction {fraction}: {listed}; first run {run.seconds:.0f} s")
    assert abs(foretold - real) <= 0.05 * real


def test_check_mode_shows_the_table_before_anything_restarts(fleet, alone):
    pid = fleet.pids([0])
    run = fleet.play("deploy", "--check", extra={**ALONE, "sglang_server_mem_fraction_static": 0.6})
    assert re.search(r"SLOT +TOTAL +FREE +WEIGHTS +FRACTION +LEFT +KV TOKENS +BOUND BY +REQUESTS", run.output)
    assert told(run) > tokens(fleet)
    assert fleet.pids([0]) == pid


def test_a_gap_above_the_limit_is_said(fleet, alone):
    asked = {**ALONE, "sglang_server_mem_fraction_static": 0.45, "sglang_server_memory_gap": 0.0001}
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
