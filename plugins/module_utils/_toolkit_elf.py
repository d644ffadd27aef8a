# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Reading a shared library's own name and what it needs: enough of ELF for that, without binutils."""

from __future__ import annotations

import struct
from pathlib import Path

_DYNAMIC, _LOAD = 2, 1
_NULL, _NEEDED, _STRTAB, _SONAME = 0, 1, 5, 14


def soname(path: str) -> str | None:
    """Return the SONAME, "" when it has none, None when the file is no shared library (an empty one, a text)."""
    found = _dynamic(path)
    return None if found is None else next(iter(found[0]), "")


def needed(path: str) -> list[str]:
    """Return the libraries that a shared library asks for."""
    found = _dynamic(path)
    return [] if found is None else found[1]


def broken(path: str) -> str:
    """Say why a shared library is not whole, "" when it is; to load a cut-off one ends the process with SIGBUS."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(64)
            if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
                return f"no shared library ({size} bytes)"
            programs, sections = struct.unpack_from("<QQ", head, 32)
            (program_size, programs_count, section_size, sections_count) = struct.unpack_from("<4H", head, 54)
            file.seek(programs)
            table = file.read(program_size * programs_count)
    except OSError as exc:
        return str(exc.strerror)
    ends = [sections + section_size * sections_count]
    try:
        for index in range(programs_count):
            header = struct.unpack_from("<IIQQQQ", table, index * program_size)
            ends.append(header[2] + header[5])  # where the part begins in the file, and how long it is
    except struct.error:
        return f"cut off: {size} bytes"
    return f"cut off: {size} of {max(ends)} bytes" if max(ends) > size else ""


def _dynamic(path: str) -> tuple[list[str], list[str]] | None:
    try:
        data = Path(path).read_bytes()
    except OSError:
        return None
    if data[:6] not in (b"\x7fELF\x02\x01",):  # 64 bits, little endian
        return None
    try:
        offset, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
        headers = [struct.unpack_from("<IIQQQQQQ", data, offset + index * size) for index in range(count)]
        entries: list[tuple[int, int]] = []
        for kind, _flags, where, _virtual, _physical, length, _memory, _align in headers:
            if kind == _DYNAMIC:
                entries += [struct.unpack_from("<qQ", data, where + at) for at in range(0, length - 15, 16)]
        names = next((value for tag, value in entries if tag == _STRTAB), None)
        if names is None:
            return None
        base = next(
            (names - v + w for k, _f, w, v, _p, n, _m, _a in headers if k == _LOAD and v <= names < v + n), names
        )
        text = {_SONAME: [], _NEEDED: []}  # type: dict[int, list[str]]
        for tag, value in entries:
            if tag == _NULL:
                break
            if tag in text:
                text[tag].append(data[base + value : data.index(b"\0", base + value)].decode("utf-8", "replace"))
        return text[_SONAME], text[_NEEDED]
    except (struct.error, ValueError):
        return None
