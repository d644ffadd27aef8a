"""Three hosts in one inventory, the first of them dead: canary host first, or all in parallel (FLEET_HOST is h1)."""

from __future__ import annotations

import json
import os
import re

import pytest
from fleet import Fleet, Run

GPUS = range(4)
ALL = {"sglang_server_serial": "100%"}
UNREACHABLE, FAILED = 4, 2  # ansible-playbook's exit status; a dead host is told of in every run
DEPLOY = r"^PLAY \[Deploy one verified"


@pytest.fixture(scope="module")
def h1(fleet) -> Fleet:
    return fleet


@pytest.fixture(scope="module")
def h2(fleet) -> Fleet:
    return Fleet(os.environ["FLEET_INVENTORY"], "h2")


def batches(run: Run, count: int) -> list[str]:
    """The output of each batch of hosts."""
    found = re.split(DEPLOY, run.output, flags=re.MULTILINE)[1:]
    assert len(found) == count, run.output
    return found


def hosts(text: str) -> set[str]:
    """The hosts that a task ended on."""
    return set(re.findall(r"^(?:ok|changed|fatal): \[(\w+)\]", text, re.MULTILINE))


def test_the_canary_host_is_the_first_that_answers(h1, h2):
    run = h1.play("deploy", rc=UNREACHABLE)
    first, second = batches(run, 2)
    assert (hosts(first), hosts(second)) == ({"h1"}, {"h2"})
    assert "4 of 4 ready" in first and "4 of 4 ready" in second
    assert all(host.answers(30000 + gpu) for host in (h1, h2) for gpu in GPUS)
    assert re.search(r"^fatal: \[dead\]: UNREACHABLE", run.output, re.MULTILINE), run.output


def test_all_in_parallel_in_one_table(h1, h2):
    run = h1.play("deploy", rc=UNREACHABLE, extra=ALL)
    (only,) = batches(run, 1)
    assert hosts(only) == {"h1", "h2"}
    assert "8 of 8 ready" in only
    assert run.changed == 0, run.output


def test_the_status_of_all_hosts_in_one_table(h1, h2, tmp_path):
    """The dead host is a row of it."""
    path = tmp_path / "status.json"
    run = h1.play("status", extra={"sglang_server_status_json": str(path)})
    assert "8 of 9 ready (1 unreachable)" in run.output
    rows = [(row["host"], row["gpu"], row["state"]) for row in json.loads(path.read_text())]
    assert rows == [("dead", None, "unreachable"), *((host, gpu, "ready") for host in ("h1", "h2") for gpu in GPUS)]


def test_a_canary_host_that_fails_leaves_the_others_alone(h1, h2):
    pids, files = h2.pids(GPUS), h2.sh("cat /etc/systemd/system/sglang@*.service | md5sum")
    bad = {"sglang_server_environment": {"STANDIN_FAULT": "no-weights"}}
    run = h1.play("deploy", rc=None, extra=bad)
    assert run.rc & FAILED or run.rc == UNREACHABLE
    (only,) = batches(run, 1)
    assert hosts(only) == {"h1"} and re.search(r"h1 GPU 0 \S+ failed", only), only
    assert (h2.pids(GPUS), h2.sh("cat /etc/systemd/system/sglang@*.service | md5sum")) == (pids, files)
    assert all(h1.answers(30000 + gpu) for gpu in GPUS)  # went back


def test_in_parallel_a_host_that_fails_stops_nobody(h1, h2):
    h1.sh("echo no-weights > /var/lib/sglang/standin-fault-30002")
    try:
        run = h1.play("deploy", rc=None, extra={**ALL, "sglang_server_watchdog_timeout": 111})
    finally:
        h1.sh("rm /var/lib/sglang/standin-fault-30002")
    assert run.rc in (FAILED, UNREACHABLE)
    assert re.search(r"^fatal: \[h1\]", run.output, re.MULTILINE), run.output
    assert re.search(r"^h1 .* unknown .*failed or was lost", run.output, re.MULTILINE), run.output
    assert "4 of 5 ready (1 unknown)" in run.output
    assert len(h2.sh("grep -l watchdog-timeout /etc/systemd/system/sglang@*.service").split()) == len(GPUS)
    assert all(h2.answers(30000 + gpu) for gpu in GPUS)
    h1.play("deploy", rc=UNREACHABLE, extra=ALL)
    assert all(host.answers(30000 + gpu) for host in (h1, h2) for gpu in GPUS)
