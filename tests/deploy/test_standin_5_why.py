"""Why: remedies that act, the retry of what passes by itself, and servers that look healthy and are not."""

from __future__ import annotations

import json
import re

import pytest

GPUS = range(8)
PORT = 30000
FRACTION = {"sglang_server_mem_fraction_static": 0.85}
LIMITS = {"gpu_oom": 0.75, "kv_pool_too_small": 0.9, "jit_compile_oom": 1}
RECORD = "/etc/sglang/remedies.json"


@pytest.fixture(scope="module", autouse=True)
def ready(fleet):
    """Eight servers that work, whatever the tests before have left."""
    fleet.play("deploy")
    yield
    fleet.sh("rm -f /var/lib/sglang/standin-fault-* /var/lib/sglang/standin-starts-*")
    assert fleet.play("deploy").changed == 0
    assert remedies(fleet) == {}


@pytest.fixture
def faults(fleet):
    """Set faults by GPU in files on the host: the plan does not change with them."""

    def write(**wanted):
        fleet.sh("rm -f /var/lib/sglang/standin-fault-* /var/lib/sglang/standin-starts-*")
        for gpu, fault in wanted.items():
            fleet.sh(f"echo {fault} > /var/lib/sglang/standin-fault-{PORT + int(gpu[1:])}")

    yield write
    write()


def remedies(fleet):
    text = fleet.sh(f"cat {RECORD} 2>/dev/null", rc=None)
    rows = json.loads(text)["remedies"] if text else {}
    return {int(gpu): (row["setting"], row["before"], row["after"]) for gpu, row in rows.items()}


def status(fleet, tmp_path):
    """The status playbook's table, and its rows by GPU."""
    path = tmp_path / "status.json"
    run = fleet.play("status", extra={"sglang_server_status_json": str(path), "sglang_server_probe_timeout": 5})
    return run.output, {row["gpu"]: row for row in json.loads(path.read_text())}


def moved(before, after):
    return [gpu for gpu in GPUS if before[gpu] != after[gpu]]


def test_remedies_are_opt_in_bounded_recorded_and_touch_only_their_gpu(fleet, faults, tmp_path):
    faults(g0="kv-pool:0.87", g3="gpu-oom-graphs:0.82", g5="jit-oom:1", g6="gpu-oom-graphs:0.5")
    # not allowed: named, gone back, nothing recorded
    run = fleet.play("deploy", extra=FRACTION, rc=2)
    assert re.search(r"GPU 0 .*\n\s*cause: kv_pool_too_small", run.output.replace("\\n", "\n")), run.output
    assert remedies(fleet) == {}
    # allowed for three of them; GPU 6 would have to go below its limit later, and gets its one try
    faults(g0="kv-pool:0.87", g3="gpu-oom-graphs:0.82", g5="jit-oom:1")
    allowed = {**FRACTION, "sglang_server_remedies": LIMITS}
    run = fleet.play("deploy", extra=allowed)
    told = remedies(fleet)
    assert told[0] == ("mem_fraction_static", 0.85, 0.88)
    assert told[3] == ("mem_fraction_static", 0.85, 0.8)
    assert told[5][0] == "MAX_JOBS"
    assert sorted(told) == [0, 3, 5]
    assert all(fleet.answers(PORT + gpu) for gpu in GPUS)
    # each of the others was started once in this run: a remedy restarts only its own GPU
    for gpu in (1, 2, 4, 6, 7):
        starts = [line for _when, line in run.lines if re.search(rf"GPU {gpu} sglang@{gpu}\S*: re?start", line)]
        assert len(starts) <= 1, starts
    words = fleet.sh("tr '\\0' ' ' < /proc/$(systemctl show -p MainPID --value sglang@3)/cmdline")
    assert "--mem-fraction-static 0.8 " in words
    # drift in the status
    table, rows = status(fleet, tmp_path)
    assert "mem_fraction_static is 0.8 instead of 0.85 (remedy for gpu_oom)" in " ".join(table.split())
    assert {gpu for gpu, row in rows.items() if row["remedy"]} == {0, 3, 5}
    # idempotent, with no restart
    pids = fleet.pids(GPUS)
    assert fleet.play("deploy", extra=allowed).changed == 0
    assert fleet.pids(GPUS) == pids
    # once per GPU: what fails again is named, not tried with a third value
    faults(g0="kv-pool:0.87", g3="gpu-oom-graphs:0.5", g5="jit-oom:1")
    fleet.sh("systemctl kill -s KILL sglang@3")
    run = fleet.play("deploy", extra=allowed, rc=2)
    assert "gpu_oom" in run.output
    assert remedies(fleet)[3] == ("mem_fraction_static", 0.85, 0.8)
    assert moved(pids, fleet.pids(GPUS)) == [3]
    # not beyond the limit
    faults(g0="kv-pool:0.87", g5="jit-oom:1", g6="gpu-oom-graphs:0.5")
    fleet.sh("systemctl kill -s KILL sglang@6")
    bounded = {**FRACTION, "sglang_server_remedies": {**LIMITS, "gpu_oom": 0.83}}
    fleet.play("deploy", extra=bounded, rc=2)
    assert 6 not in remedies(fleet)
    # another value in the inventory wins over what was recorded
    faults()
    fleet.play("deploy", extra={**allowed, "sglang_server_mem_fraction_static": 0.7})
    words = fleet.sh("tr '\\0' ' ' < /proc/$(systemctl show -p MainPID --value sglang@3)/cmdline")
    assert "--mem-fraction-static 0.7 " in words


