# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Adding what is missing to a toolkit where pip put it: only additions, each recorded, each taken back on request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileSpec, digest, write_files
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_apply import ApplyError
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_compose import Entry

PLACE = "in-place"


@dataclass(frozen=True)
class Addition:
    """A link or file that we added: its path, and what tells that it is still ours."""

    path: str
    kind: str  # link | file | folder | scratch (a file on its way to its name)
    mark: str  # a link's target, a file's hash
    before: str = ""  # the target of another's link that led nowhere and lay there

    def ours(self) -> bool:
        """Tell whether it is there as we made it."""
        if self.kind == "link":
            return os.path.islink(self.path) and os.readlink(self.path) == self.mark
        if self.kind == "folder":
            return os.path.isdir(self.path) and not os.path.islink(self.path)
        if os.path.islink(self.path) or not os.path.isfile(self.path):
            return False
        return self.kind == "scratch" or digest(self.path) == self.mark


def record_path(folder: str, root: str) -> str:
    """Return where the additions to a tree are recorded."""
    return f"{folder}/{PLACE}/{hashlib.sha256(root.encode()).hexdigest()[:12]}.json"


def load(path: str) -> list[Addition]:
    """Return the recorded additions of one tree."""
    try:
        root = root_of(path)
        items = [item for item in _read(path).get("additions", []) if item["path"].startswith(f"{root}/")]
        return [Addition(item["path"], item["kind"], item["mark"], item.get("before", "")) for item in items]
    except (KeyError, TypeError, AttributeError):
        return []


def _read(path: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def hidden(folder: str, root: str) -> frozenset[str]:
    """Return the paths that we added to a tree: they are not the toolkit's own."""
    return frozenset(item.path for item in load(record_path(folder, root)))


def wanted(root: str, entries: Sequence[Entry], recorded: Sequence[Addition]) -> list[Entry]:
    """Return what the tree lacks: of the entries those whose name no wheel has taken."""
    mine = {item.path for item in recorded if item.ours()}
    found = []
    for entry in entries:
        path = f"{root}/{entry.path}"
        if entry.path.startswith(("targets/", "bin/")) or (
            os.path.lexists(path) and path not in mine and os.path.exists(path)
        ):
            continue
        if entry.target != path:
            found.append(entry)
    return found


def differs(root: str, entries: Sequence[Entry], recorded: Sequence[Addition]) -> tuple[list[Addition], list[Entry]]:
    """Return recorded additions that are to go, and entries that are to be made (again)."""
    known = {item.path: item for item in recorded}
    names = {f"{root}/{entry.path}" for entry in entries}
    gone = [item for item in recorded if item.kind != "folder" and item.path not in names]
    make = []
    for entry in entries:
        item = known.get(f"{root}/{entry.path}")
        same = item is not None and item.ours() and (entry.kind == "stub" or item.mark == entry.target)
        if not same or not os.path.exists(f"{root}/{entry.path}"):
            make.append(entry)
    return gone, make


def apply(
    folder: str,
    root: str,
    entries: Sequence[Entry],
    stub: Callable[[str, str], int],
    write: Callable[[Sequence[FileSpec]], None] = write_files,
) -> None:
    """Add the entries to a tree; the record is written first, so that a killed run can be undone too."""
    path = record_path(folder, root)
    recorded = load(path)
    gone, make = differs(root, entries, recorded)
    top = os.path.realpath(root)
    if any(not _inside(f"{root}/{entry.path}", top) for entry in entries):
        raise ApplyError(f"{root}: a folder in it is a link that leads out of it; nothing was changed")
    folders = {f"{root}/{above}" for entry in entries for above in list(Path(entry.path).parents)[:-1]}
    known = {item.path: item for item in recorded if item not in gone}
    new = {item: Addition(item, "folder", "") for item in sorted(folders) if not os.path.isdir(item)}
    planned = {}
    for entry in make:
        name = f"{root}/{entry.path}"
        if entry.kind == "link":
            planned[name] = Addition(name, "link", entry.target, _before(name, known.get(name)))
        else:
            planned[f"{name}.new"] = Addition(f"{name}.new", "scratch", "")
            if _before(name, known.get(name)):  # known until the file takes its place
                planned[name] = Addition(name, "file", "", _before(name, known.get(name)))
    _save(path, root, [*known.values(), *gone, *new.values(), *planned.values()], write)
    for item in gone:
        _remove(item)
    for added in new:
        os.makedirs(added, exist_ok=True)
    for entry in make:
        name = f"{root}/{entry.path}"
        if entry.kind == "link":
            if os.path.islink(name):  # ours, or one that leads nowhere
                os.unlink(name)
            os.symlink(entry.target, name)
            continue
        try:
            stub(f"{root}/include", f"{name}.new")
            planned[name] = Addition(name, "file", digest(f"{name}.new"), _before(name, known.get(name)))
            _save(path, root, [*known.values(), *new.values(), *planned.values()], write)
            os.replace(f"{name}.new", name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{name}.new")
        del planned[f"{name}.new"]
    _save(path, root, list({**known, **new, **planned}.values()), write)


def _before(name: str, known: Addition | None) -> str:
    """Return where another's link led that lies where ours will lie; of one of ours, what was there before it."""
    if known and (known.before or known.ours()):
        return known.before
    return os.readlink(name) if os.path.islink(name) else ""


def undo(record: str) -> list[str]:
    """Take back the additions to one tree, as far as they are still ours; returns what went."""
    recorded = load(record)
    removed = [item.path for item in recorded if item.kind != "folder" and _remove(item)]
    for item in sorted((item for item in recorded if item.kind == "folder"), key=lambda item: -len(item.path)):
        try:
            os.rmdir(item.path)
        except OSError:
            continue
        removed.append(item.path)
    os.unlink(record)
    return removed


def records(folder: str) -> list[str]:
    """Return the records in a folder: the files there that are ours."""
    return sorted(str(path) for path in Path(folder, PLACE).glob("*.json") if "additions" in _read(str(path)))


def root_of(record: str) -> str:
    """Return the tree that a record is about."""
    return str(_read(record).get("root", ""))


def _remove(item: Addition) -> bool:
    mine = item.ours()
    if mine:
        os.unlink(item.path)
    if item.before and not os.path.lexists(item.path) and os.path.isdir(os.path.dirname(item.path)):
        os.symlink(item.before, item.path)
    return mine


def _save(path: str, root: str, items: Sequence[Addition], write: Callable[[Sequence[FileSpec]], None]) -> None:
    unique: Mapping[str, Addition] = {item.path: item for item in items}
    data = {"root": root, "additions": [vars(unique[key]) for key in sorted(unique)]}
    write([FileSpec(path, json.dumps(data, indent=2, sort_keys=True) + "\n")])


def _inside(path: str, top: str) -> bool:
    return f"{os.path.realpath(os.path.dirname(path))}/".startswith(f"{top}/")
