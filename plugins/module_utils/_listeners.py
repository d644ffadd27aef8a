# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Who listens where: /proc/net/tcp and tcp6 joined with the sockets that processes hold open."""

from __future__ import annotations

import ipaddress
import itertools
import os
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket; pids is empty when no process we may look into holds it."""

    address: str
    port: int
    inode: int
    pids: tuple[int, ...] = ()


def parse_table(text: str) -> list[Listener]:
    """Read /proc/net/tcp or tcp6: the listening sockets, without their processes."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != LISTEN:
            continue
        address, port = fields[1].rsplit(":", 1)
        found.append(Listener(_address(address), int(port, 16), int(fields[9])))
    return found


def owners(inodes: Collection[int], pids: Iterable[int] | None = None, proc: str = "/proc") -> dict[int, list[int]]:
    """Return the processes that hold each socket inode open, among pids (None: among all)."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    held: dict[int, list[int]] = {inode: [] for inode in inodes}
    if not wanted:
        return held
    if pids is None:
        pids = sorted(int(name) for name in os.listdir(proc) if name.isdigit())
    for pid in pids:
        try:
            with os.scandir(f"{proc}/{pid}/fd") as entries:
                names = [entry.path for entry in entries]
        except OSError:  # gone, or not ours to look into
            continue
        seen = set()
        for name in names:
            try:
                inode = wanted.get(os.readlink(name))
            except OSError:
                continue
            if inode is not None and inode not in seen:
                seen.add(inode)
                held[inode].append(pid)
    return held


def listeners(
    proc: str = "/proc", ports: Collection[int] | None = None, pids: Iterable[int] | None = None
) -> list[Listener]:
    """Return the listening TCP sockets (of these ports, None: all) with the processes that hold them.

    pids narrows the search for holders; a socket that none of them holds is still listed, without pids.
    """
    found: list[Listener] = []
    for name in ("tcp", "tcp6"):
        try:
            found += parse_table(Path(f"{proc}/net/{name}").read_text())
        except OSError:  # no IPv6 here
            continue
    if ports is not None:
        found = [item for item in found if item.port in ports]
    held = owners({item.inode for item in found}, pids, proc)
    return [Listener(item.address, item.port, item.inode, tuple(held[item.inode])) for item in found]


def answering(sockets: Sequence[Listener], host: str, port: int) -> Listener | None:
    """Pick the socket that a connection to host:port reaches: the exact address, else a wildcard."""
    try:
        want = ipaddress.ip_address("127.0.0.1" if host in ("localhost", "") else host)
    except ValueError:  # a name: any address may be meant
        return next((item for item in sockets if item.port == port), None)
    best: tuple[int, Listener] | None = None
    for item in sockets:
        if item.port != port:
            continue
        have = ipaddress.ip_address(item.address)
        mapped = have.ipv4_mapped if isinstance(have, ipaddress.IPv6Address) else None
        if want in (have, mapped):
            rank = 3
        elif have.is_unspecified and have.version == want.version:
            rank = 2
        elif (have.is_unspecified and have.version == 6) or (host == "localhost" and have.is_loopback):
            rank = 1  # dual stack, or the other loopback
        else:
            continue
        if best is None or rank > best[0]:
            best = (rank, item)
    return best[1] if best else None


def command_of(pid: int, proc: str = "/proc", limit: int = 160) -> str:
    """Return a process's command up to its first long option (what comes after may be a key), on one line, cut.

    Its name in brackets when it has none; '' when it is gone.
    """
    try:
        raw = Path(f"{proc}/{pid}/cmdline").read_bytes()
        if raw.strip(b"\0"):
            words = raw.decode("utf-8", "replace").strip("\0").split("\0")
            plain = itertools.takewhile(lambda word: not word.startswith("--"), words)
            text = " ".join(" ".join(plain).split())
        else:
            text = "[" + Path(f"{proc}/{pid}/comm").read_text().strip() + "]"
    except OSError:
        return ""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _address(text: str) -> str:
    # the kernel prints each 32-bit word in the machine's byte order
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words)))
