# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Adding what is missing to a toolkit where pip put it: only additions, each recorded, each taken back on request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileSpec, digest, write_files
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_apply import ApplyError
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_compose import CCCL_PARTS, DRIVER, STUB, Entry
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_elf import broken, soname
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import multiarch
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import Owned, installed_infos, owned_files
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_stub import MARK, SONAME

PLACE = "in-place"
UNRECORDED = "in_place_unrecorded"
_RECORD = re.compile(r"[0-9a-f]{12}\.json")


@dataclass(frozen=True)
class Addition:
    """A link or file that we added: its path, and what tells that it is still ours."""

    path: str
    kind: str  # link | file | folder | scratch (a file on its way to its name)
    mark: str  # a link's target, a file's hash
    before: str = ""  # the target of another's link that led nowhere and lay there
    source: str = ""  # the content that a stub was generated from

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
    found = _parse(path)
    return found[1] if found else []


def _parse(path: str) -> tuple[str, list[Addition]] | None:
    """Return a record's tree and additions, None when it is not there, or is none (any longer)."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        root, items = data["root"], [Addition(**item) for item in data["additions"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all(isinstance(value, str) for value in (root, *(value for item in items for value in vars(item).values()))):
        return None
    return root, [item for item in items if item.path.startswith(f"{root}/")]


def kept(root: str, recorded: Sequence[Addition]) -> list[Addition]:
    """Return the recorded additions but those whose name another has taken: a damaged one stays ours, to be mended."""
    changed = [item for item in recorded if item.kind in ("link", "file") and not item.ours()]
    changed = [item for item in changed if os.path.exists(item.path)]
    owned = _owned(root) if changed else {}
    taken = [item.path for item in changed if os.path.relpath(item.path, root) in owned or _serves(item)]
    return [
        item
        for item in recorded
        if item.path not in taken
        and not (item.kind == "folder" and any(path.startswith(f"{item.path}/") for path in taken))
    ]


def _serves(item: Addition) -> bool:
    """Tell whether what lies in an addition's place does its work: then somebody put it there, and it is no damage."""
    aim = os.path.join(os.path.dirname(item.path), item.mark)
    if os.path.isdir(item.path):  # a real folder is nothing that a link of ours turns into by damage
        whole = item.kind == "link" and os.path.islink(item.path) and os.path.isdir(aim)
        return not whole or set(os.listdir(aim)) <= set(os.listdir(item.path))
    if not os.path.isfile(item.path):
        return True  # a device or a socket
    name, stub = soname(item.path), item.path.endswith(f"/{STUB}")
    if not name or broken(item.path) or (stub and _marked(item.path)):
        return False
    return name == (SONAME if stub else soname(aim))


def _marked(path: str) -> bool:
    return MARK.encode() in Path(path).read_bytes()


def _owned(root: str) -> Mapping[str, Owned]:
    return owned_files(installed_infos(os.path.dirname(os.path.dirname(root))), root)


def hidden(folder: str, root: str) -> frozenset[str]:
    """Return the paths that we added to a tree: they are not the toolkit's own."""
    return frozenset(item.path for item in kept(root, load(record_path(folder, root))))


def _there(entry: Entry) -> bool:
    """Tell whether an entry is one that a tree of pip's may lack."""
    return not entry.path.startswith(("targets/", "bin/"))


def wanted(root: str, entries: Sequence[Entry], recorded: Sequence[Addition]) -> list[Entry]:
    """Return what the tree lacks: of the entries those whose name nobody else has taken."""
    mine = {item.path for item in kept(root, recorded)}
    found = []
    for entry in entries:
        path = f"{root}/{entry.path}"
        if _there(entry) and entry.target != path and (path in mine or not os.path.exists(path)):
            found.append(entry)
    return found


