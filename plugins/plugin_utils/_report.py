# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The fleet on one screen: rows out of what every host found, a table for people, JSON for machines."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

WIDTH = 120
MIN_REASON = 30
MAX_REASON_LINES = 4
DROPPED = "the host failed or was lost before its servers were asked: see above"
PREFIX = "Task failed: "  # ansible's own, and no news here
KEYS = (
    "host",
    "gpu",
    "unit",
    "state",
    "phase",
    "port",
    "code",
    "reason",
    "seconds_to_ready",
    "kv_tokens",
    "uuid",
    "url",
    "model",
    "version",
    "max_running_requests",
    "seconds",
    "first_token_seconds",
    "decode_tokens_per_second",
    "result",
    "exit_code",
    "exit_status",
    "error_lines",
    "restarts",
    "diagnosis",
    "remedy",
    "retried",
    "drift",
)
COLUMNS = (
    ("HOST", "host", "<"),
    ("GPU", "gpu", ">"),
    ("UNIT", "unit", "<"),
    ("STATE", "state", "<"),
    ("PHASE", "phase", "<"),
    ("PLAN", "drift", "<"),
    ("PORT", "port", ">"),
    ("KV TOKENS", "kv_tokens", ">"),
    ("READY AFTER", "seconds_to_ready", ">"),
    ("1ST TOKEN", "first_token_seconds", ">"),
    ("TOK/S", "decode_tokens_per_second", ">"),
)


def row(data: Mapping[str, Any], host: str) -> dict[str, Any]:
    """Return one GPU's row: all keys, None where nothing is known."""
    found = data.get("diagnosis")
    known = found if isinstance(found, Mapping) else {}
    return {
        **{key: data.get(key) for key in KEYS},
        "host": data.get("host") or host,
        "code": data.get("code") or known.get("code"),
        "diagnosis": dict(known) or None,
    }


def rows_of(host: str, result: Any, reachable: bool = True) -> list[dict[str, Any]]:
    """Return the rows of one host; a host that has nothing to show gets one row that says why."""
    found = result if isinstance(result, Mapping) else {}
    servers = found.get("servers")
    if isinstance(servers, Sequence) and not isinstance(servers, str):
        rows = [row(server, host) for server in servers if isinstance(server, Mapping)]
        if rows:
            return rows
    said = str(found.get("msg") or "").strip()
    said = said[len(PREFIX) :] if said.startswith(PREFIX) else said
    if found.get("unreachable"):
        return [row({"state": "unreachable", "reason": said or "the host could not be reached"}, host)]
    if not found and not reachable:
        return [row({"state": "unknown", "reason": DROPPED}, host)]
    if found and not found.get("failed"):
        return [row({"state": "absent", "reason": said or "no server is planned on this host"}, host)]
    return [row({"state": "unknown", "reason": said or "no health was taken on this host"}, host)]


def collect(
    hosts: Sequence[str], results: Mapping[str, Any], alive: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of all hosts, sorted by host and GPU. alive: hosts that still take part (None: all)."""
    rows = [line for host in hosts for line in rows_of(host, results.get(host), alive is None or host in alive)]
    return sorted(rows, key=lambda line: (str(line["host"]), line["gpu"] is not None, _order(line["gpu"])))


def to_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as the JSON text of a list."""
    return json.dumps(list(rows), indent=2) + "\n"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line: how many are how."""
    counts: dict[str, int] = {}
    for line in rows:
        counts[str(line["state"])] = counts.get(str(line["state"]), 0) + 1
    others = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()) if state != "ready")
    return f"{counts.get('ready', 0)} of {len(rows)} ready" + (f" ({others})" if others else "")


def table(rows: Sequence[Mapping[str, Any]], width: int = WIDTH) -> str:
    """Return a table no wider than width; long reasons wrap below themselves and are cut in the end."""
    compared = any(line.get("drift") is not None for line in rows)
    columns = [column for column in COLUMNS if compared or column[1] != "drift"]
    cells = [[_cell(key, line.get(key)) for _title, key, _side in columns] for line in rows]
    sizes = [max([len(title), *(len(line[at]) for line in cells)]) for at, (title, _key, _side) in enumerate(columns)]
    reasons = [_reason(line) for line in rows]
    used = sum(sizes) + 2 * len(sizes)
    beside = width - used >= MIN_REASON
    indent = used if beside else 6
    head = _join([title for title, _key, _side in columns], sizes, columns)
    lines = [head + ("  REASON" if beside and any(reasons) else "")]
    for cell, reason in zip(cells, reasons):
        wrapped = textwrap.wrap(reason, width - indent, max_lines=MAX_REASON_LINES, placeholder=" ...")
        first = _join(cell, sizes, columns)
        if beside and wrapped:
            first += "  " + wrapped.pop(0)
        lines.append(first.rstrip())
        lines += [" " * indent + text for text in wrapped]
    lines.append(summary(rows))
    return "\n".join(line.rstrip() for line in lines)


def _reason(line: Mapping[str, Any]) -> str:
    """Return the code and what shows it, else the plain reason."""
    found = line.get("diagnosis") or {}
    evidence = (found.get("evidence") or [""])[0]
    text = str(line.get("reason") or "")
    if found.get("code"):
        text = f"{found['code']}: {evidence or text}"
    notes = [str(line["remedy"])] if line.get("remedy") else []
    notes += list(line.get("drift") or [])
    notes += [f"started once more after {line['retried']}"] if line.get("retried") else []
    return " ".join("; ".join([*([text] if text else []), *notes]).split())


def _join(cell: Sequence[str], sizes: Sequence[int], columns: Sequence[tuple[str, str, str]]) -> str:
    return "  ".join(f"{text:{side}{size}}" for text, size, (_title, _key, side) in zip(cell, sizes, columns))


def _cell(key: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if key == "drift":
        return "differs" if value else "same"
    if key == "unit":
        return _cut(str(value)[: -len(".service")] if str(value).endswith(".service") else str(value), 16)
    if key == "host":
        return _cut(str(value), 20)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if key == "seconds_to_ready":
            return f"{value:.0f} s"
        if key == "first_token_seconds":
            return f"{value:.2f} s"
        if key == "decode_tokens_per_second":
            return f"{value:.1f}"
    return str(value)


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "~"


def _order(gpu: Any) -> tuple[int, str]:
    return (gpu, "") if isinstance(gpu, int) else (-1, str(gpu))
