# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What a person sees while servers are waited for: a line per phase change of each, never long silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEARTBEAT = 30.0  # s of silence
MAX_LINE = 300


class Progress:
    """Turns the servers of one slice after the other into the lines that are news."""

    def __init__(self, now: float) -> None:
        self.spoke = now
        self.states: dict[str, str] = {}
        self.phases: dict[str, set[str]] = {}

    def update(self, servers: Sequence[Mapping[str, Any]], now: float) -> list[str]:
        """Return the lines to print now."""
        lines = [line for server in servers for line in self._server(server)]
        if not lines and now - self.spoke >= HEARTBEAT:
            lines = heartbeat(servers)
        if lines:
            self.spoke = now
        return lines

    def _server(self, server: Mapping[str, Any]) -> list[str]:
        unit, state = server["unit"], server["state"]
        before = self.states.get(unit)
        known = self.phases.setdefault(unit, set())
        times = dict(server.get("phases") or {})
        if state == "starting":
            times.setdefault(server["phase"], server["seconds"])
        new = [phase for phase in times if phase not in known and phase != "ready"]
        known.update(new)
        self.states[unit] = state
        said = ", ".join(f"{phase}{_seconds(times[phase], ' ({} s)')}" for phase in new)
        # the way of a server that was seen on its way; not of one that had arrived before the first look
        lines = [_line(server, said)] if said and (state == "starting" or before == "starting") else []
        if state in ("starting", before):
            return lines
        return [*lines, _line(server, ready(server) if state == "ready" else f"{state}: {_why(server)}")]


def ready(server: Mapping[str, Any]) -> str:
    """Say in a few words how a server became ready."""
    words = "ready" + _seconds(server.get("seconds_to_ready"), " after {} s") + f", port {server['port']}"
    first = server.get("first_token_seconds")
    return words if first is None else f"{words}, 1st token {first:.2f} s"


def heartbeat(servers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say who is still waited for."""
    waiting = [server for server in servers if server["state"] in ("starting", "stopped", "unhealthy", "foreign")]
    if not waiting:
        return []
    each = ", ".join(
        f"GPU {server['gpu']} {server['phase']}{_seconds(server['seconds'], ' ({} s)')}" for server in waiting
    )
    return [_cut(f"{servers[0]['host']}: waiting for {len(waiting)} of {len(servers)}: {each}")]


def name(server: Mapping[str, Any]) -> str:
    """Name a server as people do: host, GPU, unit."""
    unit = server["unit"]
    unit = unit[: -len(".service")] if unit.endswith(".service") else unit
    return f"{server['host']} GPU {server['gpu']} {unit}"


def _line(server: Mapping[str, Any], text: str) -> str:
    return _cut(f"{name(server)}: {text}")


def _why(server: Mapping[str, Any]) -> str:
    reason = server["reason"] or "no reason known"
    found = server.get("diagnosis") or {}
    if found and found["code"] != "unknown_failure":
        reason = f"{found['code']}: {(found['evidence'] or [reason])[0]}"
    if server["state"] != "failed" or not server["exit_code"]:
        return reason
    ended = f"{server['exit_code']} {server['exit_status']}"
    return reason if ended in reason else f"{ended}: {reason}"


def _seconds(value: float | None, text: str) -> str:
    return "" if value is None else text.format(f"{value:.0f}")


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE else line[: MAX_LINE - 3] + "..."
