# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""A bound for one module's build: a compiler that hangs is killed and named. Run by the engine's own Python."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KILLING = 5.0  # s
OPTION = "sglang_server_jit_module_timeout"


class BuildHung(BaseException):
    """A module was not built in time; the message names the limit and what was at work.

    No Exception: an engine that falls back when a build fails is not to swallow it.
    """


def descendants(pid: int, proc: str = "/proc") -> list[int]:
    """Return every process below one: ninja puts each compiler into a group of its own, so no group has them all."""
    parents: dict[int, int] = {}
    for path in Path(proc).glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    found, fresh = [], [pid]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def doing(pids: list[int], proc: str = "/proc") -> str:
    """Say what the innermost of them work on: program and source."""
    said = []
    for pid in pids:
        with contextlib.suppress(OSError):
            words = (Path(proc) / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            source = next((os.path.basename(word) for word in words if word.endswith((".cu", ".cpp", ".cc"))), "")
            if source and words[0]:
                said.append(f"{os.path.basename(words[0])} {source}")
    return ", ".join(dict.fromkeys(said[-3:]))


@contextlib.contextmanager
def bounded(limit: float, name: str) -> Iterator[None]:
    """Raise BuildHung after so many seconds, once every compiler below this process is gone; 0 is without a limit."""

    def ring(_signal: int, _frame: Any) -> None:
        below = descendants(os.getpid())
        text = f"{name} was not built within {limit:.0f} s ({OPTION})"
        busy = doing(below)
        end = time.monotonic() + KILLING
        while below and time.monotonic() < end:  # one that hangs in the kernel does not die
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            below = [pid for pid in descendants(os.getpid()) if _at_work(pid)]
        raise BuildHung(f"{text}; at work was: {busy}" if busy else text)

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a killed ninja leaves stays below us
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def within(limit: float, work: Callable[..., None], module: Any, *more: Any) -> None:
    """Do the work on a module within the limit."""
    with bounded(limit, module.name):
        work(module, *more)


def _at_work(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False
