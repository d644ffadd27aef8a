"""Day two, the short part: drift, two operators at once, a release beside the other and back."""

from __future__ import annotations

import json
import re

import pytest
from day_two import GPUS, LOCK, PORT, changed, runs_from, status


@pytest.fixture(scope="module", autouse=True)
def deployed(fleet):
    fleet.play("deploy")
    assert fleet.sh(f"ls {LOCK}", rc=None) == ""


def test_a_unit_edited_by_hand_is_named_and_put_right(fleet, tmp_path):
    assert set(map(str, status(fleet, tmp_path).values())) == {"[]"}
    unit = "/etc/systemd/system/sglang@2.service"
    fleet.sh(f"sed -i 's/^RestartSec=.*/RestartSec=77/' {unit}; systemctl daemon-reload; systemctl restart sglang@2")
    fleet.wait(lambda: fleet.answers(PORT + 2), 30, "GPU 2 answers")
    drift = status(fleet, tmp_path)
    assert drift[2] == [f"unit file {unit}: RestartSec=77 -> RestartSec=1"]
    assert not any(drift[gpu] for gpu in GPUS if gpu != 2)
    pids = fleet.pids(GPUS)
    fleet.play("deploy")
    assert changed(fleet, pids) == [2]
    assert status(fleet, tmp_path)[2] == []


def test_two_operators_at_once_and_a_dead_one(fleet):
    # a canary that takes its time: the first run is still at it when the others come
    slow = {"gpu": "0", "environment": {"STANDIN_FAULT": "slow:15"}}
    extra = {"sglang_server_watchdog_timeout": 116, "sglang_server_instances": [slow]}
    first = fleet.launch("deploy", extra=extra)
    first.wait_for(r"sglang@0\S*: restart")
    second = fleet.play("stop", rc=2)
    said = second.output.replace("\n", " ")
    assert re.search(r"another run changes the servers.*root on \S+ .*runs deploy since \d{4}-", said), said
    first.kill()  # its lock stays, and the plan that it had written
    again = fleet.play("deploy", extra=extra)
    assert "the lock of a run that is gone was taken over" in again.output
    assert fleet.sh(f"ls {LOCK}", rc=None) == ""


def test_a_release_beside_the_other_and_back(fleet, tmp_path):
    pids = fleet.pids(GPUS)
    extra = {"sglang_server_release": "second", "sglang_server_reason": "try it"}
    fleet.play("deploy", extra=extra)
    assert changed(fleet, pids) == list(GPUS)
    assert all(runs_from(fleet, "second", gpu) for gpu in (0, 7))
    run = fleet.play("rollback", extra={"sglang_server_reason": "no good"})
    print(f"rollback of 8 slots: {run.seconds:.0f} s")
    assert all(runs_from(fleet, "standin", gpu) for gpu in (0, 7))
    assert not any(status(fleet, tmp_path).values())
    entries = [json.loads(line) for line in fleet.sh("cat /etc/sglang/history.jsonl").splitlines()]
    assert [(entry["what"], entry["release"], entry["why"]) for entry in entries[-2:]] == [
        ("deploy", "second", "try it"),
        ("rollback", "standin", "no good"),
    ]
    assert {server["gpu"]: server["kv_tokens"] for server in entries[-1]["servers"]} == dict.fromkeys(GPUS, 1000000)
