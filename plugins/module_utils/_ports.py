# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Who listens on which TCP port: /proc/net/tcp, inode, process, unit."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import unit_of_pid

_LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    """One listening TCP socket; pid, command and unit are None when this user may not see its owner."""

    address: str
    port: int
    inode: int = 0
    pid: int | None = None
    command: str | None = None
    unit: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a module's result."""
        return {key: value for key, value in asdict(self).items() if key != "inode"}


def parse_tcp(text: str) -> list[tuple[str, int, int]]:
    """Return (address, port, inode) of the listening sockets of /proc/net/tcp or tcp6."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN:
            continue
        try:
            address, port = fields[1].split(":")
            found.append((_address(address), int(port, 16), int(fields[9])))
        except (ValueError, OSError, struct.error):
            continue
    return found


def listeners(proc: str = "/proc") -> list[Listener]:
    """Return all listening TCP sockets of this network namespace with their owners."""
    sockets: list[tuple[str, int, int]] = []
    for name in ("tcp", "tcp6"):
        try:
            sockets.extend(parse_tcp(Path(f"{proc}/net/{name}").read_text(encoding="ascii", errors="replace")))
        except OSError:  # no IPv6 on this host
            continue
    owners = _owners({inode for _address_, _port, inode in sockets if inode}, proc)
    found = []
    for address, port, inode in sorted(sockets):
        pid = owners.get(inode)
        if pid is None:
            found.append(Listener(address, port, inode))
        else:
            found.append(Listener(address, port, inode, pid, command_of(pid, proc), unit_of_pid(pid, proc)))
    return found


def command_of(pid: int, proc: str = "/proc") -> str | None:
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


def _address(text: str) -> str:
    # the kernel prints each 32-bit word in the machine's byte order
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def _owners(inodes: set[int], proc: str) -> dict[int, int]:
    owners: dict[int, int] = {}
    if not inodes:
        return owners
    for folder in sorted(
        (item for item in Path(proc).iterdir() if item.name.isdigit()), key=lambda item: int(item.name)
    ):
        try:
            links = list((folder / "fd").iterdir())
        except OSError:  # another user's process, or one that has ended
            continue
        for link in links:
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:[") and target[8:-1].isdigit() and int(target[8:-1]) in inodes:
                owners.setdefault(int(target[8:-1]), int(folder.name))
    return owners
