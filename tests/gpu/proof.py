#!/usr/bin/env python3
"""The GPU proof: our deploy on real GPUs of a bare machine, as a report in JSON.

proof.py start [--phases A,B,...]   starts the proof in the background; it waits for the parts of the kit it needs
proof.py watch SECONDS OUT          prints what it does until it ends or the time is over; leaves the report in OUT
proof.py phases                     lists the phases

The parts (pack.py) are moved into /opt/kit/in one by one; p1 holds this program. See README.md.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import phases

PROOF = Path("/opt/proof")
LOG, REPORT, ENDED = PROOF / "proof.log", PROOF / "report.json", PROOF / "ended"


def start(names: list[str]) -> int:
    """Start the proof in a session of its own, so that it outlives the call."""
    PROOF.mkdir(parents=True, exist_ok=True)
    ENDED.unlink(missing_ok=True)
    if os.fork() > 0:
        print(f"proof: started: {', '.join(names)}")
        return 0
    os.setsid()
    with LOG.open("a", encoding="utf-8") as log, open(os.devnull, encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        prove(names)
    finally:
        ENDED.touch()
    return 0


def say(text: str) -> None:
    """Write a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def prove(names: list[str]) -> None:
    """Run the phases in order; the report is whole after each."""
    report: dict[str, Any] = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else {"phases": {}}
    context = phases.Context(say, PROOF, report)
    for name in names:
        say(f"== {name}")
        started = time.monotonic()
        report["phases"][name] = entry = {"ok": False}
        try:
            found = phases.PHASES[name](context)
            entry.update({"ok": "why" not in found, **found})
        except Exception as exc:
            entry["why"] = f"{type(exc).__name__}: {exc}"[:1500]
            say(traceback.format_exc())
        entry["took"] = round(time.monotonic() - started, 1)
        write(report)
        say(f"== {name}: {'ok' if entry['ok'] else 'NOT ok'} after {entry['took']} s: {json.dumps(entry)[:1500]}")


def write(report: dict[str, Any]) -> None:
    """Write the report in one step."""
    new = REPORT.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.rename(REPORT)


def watch(seconds: float, out: Path) -> int:
    """Print the log as it grows, from where the last watch stopped."""
    mark = PROOF / "watched"
    offset = int(mark.read_text(encoding="utf-8")) if mark.exists() else 0
    deadline = time.monotonic() + seconds
    while True:
        over = ENDED.exists() or time.monotonic() > deadline
        with LOG.open("rb") as log:
            log.seek(offset)
            data = log.read()
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()
        offset += len(data)
        mark.write_text(str(offset), encoding="utf-8")
        if over:
            break
        time.sleep(1)
    out.mkdir(parents=True, exist_ok=True)
    if REPORT.exists():
        shutil.copy(REPORT, out / "report.json")
    shutil.copy(LOG, out / "proof.log")
    logs = sorted((PROOF / "logs").glob("*")) if (PROOF / "logs").exists() else []
    shutil.make_archive(str(out / "logs"), "xztar", PROOF / "logs") if logs else None
    print(f"proof: {'ended' if ENDED.exists() else 'still running'}")
    return 0 if ENDED.exists() else 3


def main() -> int:
    """Command line."""
    words = sys.argv[1:]
    if words[:1] == ["start"]:
        chosen = words[2].split(",") if words[1:2] == ["--phases"] and len(words) > 2 else list(phases.PHASES)
        unknown = [name for name in chosen if name not in phases.PHASES]
        if not unknown:
            return start(chosen)
        print(f"proof: no phase {', '.join(unknown)}; there are: {', '.join(phases.PHASES)}", file=sys.stderr)
        return 2
    if words[:1] == ["watch"] and len(words) == 3:
        return watch(float(words[1]), Path(words[2]))
    if words[:1] == ["phases"]:
        for name, phase in phases.PHASES.items():
            print(f"{name:10} {(phase.__doc__ or '').splitlines()[0]}")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