def state(root: str, entries: Sequence[Entry]) -> str:
    """Return a digest of what really lies where the tree lacks something: a proof holds for that alone."""
    lines = []
    for entry in entries:
        path = f"{root}/{entry.path}"
        if not _there(entry) or entry.target == path:
            continue
        aim = os.readlink(path) if os.path.islink(path) else ""
        status = os.stat(path) if os.path.isfile(path) else None
        lines.append(f"{path}\0{aim}\0{f'{status.st_size} {status.st_mtime_ns}' if status else os.path.isdir(path)}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]


def differs(root: str, entries: Sequence[Entry], recorded: Sequence[Addition]) -> tuple[list[Addition], list[Entry]]:
    """Return recorded additions that are to go, and entries that are to be made (again)."""
    known = {item.path: item for item in recorded}
    names = {f"{root}/{entry.path}" for entry in entries}
    gone = [item for item in recorded if item.kind != "folder" and item.path not in names]
    make = []
    for entry in entries:
        item = known.get(f"{root}/{entry.path}")
        same = item is not None and item.ours() and _as_planned(item, entry)
        if not same or not os.path.exists(f"{root}/{entry.path}"):
            make.append(entry)
    return gone, make


def _as_planned(item: Addition, entry: Entry) -> bool:
    """Tell whether an addition is the entry's: a stub follows the header that it was generated from."""
    return item.source == entry.identity if entry.kind == "stub" else item.mark == entry.target


def apply(
    folder: str,
    root: str,
    entries: Sequence[Entry],
    stub: Callable[[str, str], int],
    write: Callable[[Sequence[FileSpec]], None] = write_files,
) -> None:
    """Add the entries to a tree; the record is written first, so that a killed run can be undone too."""
    path = record_path(folder, root)
    recorded = kept(root, load(path))
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
            if os.path.lexists(name):  # ours, whole or damaged, or a link that leads nowhere
                os.unlink(name)
            os.symlink(entry.target, name)
            continue
        try:
            stub(f"{root}/include", f"{name}.new")
            made = digest(f"{name}.new")
            planned[name] = Addition(name, "file", made, _before(name, known.get(name)), entry.identity)
            _save(path, root, [*known.values(), *new.values(), *planned.values()], write)
            os.replace(f"{name}.new", name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{name}.new")
        del planned[f"{name}.new"]
    _save(path, root, list({**known, **new, **planned}.values()), write)


def _before(name: str, known: Addition | None) -> str:
    """Return where another's link led that lies where ours will lie; of one of ours, what was there before it."""
    if known:
        return known.before
    return os.readlink(name) if os.path.islink(name) else ""


def undo(record: str) -> list[str]:
    """Take back the additions to one tree, as far as nobody has taken their names; returns what went."""
    recorded = kept(root_of(record), load(record))
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
    return sorted(str(path) for path in Path(folder, PLACE).glob("*.json") if _parse(str(path)))


def garbage(folder: str) -> list[str]:
    """Return what was a record once: it has a name that only we give, and says nothing any more."""
    found = (path for path in Path(folder, PLACE).glob("*.json") if _RECORD.fullmatch(path.name))
    return sorted(str(path) for path in found if path.is_file() and not _parse(str(path)))


def root_of(record: str) -> str:
    """Return the tree that a record is about."""
    found = _parse(record)
    return found[0] if found else ""


def lost(folder: str, root: str, before: Mapping[str, Any]) -> list[Addition]:
    """Return additions to a tree of pip's that no record names (any longer), where something says that they are ours.

    A link as we make it may be anybody's, so that alone tells nothing. What tells: toolkit.json (before), a record
    that is garbage now, the stub with our mark, or a link into our folder.
    """
    record = record_path(folder, root)
    places = {record, record_path(str(before.get("folder") or folder), root)}
    if Path(root).parent.name != "nvidia" or any(_parse(path) for path in places):
        return []
    told = before.get("how") == "in_place" and root in (before.get("source"), before.get("cuda_home"))
    told = told or os.path.lexists(record) or UNRECORDED in str(before.get("findings"))
    found = _as_we_make(folder, root)
    return found if told or any(i.kind == "file" or i.mark.startswith(f"{folder}/") for i in found) else []


def _as_we_make(folder: str, root: str) -> list[Addition]:
    """Return what no wheel brought and lies there as we would make it."""
    owned, found = _owned(root), []
    drivers = tuple(f"/{place.format(multiarch=multiarch())}" for place in DRIVER)
    targets = {"lib64": ("lib",), STUB: drivers, **{f"include/{name}": (f"cccl/{name}",) for name in CCCL_PARTS}}
    sources = (f"{folder}/wheels/", f"{os.path.dirname(os.path.dirname(root))}/flashinfer/")
    numbered = [f"lib/{path.name}" for path in sorted(Path(root).glob("lib/*.so"))]
    parts = [f"include/cccl/{name}" for name in CCCL_PARTS]
    for name in {*targets, *numbered, *parts} - set(owned):
        path = f"{root}/{name}"
        if os.path.islink(path):
            aim = os.readlink(path)
            plain = name in numbered and re.fullmatch(rf"{re.escape(os.path.basename(name))}\.\d[\d.]*", aim)
            if plain or aim in targets.get(name, ()) or (name in parts and aim.startswith(sources)):
                found.append(Addition(path, "link", aim))
        elif name == STUB and os.path.isfile(path) and _marked(path):
            found.append(Addition(path, "file", digest(path)))
    found.sort(key=lambda item: item.path)
    mine = {item.path for item in found}
    for place in (f"{root}/lib/stubs", f"{root}/include/cccl"):
        if os.path.isdir(place) and os.listdir(place) and {f"{place}/{name}" for name in os.listdir(place)} <= mine:
            found.append(Addition(place, "folder", ""))
    return found


def adopt(folder: str, root: str, found: Sequence[Addition]) -> None:
    """Record additions again."""
    _save(record_path(folder, root), root, found, write_files)


def unrecorded(folder: str, root: str, found: Sequence[Addition]) -> Finding:
    """Say that additions stay, for nothing says any more that each of them is ours."""
    paths = " ".join(item.path for item in found if item.kind != "folder")
    text = (
        f"{root}: the record of what was added to it in place ({record_path(folder, root)}) is lost or unreadable; "
        f"these look like additions, and were left: {paths}"
    )
    return Finding(UNRECORDED, text, f"Run with repair in_place, which records them anew, or: rm {paths}", WARNING)


def _remove(item: Addition) -> bool:
    """Remove one of those that are kept: as we made it, or damaged; a link that leads nowhere may be another's."""
    mine = item.ours() or (item.kind in ("link", "file") and os.path.exists(item.path))
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
