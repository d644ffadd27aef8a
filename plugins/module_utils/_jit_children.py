# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Forked children, each building one module; what they say, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = 16_000  # of a failed build's output: enough to say what it was
HELD = b"\0"  # said by a child that holds its module's lock


@dataclass
class Child:
    """One child at work."""

    item: Any
    pid: int
    began: float
    said: bytes = b""

    @property
    def held(self) -> bool:
        """Whether it has its module's lock: a server that needs the module waits from now on."""
        return self.said.startswith(HELD)


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    item: Any
    status: int  # as os.waitpid() has it
    text: str
    seconds: float


class Children:
    """Those at work."""

    def __init__(self) -> None:
        self.running: dict[int, Child] = {}  # by the pipe's end

    def start(self, item: Any, work: Callable[[Callable[[], None]], None], jobs: int, nice: int = 0) -> None:
        """Fork a child that does the work; the work is given what to call once it holds the lock."""
        reader, writer = os.pipe()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.nice(nice)
            _expendable()
            run(lambda: work(lambda: _tell(writer, HELD)), jobs, writer)
        os.close(writer)
        self.running[reader] = Child(item, pid, began)

    def wait(self) -> Ended | None:
        """Wait until one says something or ends; returns the one that ended."""
        reader = select.select(list(self.running), [], [])[0][0]
        child = self.running[reader]
        data = os.read(reader, 1 << 16)
        if data:
            child.said += data
            return None
        os.close(reader)
        del self.running[reader]
        status = os.waitpid(child.pid, 0)[1]
        text = child.said.lstrip(HELD).decode("utf-8", errors="replace")
        return Ended(child.item, status, text, round(time.monotonic() - child.began, 1))


def run(work: Callable[[], None], jobs: int, writer: int) -> None:
    """Do the work in a forked child, which ends here; what went wrong goes to the pipe."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: not to outlive the run
        os.environ["MAX_JOBS"] = str(jobs)
        work()
        code = 0
    except BaseException as exc:
        text = f"{exc}" or traceback.format_exc()
        lines = [line for line in text.splitlines() if "-isystem" not in line or len(line) < 400]
        _tell(writer, "\n".join(lines)[:TEXT].encode())
    finally:
        os._exit(code)


def _expendable() -> None:
    """When memory ends the kernel is to take a compiler, which is tried once more; not the run, and not a server."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def _tell(writer: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(writer, data)
