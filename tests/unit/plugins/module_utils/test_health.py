# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import json
from dataclasses import replace

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._health import (
    Limits,
    Look,
    Memory,
    choose_invocation,
    describe,
    failure_message,
    judge,
    memory_from_dict,
    note_progress,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._phases import LogDigest
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe import ProbeResult
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import UnitState

INSTANCE = Instance(3, "sglang@3.service", "127.0.0.1", 30003, [], {}, "", "", uuid="GPU-3")
UP = UnitState(
    "sglang@3.service", "loaded", "active", "running", invocation_id="i1", main_pid=9, started=100.0, control_group="/x"
)
NONE = UnitState("sglang@3.service")
STOPPED = replace(UP, active_state="inactive", sub_state="dead", main_pid=0, exit_code=1, exited=150.0)
FAILED = replace(STOPPED, active_state="failed", sub_state="failed", result="exit-code", exit_status=2)
LOOP = replace(FAILED, active_state="activating", sub_state="auto-restart", restarts=1)
STOPPING = replace(UP, active_state="deactivating", sub_state="stop-sigterm")
DYING = replace(STOPPING, main_pid=0, exit_code=2, exit_status=9, exited=150.0)
READY = ProbeResult(ok=True, model="m", version="0.5.23", kv_tokens=10, first_token_seconds=0.13, completion_tokens=16)
WARMING = ProbeResult(starting=True, reason="GET /ready answered 503")
EMPTY = ProbeResult(reason="POST /generate answered 200 but no tokens came back")
LIMITS = Limits(60, 600)


def digest(*lines):
    found = LogDigest()
    for line in lines:
        found.feed(line, 120.0)
    return found


FIRED = digest("The server is fired up and ready to roll!")
CAUSE = digest("RuntimeError: no weights", "Received sigquit from a child process.")
BIND = digest(
    "ERROR: [Errno 98] error while attempting to bind on address", "The server is fired up and ready to roll!"
)


def one(unit, log=None, port="none", answer=None, expected="", limits=None, now=160.0, **more):
    memory = Memory()
    choose_invocation(memory, unit, expected)
    look = Look(now, unit, log or LogDigest(), port, **more)
    note_progress(memory, look)
    if answer:
        memory.take(answer, now)
    return memory, look, judge(memory, look, limits)


TABLE = [
    # unit, log, port, answer, expected -> state, reason, terminal
    (NONE, None, "none", None, "", "absent", "no such unit", True),
    (NONE, None, "none", None, "i1", "failed", "its unit is gone, without an error line in its log", True),
    (STOPPED, None, "none", None, "", "stopped", "", True),
    (STOPPED, None, "foreign", None, "", "stopped", "the port is held by pid 7", True),
    (STOPPED, None, "none", None, "i1", "failed", "stopped, exited 0, without an error line in its log", True),
    (STOPPING, None, "none", None, "", "stopped", "is being stopped", False),
    (DYING, None, "none", None, "", "failed", "killed 9, without an error line in its log", True),
    (FAILED, CAUSE, "none", None, "", "failed", "RuntimeError: no weights", True),
    (FAILED, None, "none", None, "", "failed", "exited 2, without an error line in its log", True),
    (replace(FAILED, result="oom-kill"), None, "none", None, "", "failed", "exited 2, result oom-kill, without", True),
    (LOOP, CAUSE, "none", None, "", "failed", "RuntimeError: no weights", True),
    (UP, BIND, "none", None, "", "failed", "ERROR: [Errno 98]", True),
    (
        UP,
        BIND,
        "foreign",
        READY,
        "",
        "failed",
        "ERROR: [Errno 98] error while attempting to bind on address (the",
        True,
    ),
    (replace(UP, invocation_id="i2"), CAUSE, "ours", READY, "i1", "failed", "RuntimeError: no weights", True),
    (
        replace(UP, invocation_id="i2", restarts=1),
        None,
        "none",
        None,
        "i1",
        "failed",
        "died and was started again (1",
        True,
    ),
    (UP, None, "none", None, "", "starting", "", False),
    (UP, None, "ours", None, "", "starting", "", False),
    (UP, None, "ours", WARMING, "", "starting", "", False),
    (UP, None, "foreign", READY, "", "foreign", "the port is held by pid 7", False),
    (UP, FIRED, "foreign", READY, "i1", "foreign", "the port is held by pid 7", False),
    (UP, FIRED, "none", None, "", "unhealthy", "says it is ready but nothing listens on its port", False),
    (UP, FIRED, "ours", WARMING, "", "unhealthy", "GET /ready answered 503", False),
    (UP, FIRED, "ours", EMPTY, "", "unhealthy", "POST /generate answered 200 but no tokens came back", False),
    (UP, None, "ours", EMPTY, "", "unhealthy", "POST /generate answered 200 but no tokens came back", False),
    (UP, FIRED, "unknown", None, "", "unhealthy", "cannot see which process listens on the port", False),
    (UP, FIRED, "ours", READY, "", "ready", "", True),
    (UP, None, "ours", READY, "i1", "ready", "", True),  # a journal that has lost the start
    (replace(UP, restarts=4), FIRED, "ours", READY, "i1", "ready", "", True),  # restarts before our start
]


@pytest.mark.parametrize(("unit", "log", "port", "answer", "expected", "state", "reason", "terminal"), TABLE)
@pytest.mark.parametrize("limits", [None, LIMITS])
def test_judge(unit, log, port, answer, expected, state, reason, terminal, limits):
    _memory, _look, verdict = one(unit, log, port, answer, expected, limits, holder="pid 7")
    assert (verdict.state, verdict.terminal) == (state, terminal)
    assert verdict.reason.startswith(reason) if reason else verdict.reason == ""


class Course:
    """A unit over time."""

    def __init__(self, expected=""):
        self.memory = Memory()
        self.expected = expected

    def at(self, now, unit=UP, log=None, answer=None, limits=LIMITS, **more):
        choose_invocation(self.memory, unit, self.expected)
        look = Look(now, unit, log or LogDigest(), **more)
        note_progress(self.memory, look)
        if answer:
            self.memory.take(answer, now)
        verdict = judge(self.memory, look, limits)
        self.memory = memory_from_dict(json.loads(json.dumps(self.memory.to_dict())))
        return verdict


def test_stalls_without_progress_only():
    course = Course()
    assert course.at(0).state == "starting"
    assert course.at(59).state == "starting"
    assert course.at(70, log=digest("Load weight begin")).state == "starting"  # a phase
    assert course.at(129).state == "starting"
    lines = digest("Load weight begin", "another line")
    assert course.at(130, log=lines).state == "starting"  # a line
    assert course.at(180, log=lines, cpu_seconds=9).state == "starting"  # 9 s of CPU in 50 s
    assert course.at(239, log=lines, cpu_seconds=10).state == "starting"  # 1 s in 59 s is too little
    assert course.at(239.5, log=lines, cpu_seconds=10, compiling=True).state == "starting"
    stalled = course.at(300, log=lines, cpu_seconds=11)
    assert (stalled.state, stalled.terminal) == ("stalled", True)
    assert stalled.reason == "no progress for 60 s in phase weights"


def test_spinning_behind_an_open_port_is_no_progress():
    course = Course()
    for now in range(0, 60, 5):
        assert course.at(now, port="ours", answer=WARMING, cpu_seconds=float(now)).state == "starting"
    assert course.at(61, port="ours", answer=WARMING, cpu_seconds=61.0).state == "stalled"


def test_hard_cap():
    course = Course()
    for now in range(0, 600, 10):
        assert not course.at(now, cpu_seconds=float(now)).terminal
    verdict = course.at(600, cpu_seconds=600.0)
    assert (verdict.state, verdict.reason) == ("stalled", "not ready after 600 s, in phase none")


def test_foreign_must_stay():
    course = Course()
    assert not course.at(0, port="foreign", holder="x").terminal
    assert course.at(1).state == "starting"
    assert not course.at(2, port="foreign", holder="x").terminal
    assert course.at(5, port="foreign", holder="x").terminal


def test_unhealthy_must_stay():
    course = Course()
    assert not course.at(0, log=FIRED, port="ours", answer=EMPTY).terminal
    assert not course.at(20, log=FIRED, port="ours", answer=EMPTY).terminal
    assert not course.at(29, log=FIRED, port="ours", answer=EMPTY).terminal
    verdict = course.at(31, log=FIRED, port="ours", answer=EMPTY)
    assert (verdict.state, verdict.terminal) == ("unhealthy", True)
    course = Course()
    assert not course.at(0, log=FIRED, port="ours", answer=EMPTY).terminal
    assert course.at(40, log=FIRED, port="ours", answer=READY).state == "ready"


def test_death_is_seen_at_once():
    for gone in (LOOP, FAILED, DYING, STOPPED, NONE, replace(UP, invocation_id="i2"), replace(UP, restarts=1)):
        course = Course("i1")
        assert course.at(0).state == "starting"
        verdict = course.at(0.7, gone)
        assert (verdict.state, verdict.terminal) == ("failed", True), gone
        course = Course()  # the same without having been told the invocation
        assert course.at(0, log=FIRED, port="ours", answer=READY).state == "ready"
        assert course.at(0.7, gone).state == "failed", gone


def test_stopping_then_started_by_somebody_is_no_death():
    course = Course()
    assert course.at(0, STOPPING).state == "stopped"
    assert course.at(1, replace(UP, invocation_id="i2")).state == "starting"
    assert course.memory.invocation == "i2"


def test_describe_ready():
    memory, look, verdict = one(UP, FIRED, "ours", READY)
    found = describe(INSTANCE, memory, look, verdict, "ct200")
    assert (found["host"], found["gpu"], found["uuid"], found["url"]) == ("ct200", 3, "GPU-3", "http://127.0.0.1:30003")
    assert (found["state"], found["phase"], found["reason"], found["error_lines"]) == ("ready", "ready", "", [])
    assert (found["seconds"], found["seconds_to_ready"], found["phases"]) == (
        60.0,
        20.0,
        {"process": 20.0, "ready": 20.0},
    )
    assert (found["kv_tokens"], found["exit_code"], found["exit_status"]) == (10, "", None)


def test_describe_ready_without_the_line():
    memory, look, verdict = one(UP, None, "ours", READY)
    assert describe(INSTANCE, memory, look, verdict, "h")["seconds_to_ready"] is None
    course = Course()
    course.at(110)
    course.at(130, port="ours", answer=READY)
    look = Look(140, UP, LogDigest(), "ours")
    assert describe(INSTANCE, course.memory, look, judge(course.memory, look), "h")["seconds_to_ready"] == 30.0


def test_describe_what_was_restarted():
    log = digest("RuntimeError: no weights")
    log.feed_systemd("sglang@3.service: Main process exited, code=killed, status=9/KILL")
    log.feed_systemd("sglang@3.service: Failed with result 'signal'.")
    memory, look, verdict = one(replace(UP, invocation_id="i2", restarts=1), log, expected="i1")
    found = describe(INSTANCE, memory, look, verdict, "h")
    assert (found["exit_code"], found["exit_status"], found["result"]) == ("killed", 9, "signal")
    assert (found["invocation_id"], found["seconds"], found["restarts"]) == ("i1", None, 1)


def test_failure_message_names_all():
    servers = []
    for unit, log, port in ((FAILED, CAUSE, "none"), (UP, BIND, "foreign"), (UP, FIRED, "ours")):
        memory, look, verdict = one(unit, log, port, READY if port == "ours" else None, holder="pid 7 (nginx)")
        servers.append(describe(INSTANCE, memory, look, verdict, "ct200"))
    assert failure_message(servers).splitlines() == [
        "2 of 3 servers not ready.",
        "ct200 GPU 3 sglang@3: failed in phase process (exited 2, systemd result exit-code)",
        "    RuntimeError: no weights",
        "    look: journalctl -u sglang@3 _SYSTEMD_INVOCATION_ID=i1",
        "ct200 GPU 3 sglang@3: failed in phase process",
        "    ERROR: [Errno 98] error while attempting to bind on address (the port is held by pid 7 (nginx))",
        "    look: journalctl -u sglang@3 _SYSTEMD_INVOCATION_ID=i1",
    ]
