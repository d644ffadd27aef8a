# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Which ports are taken, and by whom: listening sockets with process, command and unit."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _listeners
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import unit_of_pid


@dataclass(frozen=True)
class Listener:
    """One listening TCP socket; pid, command and unit are None when this user may not see its owner."""

    address: str
    port: int
    pid: int | None = None
    command: str | None = None
    unit: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a module's result."""
        return asdict(self)


def listeners(proc: str = "/proc") -> list[Listener]:
    """Return all listening TCP sockets of this network namespace with their owners."""
    found = []
    for item in sorted(_listeners.listeners(proc), key=lambda each: (each.port, each.address)):
        pid = item.pids[0] if item.pids else None
        if pid is None:
            found.append(Listener(item.address, item.port))
        else:
            found.append(Listener(item.address, item.port, pid, program_of(pid, proc), unit_of_pid(pid, proc)))
    return found


def program_of(pid: int, proc: str = "/proc") -> str | None:
    """Return a process's command up to its first option with a value: what it is, not what it was told (keys)."""
    try:
        words = Path(f"{proc}/{pid}/cmdline").read_bytes().decode("utf-8", errors="replace").split("\0")
        if words and words[0]:
            kept = []
            for word in words:
                if word.startswith("--"):
                    break
                kept.append(word)
            return " ".join(" ".join(kept).split())[:120]
        return Path(f"{proc}/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def clashes(address: str, host: str) -> bool:
    """Say whether a socket on address keeps a server from binding host (same port): wildcards meet everything."""
    if not host:
        return True
    try:
        wanted = _plain(ipaddress.ip_address(host))
    except ValueError:  # a name: it may be any address of this host
        return True
    try:
        there = _plain(ipaddress.ip_address(address.split("%")[0]))
    except ValueError:
        return True
    if there == ipaddress.IPv6Address("::") or wanted == ipaddress.IPv6Address("::"):
        return True  # dual-stack unless told otherwise
    if there.version != wanted.version:
        return False
    return there == wanted or there.is_unspecified or wanted.is_unspecified


def holders(found: Iterable[Listener], host: str, port: int) -> list[Listener]:
    """Return the sockets that keep a server from binding host:port."""
    return [item for item in found if item.port == port and clashes(item.address, host)]


def describe(holder: Listener) -> str:
    """Return 'pid 812 (nginx: master, nginx.service)' or what there is to say."""
    if holder.pid is None:
        return f"a process this user may not see, on {holder.address}"
    return f"pid {holder.pid} ({holder.command or 'unknown command'}, {holder.unit or 'no unit'}) on {holder.address}"


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped if mapped is not None else address
