"""Children as the engine has them: same titles, and death as it spreads there."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1


def set_title(title: str) -> None:
    """Do what setproctitle does: overwrite the argument vector, and name the thread."""
    data = title.encode()
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end (proc(5): fields 48 and 49)
    if start and end - start > len(data):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, data, len(data))
    Path("/proc/self/comm").write_bytes(data[:15])


def spawn(title: str, burn: float = 0.0, burn_after: float = 0.0) -> int:
    """Fork a child with this title that lives until killed or orphaned; it uses CPU for `burn` seconds."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        set_title(title)
        time.sleep(burn_after)
        stop = time.monotonic() + burn
        while time.monotonic() < stop:
            pass
        while os.getppid() == parent:
            time.sleep(0.5)
    finally:
        os._exit(0)


def exit_code(pid: int) -> int | None:
    """Return the code of an ended child as multiprocessing shows it (-9: SIGKILL), None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        return None
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def die_by_sigkill() -> None:
    """End as the engine does after a child failed: everybody, the parent last, by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)
