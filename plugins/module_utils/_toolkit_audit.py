# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Whether the files of NVIDIA's wheels are what their RECORDs say: lost, cut off, zeroed or exchanged ones by name."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileError, FileSpec, digest, write_files
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_folder import foreign
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import COMPONENTS, Owned, owned_files

SEALS = ".seals.json"
COMPILER = frozenset(COMPONENTS.values())
UNREADABLE = "unreadable"


class Seals:
    """What reading every file showed, by tree; it holds as long as no size, time or inode changes."""

    def __init__(self, folder: str = "") -> None:
        self.path = f"{folder}/{SEALS}" if folder else ""
        try:
            data = json.loads(Path(self.path).read_text(encoding="utf-8")) if folder else {}
        except (OSError, ValueError):
            data = {}
        self.before: dict[str, Any] = data if isinstance(data, dict) else {}
        self.now: dict[str, Any] = {}

    def contents(self, tree: str, stamp: str) -> dict[str, str] | None:
        """Return the contents that differed then, None when the tree has to be read."""
        kept = self.now.get(tree) or self.before.get(tree)
        differ = kept.get("differ") if isinstance(kept, dict) and kept.get("stamp") == stamp else None
        return {str(key): str(value) for key, value in differ.items()} if isinstance(differ, dict) else None

    def keep(self, tree: str, stamp: str, differ: Mapping[str, str]) -> None:
        """Remember what reading showed."""
        self.now[tree] = {"stamp": stamp, "differ": dict(differ)}

    def save(self) -> None:
        """Write it down (the folder's lock is held); where that fails, the next run reads every file again."""
        data = {tree: seal for tree, seal in {**self.before, **self.now}.items() if os.path.isdir(tree)}
        if data != self.before:
            with contextlib.suppress(FileError, OSError):
                write_files([FileSpec(self.path, json.dumps(data, indent=2, sort_keys=True) + "\n", 0o600)])


@dataclass(frozen=True)
class Damage:
    """A file that is not as its wheel brought it."""

    path: str  # in the tree
    dist: str
    what: str
    severe: bool  # no patch by hand: what is compiled with it is wrong, or does not compile


@dataclass
class Audit:
    """The files of a tree by their wheels, with the hash of what is really there, and those that are not as brought."""

    owned: dict[str, Owned] = field(default_factory=dict)
    damages: list[Damage] = field(default_factory=list)


def audit(infos: Mapping[str, str], tree: str, seals: Seals) -> Audit:
    """Compare a tree with its wheels' RECORDs: sizes always, the compiler's contents when a stat has changed."""
    found = Audit(owned_files(infos, tree))
    lines, sizes = [], {}
    for path, item in found.owned.items():
        try:
            status = os.stat(f"{tree}/{path}")
        except OSError:
            vital = item.dist in COMPILER and path.startswith(("bin/", "include/", "nvvm/"))
            found.damages.append(Damage(path, item.dist, "is missing", vital))
            continue
        sizes[path] = status.st_size
        times = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        lines.append(f"{path}\0{item.sha}\0{times}\n")
    stamp = hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    differ = seals.contents(tree, stamp)
    if differ is None:
        differ = {path: real for path in sizes for real in [_differs(f"{tree}/{path}", found.owned[path])] if real}
        seals.keep(tree, stamp, differ)
    for path, size in sizes.items():
        item = found.owned[path]
        if path in differ:
            found.damages.append(_damage(tree, path, item, size, differ[path]))
            found.owned[path] = replace(item, sha=differ[path], size=None)
        elif item.size not in (None, size):
            found.damages.append(Damage(path, item.dist, "has another size than the wheel's", False))
    return found


def _differs(path: str, owned: Owned) -> str:
    """Return the hash of a compiler's file when it is not the wheel's."""
    if owned.dist not in COMPILER or not owned.sha.startswith("sha256="):
        return ""
    try:
        content = bytes.fromhex(digest(path))
    except OSError:
        return UNREADABLE
    real = f"sha256={base64.urlsafe_b64encode(content).rstrip(b'=').decode()}"
    return "" if real == owned.sha else real


def _damage(tree: str, path: str, owned: Owned, size: int, real: str) -> Damage:
    """Tell damage from a patch: people patch texts, and then these are neither shorter nor hold zero bytes."""
    if real == UNREADABLE:
        return Damage(path, owned.dist, "cannot be read", True)
    if owned.size is not None and size < owned.size:
        return Damage(path, owned.dist, "is cut off", path != "bin/nvcc.profile")
    text = path.startswith("include/") or path == "bin/nvcc.profile"
    severe = not text or b"\0" in Path(tree, path).read_bytes()
    return Damage(path, owned.dist, "is not what the wheel brought", severe)


def findings(tree: str, damages: list[Damage], python: str, packages: Mapping[str, str]) -> list[Finding]:
    """Say it wheel by wheel: the file, the wheel, and how to get it back."""
    groups: dict[tuple[str, bool], list[Damage]] = {}
    for item in sorted(damages, key=lambda one: one.path):
        groups.setdefault((item.dist, item.severe), []).append(item)
    found = []
    for (dist, severe), items in sorted(groups.items()):
        wheel = f"{dist}=={packages[dist]}" if dist in packages else dist
        more = f", and {len(items) - 1} more of its files" if len(items) > 1 else ""
        text = f"{tree}/{items[0].path}, of the wheel {wheel}, {items[0].what}{more}"
        remedy = f"{python} -m pip install --force-reinstall --no-deps {wheel}"
        code = "cccl_damaged" if dist == COMPONENTS["cccl"] else "wheel_damaged"
        if severe:
            found.append(Finding(code, text, remedy))
        else:
            found.append(Finding("wheel_changed", text, f"Unless that was meant: {remedy}", WARNING))
    return found


def flaw(infos: Mapping[str, str], tree: str, seals: Seals) -> str:
    """Return what is wrong with a private tree, in which nobody has any business; "" when it is whole."""
    seen = audit(infos, tree, seals)
    if seen.damages:
        return f"{tree}/{seen.damages[0].path} {seen.damages[0].what}"
    for base, folders, files in os.walk(tree):
        for path in [base, *(f"{base}/{name}" for name in files)]:
            if foreign(path):
                return foreign(path)
            needed = 0o055 if path == base else 0o044
            if os.lstat(path).st_mode & needed != needed:
                return f"{path} cannot be read by the servers' user"
        links = [name for name in folders if os.path.islink(f"{base}/{name}")]
        strange = [n for n in [*files, *links] if os.path.relpath(f"{base}/{n}", tree) not in seen.owned]
        if strange:
            return f"{base}/{strange[0]} was not brought by a wheel"
    return ""
