"""Which fault a server shows: STANDIN_FAULT, or a file that tests change without touching the plan."""

from __future__ import annotations

import os
from pathlib import Path

KNOWN = frozenset(
    [
        "no-weights",
        "model-missing",
        "attn-bad",
        "mem-fraction-small",
        "kv-pool",
        "gpu-oom-graphs",
        "bind-hang",
        "false-ready",
        "exit2",
        "hang-loading",
        "slow",
        "crash-after",
        "dead-scheduler",
        "empty-answer",
        "garbage",
        "nan-logits",
        "same-samples",
        "killed-loading",
        "silent-graphs",
        "jit-race",
        "jit-oom",
        "stall",
        "swallowed",
        "tokens-per-second",
        "leak",
    ]
)


def read(port: int) -> dict[str, float]:
    """Return {fault: seconds}; ./standin-fault-<port>, then ~/standin-fault-<port>, then the environment decide.

    An empty file means no fault. Seconds are 0 where a fault takes none.
    """
    text = os.environ.get("STANDIN_FAULT", "")
    for folder in (Path.cwd(), Path(os.environ.get("HOME", "/"))):
        try:
            text = (folder / f"standin-fault-{port}").read_text(encoding="utf-8")
            break
        except OSError:
            continue
    faults: dict[str, float] = {}
    for item in text.replace("\n", ",").split(","):
        name, _colon, seconds = item.strip().partition(":")
        if name:
            if name not in KNOWN:
                raise SystemExit(f"stand-in: unknown fault {name!r}; known: {' '.join(sorted(KNOWN))}")
            faults[name] = float(seconds or 0)
    return faults
