# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Journals as they come: garbage, endless lines, colours, ranks in each other's tracebacks, cut-off ones."""

from __future__ import annotations

import random
import time

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts
from ansible_collections.gpufleet.sglang.plugins.module_utils._why import read_lines

GARBAGE = random.Random(1).randbytes(200_000)
FULL = b"OSError: [Errno 28] No space left on device: '/srv/x'"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def rank(number, last):
    return [
        f"[2026-12-01 02:16:58 TP{number}] Scheduler hit an exception: Traceback (most recent call last):",
        f'  File "/v/sglang/srt/managers/scheduler.py", line {number}, in run_scheduler_process',
        "    scheduler = Scheduler(a)",
        f'  File "/v/sglang/srt/x{number}.py", line {number}, in f{number}',
        last,
    ]


def interleaved(*ranks):
    return "\n".join(line for lines in zip(*ranks, strict=True) for line in lines)


HERE = rank(1, OOM)
THERE = rank(0, "torch.distributed.DistBackendError: NCCL error: Connection closed by peer")
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/v/x.py", line 1, in main
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/v/z.py", line 3, in g
    |     raise ConnectionResetError
    | ConnectionResetError: [Errno 104] Connection reset by peer
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/v/z.py", line 3, in g
    | OSError: [Errno 28] No space left on device: '/srv/x'
    +------------------------------------"""
CHAIN = """Traceback (most recent call last):
  File "/v/triton/runtime/build.py", line 1, in _build
{first}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/v/sglang/srt/x.py", line 1, in f
{second}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/v/sglang/srt/y.py", line 1, in g
Exception: Capture cuda graph failed: it did not go
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)"""
COMPILER = "FileNotFoundError: [Errno 2] No such file or directory: 'gcc'"
OPTIONAL = "ModuleNotFoundError: No module named 'flash_attn_3'"
ODD = """Traceback (most recent call last):
  File "/v/flashinfer/jit/core.py", line 1, in build
{last}"""
TABLE = {
    "nothing": (b"", "unknown_failure", ""),
    "empty lines": (b"\n" * 1000, "unknown_failure", ""),
    "garbage": (GARBAGE, "unknown_failure", ""),
    "garbage around the cause": (GARBAGE + b"\n" + FULL + b"\n" + GARBAGE, "disk_full", "No space left"),
    "nul bytes": (b"\0\0" + FULL + b"\0", "disk_full", "OSError"),
    "utf-16": ("OSError: [Errno 28] No space left on device".encode("utf-16"), "disk_full", "No space left"),
    "latin-1": (b'  File "/v/x\xff.py", line 1, in run\n' + FULL + b"\xe8", "disk_full", "No space left"),
    "an endless line": (b"x" * 1_000_000 + b"\n" + FULL, "disk_full", "No space left"),
    "an endless line of spaces": (b" " * 1_000_000 + b"\n" + FULL, "disk_full", "No space left"),
    "the cause begins an endless line": (OOM.encode() + b" y" * 500_000, "gpu_oom", "CUDA out of memory"),
    "colours": (
        '\x1b[31m\x1b[1mTraceback (most recent call last):\x1b[0m\n  \x1b[35mFile "/v/x.py"\x1b[0m, line 3, in put\n'
        "\x1b[31mOSError: [Errno 28] No space\x1b[0m left on device",
        "disk_full",
        "OSError: [Errno 28] No space left on device",
    ),
    "a title and a link for the terminal": (
        f"\x1b]0;title\x07\x1b]8;;http://x\x1b\\{OOM}\x1b]8;;\x1b\\",
        "gpu_oom",
        "torch.OutOfMemoryError",
    ),
    "CRLF": ("\r\n".join([*HERE, "", ""]), "gpu_oom", "CUDA out of memory"),
    "a bar that is written over": (f"0%\r50%\r100%\r{OOM}\r\n", "gpu_oom", "torch.OutOfMemoryError"),
    "ranks in each other's tracebacks": (interleaved(HERE, THERE), "gpu_oom", "CUDA out of memory"),
    "the same, the other rank first": (interleaved(THERE, HERE), "gpu_oom", "CUDA out of memory"),
    "a traceback without its end": ("\n".join(HERE[:-1]), "unknown_failure", ""),
    "a traceback without its beginning": (
        '  File "/v/triton/runtime/cache.py", line 9, in put\n    f = open(path)\n'
        "PermissionError: [Errno 13] Permission denied: '/root/.triton'",
        "jit_cache_not_writable",
        "PermissionError",
    ),
    "an exception of any name": (
        ODD.format(last="zmq.error.Odd: [Errno 13] Permission denied"),
        "jit_cache_not_writable",
        "zmq.error.Odd",
    ),
    "a name and no message": (ODD.format(last="some.where.Gone"), "unknown_failure", "some.where.Gone"),
    "a group of exceptions": (GROUP, "disk_full", "OSError"),
    "chained, the first is the cause": (
        CHAIN.format(first=COMPILER, second="RuntimeError: it did not go"),
        "build_tools_missing",
        "'gcc'",
    ),
    "chained, the second is the cause": (CHAIN.format(first="KeyError: 'x'", second=OOM), "gpu_oom", "CUDA out"),
    "chained, the first was a question": (CHAIN.format(first=OPTIONAL, second=OOM), "gpu_oom", "CUDA out of memory"),
    "a question, and nothing better": (
        CHAIN.format(first=OPTIONAL, second="RuntimeError: it did not go"),
        "package_mismatch",
        "flash_attn_3",
    ),
    "a linker in French": ("/usr/bin/ld : ne peut trouver -lcuda : Aucun fichier", "toolkit_incomplete", "-lcuda"),
    "a compiler quotes its source": (
        "x/fastdiv.cuh(39): error: qualified name is not allowed\n  cuda::fast_mod_div<uint32_t> impl_;",
        "cuda_version_skew",
        "fast_mod_div",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_rough_journals(name):
    raw, code, said = TABLE[name]
    raw = raw if isinstance(raw, bytes) else raw.encode()
    found = diagnose(read_lines(iter(raw.split(b"\n"))), Facts(failed=True))
    assert found.code == code, found
    shown = " ".join(found.evidence)
    assert said in shown
    assert not any(ord(char) < 32 for char in shown)


@pytest.mark.parametrize(
    "word", ["/cache/", "A", "a.", "error: (((", "status=2", "AB_", "cannot find ", "not enough memory "]
)
def test_lines_made_to_take_long_do_not(word):
    """Patterns that try each word to its end, from each of its letters, would take minutes."""
    lines = [(f"failed error {number} " + word * (4000 // len(word))).encode() for number in range(300)]
    begun = time.process_time()
    found = diagnose(read_lines(iter([*lines, FULL])), Facts(failed=True))
    assert (found.code, time.process_time() - begun < 3) == ("disk_full", True)
