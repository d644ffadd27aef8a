"""What goes wrong: the canary, one of the others, the controller; each time by name, and nothing else is touched."""

from __future__ import annotations

import re

import pytest

GPUS = range(8)
REST = range(1, 8)
PORT = 30000
LIMIT = 5.0  # s from a process's death (or the bind error) to the line that names it


def faulty(gpu, fault, **more):
    return {"sglang_server_instances": [{"gpu": str(gpu), "environment": {"STANDIN_FAULT": fault}, **more}]}


def death(fleet, gpu, since):
    """When (epoch) the main process of this rollout's server ended, or its bind error was logged."""
    for entry in fleet.journal(f"sglang@{gpu}.service", f"--since=@{since:.0f}"):
        text = str(entry.get("MESSAGE"))
        if "Main process exited" in text or "error while attempting to bind" in text:
            return int(entry["__REALTIME_TIMESTAMP"]) / 1e6
    raise AssertionError("no death in the journal")


FAULTS = [
    # fault of the stand-in, what must be said
    ("no-weights", r"Cannot find any model weights"),
    ("mem-fraction-small", r"Loaded weights leave no GPU memory|mem-fraction-static"),
    ("attn-bad", r"invalid choice: 'nope'"),
    ("exit2", r"exited.*2|status 2"),
    ("bind-hang", r"\[Errno 98\] error while attempting to bind"),
    ("false-ready", r"\[Errno 98\] error while attempting to bind"),
    ("killed-loading", r"killed|KILL|signal 9"),
]


@pytest.mark.parametrize(("fault", "cause"), FAULTS, ids=[fault for fault, _cause in FAULTS])
def test_a_failing_canary_is_named_and_goes_back(fleet, fault, cause):
    files = "cat /etc/systemd/system/sglang@[1-7].service /etc/sglang/[1-7].env | md5sum"
    pids, old = fleet.pids(GPUS), fleet.sh(files)
    # a setting that concerns all eight, so that the others would restart if they were reached
    run = fleet.play("deploy", extra={**faulty(0, fault), "sglang_server_watchdog_timeout": 111}, rc=2)
    failed = run.when(r"GPU 0 sglang@0\S*: failed")
    died = death(fleet, 0, run.started)
    print(f"{fault}: named {failed - died:.1f} s after its death; deploy ended {run.seconds:.0f} s after its start")
    assert failed - died <= LIMIT
    text = run.output[run.output.index("GPU 0 sglang@0") :]
    assert re.search(cause, text), run.output
    assert re.search(r"answers again", run.output), run.output
    assert fleet.answers(PORT) > 0
    after = fleet.pids(GPUS)
    assert [gpu for gpu in REST if after[gpu] != pids[gpu]] == []
    assert fleet.sh(files) == old
    assert "watchdog-timeout" not in fleet.sh("cat /etc/systemd/system/sglang@0.service")


def test_the_next_good_deploy_repairs_it(fleet):
    run = fleet.play("deploy")
    assert all(fleet.answers(PORT + gpu) for gpu in GPUS)
    assert fleet.play("deploy").changed == 0, run.output


def test_one_of_seven_fails_the_others_are_up_and_judged(fleet):
    run = fleet.play("deploy", extra={**faulty(4, "no-weights"), "sglang_server_watchdog_timeout": 112}, rc=2)
    for gpu in GPUS:
        line = "failed" if gpu == 4 else "ready"
        assert re.search(rf"GPU {gpu} sglang@{gpu}\S*: .*{line}", run.output), f"GPU {gpu}: {run.output}"
    assert all(fleet.answers(PORT + gpu) for gpu in GPUS)  # 4 went back to what worked
    text = fleet.sh("grep -l watchdog-timeout /etc/systemd/system/sglang@*.service")
    assert "sglang@4" not in text
    assert len(text.split()) == 7
    fleet.play("deploy")
    assert fleet.play("deploy").changed == 0


def test_a_crash_loop_stops_and_does_not_block_the_next_deploy(fleet):
    """The start limit really ends it, and our own start is not refused by it."""
    fleet.sh(f"echo no-weights > /var/lib/sglang/standin-fault-{PORT + 6}")
    fleet.sh("systemctl kill --signal=SIGKILL sglang@6")
    try:
        fleet.wait(lambda: fleet.units([6])[6]["ActiveState"] == "failed", 60, "the unit gives up")
        assert "Start request repeated too quickly" in str(fleet.journal("sglang@6.service", "-n 20"))
    finally:
        fleet.sh(f"rm /var/lib/sglang/standin-fault-{PORT + 6}")
    fleet.play("deploy")
    assert fleet.answers(PORT + 6)


