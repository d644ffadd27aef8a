"""Flags change, the release switches, and it goes back, while three real servers answer a client that never stops."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

GPUS = range(3)
PORTS = [30000 + gpu for gpu in GPUS]
OTHER = "0.5.22"  # runs on the same dependencies
ONE = {"sglang_server_max_unavailable": 1}
STEADY = {**ONE, "sglang_server_max_running_requests": 16}


def load(fleet, threads=3):
    """Start the client on the host; its standard input ends it."""
    program = Path(__file__).with_name("load.py").read_text(encoding="utf-8")
    subprocess.run([*fleet.ssh_args, "cat > /run/load.py"], input=program, text=True, check=True)
    command = f"LOAD_THREADS={threads} LOAD_TOKENS=4 python3 /run/load.py 0 {' '.join(map(str, PORTS))}"
    return subprocess.Popen([*fleet.ssh_args, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def judged(client, run, what):
    """End the client and check its counts; prints them, and when each server went and came back."""
    told = json.loads(client.communicate(timeout=180)[0])
    print(f"{what}, {run.seconds:.0f} s: {json.dumps(told)}")
    for when, text in run.lines:
        if re.search(r"out of service after|: restart \(|: ready after", text):
            print(f"  {when - run.started:4.0f} s  {text}")
    assert told["requests"] > 0
    assert told["failed"] == 0, told
    assert told["sent_to_draining"] == 0, told
    assert told["retries"] <= told["requests"]
    return told


@pytest.fixture(scope="module")
def other(fleet, tmp_path_factory):
    """The variables of the other release: the same lock with another engine."""
    lock = Path(__file__).resolve().parents[1] / "cpu-engine/requirements.lock"
    version = fleet.variables["sglang_server_version"]
    text = lock.read_text(encoding="utf-8").replace(f"\nsglang=={version}\n", f"\nsglang=={OTHER}\n")
    path = tmp_path_factory.mktemp("lock") / "requirements.lock"
    path.write_text(text, encoding="utf-8")
    return {"sglang_server_version": OTHER, "sglang_server_lock_file": str(path)}


def versions(fleet):
    return [json.loads(fleet.http(port, "/server_info")[1])["version"] for port in PORTS]


def test_one_variable_changes_under_load(fleet):
    pids = fleet.pids(GPUS)
    client = load(fleet)
    extra = {**ONE, "sglang_server_instances": [{"gpu": "2", "max_running_requests": 16}]}
    run = fleet.play("deploy", extra=extra, timeout=900)
    told = judged(client, run, "one server's flag, deploy")
    assert told["requests"] >= 3
    after = fleet.pids(GPUS)
    assert [gpu for gpu in GPUS if after[gpu] != pids[gpu]] == [2]


def test_the_release_switches_under_load(fleet, other):
    before = fleet.variables["sglang_server_version"]
    client = load(fleet)
    extra = {**ONE, **other, "sglang_server_reason": "a try of the other engine"}
    run = fleet.play("deploy", extra=extra, timeout=900)
    judged(client, run, f"{before} -> {OTHER}, deploy")
    assert versions(fleet) == [OTHER] * 3
    entry = json.loads(fleet.sh("tail -1 /etc/sglang/history.jsonl"))
    assert (entry["release"], entry["previous"], entry["why"]) == (OTHER, before, "a try of the other engine")
    assert all(server["memory_mib"] > 100 and server["kv_tokens"] > 0 for server in entry["servers"])
    assert f"release {before} had" in run.output
    assert fleet.sh("stat -c %a /etc/sglang/history.jsonl").strip() == "644"


def test_it_goes_back_under_load_without_the_wheels(fleet):
    """One command; neither a network nor a folder of wheels is needed, nothing is installed."""
    before = fleet.variables["sglang_server_version"]
    client = load(fleet)
    run = fleet.play(
        "rollback",
        extra={**ONE, "sglang_server_reason": "memory", "sglang_server_wheel_dir": "/nowhere"},
        timeout=900,
    )
    judged(client, run, f"rollback {OTHER} -> {before}")
    assert versions(fleet) == [before] * 3
    entry = json.loads(fleet.sh("tail -1 /etc/sglang/history.jsonl"))
    assert (entry["what"], entry["release"], entry["why"], entry["who"] != "") == ("rollback", before, "memory", True)
    status = fleet.play("status")
    assert "differs" not in status.output
    assert os.path.basename(fleet.sh("ls -d /opt/sglang/releases/0.5.22").strip()) == OTHER
