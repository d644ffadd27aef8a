"""inventories/ct200 by each of its ways in: FLEET_HOST plays the container, pve its Proxmox host."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time

import pytest
from fleet import Fleet
from proxmox import ENVIRONMENT, OURS, SSH, THEIRS, WAYS, adhoc, proxmox_host, reference

SLOTS = range(8)
HARD = ["a b", "it's", '"q"', "$HOME `id` $(id)", "\\", "*", "--", "-x", "ü€", "two\nlines", "", "a;b|c&d>e"]
LISTENER = "$(systemctl show -p MainPID --value ssh)"


@pytest.fixture(scope="module")
def ct(fleet) -> Fleet:
    return reference(os.environ["FLEET_INVENTORY"], fleet.host)


@pytest.fixture(scope="module")
def pve(ct) -> Fleet:
    return proxmox_host(os.environ["FLEET_INVENTORY"], "pve", ct)


@pytest.fixture(params=WAYS)
def by(request) -> str:
    return request.param


def run(ct: Fleet, by: str, module: str, args: dict | str = "", rc: int | None = 0, **extra) -> str:
    """Run one module in the container; returns what Ansible printed."""
    text = args if isinstance(args, str) else json.dumps(args)
    done = adhoc(ct, by, "-m", f"ansible.builtin.{module}", "-a", text, **extra)
    said = done.stdout + done.stderr
    if rc is not None:
        assert done.returncode == rc, f"rc {done.returncode}, expected {rc}:\n{said}"
    return said


def play(ct: Fleet, by: str, playbook: str, **extra):
    return ct.play(playbook, extra={"ct200_by": by, **extra}, env=ENVIRONMENT)


def test_the_deploy(ct, pve):
    """Through pct; then by every other way in the same servers are found, and nothing changes."""
    play(ct, OURS, "deploy")
    pids = ct.pids(SLOTS)
    assert all(ct.answers(30000 + slot) for slot in SLOTS)
    for way in (OURS, SSH, THEIRS):
        assert play(ct, way, "deploy").changed == 0, way
    assert play(ct, OURS, "deploy", ansible_user="fred").changed == 0
    assert ct.pids(SLOTS) == pids


def test_pct_is_one_round_trip_a_task(ct, pve):
    """A deploy that changes nothing runs pct once a task that runs a module."""
    pve.sh(": > /var/log/pct.log")
    done = play(ct, OURS, "deploy")
    tasks = sum(line.startswith(("ok: [ct200]", "changed: [ct200]")) for _when, line in done.lines)
    calls = int(pve.sh("wc -l < /var/log/pct.log"))
    print(f"pct exec: {calls} for {tasks} tasks")
    assert 0 < calls <= tasks


def test_a_hundred_megabytes(ct, pve, by, tmp_path):
    big, back = tmp_path / "big", tmp_path / "back"
    big.write_bytes(os.urandom(1 << 20) * 100)
    want = hashlib.sha1(big.read_bytes()).hexdigest()
    path = "/tmp/big" if by == THEIRS else "/tmp/big file"  # theirs does not quote what it fetches
    begun = time.monotonic()
    run(ct, by, "copy", {"src": str(big), "dest": path})
    there = time.monotonic()
    assert ct.sh(f"sha1sum '{path}'").split()[0] == want
    run(ct, by, "fetch", {"src": path, "dest": str(back), "flat": True})
    print(f"{by}: 100 MiB there {there - begun:.1f} s, back {time.monotonic() - there:.1f} s")
    assert hashlib.sha1(back.read_bytes()).hexdigest() == want
    ct.sh(f"rm '{path}'")


def test_an_empty_file(ct, pve, by, tmp_path):
    (tmp_path / "empty").touch()
    run(ct, by, "copy", {"src": str(tmp_path / "empty"), "dest": "/tmp/empty"})
    run(ct, by, "fetch", {"src": "/tmp/empty", "dest": str(tmp_path / "back"), "flat": True})
    assert (tmp_path / "back").read_bytes() == b""


def test_quoting(ct, pve, by):
    """No shell on the way splits or expands a word: in a module's arguments, and in a command line."""
    for host in (ct, pve):
        host.sh("rm -f /tmp/a; touch /tmp/a")
    script = "import json, sys; json.dump(sys.argv[1:], open('/tmp/a', 'w'))"
    run(ct, by, "command", {"argv": ["python3", "-c", script, *HARD], "expand_argument_vars": False})
    assert json.loads(ct.sh("cat /tmp/a")) == HARD
    words = " ".join("'" + word.replace("'", "'\\''") + "'" for word in HARD)
    run(ct, by, "raw", {"_raw_params": f"printf '<%s>' {words} > /tmp/a; echo $((6*7)) >> /tmp/a"})
    # of theirs, what follows a `>` or a `;` in a raw task happens on the Proxmox host
    assert (pve if by == THEIRS else ct).sh("cat /tmp/a") == "".join(f"<{word}>" for word in HARD) + "42\n"
    (ct if by == THEIRS else pve).sh("! grep -q 42 /tmp/a")


