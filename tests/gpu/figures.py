"""Figures read from a deploy's output and from what servers left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

from box import CACHE, Box, kernels


def units(box: Box) -> list[str]:
    """Return the servers' units."""
    return sorted(path.name for path in (box.root / "etc/systemd/system").glob("sglang@*.service"))


def compiled_since_start(box: Box, unit: str) -> list[str]:
    """Return the modules in the shared cache that are newer than the unit's process and not the warm-up's.

    The warm-up may still be at work when the canary starts: what it built, its proof and the servers' compilers are
    looked at apart.
    """
    show = ("systemctl", "show", "--timestamp=unix", "-p", "ExecMainStartTimestamp", "--value", unit)
    since = box.run(*show).stdout.strip().lstrip("@")
    if not since:
        return []
    jit = box.root / "etc/sglang/jit.json"
    report = json.loads(jit.read_text(encoding="utf-8")).get("report", {}) if jit.exists() else {}
    ours = {row["name"] for row in report.get("modules", []) if row["state"] == "compiled" and not row.get("again")}
    return [path for path in kernels(float(since), box.root / CACHE.lstrip("/")) if Path(path).stem not in ours]


def memory(text: str) -> list[dict[str, float]]:
    """Return what the deploy says of the memory plan and the engine's own figures."""
    line = r"GPU (\d+): KV tokens (\d+) \(foretold (\d+), ([\d.]+) % off\), requests at once (\d+) \(foretold (\d+)\)"
    names = ("gpu", "kv_tokens", "kv_tokens_foretold", "percent_off", "requests", "requests_foretold")
    return [dict(zip(names, (float(value) for value in found))) for found in re.findall(line, text)]


def built(text: str) -> dict[str, float]:
    """Return the seconds that each module took."""
    return {name: float(took) for name, took in re.findall(r"module \d+ of \d+: (\S+) built in ([\d.]+) s", text)}
