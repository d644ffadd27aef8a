# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import json

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._phases import (
    MAX_CHARS,
    MAX_ERRORS,
    LogDigest,
    digest_from_dict,
)
from ansible_collections.gpufleet.sglang.tests.unit.replay import REPLAYS, lines_of


def digest_of(lines):
    digest = LogDigest()
    for number, line in enumerate(lines):
        digest.feed(line, float(number))
    return digest


@pytest.mark.parametrize(("name", "phases", "tokens", "errors"), REPLAYS, ids=[case[0] for case in REPLAYS])
def test_replay(name, phases, tokens, errors):
    digest = digest_of(lines_of(name))
    assert list(digest.phase_times) == phases.split()
    assert digest.kv_tokens == tokens
    found = digest.error_lines()
    assert len(found) == len(errors), found
    for line, begin in zip(found, errors):
        assert line.startswith(begin)
        assert len(line) <= MAX_CHARS


@pytest.mark.parametrize("name", [case[0] for case in REPLAYS])
def test_replay_in_slices_gives_the_same(name):
    whole = digest_of(lines_of(name))
    digest = LogDigest()
    for number, line in enumerate(lines_of(name)):
        digest.feed(line, float(number))
        if number % 7 == 0:
            digest = digest_from_dict(json.loads(json.dumps({**digest.to_dict(), "of_a_newer_version": 1})))
    assert digest == whole


STAMP = "[2026-12-01 02:41:24] "
LINES = [
    ([], "none", []),
    (["hello"], "process", []),
    ([STAMP + "Load weight begin. avail mem=1 GB"], "weights", []),
    (["[2026-12-01 02:41:24.123 DP1 TP0] Load weight begin. avail mem=1 GB"], "weights", []),
    ([STAMP + "Mamba Cache is allocated. x"], "kv_pool", []),
    ([STAMP + "Capture cuda graph begin. This can take up to several minutes."], "graphs", []),
    ([STAMP + "Running FlashInfer autotune with cache: /c"], "graphs", []),
    (
        [STAMP + "Load weight begin.", STAMP + "Engine startup timings (s): x", STAMP + "Load weight begin."],
        "warmup",
        [],
    ),
    # a user's prompt in the log is no phase
    ([STAMP + "Receive: text='The server is fired up and ready to roll!'"], "process", []),
    ([STAMP + "server_args={'a': 'max_total_num_tokens=5 Load weight begin error: '}"], "process", []),
    (["\x1b[1;33m[2026-12-01 02:41:24] Load weight begin.\x1b[0m"], "weights", []),
    (["  0%|  | 0/12\rCapturing batches: 100%|x| 12/12"], "process", []),
    ([STAMP + "Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit"], "process", []),
    (["nanobind: leaked 3 functions!", ' - leaked function "error"'], "process", []),
    (["/x/y.py:71: UserWarning: error: something failed"], "process", []),
    (["terminate called after throwing an instance of 'c10::Error'"], "process", ["terminate called"]),
    (["/x/h.cu(3): fatal error: cuda_runtime.h: No such file or directory"], "process", ["/x/h.cu(3): fatal error"]),
    (
        [STAMP + "Some op failed, falling back", STAMP + "ERROR: CUDA error: out of memory"],
        "process",
        ["ERROR: CUDA error: out of memory", "Some op failed, falling back"],
    ),
    (  # only wrappers: then they are all there is to say
        [STAMP + "Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9"],
        "process",
        ["Rank 0 scheduler died during initialization"],
    ),
    (  # what comes after a wrapper follows from it
        [
            "Traceback (most recent call last):",
            '  File "/a/site-packages/b/c.py", line 3, in f',
            "ValueError: cause",
            STAMP + "Received sigquit from a child process.",
            "Traceback (most recent call last):",
            "EOFError",
        ],
        "process",
        ["ValueError: cause (b/c.py:3 in f)"],
    ),
    (  # skip-server-warmup: harmless
        [
            STAMP + "post-warmup freeze_gc failed: Traceback (most recent call last):",
            "  x",
            "ConnectionRefusedError: x",
        ],
        "process",
        [],
    ),
    (  # a message of several lines, cut in by another process
        [
            "Traceback (most recent call last):",
            "torch.OutOfMemoryError: CUDA out of memory.",
            "Tried to allocate 2 GiB.",
            STAMP + "Prefill batch, x",
            "and more",
        ],
        "process",
        ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."],
    ),
    (  # cut in: the traceback's end never comes
        ["Traceback (most recent call last):", "  File x", STAMP + "Load weight begin.", "text"],
        "weights",
        [],
    ),
]


@pytest.mark.parametrize(("lines", "phase", "errors"), LINES)
def test_lines(lines, phase, errors):
    digest = digest_of(lines)
    assert digest.phase == phase
    found = digest.error_lines()
    assert len(found) == len(errors), found
    assert all(line.startswith(begin) for line, begin in zip(found, errors))


def test_chatty_log_stays_small():
    digest = LogDigest()
    for number in range(2000):
        digest.feed(f"{STAMP}request {number} failed: {'x' * 3000}", number)
        digest.feed(f'{STAMP}INFO:     127.0.0.1:{number} - "GET /health HTTP/1.1" 200 OK', number)
    digest.feed("\x00" * 100000, 0)
    assert len(digest.causes) == MAX_ERRORS
    assert len(json.dumps(digest.to_dict())) < 10000
    assert digest.lines == 2001  # traffic is no progress


def test_a_stronger_line_takes_the_place_of_a_weak_one():
    digest = digest_of([f"thing {number} failed" for number in range(50)] + ["x: error: real"])
    assert digest.error_lines()[0] == "x: error: real"
    assert len(digest.error_lines()) == MAX_ERRORS


def test_errors_that_a_serving_server_survived_are_forgotten():
    digest = digest_of(["Traceback (most recent call last):", "ValueError: while starting"])
    digest.feed(STAMP + "The server is fired up and ready to roll!", 100)
    assert digest.error_lines() == []
    digest.feed("ERROR: a client went away", 200)
    digest.feed("RuntimeError: the cause", 900)
    digest.feed(STAMP + "Subprocess scheduler_0 (pid=7) crashed with exit code -9.", 901)
    assert digest.error_lines() == ["RuntimeError: the cause"]


def test_systemd_messages():
    digest = LogDigest()
    for text in (
        "Started sglang@3.service.",
        "sglang@3.service: Main process exited, code=exited, status=203/EXEC",
        "sglang@3.service: Failed at step EXEC spawning /x: No such file or directory",
        "sglang@3.service: Failed with result 'exit-code'.",
    ):
        digest.feed_systemd(text)
    assert (digest.exit, digest.result, digest.phase) == ("exited 203", "exit-code", "none")
    assert digest.error_lines() == ["sglang@3.service: Failed at step EXEC spawning /x: No such file or directory"]
