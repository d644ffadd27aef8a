# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import json
import sys
import time

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._journal import (
    Follower,
    ProcessLines,
    parse_entry,
)
from ansible_collections.gpufleet.sglang.tests.unit.replay import Journal

READY = "[2026-12-01 02:29:52] The server is fired up and ready to roll!"


def test_follow_and_poll():
    journal = Journal()
    journal.add("noise", unit="other.service", invocation="x")
    journal.add("of an earlier invocation: error: x", invocation="i0")
    journal.add("Load weight begin")
    follower = Follower(journal)
    follower.follow("a.service", "i1")
    assert follower.digest("a.service").phase == "weights"
    assert follower.poll() is False  # nothing new, and nothing counted twice
    journal.add("KV Cache is allocated")
    journal.add("b: error: x", unit="b.service", invocation="i2")
    journal.add("c: error: x", invocation="i9")
    journal.add("a.service: Main process exited, code=killed, status=9/KILL", manager=True)
    assert follower.poll() is True
    digest = follower.digest("a.service")
    assert (digest.phase, digest.exit, digest.error_lines(), digest.lines) == ("kv_pool", "killed 9", [], 3)
    assert follower.poll() is False
    assert sum("--cursor" in " ".join(call) for call in journal.calls) == 3


def test_one_call_for_all_units():
    journal = Journal()
    for number in range(8):
        journal.add("x", unit=f"u{number}.service", invocation=f"i{number}")
    follower = Follower(journal)
    for number in range(8):
        follower.follow(f"u{number}.service", f"i{number}")
    journal.calls.clear()
    journal.add("Load weight begin", unit="u5.service", invocation="i5")
    follower.poll()
    assert len(journal.calls) == 1
    assert [follower.digest(f"u{number}.service").phase for number in (4, 5)] == ["process", "weights"]


def test_state_carries_on():
    journal = Journal()
    journal.add("Load weight begin")
    follower = Follower(journal)
    follower.follow("a.service", "i1")
    state = json.loads(json.dumps(follower.state()))
    journal.add("KV Cache is allocated")
    journal.calls.clear()
    again = Follower(journal, state)
    again.follow("a.service", "i1")
    again.poll()
    assert again.digest("a.service").phase == "kv_pool"
    assert len(journal.calls) == 1


def test_busy_server_is_not_read_through():
    journal = Journal()
    journal.add("Load weight begin")
    journal.add(READY)
    for _number in range(100000):
        journal.add("Decode batch, x")
    journal.add("last: error: x")
    follower = Follower(journal)
    follower.follow("a.service", "i1")
    digest = follower.digest("a.service")
    assert digest.phase_times == {"process": 1.0, "weights": 1.0, "ready": 2.0}
    assert digest.error_lines() == ["last: error: x"]
    assert journal.read < 400


def test_journal_that_has_lost_the_start():
    journal = Journal()
    for _number in range(30000):
        journal.add("Decode batch, x")
    follower = Follower(journal)
    follower.follow("a.service", "i1")
    assert "ready" not in follower.digest("a.service").phase_times
    assert journal.read < 21000


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("plain", "plain"),
        ([104, 105, 255, 27], "hi\ufffd\x1b"),  # bytes that are no printable UTF-8
        ([-61, -92], "\u00e4"),
        (["first", "second"], "first"),
        (None, ""),
        ("", ""),
    ],
)
def test_messages(message, text):
    raw = {"__CURSOR": "c", "__MONOTONIC_TIMESTAMP": "1500000", "MESSAGE": message, "_SYSTEMD_UNIT": "u"}
    entry = parse_entry(json.dumps(raw))
    assert (entry.message, entry.time, entry.unit, entry.manager) == (text, 1.5, "u", False)


@pytest.mark.parametrize("raw", ["", "{", "[]", "{}", '{"__CURSOR": "c", "__MONOTONIC_TIMESTAMP": "x"}', b"\xff"])
def test_garbage(raw):
    assert parse_entry(raw) is None


def test_no_journal_at_all():
    class Nothing:
        def lines(self, argv, *, seconds):
            return iter(())

    follower = Follower(Nothing())
    follower.follow("a.service", "i1")
    assert follower.poll() is False
    assert follower.digest("a.service").phase == "none"


def test_process_lines():
    source = ProcessLines()
    code = "print('a'); print('b' * 10); print('no newline', end='')"
    assert list(source.lines([sys.executable, "-c", code], seconds=10)) == [b"a", b"b" * 10, b"no newline"]
    assert list(source.lines(["/does/not/exist"], seconds=1)) == []
    begun = time.monotonic()
    endless = "import time\nwhile True: print('x', flush=True); time.sleep(0.01)"
    assert len(list(source.lines([sys.executable, "-c", endless], seconds=0.5))) > 3
    lines = source.lines([sys.executable, "-c", endless], seconds=30)
    assert next(lines) == b"x"
    lines.close()
    assert time.monotonic() - begun < 25  # the endless program was ended