def test_long_commands(ct, pve, by):
    """100,000 characters pass; what is longer than Linux allows for one argument fails and says so."""
    assert "100000" in run(ct, by, "raw", "printf %s {{ 'x' * 100000 }} | wc -c")
    args = {"argv": "{{ ['sh', '-c', 'echo $#', 'sh'] + ['y' * 1000] * 500 }}", "expand_argument_vars": False}
    assert "500" in run(ct, by, "command", args), "half a megabyte of arguments, in a module"
    assert "rgument list too long" in run(ct, by, "raw", "printf %s {{ 'x' * 140000 }} | wc -c", rc=None)


def test_output_that_is_not_utf8(ct, pve, by):
    """A command line's bytes are replaced and its exit status kept; a module's are refused, by Ansible itself."""
    line = r"printf 'out\377end'; printf 'err\377end' >&2; exit 3"
    said = run(ct, by, "raw", line, rc=2)
    assert "rc=3" in said and "out" in said
    said = run(ct, by, "command", {"argv": ["sh", "-c", line]}, rc=2)
    assert "invalid UTF8 string" in said or "rc=3" in said  # which depends on ansible-core


def test_a_stopped_container(ct, pve):
    pve.sh("pct stop 200")
    try:
        said = run(ct, OURS, "ping", rc=4)
        theirs = run(ct, THEIRS, "ping", rc=4)
    finally:
        pve.sh("pct start 200")
    assert "UNREACHABLE" in said and "container 200 does not run: `pct start 200` there" in said
    assert "UNREACHABLE" in theirs and "exited with result 255" in theirs  # why, only with -vvvv


def test_a_wrong_id(ct, pve):
    said = run(ct, OURS, "ping", rc=4, proxmox_vmid=999)
    assert "UNREACHABLE" in said and "has no container 999" in said
    assert "exited with result 255" in run(ct, THEIRS, "ping", rc=4, proxmox_vmid=999)


def test_a_host_without_pct_and_a_user_without_rights(ct, pve):
    said = run(ct, OURS, "ping", rc=4, ct200_proxmox_host=ct.address)
    assert "has no /usr/sbin/pct: ansible_host must be the Proxmox host" in said
    pve.sh("mv /etc/sudoers.d/pct /root/")
    try:
        said = run(ct, OURS, "ping", rc=4, ansible_user="fred")
    finally:
        pve.sh("mv /root/pct /etc/sudoers.d/")
    assert "fred may not run /usr/sbin/pct as root there without a password" in said


def dropped(ct: Fleet, by: str, host: Fleet, cut: str) -> tuple[str, float]:
    """Cut the connection while a command runs; returns what was said and after how many seconds."""
    ended: list[str] = []
    begun = time.monotonic()
    thread = threading.Thread(target=lambda: ended.append(run(ct, by, "command", "sleep 47", rc=None)), daemon=True)
    thread.start()
    ct.wait(lambda: ct.sh("pgrep -fx 'sleep 47'", rc=None), what="the command")
    host.sh(cut, rc=None)
    thread.join(100)
    ct.sh("pkill -fx 'sleep 47'", rc=None)
    assert ended, "nothing was said within 100 s"
    return ended[0], time.monotonic() - begun


def test_a_dropped_connection(ct, pve, by):
    """The host is unreachable, at once."""
    host = ct if by == SSH else pve
    said, seconds = dropped(ct, by, host, f"kill -KILL $(pgrep -P {LISTENER})")
    assert seconds < 20
    assert "UNREACHABLE" in said
    assert ("SSH session not active" if by == THEIRS else "Make sure this host can be reached over ssh") in said


def test_a_connection_that_goes_silent(ct, pve):
    """No packet comes back: noticed by ServerAliveInterval (ansible.cfg), not after TCP's quarter of an hour."""
    quiet = "(sleep 1; ip link set eth0 down; sleep 60; ip link set eth0 up) > /dev/null 2>&1 &"
    said, seconds = dropped(ct, OURS, pve, quiet)
    ct.wait(lambda: pve.sh("echo up", rc=None, timeout=90) == "up\n", seconds=90, what="the network")
    assert "UNREACHABLE" in said and seconds < 60, said


def test_a_connection_lost_at_the_gate_does_not_lose_the_deploy(ct, pve):
    ct.sh("systemctl stop sglang.target")
    slow = {"sglang_server_environment": {"STANDIN_FAULT": "slow:12"}}
    deploy = ct.launch("deploy", extra={"ct200_by": OURS, **slow}, env=ENVIRONMENT)
    deploy.wait_for(r"TASK \[.*Wait until each has answered")
    time.sleep(2)
    pve.sh(f"kill -KILL $(pgrep -P {LISTENER})", rc=None)
    assert deploy.process.wait(300) == 0, deploy.output
    assert "connection lost, trying again" in deploy.output
    assert all(ct.answers(30000 + slot) for slot in SLOTS)
