"""Day two: drift, rolling changes, releases side by side, and what may happen in the middle of them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest

GPUS = range(8)
REST = range(1, 8)
PORT = 30000
LOCK = "/run/gpufleet-sglang.lock"


@pytest.fixture(scope="module", autouse=True)
def deployed(fleet):
    fleet.play("deploy")
    assert fleet.sh(f"ls {LOCK}", rc=None) == ""


def changed(fleet, pids):
    after = fleet.pids(GPUS)
    return [gpu for gpu in GPUS if after[gpu] != pids[gpu]]


def runs_from(fleet, release, gpu):
    return f"/opt/sglang/releases/{release}/" in fleet.sh(f"cat /proc/{fleet.pids([gpu])[gpu]}/cmdline | tr '\\0' ' '")


def status(fleet, tmp_path):
    path = tmp_path / "status.json"
    fleet.play("status", extra={"sglang_server_status_json": str(path)})
    return {row["gpu"]: row["drift"] for row in json.loads(path.read_text())}


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


def test_a_drop_in_that_came_and_one_that_went_are_named_and_followed(fleet, tmp_path):
    folder = "/etc/systemd/system/sglang@5.service.d"
    pids = fleet.pids(GPUS)
    fleet.sh(f"mkdir {folder}; printf '[Service]\\nEnvironment=MINE=hunter2\\n' > {folder}/own.conf")
    assert re.search(r"drop-in .*own.conf: not there -> text", str(status(fleet, tmp_path)[5]))
    fleet.play("deploy")
    assert changed(fleet, pids) == [5]
    drift = status(fleet, tmp_path)[5]
    assert drift == ["environment MINE: (hidden) -> not set"]  # which the plan does not have, and that is said
    fleet.sh(f"rm -r {folder}")
    assert re.search(r"drop-in .*own.conf: text .* -> not there", str(status(fleet, tmp_path)[5]))
    pids = fleet.pids(GPUS)
    fleet.play("deploy")
    assert changed(fleet, pids) == [5]
    assert status(fleet, tmp_path)[5] == []
    assert fleet.play("deploy").changed == 0


def test_no_more_than_max_unavailable_are_out_and_no_request_is_lost(fleet):
    program = Path(__file__).with_name("load.py").read_text(encoding="utf-8")
    subprocess.run([*fleet.ssh_args, "cat > /run/load.py"], input=program, text=True, check=True)
    ports = " ".join(str(PORT + gpu) for gpu in GPUS)
    client = subprocess.Popen(
        [*fleet.ssh_args, f"python3 /run/load.py 0 {ports}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    run = fleet.play("deploy", extra={"sglang_server_watchdog_timeout": 115, "sglang_server_max_unavailable": 4})
    told = json.loads(client.communicate(timeout=60)[0])
    print(f"{run.seconds:.0f} s: {told}")
    out = [len(line.split(",")) for _when, line in run.lines if "out of service after" in line]
    assert out == [1, 4, 3]
    assert (told["failed"], told["sent_to_draining"]) == (0, 0)
    assert told["requests"] > 100
    assert fleet.sh("ls /run/gpufleet-sglang/draining") == ""


def test_two_operators_at_once_and_a_dead_one(fleet, tmp_path):
    extra = {"sglang_server_watchdog_timeout": 116}
    first = fleet.launch("deploy", extra=extra)
    first.wait_for(r"sglang@0\S*: restart")
    for playbook in ("deploy", "remove"):
        second = fleet.play(playbook, rc=2)
        said = second.output.replace("\n", " ")
        assert re.search(r"another run changes the servers.*root on \S+ .*runs deploy since \d{4}-", said), (
            second.output
        )
    first.kill()  # its lock stays, and the plan that it had written
    assert any("--watchdog-timeout" in str(drift) for drift in status(fleet, tmp_path).values())
    again = fleet.play("deploy", extra=extra)
    assert "the lock of a run that is gone was taken over" in again.output
    assert fleet.play("deploy", extra=extra).changed == 0
    assert not any(status(fleet, tmp_path).values())
    # a holder on another controller, silent for longer than the patience
    fleet.sh(f'echo \'{{"run": "x", "who": "eve", "where": "far"}}\' > {LOCK}')
    assert "eve on far" in fleet.play("stop", rc=2).output
    fleet.sh(f"touch -d '-2 hours' {LOCK}")
    assert "eve on far" in fleet.play("start").output
    assert fleet.sh(f"ls {LOCK}", rc=None) == ""


def test_a_full_disk_while_rendering_touches_no_server(fleet):
    pids = fleet.pids(GPUS)
    fleet.sh("cp -a /etc/sglang /run/etc-sglang && mount -t tmpfs -o size=1m,mode=755 none /etc/sglang")
    try:
        fleet.sh("cp -a /run/etc-sglang/. /etc/sglang/")
        extra = {"sglang_server_watchdog_timeout": 117}
        fleet.sh("head -c 2m /dev/zero > /etc/sglang/full 2>/dev/null", rc=None)
        run = fleet.play("deploy", extra=extra, rc=2)
        assert re.search(r"No space left on device", run.output), run.output
        assert changed(fleet, pids) == []
        assert all(fleet.answers(PORT + gpu) for gpu in GPUS)
        fleet.sh("rm /etc/sglang/full")
        fleet.play("deploy", extra=extra)
        assert fleet.play("deploy", extra=extra).changed == 0
        fleet.sh("cp -a /etc/sglang/. /run/etc-sglang/")
    finally:
        fleet.sh("umount /etc/sglang && cp -a /run/etc-sglang/. /etc/sglang/ && rm -r /run/etc-sglang")


def test_a_reboot_in_the_middle_is_finished_by_the_next_run(fleet):
    extra = {"sglang_server_watchdog_timeout": 118}
    run = fleet.launch("deploy", extra=extra)
    run.wait_for(r"sglang@3\S*: restart")
    fleet.sh("systemctl reboot", rc=None)
    assert run.process.wait(120) != 0
    fleet.wait(lambda: fleet.sh("systemctl is-system-running", rc=None).strip() == "running", 60, "the host")
    again = fleet.play("deploy", extra=extra)
    assert all(fleet.answers(PORT + gpu) for gpu in GPUS)
    assert fleet.play("deploy", extra=extra).changed == 0, again.output


def test_a_release_beside_the_other_and_back(fleet, tmp_path):
    pids = fleet.pids(GPUS)
    first = fleet.sh("ls /opt/sglang/releases").split()
    extra = {"sglang_server_release": "second", "sglang_server_reason": "try it", "sglang_server_max_unavailable": 7}
    fleet.play("deploy", extra=extra)
    assert changed(fleet, pids) == list(GPUS)
    assert all(runs_from(fleet, "second", gpu) for gpu in (0, 7))
    # the previous release is what a rollback goes to: it stays, whatever keep_releases says
    fleet.play("deploy", extra={**extra, "sglang_server_keep_releases": 1})
    assert set(fleet.sh("ls /opt/sglang/releases").split()) >= {"standin", "second"}
    run = fleet.play("rollback", extra={"sglang_server_reason": "no good", "sglang_server_max_unavailable": 7})
    print(f"rollback of 8 slots: {run.seconds:.0f} s")
    assert all(runs_from(fleet, "standin", gpu) for gpu in (0, 7))
    assert not any(status(fleet, tmp_path).values())
    entries = [json.loads(line) for line in fleet.sh("cat /etc/sglang/history.jsonl").splitlines()]
    assert [(entry["what"], entry["release"], entry["why"]) for entry in entries[-2:]] == [
        ("deploy", "second", "try it"),
        ("rollback", "standin", "no good"),
    ]
    assert {server["gpu"]: server["kv_tokens"] for server in entries[-1]["servers"]} == dict.fromkeys(GPUS, 1000000)
    assert first == [name for name in fleet.sh("ls /opt/sglang/releases").split() if "second" not in name]


def test_a_rollback_that_fails_goes_back_to_what_ran(fleet):
    fleet.play("deploy", extra={"sglang_server_max_unavailable": 7})
    fleet.sh(f"echo no-weights > /var/lib/sglang/standin-fault-{PORT}")
    pids = fleet.pids(GPUS)
    try:
        run = fleet.launch("rollback")
        run.wait_for(r"GPU 0 sglang@0\S*: failed")
        fleet.sh(f"rm /var/lib/sglang/standin-fault-{PORT}")
        assert run.process.wait(120) == 2
    finally:
        fleet.sh(f"rm -f /var/lib/sglang/standin-fault-{PORT}")
    time.sleep(0.2)
    assert "answers again" in run.output
    assert changed(fleet, pids) == [0]
    assert runs_from(fleet, "standin", 0)
    fleet.play("deploy")
    assert fleet.play("deploy").changed == 0
