# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Servers of one host beside each other: one on a GPU that is not its own, a far slower one, one that differs.

For servers that are ready. What stands out is told in their diagnosis; only the wrong device makes a server unhealthy.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_codes import CODES
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_remedy import REMEDIES

SLOWER = 5.0  # times slower than the median of its siblings
MIN_SIBLINGS = 3
PREFIX = 4  # characters of the greedy answer: rounding does not change the first token on like GPUs


def note(code: str, detail: str, evidence: str, remedy: str = "") -> dict[str, Any]:
    """Return a diagnosis as plain data."""
    known = CODES[code]
    return {
        "code": code,
        "detail": detail,
        "severity": known.severity,
        "retry": known.retry,
        "says": known.says,
        "evidence": [evidence],
        "remedy": remedy or REMEDIES[code].split("{", 1)[0].strip() or REMEDIES[code],
        "also_seen": [],
        "phase": "ready",
    }


def stand_out(
    servers: list[dict[str, Any]], places: Mapping[str, tuple[bool, str]], nan: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Put into the servers what stands out: a GPU that is not theirs, NaN in their log, what differs from siblings.

    places: by unit, is it on its GPU, and on which others; nan: by unit, the engine's own line.
    """
    said = compare(servers)
    for server in servers:
        right, others = places.get(server["unit"], (True, ""))
        if not right:
            where = f"on GPU {others} instead of {server['uuid']}" if others else "on no GPU at all"
            detail = "gpu_selection_wrong" if others else "silent_cpu_fallback"
            server["diagnosis"] = note("wrong_device", detail, f"the server's processes are {where}")
            server["state"], server["reason"] = "unhealthy", f"its processes are {where}"
        elif nan and nan.get(server["unit"]) and server["state"] == "ready":
            server["diagnosis"] = note("output_wrong", "output_nan", nan[server["unit"]])
        elif server["unit"] in said:
            server["diagnosis"] = said[server["unit"]]
    return servers


def compare(servers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what stands out, by unit; servers of one model only are compared."""
    found: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for server in servers:
        if server["state"] == "ready":
            groups.setdefault(str(server.get("model")), []).append(server)
    for group in groups.values():
        for server in group:
            others = [other for other in group if other is not server]
            if len(others) < MIN_SIBLINGS:
                continue
            said = _differs(server, others) or _slow(server, others)
            if said:
                found[str(server["unit"])] = said
    return found


def _slow(server: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    rate = server.get("decode_tokens_per_second")
    rates = [other["decode_tokens_per_second"] for other in others if other.get("decode_tokens_per_second")]
    if not rate or len(rates) < MIN_SIBLINGS or rate * SLOWER >= statistics.median(rates):
        return None
    text = f"{rate:g} tokens/s where its siblings give {statistics.median(rates):g}"
    return note(
        "state_degraded",
        "slower_than_siblings",
        text,
        "See what else uses this GPU, its clocks (nvidia-smi -q -d PERFORMANCE) and its slot",
    )


def _differs(server: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    mine = (server.get("text") or "")[:PREFIX]
    theirs = [(other.get("text") or "")[:PREFIX] for other in others]
    (common, count) = Counter(theirs).most_common(1)[0]
    if not common or mine == common or count < len(theirs):
        return None
    text = f"its greedy answer begins {mine!r} where all {count} siblings begin {common!r}"
    return note(
        "output_wrong",
        "differs_from_siblings",
        text,
        "Compare its packages, caches and settings with its siblings'; test the GPU",
    )
