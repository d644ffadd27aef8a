"""The real SGLang on a CPU, three slots: what only the real engine can show."""

from __future__ import annotations

import json
import re
import subprocess
import time

GPUS = range(3)
PORT = 30000


def test_deployed(fleet):
    """The scenario's converge step has deployed."""
    for gpu in GPUS:
        assert fleet.answers(PORT + gpu) > 0
    version = json.loads(fleet.http(PORT, "/server_info")[1])["version"]
    assert version == fleet.variables["sglang_server_version"]


def test_the_journal_proves_the_order(fleet):
    units = fleet.units(GPUS)
    starts = {gpu: int(units[gpu]["ExecMainStartTimestampMonotonic"]) / 1e6 for gpu in GPUS}
    answered = [
        int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6
        for entry in fleet.journal("sglang@0.service")
        if re.search(r"POST /generate HTTP/1\.1. 200", str(entry["MESSAGE"]))
    ]
    assert len([when for when in answered if when < min(starts[1], starts[2])]) >= 2
    assert abs(starts[1] - starts[2]) < 2


def test_second_deploy_changes_nothing(fleet):
    pids = fleet.pids(GPUS)
    assert fleet.play("deploy").changed == 0
    assert fleet.pids(GPUS) == pids


def test_servers_share_caches_and_run_in_their_sandbox(fleet):
    pid = fleet.pids(GPUS)[1]
    environ = dict(
        line.split("=", 1) for line in fleet.sh(f"tr '\\0' '\\n' < /proc/{pid}/environ").splitlines() if "=" in line
    )
    assert environ["SGLANG_CACHE_DIR"].startswith("/var/cache/sglang")
    assert environ["HOME"] == "/var/lib/sglang"
    assert environ["PATH"].split(":")[0].endswith("/bin")
    assert fleet.sh(f"stat -c %U /proc/{pid}").strip() == "sglang"
    assert fleet.sh("stat -c '%a %U' /etc/sglang/1.env").strip() == "600 root"
    score = fleet.sh("systemd-analyze security --no-pager sglang@1.service | tail -1")
    assert float(re.search(r": ([0-9.]+)", score).group(1)) <= 2.0
    listening = fleet.sh("ss -Htln sport = :30001")
    assert "127.0.0.1:30001" in listening
    assert "0.0.0.0:30001" not in listening


def test_a_killed_scheduler_brings_back_that_server_only(fleet):
    pids = fleet.pids(GPUS)
    children = fleet.sh(f"ps -o pid=,args= --ppid {pids[2]}").splitlines()
    scheduler = [line.split()[0] for line in children if "scheduler" in line]
    assert scheduler
    fleet.sh(f"kill -KILL {scheduler[0]}")
    fleet.wait(lambda: int(fleet.units([2])[2]["NRestarts"]) == 1, 60, "a restart by systemd")
    fleet.wait(lambda: fleet.answers(PORT + 2), 120, "slot 2 answers again")
    after = fleet.pids(GPUS)
    assert [gpu for gpu in GPUS if after[gpu] != pids[gpu]] == [2]


def test_a_canary_with_a_missing_shard_goes_back(fleet):
    """The real engine's own failure: the folder passes for a model, the weights do not load."""
    fleet.sh("cp -r /srv/models/tiny /srv/broken && truncate -s 1000 /srv/broken/model.safetensors")
    pids = fleet.pids(GPUS)
    run = fleet.play("deploy", extra={"sglang_server_model": "/srv/broken"}, rc=2, timeout=300)
    died = [
        int(entry["__REALTIME_TIMESTAMP"]) / 1e6
        for entry in fleet.journal("sglang@0.service", f"--since=@{run.started:.0f}")
        if "Main process exited" in str(entry.get("MESSAGE"))
    ]
    named = run.when(r"GPU 0 sglang@0\S*: failed")
    print(f"named {named - min(died):.1f} s after its death")
    assert named - min(died) <= 5
    assert re.search(r"afetensor|HeaderTooLarge|MetadataIncompleteBuffer", run.output)
    assert "answers again" in run.output, run.output
    assert fleet.answers(PORT) > 0
    after = fleet.pids(GPUS)
    assert [gpu for gpu in GPUS if after[gpu] != pids[gpu]] == [0]


def failing(fleet, trouble):
    """Deploy a change; when the canary restarts, make trouble; returns the run and when the canary was named."""
    pids = fleet.pids(GPUS)
    run = fleet.launch("deploy", extra={"sglang_server_watchdog_timeout": 111})
    run.wait_for(r"GPU 0 sglang@0: process")  # the old one is gone, the new one loads
    trouble(run)
    assert run.process.wait(300) == 2, run.output
    assert "answers again" in run.output, run.output
    after = fleet.pids(GPUS)
    assert [gpu for gpu in GPUS if after[gpu] != pids[gpu]] == [0]
    assert fleet.answers(PORT) > 0
    return run


def test_a_canary_killed_while_loading_is_named_at_once(fleet):
    when = []

    def kill(run):
        fleet.sh("systemctl kill --signal=SIGKILL --kill-who=main sglang@0")
        when.append(time.time())

    run = failing(fleet, kill)
    named = run.when(r"GPU 0 sglang@0\S*: failed")
    print(f"named {named - when[0]:.1f} s after the kill")
    assert named - when[0] <= 5
    assert re.search(r"killed 9", run.output)


def test_a_port_taken_while_the_canary_loads_is_named_with_its_holder(fleet):
    """SGLang binds last: the plan saw a free port, and the real one would hang for two minutes now."""

    def squat(run):
        fleet.sh(f"systemd-run --collect --unit=squatter python3 -m http.server --bind 127.0.0.1 {PORT}")
        try:
            run.wait_for(r"GPU 0 sglang@0\S*: (failed|foreign)", 60)
        finally:
            fleet.sh("systemctl stop squatter")

    run = failing(fleet, squat)
    assert re.search(r"squatter\.service", run.output), run.output


def test_stop_lets_requests_finish(fleet):
    body = json.dumps({"text": "hello", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}})
    url = f"http://127.0.0.1:{PORT + 1}/generate"
    asked = subprocess.Popen(
        [*fleet.ssh_args, f"curl -s -m 120 -H 'Content-Type: application/json' -d '{body}' {url}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    fleet.wait(lambda: fleet.sh(f"ss -Htn state established sport = :{PORT + 1}"), 10, "the request is in flight")
    time.sleep(0.5)
    fleet.play("stop")
    assert json.loads(asked.communicate(timeout=120)[0])["meta_info"]["completion_tokens"] == 300
    for unit in fleet.units(GPUS).values():
        assert (unit["ActiveState"], unit["Result"]) == ("inactive", "success")


def test_a_reboot_brings_all_back(fleet):
    fleet.sh("systemctl reboot", rc=None)
    fleet.wait(lambda: fleet.sh("systemctl is-system-running", rc=None).strip() == "running", 60, "the host")
    fleet.wait(lambda: all(fleet.answers(PORT + gpu) for gpu in GPUS), 240, "all answer")
