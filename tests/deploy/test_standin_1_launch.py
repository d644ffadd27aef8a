"""Launch, idempotence, status, stop, reboot: eight slots of the stand-in engine (run in this order)."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

GPUS = range(8)
PORT = 30000
FIRST = re.compile(r"POST /generate HTTP/1\.1. 200")


def started(fleet, gpu):
    """Seconds (monotonic) at which systemd began to start a unit."""
    return int(fleet.units([gpu])[gpu]["ExecMainStartTimestampMonotonic"]) / 1e6


def predicted_and_done(fleet, *args, extra=None):
    check = fleet.play("deploy", "--check", "--diff", *args, extra=extra)
    real = fleet.play("deploy", *args, extra=extra)
    return check, real


def test_check_on_an_empty_host_names_the_stages_and_changes_nothing(fleet):
    before = fleet.sh(
        "find /etc /opt /var/lib/sglang /var/cache/sglang -xdev -not -path '/etc/.*' | sort | md5sum", rc=None
    )
    run = fleet.play("deploy", "--check", "--diff")
    assert "sglang@0.service" in run.output
    assert "sglang@7.service" in run.output
    assert re.search(r"would install|release", run.output)
    after = fleet.sh(
        "find /etc /opt /var/lib/sglang /var/cache/sglang -xdev -not -path '/etc/.*' | sort | md5sum", rc=None
    )
    assert before == after
    assert fleet.units([0])[0]["LoadState"] == "not-found"


def test_first_deploy_brings_up_all(fleet):
    run = fleet.play("deploy")
    for gpu in GPUS:
        assert fleet.answers(PORT + gpu) > 0
        assert fleet.units([gpu])[gpu]["UnitFileState"] == "enabled"
        assert re.search(rf"GPU {gpu} .*ready", run.output)


def test_the_journal_proves_the_order(fleet):
    starts = {gpu: started(fleet, gpu) for gpu in GPUS}
    rest = [starts[gpu] for gpu in GPUS if gpu != 0]
    answered = [
        int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6
        for entry in fleet.journal("sglang@0.service")
        if FIRST.search(str(entry["MESSAGE"]))
    ]
    # the engine's own warm-up is the first request, the deploy's the second
    assert len([when for when in answered if when < min(rest)]) >= 2
    assert max(rest) - min(rest) < 2


def test_second_deploy_changes_nothing(fleet):
    pids = fleet.pids(GPUS)
    run = fleet.play("deploy")
    assert run.changed == 0, run.output
    assert fleet.pids(GPUS) == pids
    print(f"second deploy of 8 slots: {run.seconds:.1f} s")


@pytest.mark.parametrize("tag", ["preflight", "engine", "toolkit", "cccl", "jit", "canary", "fleet", "health"])
def test_every_tag_runs_alone(fleet, tag):
    run = fleet.play("deploy", "--tags", tag)
    assert run.changed == 0, run.output


def test_status_is_a_table_and_json(fleet, tmp_path):
    path = tmp_path / "status.json"
    run = fleet.play("status", extra={"sglang_server_status_json": str(path)})
    for gpu in GPUS:
        assert re.search(rf"^{fleet.host}\s+{gpu}\s+sglang@{gpu}\s+ready", run.output, re.MULTILINE), run.output
    rows = json.loads(path.read_text())
    assert [row["gpu"] for row in rows] == list(GPUS)
    for row in rows:
        assert row["host"] == fleet.host
        assert (row["state"], row["phase"], row["port"]) == ("ready", "ready", PORT + row["gpu"])
        assert row["seconds_to_ready"] > 0
        assert row["kv_tokens"] > 0
        assert row["reason"] == ""


def test_a_changed_setting_is_predicted_exactly_and_restarts_only_its_server(fleet):
    slow = {"STANDIN_FAULT": "slow:6"}
    extra = {"sglang_server_instances": [{"gpu": "5", "max_running_requests": 3, "environment": slow}]}
    pids = fleet.pids(GPUS)
    check, real = predicted_and_done(fleet, extra=extra)
    assert check.changed_tasks() == [task for task in real.changed_tasks() if not re.search("known good|history", task)]
    assert "max-running-requests" in check.output
    assert re.search(r"GPU 5 .*weights \(", real.output), real.output  # a line per phase, not silence
    after = fleet.pids(GPUS)
    assert [gpu for gpu in GPUS if after[gpu] != pids[gpu]] == [5]
    assert fleet.play("deploy", extra=extra).changed == 0
    fleet.play("deploy")
    assert [gpu for gpu in GPUS if fleet.pids(GPUS)[gpu] != after[gpu]] == [5]


def test_a_killed_scheduler_brings_back_that_server_only(fleet):
    pids = fleet.pids(GPUS)
    children = fleet.sh(f"ps -o pid= --ppid {pids[3]}").split()
    fleet.sh(f"kill -KILL {children[0]}")
    fleet.wait(lambda: int(fleet.units([3])[3]["NRestarts"]) == 1, 30, "a restart by systemd")
    fleet.wait(lambda: fleet.answers(PORT + 3), 60, "GPU 3 answers again")
    after = fleet.pids(GPUS)
    assert [gpu for gpu in GPUS if after[gpu] != pids[gpu]] == [3]


def test_stop_lets_requests_finish(fleet):
    body = json.dumps({"text": "hello", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}})
    asked = subprocess.Popen(
        [
            *fleet.ssh_args,
            f"curl -s -m 60 -H 'Content-Type: application/json' -d '{body}' http://127.0.0.1:{PORT + 2}/generate",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    fleet.wait(lambda: fleet.sh(f"ss -Htn state established sport = :{PORT + 2}"), 10, "the request is in flight")
    run = fleet.play("stop")
    answer = json.loads(asked.communicate(timeout=60)[0])
    assert answer["meta_info"]["completion_tokens"] == 400
    for unit in fleet.units(GPUS).values():
        assert (unit["ActiveState"], unit["Result"]) == ("inactive", "success")
    assert fleet.play("stop").changed == 0
    assert "stop" in run.output


def test_status_of_a_stopped_fleet(fleet, tmp_path):
    path = tmp_path / "status.json"
    fleet.play("status", extra={"sglang_server_status_json": str(path)})
    rows = json.loads(path.read_text())
    assert {(row["state"], row["phase"], row["kv_tokens"]) for row in rows} == {("stopped", "none", None)}


def test_start_canary_first(fleet):
    fleet.play("start")
    starts = {gpu: started(fleet, gpu) for gpu in GPUS}
    assert min(starts, key=starts.get) == 0
    assert all(fleet.answers(PORT + gpu) for gpu in GPUS)


def test_a_reboot_brings_all_back(fleet):
    fleet.sh("systemctl reboot", rc=None)
    fleet.wait(
        lambda: fleet.sh("cut -d. -f1 /proc/uptime; systemctl is-system-running", rc=None).strip(), 60, "the host"
    )
    fleet.wait(lambda: all(fleet.answers(PORT + gpu) for gpu in GPUS), 60, "all eight answer")
    assert fleet.play("deploy").changed == 0