def test_a_killed_controller_leaves_work_that_the_next_run_finishes(fleet):
    extra = {"sglang_server_watchdog_timeout": 113}
    run = fleet.launch("deploy", extra=extra)
    run.wait_for(r"sglang@3\S*: restart")
    run.kill()
    fleet.play("deploy", extra=extra)
    assert fleet.play("deploy", extra=extra).changed == 0
    fleet.play("deploy")


def test_a_foreign_process_on_a_port_is_named_before_anything_is_touched(fleet):
    pids = fleet.pids(GPUS)
    fleet.sh("systemd-run --collect --unit=squatter python3 -m http.server --bind 127.0.0.1 31005")
    try:
        fleet.wait(lambda: fleet.sh("ss -Htln sport = :31005"), 10, "the squatter listens")
        run = fleet.play("deploy", extra={"sglang_server_base_port": 31000}, rc=2)
    finally:
        fleet.sh("systemctl stop squatter")
    assert re.search(r"31005.*squatter\.service", run.output.replace("\n", " ")), run.output
    assert fleet.pids(GPUS) == pids


def test_wrong_flags_are_refused_together_before_anything_is_touched(fleet):
    pids = fleet.pids(GPUS)
    extra = {
        "sglang_server_extra_args": {"max-runing-requests": 3, "attention-backend": "flashinfr"},
        "sglang_server_model": "/srv/models/nothing-here",
    }
    run = fleet.play("deploy", extra=extra, rc=2)
    for named in ("max-runing-requests", "max-running-requests", "flashinfr", "nothing-here"):
        assert named in run.output
    assert fleet.pids(GPUS) == pids


def test_a_misspelt_variable_is_refused(fleet):
    run = fleet.play("deploy", extra={"sglang_server_max_running_request": 3}, rc=2)
    assert "sglang_server_max_running_request" in run.output[run.output.index("the role has no") :]


def test_secrets_reach_the_process_and_nobody_else_and_do_not_outlive_their_variable(fleet):
    secret = 'hf_SECRET"$%x'
    extra = {"sglang_server_secret_environment": {"HF_TOKEN": secret}}
    run = fleet.play("deploy", "--diff", "-vvv", extra=extra)
    pid = fleet.pids(GPUS)[3]
    assert f"HF_TOKEN={secret}" in fleet.sh(f"tr '\\0' '\\n' < /proc/{pid}/environ").splitlines()
    assert "hf_SECRET" not in run.output
    assert fleet.sh("grep -rl hf_SECRET /etc/systemd /run/systemd 2>/dev/null", rc=None) == ""
    assert fleet.sh("find $(grep -rl hf_SECRET /etc/sglang) -perm /077", rc=None) == ""
    fleet.play("deploy")
    assert fleet.sh("grep -rl hf_SECRET /etc/sglang", rc=None) == ""


def test_remove_takes_away_everything(fleet):
    fleet.play("remove")
    for path in ("/etc/sglang", "/var/lib/sglang", "/var/cache/sglang", "/opt/sglang"):
        assert fleet.sh(f"ls -d {path} 2>/dev/null", rc=None) == ""
    assert fleet.sh("ls /etc/systemd/system | grep sglang", rc=None) == ""
    assert fleet.sh("getent passwd sglang", rc=None) == ""
    assert fleet.sh("ls /srv/models")  # models stay
    assert fleet.sh("systemctl --failed --no-legend --plain | grep sglang", rc=None) == ""
    assert fleet.play("remove").changed == 0


def test_what_was_there_before_is_not_taken_over(fleet):
    fleet.sh("groupadd llm && useradd -u 1500 -g llm -d /home/s -s /bin/bash sglang && mkdir -p /var/cache/sglang")
    try:
        run = fleet.play("deploy", rc=2)
        assert re.search(r"/var/cache/sglang was there before and belongs to\s+root", run.output.replace("\n", " "))
        fleet.sh("chown sglang /var/cache/sglang && touch /var/cache/sglang/own")
        fleet.play("deploy")
        assert fleet.sh("getent passwd sglang").strip().endswith(":/home/s:/bin/bash")
        fleet.play("remove")
        assert fleet.sh("getent passwd sglang; ls /var/cache/sglang").split()[-1] == "own"
    finally:
        fleet.sh("userdel sglang; groupdel llm; rm -rf /var/cache/sglang", rc=None)


def test_a_first_deploy_whose_canary_fails_leaves_it_stopped_and_disabled(fleet):
    run = fleet.play("deploy", extra=faulty(0, "no-weights"), rc=2)
    assert "Cannot find any model weights" in run.output
    unit = fleet.units([0])[0]
    assert unit["ActiveState"] in ("inactive", "failed")
    assert unit["UnitFileState"] == "disabled"
    for gpu in REST:
        assert fleet.units([gpu])[gpu]["LoadState"] == "not-found"
    fleet.play("deploy")
    assert all(fleet.answers(PORT + gpu) for gpu in GPUS)