def test_what_passes_by_itself_is_tried_once_more_and_nothing_else_is(fleet, faults):
    change = {"sglang_server_watchdog_timeout": 121}
    # GPU 2 fails in its first start, as when two servers build the same kernel; GPU 5 in every one; GPU 7 differs
    faults(g2="jit-race:1", g5="jit-race", g7="no-weights")
    run = fleet.play("deploy", extra=change, rc=2)
    again = [line for _when, line in run.lines if "started once more" in line]
    assert [re.search(r"GPU (\d)", line).group(1) for line in again] == ["2", "5"], run.output
    assert all("jit_contention" in line for line in again)
    said = run.output.replace("\\n", "\n")
    assert "2 of 7 servers not ready." in said
    assert re.search(r"GPU 5 sglang@5: failed.*\n\s*cause: jit_contention", said), run.output
    assert re.search(r"GPU 7 sglang@7: failed.*\n\s*cause: model_unavailable", said), run.output
    # short: the task that fails shows what a person needs, and not the whole structure
    fatal = [line for _when, line in run.lines if line.startswith("fatal:")]
    assert fatal
    assert all(len(line) < 3000 and "invocation_id" not in line for line in fatal), [len(line) for line in fatal]
    faults()
    fleet.play("deploy")


WRONG = {
    # fault: the code, and what shows it
    "nan-logits": ("output_wrong", r"log probabilities of the answer are null"),
    "same-samples": ("output_wrong", r"two samples at temperature 1 are equal"),
    "garbage": ("output_wrong", r"no tokens came back"),
    "swallowed": ("content_empty", r"all went to reasoning_content"),
    "empty-answer": ("output_wrong", r"no tokens came back"),
    "stall": ("engine_stalled", r"requests run and no token came"),
    "dead-scheduler": ("engine_stalled", r"no answer within 4 s"),
}


