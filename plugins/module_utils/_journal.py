# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Following the journal of many units: a bounded first look at each, then one journalctl per poll for all."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ansible_collections.gpufleet.sglang.plugins.module_utils._phases import LogDigest, digest_from_dict

FIELDS = "MESSAGE,UNIT,INVOCATION_ID,_SYSTEMD_UNIT,_SYSTEMD_INVOCATION_ID,_PID"
BASE = ("journalctl", "--quiet", "--no-pager", "--all", "--output=json", f"--output-fields={FIELDS}")
HEAD_LINES = 20000  # of one invocation, until its ready line
TAIL_LINES = 300
POLL_LINES = 20000
SECONDS = 3.0  # one journalctl may take this long: the rest is read by the next poll
MAX_BYTES = 65536  # longest line read; server_args of a real server has about 20000


class LineSource(Protocol):
    """Anything that runs a command and hands over its lines while it runs."""

    def lines(self, argv: Sequence[str], *, seconds: float) -> Iterable[bytes]:
        """Run argv for at most seconds and yield its lines; closing the iterator ends the command."""


class ProcessLines:
    """The real thing: reads a pipe line by line, so that a journal of a million lines is never in memory."""

    def lines(self, argv: Sequence[str], *, seconds: float) -> Iterable[bytes]:
        """See LineSource; a command that is missing or fails yields nothing."""
        try:
            process = subprocess.Popen(  # pylint: disable=ansible-bad-function
                list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        except OSError:
            return
        pipe = process.stdout
        if pipe is None:  # never, with PIPE above
            return
        deadline = time.monotonic() + seconds
        rest = b""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(pipe, selectors.EVENT_READ)
                while True:
                    left = deadline - time.monotonic()
                    if left <= 0 or not selector.select(left):
                        return
                    data = os.read(pipe.fileno(), 65536)
                    if not data:
                        break
                    *whole, rest = (rest + data).split(b"\n")
                    if len(rest) > 64 * MAX_BYTES:  # a message as an array of numbers takes 5 bytes for one
                        return
                    yield from whole
            if rest:
                yield rest
        finally:
            pipe.close()
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass(frozen=True)
class Entry:
    """One line of the journal about one of our units."""

    unit: str
    invocation: str
    message: str
    time: float  # CLOCK_MONOTONIC
    cursor: str
    manager: bool = False  # systemd's own message about the unit


def parse_entry(raw: bytes | str) -> Entry | None:
    """Read one line of `journalctl --output=json`; None when it is not an entry."""
    try:
        data = json.loads(raw)
        moment = int(data["__MONOTONIC_TIMESTAMP"]) / 1e6
        cursor = data["__CURSOR"]
    except (ValueError, KeyError, TypeError):
        return None
    manager = "UNIT" in data
    return Entry(
        unit=_text(data.get("UNIT" if manager else "_SYSTEMD_UNIT")),
        invocation=_text(data.get("INVOCATION_ID" if manager else "_SYSTEMD_INVOCATION_ID")),
        message=_text(data.get("MESSAGE")),
        time=moment,
        cursor=cursor,
        manager=manager,
    )


@dataclass
class Track:
    """What is followed of one unit: one invocation, and its log so far."""

    invocation: str = ""
    digest: LogDigest = field(default_factory=LogDigest)
    seen: float = -1.0  # time of the newest line fed
    cursor: str = ""

    def feed(self, entry: Entry) -> bool:
        """Take an entry of this unit; False when it is of another invocation or was fed before."""
        if entry.invocation != self.invocation or entry.time < self.seen or entry.cursor == self.cursor:
            return False
        self.seen, self.cursor = entry.time, entry.cursor
        for line in entry.message.split("\n"):
            if entry.manager:
                self.digest.feed_systemd(line, entry.time)
            else:
                self.digest.feed(line, entry.time)
        return True


class Follower:
    """Follows one invocation of each unit; state() is all that must be carried to follow on later."""

    def __init__(self, source: LineSource, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.source = source
        self.cursor: str = state.get("cursor", "")
        self.tracks = {
            unit: Track(item["invocation"], digest_from_dict(item["digest"]), item["seen"], item["cursor"])
            for unit, item in state.get("tracks", {}).items()
        }

    def state(self) -> dict[str, Any]:
        """Return plain data, a few kilobytes a unit."""
        return {
            "cursor": self.cursor,
            "tracks": {
                unit: {
                    "invocation": track.invocation,
                    "digest": track.digest.to_dict(),
                    "seen": track.seen,
                    "cursor": track.cursor,
                }
                for unit, track in self.tracks.items()
            },
        }

    def digest(self, unit: str) -> LogDigest:
        """Return what the log has said so far; empty for a unit that is not followed."""
        track = self.tracks.get(unit)
        return track.digest if track else LogDigest()

    def follow(self, unit: str, invocation: str) -> None:
        """Begin with a unit's invocation (a first look at its log), unless it is followed already."""
        if not invocation or (unit in self.tracks and self.tracks[unit].invocation == invocation):
            return
        if not self.cursor:  # before the first look, so that nothing falls between it and the first poll
            newest = list(self._read([*BASE, "--lines=1"], 1))
            self.cursor = newest[-1].cursor if newest else ""
        track = self.tracks[unit] = Track(invocation)
        matches = [
            f"_SYSTEMD_INVOCATION_ID={invocation}",
            "+",
            f"INVOCATION_ID={invocation}",
            f"UNIT={unit}",
            "_PID=1",
        ]
        count = 0
        for entry in self._read([*BASE, "--boot", *matches], HEAD_LINES):
            count += track.feed(_named(entry, unit))
            if track.digest.phase == "ready":
                break
        else:
            if count < HEAD_LINES:
                return
        # a server that has been serving: skip its traffic, the newest lines say how it is now
        for entry in self._read([*BASE, "--boot", f"--lines={TAIL_LINES}", *matches], TAIL_LINES):
            track.feed(_named(entry, unit))

    def before(self, unit: str) -> LogDigest:
        """Read the end of the invocation before the one that is followed: why a unit that loops died last."""
        track = self.tracks.get(unit)
        digests: dict[str, LogDigest] = {}
        for entry in self._read([*BASE, "--boot", f"--lines={TAIL_LINES * 4}", "--unit", unit], TAIL_LINES * 4):
            if entry.invocation and (track is None or entry.invocation != track.invocation):
                other = Track(entry.invocation, digests.setdefault(entry.invocation, LogDigest()))
                other.feed(entry)
        return list(digests.values())[-1] if digests else LogDigest()

    def poll(self) -> bool:
        """Read what is new for all units at once; True when one of them had something to say."""
        if not self.tracks or not self.cursor:
            return False
        # not --after-cursor: when the cursor's own entry does not match, journalctl 252 skips the first that does
        argv = [*BASE, f"--cursor={self.cursor}"]
        for unit in sorted(self.tracks):
            argv += ["--unit", unit]
        fed = False
        for entry in self._read(argv, POLL_LINES):
            if entry.cursor == self.cursor:
                continue
            self.cursor = entry.cursor
            track = self.tracks.get(entry.unit)
            if track:
                fed = track.feed(entry) or fed
        return fed

    def _read(self, argv: Sequence[str], limit: int) -> Iterable[Entry]:
        source = self.source.lines(argv, seconds=SECONDS)
        try:
            for count, raw in enumerate(source, 1):
                entry = parse_entry(raw)
                if entry:
                    yield entry
                if count >= limit:
                    return
        finally:
            close: Callable[[], None] | None = getattr(source, "close", None)
            if close:
                close()


def _named(entry: Entry, unit: str) -> Entry:
    # matched by invocation: a process may have been moved to a cgroup below the unit
    return entry if entry.unit == unit else Entry(unit, entry.invocation, entry.message, entry.time, entry.cursor)


def _text(value: Any) -> str:
    """Give a journal field as text: JSON has it as a string, or as bytes when it is not printable UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, int) for item in value):
            return bytes(item & 0xFF for item in value).decode("utf-8", "replace")
        return _text(value[0])  # a field that occurs twice
    return ""
