# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""One operator at a time: a file on the host that says who changes the servers, since when and from where.

Ansible leaves no process on the host between two tasks, so no kernel lock can stand for a playbook. The file is
a lease: its time of change is the holder's last sign of life. A holder on the asking controller is known to
be dead as soon as its process is gone; one elsewhere when it has given no sign for too long.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

PATH = "/run/gpufleet-sglang.lock"  # gone after a reboot, as every holder's work is


class LockHeldError(Exception):
    """Somebody else changes this host's servers; the message says who, since when, from where, and what to do."""


@dataclass(frozen=True)
class Holder:
    """A playbook run that changes the servers of a host."""

    run: str  # unlike any other run: controller's boot, process and its start
    who: str = ""
    controller: str = ""  # the controller's boot id: runs of one controller can look for each other's process
    where: str = ""  # host name of the controller, and the address it comes from
    what: str = ""  # deploy, stop, ...
    since: float = 0.0  # epoch, the host's clock
    pid: int = 0

    def text(self, now: float, seen: float) -> str:
        """Say who it is, for people."""
        since = datetime.fromtimestamp(self.since, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        return (
            f"{self.who or 'somebody'} on {self.where or 'an unknown machine'} (pid {self.pid})"
            f" runs {self.what or 'a playbook'} since {since}, last sign of life {max(0.0, now - seen):.0f} s ago"
        )


def parse(text: str) -> Holder | None:
    """Read a lock's text; None when it is empty or not a lock's."""
    try:
        data = json.loads(text)
        names = {item.name for item in fields(Holder)}
        return Holder(**{key: value for key, value in data.items() if key in names})
    except (ValueError, TypeError, AttributeError):
        return None


def is_dead(holder: Holder, asker: Holder, alive: bool | None, silent: float, patience: float) -> bool:
    """Say whether a holder is gone.

    alive: whether its process still runs, as its own controller knows (None: nobody has looked);
    silent: seconds without a sign of life.
    """
    if holder.controller and holder.controller == asker.controller:
        return alive is False
    return silent > patience


def hold(asker: Holder, now: float, alive: dict[str, bool], patience: float, path: str = PATH) -> tuple[bool, str]:
    """Take or renew the lock. Returns whether it is new, and whom it was taken over from ("" = nobody).

    alive says of runs of the asker's controller whether they still run. Raises LockHeldError.
    """
    with _guard(path) as handle:
        found = parse(_read(handle))
        seen = os.fstat(handle).st_mtime
        if found is not None and found.run == asker.run:
            os.utime(handle)
            return False, ""
        if found is not None and not is_dead(found, asker, alive.get(found.run), now - seen, patience):
            raise LockHeldError(refusal(found, now, seen, patience, path))
        _write(handle, json.dumps({**asdict(asker), "since": now}) + "\n")
        return True, found.text(now, seen) if found is not None else ""


def look(path: str = PATH) -> tuple[Holder | None, float]:
    """Return the holder and when (epoch) it gave its last sign of life."""
    try:
        return parse(Path(path).read_text(encoding="utf-8")), os.stat(path).st_mtime
    except OSError:
        return None, 0.0


def release(run: str, path: str = PATH) -> bool:
    """Give the lock back, when it is this run's."""
    if not os.path.exists(path):
        return False
    with _guard(path) as handle:
        found = parse(_read(handle))
        if found is None or found.run != run:
            return False
        os.unlink(path)
        return True


def sign_of_life(path: str = PATH) -> None:
    """Renew the lease of whoever holds it: called by what waits for long on the holder's behalf."""
    try:
        os.utime(path)
    except OSError:
        return


def refusal(holder: Holder, now: float, seen: float, patience: float, path: str) -> str:
    """Say why not, and what to do."""
    left = max(0.0, patience - (now - seen))
    told = holder.text(now, seen)
    return (
        f"another run changes the servers of this host: {told}. Nothing was touched. Wait until it is done; if that run"
        f" is dead, its lock is taken over in {left:.0f} s (at once from its own controller), or remove {path} now"
    )


@contextmanager
def _guard(path: str) -> Iterator[int]:
    """Open the file that path really names, under the kernel's lock: two askers decide one after the other."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                same = os.stat(path).st_ino == os.fstat(handle).st_ino
            except FileNotFoundError:  # given back while we waited
                same = False
            if same:
                yield handle
                return
        finally:
            os.close(handle)


def _read(handle: int) -> str:
    return os.pread(handle, 1 << 16, 0).decode("utf-8", errors="replace")


def _write(handle: int, text: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)
    os.fsync(handle)