def test_what_only_looks_healthy_does_not_pass_the_gate(fleet):
    gpus = dict(zip(range(1, 8), WRONG, strict=True))
    extra = {
        "sglang_server_probe_chat_tokens": 64,
        "sglang_server_probe_timeout": 4,
        "sglang_server_instances": [
            {"gpu": str(gpu), "environment": {"STANDIN_FAULT": fault}} for gpu, fault in gpus.items()
        ],
    }
    run = fleet.play("deploy", extra=extra, rc=2)
    said = run.output.replace("\\n", "\n")
    print(f"seven servers that answer, and wrongly: judged after {run.when('7 of 7 servers') - run.started:.0f} s")
    for gpu, fault in gpus.items():
        code, shown = WRONG[fault]
        found = re.search(rf"GPU {gpu} sglang@{gpu}: unhealthy.*\n\s*cause: (\w+): .*\n\s*(.*)", said)
        assert found, (fault, run.output)
        print(f"{fault}: {found.group(1)}: {found.group(2)}")
        assert found.group(1) == code, (fault, run.output)
        assert re.search(shown, found.group(2)), (fault, run.output)
    assert all(fleet.answers(PORT + gpu) for gpu in GPUS)  # all went back


def test_what_only_looks_healthy_is_named_by_the_status(fleet, faults, tmp_path):
    faults(g1="nan-logits", g2="same-samples", g3="stall", g4="dead-scheduler", g6="tokens-per-second:15")
    fleet.sh("systemctl restart sglang@1 sglang@2 sglang@3 sglang@4 sglang@6")
    fleet.wait(lambda: all(fleet.http(PORT + gpu, "/ready")[0] == 200 for gpu in (1, 2, 3, 4, 6)), 30, "they are up")
    table, rows = status(fleet, tmp_path)
    codes = {gpu: rows[gpu]["code"] for gpu in GPUS}
    print(table)
    assert codes == {
        0: None,
        1: "output_wrong",
        2: "output_wrong",
        3: "engine_stalled",
        4: "engine_stalled",
        5: None,
        6: "state_degraded",
        7: None,
    }, table
    assert [rows[gpu]["state"] for gpu in GPUS] == ["ready", *["unhealthy"] * 4, "ready", "ready", "ready"]
    assert "siblings give" in table
    faults()
    fleet.sh("systemctl kill -s KILL sglang@3 sglang@4")  # a stop would wait for the requests that hang
    fleet.play("deploy")


SMI = """#!/usr/bin/env python3
import subprocess, sys
def pid(gpu):
    argv = ["systemctl", "show", "-p", "MainPID", "--value", f"sglang@{gpu}"]
    return subprocess.check_output(argv, text=True).strip()
if "--query-compute-apps=gpu_uuid,pid" in sys.argv:
    print("GPU-aaaa0000, " + pid(0)); print("GPU-aaaa0007, " + pid(1))
"""


def test_a_server_on_another_gpu_or_on_none_is_named(fleet, tmp_path):
    """The driver's list of processes is the stand-in here; everything that reads it is real."""
    fleet.sh(f"cat > /usr/local/bin/nvidia-smi <<'X'\n{SMI}\nX\nchmod +x /usr/local/bin/nvidia-smi")
    plan = json.loads(fleet.sh("cat /etc/sglang/plan.json"))["instances"][:3]
    instances = [{**item, "uuid": f"GPU-aaaa000{item['gpu']}"} for item in plan]
    task = {"gpufleet.sglang.sglang_health": {"instances": instances}, "register": "health"}
    keep = {"ansible.builtin.copy": {"content": "{{ health | to_json }}", "dest": "/srv/health.json", "mode": "0600"}}
    play = tmp_path / "place.yml"
    play.write_text(json.dumps([{"hosts": fleet.host, "gather_facts": False, "tasks": [task, keep]}]))
    try:
        fleet.play(str(play))
    finally:
        fleet.sh("rm /usr/local/bin/nvidia-smi")
    servers = json.loads(fleet.sh("cat /srv/health.json"))["servers"]
    assert [server["state"] for server in servers] == ["ready", "unhealthy", "unhealthy"]
    said = [(server["diagnosis"] or {}) for server in servers]
    assert [item.get("code") for item in said] == [None, "wrong_device", "wrong_device"]
    assert [item.get("detail") for item in said] == [None, "gpu_selection_wrong", "silent_cpu_fallback"]
    assert "GPU-aaaa0007 instead of GPU-aaaa0001" in said[1]["evidence"][0]
