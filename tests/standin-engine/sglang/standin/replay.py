"""Real logs, said again: their lines and pauses, with the time, paths and numbers of this run."""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Callable

HERE = Path(__file__).parent
_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)( [A-Z]+\d+)*\] ")
_lock = threading.Lock()


def say(text: str) -> None:
    """Write one log line as the engine's logger does."""
    raw(f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {text}")


def raw(text: str) -> None:
    """Write a line as it is (warnings, tracebacks)."""
    with _lock:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def lines(name: str, values: dict[str, Any]) -> Iterator[tuple[float, str, bool]]:
    """Yield (pause before it in the real run, text, stamped) for each line of a log."""
    last: datetime | None = None
    fill = {"site": sysconfig.get_paths()["purelib"], "stdlib": sysconfig.get_paths()["stdlib"], **values}
    for line in (HERE / "logs" / name).read_text(encoding="utf-8").split("\n")[:-1]:
        for key, value in fill.items():
            line = line.replace("{" + key + "}", str(value))
        stamp = _STAMP.match(line)
        if not stamp:
            yield 0.0, line, False
            continue
        now = datetime.strptime(stamp.group(1), "%Y-%m-%d %H:%M:%S")
        pause = (now - last).total_seconds() if last else 0.0
        last = now
        yield max(pause, 0.0), line[stamp.end() :], True


def play(
    name: str,
    values: dict[str, Any],
    speed: float,
    *,
    sleep: Callable[[float], None],
    until: str = "",
    skip: str = "",
) -> None:
    """Say a log's lines at `speed` times its pace: from the one after `skip` to the one that starts with `until`."""
    on = not skip
    for pause, text, stamped in lines(name, values):
        if not on:
            on = text.startswith(skip)
            continue
        sleep(pause / speed)
        (say if stamped else raw)(text)
        if until and text.startswith(until):
            return
