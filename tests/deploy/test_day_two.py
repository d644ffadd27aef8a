"""Day two, the long part: what may happen in the middle of a change, and what is done about it."""

from __future__ import annotations

import json
import re
import subprocess
import time

import pytest
from day_two import GPUS, LOCK, PORT, changed, load, runs_from, status


@pytest.fixture(scope="module", autouse=True)
def deployed(fleet):
    fleet.play("deploy")


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
    with load(fleet) as told:
        run = fleet.play("deploy", extra={"sglang_server_watchdog_timeout": 115, "sglang_server_max_unavailable": 4})
    out = [len(line.split(",")) for _when, line in run.lines if "out of service after" in line]
    assert out == [1, 4, 3]
    assert (told["failed"], told["sent_to_draining"]) == (0, 0)
    assert told["requests"] > 100
    assert fleet.sh("ls /run/gpufleet-sglang/draining") == ""


def test_a_dead_operators_plan_is_followed_and_a_far_ones_lock_times_out(fleet, tmp_path):
    # a canary that takes its time: the first run is still at it when the others come
    slow = {"gpu": "0", "environment": {"STANDIN_FAULT": "slow:15"}}
    extra = {"sglang_server_watchdog_timeout": 116, "sglang_server_instances": [slow]}
    first = fleet.launch("deploy", extra=extra)
    first.wait_for(r"sglang@0\S*: restart")
    assert "another run changes the servers" in fleet.play("remove", rc=2).output
    first.kill()
    assert any("--watchdog-timeout" in str(drift) for drift in status(fleet, tmp_path).values())
    fleet.play("deploy", extra=extra)
    again = fleet.play("deploy", extra=extra)
    assert again.changed == 0, again.changed_tasks()
    assert not any(status(fleet, tmp_path).values())
    # a holder on another controller, silent for longer than the patience
    fleet.sh(f'echo \'{{"run": "x", "who": "eve", "where": "far"}}\' > {LOCK}')
    assert "eve on far" in fleet.play("stop", rc=2).output
    fleet.sh(f"touch -d '-2 hours' {LOCK}")
    assert "eve on far" in fleet.play("start").output
    assert fleet.sh(f"ls {LOCK}", rc=None) == ""


def test_a_server_that_stands_still_is_not_waited_for(fleet):
    """Requests run and no token comes: neither a change nor a stop waits for its whole stop_timeout (300 s)."""
    fault = f"/var/lib/sglang/standin-fault-{PORT + 3}"
    extra = {"sglang_server_watchdog_timeout": 119, "sglang_server_stall_timeout": 5}
    url, body = f"http://127.0.0.1:{PORT + 3}/generate", json.dumps({"text": "hello"})
    ask = f"nohup curl -s -m 600 {url} -d '{body}' > /dev/null 2>&1 &"
    try:
        for playbook in ("deploy", "stop"):
            fleet.sh(f"echo stall > {fault}; systemctl restart sglang@3")
            fleet.wait(lambda: fleet.http(PORT + 3, "/v1/models")[0] == 200, 60, "it listens")
            fleet.sh(f"rm {fault}; {ask} sleep 1")
            run = fleet.play(playbook, extra=extra)
            print(f"{playbook} with a server that stands still: {run.seconds:.0f} s")
            assert "sglang@3.service: no sign of progress for 5 s while it stops: killed" in run.output
            assert run.seconds < 240
    finally:
        fleet.sh(f"rm -f {fault}")
    fleet.play("start")
    assert fleet.play("deploy", extra=extra).changed == 0


def test_a_slow_request_is_waited_for_as_long_as_tokens_come(fleet):
    fault = f"/var/lib/sglang/standin-fault-{PORT + 3}"
    fleet.sh(f"echo tokens-per-second:10 > {fault}; systemctl restart sglang@3; sleep 1; rm {fault}")
    fleet.wait(lambda: fleet.answers(PORT + 3), 60, "GPU 3 answers")
    body = json.dumps({"text": "hello", "sampling_params": {"max_new_tokens": 300}})
    ask = f"curl -s -m 600 http://127.0.0.1:{PORT + 3}/generate -d '{body}'"
    client = subprocess.Popen([*fleet.ssh_args, ask], stdout=subprocess.PIPE, text=True)
    time.sleep(1)
    run = fleet.play("stop", extra={"sglang_server_stall_timeout": 5, "sglang_server_drain_timeout": 3})
    assert json.loads(client.communicate(timeout=60)[0])["meta_info"]["completion_tokens"] == 300
    assert "killed" not in run.output
    fleet.play("start")


@pytest.mark.parametrize(
    "moment",
    [
        r"out of service after .*sglang@0",
        r"sglang@0\S*: restart",
        r"TASK .*Remember what has answered",
        r"sglang@3\S*: restart",
        r"TASK .*Add to the history",
    ],
)
def test_a_release_switch_killed_at_any_moment_is_finished_by_the_next_run(fleet, tmp_path, moment):
    runs = "standin" if runs_from(fleet, "second", 0) else "second"
    extra = {"sglang_server_release": runs, "sglang_server_max_unavailable": 4}
    with load(fleet) as told:
        run = fleet.launch("deploy", extra=extra)
        run.wait_for(moment)
        run.kill()
        fleet.play("deploy", extra=extra)
    assert (told["failed"], told["sent_to_draining"]) == (0, 0), told
    assert told["requests"] > 100
    assert all(runs_from(fleet, runs, gpu) for gpu in GPUS)
    assert fleet.sh("ls /run/gpufleet-sglang/draining") == ""
    assert not any(status(fleet, tmp_path).values())
    again = fleet.play("deploy", extra=extra)
    assert again.changed == 0, again.changed_tasks()
    entry = json.loads(fleet.sh("tail -1 /etc/sglang/history.jsonl"))
    assert entry["release"] == runs


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


def test_a_release_that_a_rollback_would_choose_is_never_pruned(fleet):
    for name in ("second", "third"):
        fleet.play("deploy", extra={"sglang_server_release": name, "sglang_server_keep_releases": 1})
    # the first one is beyond what is kept, and nothing goes back to it
    assert set(fleet.sh("ls /opt/sglang/releases").split()) & {"standin", "second", "third"} == {"second", "third"}
    fleet.play("rollback")
    assert all(runs_from(fleet, "second", gpu) for gpu in (0, 7))


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
