# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Writing a composed CUDA_HOME: beside its place, then renamed; a killed run leaves the old tree or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import filecmp
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._files import digest
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_compose import Entry
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_folder import (
    FILES,
    FOLDERS,
    LOCK,
    MARK,
    check_folder,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import RECORD

WHEELS = "gpufleet-wheels.json"  # in a private set of wheels
LOCK_TIMEOUT = 1800.0
NOTE = "made by gpufleet.sglang: CUDA_HOME folders composed of links, safe to remove\n"
MADE = "made too: "  # folders above it, from the lowest one on
# a tree (12 digits of its fingerprint) or a private set (8) on its way in or out: only names that we give
_LEFT = re.compile(r"[0-9][0-9.]*-[0-9a-f]{8}([0-9a-f]{4})?\.(new|old)")
_TREE, _SET = re.compile(r"[0-9][0-9.]*-[0-9a-f]{12}"), re.compile(r"[0-9][0-9.]*-[0-9a-f]{8}")
_EXCHANGE = 2


class ApplyError(Exception):
    """The tree cannot be written; the message names the folder and the remedy."""


@contextlib.contextmanager
def locked(folder: str, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Hold the folder's lock; made with its parents when it is not there, readable for the servers' user."""
    problem = check_folder(folder, os.geteuid())
    if problem:
        raise ApplyError(problem)
    try:
        made = [path for path in [Path(folder), *Path(folder).parents] if not path.exists()]
        for path in reversed(made):
            if not path.exists():
                path.mkdir(exist_ok=True)
                path.chmod(0o755)  # whatever the umask
        handle = os.open(f"{folder}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise ApplyError(f"{folder}: {exc.strerror}: give another folder, or the right to write there") from exc
    try:
        deadline = clock() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock() > deadline:
                    raise ApplyError(f"{folder}: another run holds {folder}/{LOCK}") from None
                time.sleep(0.1)
        problem = check_folder(folder, os.geteuid())  # somebody may have been quicker to make it
        if not problem and not _same(handle, f"{folder}/{LOCK}"):
            problem = f"{folder} was taken back by another run meanwhile: run this again"
        if problem:
            raise ApplyError(problem)
        try:
            mark = Path(folder, MARK)
            if not mark.exists():
                _mark(mark, "".join(f"{MADE}{path}\n" for path in made[1:]))
            _sweep(folder)
        except OSError as exc:
            raise ApplyError(f"{exc.filename or folder}: {exc.strerror}: correct that, or give another folder") from exc
        yield
    finally:
        os.close(handle)


def _mark(mark: Path, above: str) -> None:
    """Write the mark whole or not at all: half of it, on a full disk, would forget what was made above."""
    try:
        mark.write_text(f"{NOTE}{above}", encoding="utf-8")
        mark.chmod(0o644)
    except OSError:
        mark.unlink(missing_ok=True)
        raise


def _same(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _sweep(folder: str) -> None:
    """Take away what killed runs left; only names that we give."""
    for place in (folder, f"{folder}/wheels"):
        for path in Path(place).glob("*-*.*"):
            if _LEFT.fullmatch(path.name):
                remove_tree(str(path))
    for path in [
        *Path(folder).glob("..users.*"),
        *Path(folder).glob("..seals.json.*"),
        *Path(folder, "in-place").glob(".*.json.*"),
    ]:
        remove_tree(str(path))


def intact(path: str, entries: Sequence[Entry]) -> bool:
    """Tell whether a tree is there with all that was planned, each entry whole, and with nothing else."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    made = read_record(path).get("made")
    if not isinstance(made, dict):
        return False
    names = {RECORD, *(entry.path for entry in entries)}
    names |= {str(above) for name in names for above in Path(name).parents}  # "." is the tree itself
    try:
        found = {
            os.path.relpath(f"{base}/{name}", path)
            for base, folders, files in os.walk(path)
            for name in [*folders, *files]
        }
        return (
            found | {"."} == names
            and all(_as_made(f"{path}/{name}") for name in names)
            and all(_whole(f"{path}/{entry.path}", entry, made.get(entry.path)) for entry in entries)
        )
    except OSError:
        return False


def _as_made(name: str) -> bool:
    """Tell whether owner and mode are as we leave them: nobody else can swap it, and the servers' user can read it."""
    status = os.lstat(name)
    wanted = 0o644 if os.path.basename(name) == RECORD else 0o755
    return status.st_uid in (os.geteuid(), 0) and (
        stat.S_ISLNK(status.st_mode) or stat.S_IMODE(status.st_mode) == wanted
    )


def _whole(name: str, entry: Entry, made: str | None) -> bool:
    if entry.kind == "link":
        return os.readlink(name) == entry.target and os.path.exists(name)
    if os.path.islink(name) or not os.path.isfile(name) or not os.access(name, os.X_OK) or digest(name) != made:
        return False
    if entry.kind == "copy":
        return filecmp.cmp(name, entry.target, shallow=False)
    return entry.kind != "text" or Path(name).read_text(encoding="utf-8") == entry.target


def write_tree(path: str, entries: Sequence[Entry], record: Mapping[str, Any], stub: Callable[[str, str], int]) -> None:
    """Write the tree to path (the folder's lock is held); stub(include, out) makes the stub."""
    new = f"{path}.new"
    try:
        remove_tree(new)
        os.mkdir(new)
        os.chmod(new, 0o755)
        for entry in sorted(entries, key=lambda item: item.kind == "stub"):  # the stub is made from the headers
            name = f"{new}/{entry.path}"
            _parents(new, entry.path)
            if entry.kind == "link":
                os.symlink(entry.target, name)
            elif entry.kind == "text":
                with open(name, "w", encoding="utf-8") as text:
                    text.write(entry.target)
                os.chmod(name, 0o755)
            elif entry.kind == "copy":
                shutil.copyfile(entry.target, name)
                os.chmod(name, 0o755)
            else:
                stub(f"{new}/include", name)
        made = {entry.path: digest(f"{new}/{entry.path}") for entry in entries if entry.kind != "link"}
        with open(f"{new}/{RECORD}", "w", encoding="utf-8") as file:
            json.dump({**record, "made": made}, file, indent=2, sort_keys=True)
            file.write("\n")
        os.chmod(f"{new}/{RECORD}", 0o644)
        sync(new)
        swap(new, path)
    except OSError as exc:
        remove_tree(new)
        raise ApplyError(f"{exc.filename or path}: {exc.strerror}; nothing was changed") from exc
    except BaseException:
        remove_tree(new)
        raise


def _parents(top: str, path: str) -> None:
    folder = top
    for part in path.split("/")[:-1]:
        folder = f"{folder}/{part}"
        if not os.path.isdir(folder):
            os.mkdir(folder)
            os.chmod(folder, 0o755)


def swap(new: str, path: str) -> None:
    """Put new in the place of path in one step, whether or not something is there."""
    parent = os.path.dirname(path)
    if not os.path.lexists(path):
        os.rename(new, path)
    elif _exchange(new, path):
        remove_tree(new)
    else:  # an old kernel or file system: two steps
        remove_tree(f"{path}.old")
        os.rename(path, f"{path}.old")
        os.rename(new, path)
        remove_tree(f"{path}.old")
    handle = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(one: str, other: str) -> bool:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(call(-100, os.fsencode(one), -100, os.fsencode(other), _EXCHANGE) == 0)


def sync(folder: str) -> None:
    """Flush the file system that the folder is on."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None).syncfs(handle) != 0:
            os.sync()
    finally:
        os.close(handle)


def remove_tree(path: str) -> None:
    """Remove a tree, a link or a file; links in it are removed, never followed."""
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)


def discard(path: str) -> None:
    """Remove a tree so that a run killed on the way leaves no half of it under its name."""
    os.rename(path, f"{path}.old")
    remove_tree(f"{path}.old")


def trees(folder: str) -> list[str]:
    """Return the composed trees in a folder of ours, those too that have lost their record."""
    return _made(folder, _TREE, RECORD)


def private_sets(folder: str) -> list[str]:
    """Return the private sets of wheels in a folder of ours, those too that have lost their record."""
    return _made(f"{folder}/wheels", _SET, WHEELS)


def _made(folder: str, name: re.Pattern[str], record: str) -> list[str]:
    try:
        folders = [path for path in Path(folder).iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
    return sorted(str(path) for path in folders if name.fullmatch(path.name) or (path / record).is_file())


def linked_from(folder: str, names: Sequence[str]) -> set[str]:
    """Return which of the private sets the remaining trees link to, by their own names: a folder has many spellings."""
    found: set[str] = set()
    for tree in trees(folder):
        for base, folders, files in os.walk(tree):
            for name in [*folders, *files]:
                path = f"{base}/{name}"
                target = os.readlink(path) if os.path.islink(path) else ""
                found.update(item for item in names if f"/{os.path.basename(item)}/" in target)
    return found


def read_record(tree: str) -> dict[str, Any]:
    """Return what a tree says of itself, empty when it cannot be read."""
    try:
        data = json.loads(Path(tree, RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def remove_all(folder: str) -> list[str]:
    """Remove everything that we made in the folder, and the folder when nothing else is in it; returns what went."""
    if os.path.islink(folder) or not os.path.isfile(f"{folder}/{MARK}"):
        return []
    _sweep(folder)
    gone = [*trees(folder), *private_sets(folder)]
    for path in gone:
        discard(path)
    for path in (f"{folder}/{name}" for name in FOLDERS):  # what others put there stays
        with contextlib.suppress(OSError):
            os.rmdir(path)
    lines = Path(folder, MARK).read_text(encoding="utf-8", errors="replace").splitlines()
    above = [line[len(MADE) :] for line in lines if line.startswith(MADE)]
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/{name}")
    with contextlib.suppress(OSError):  # as far as they are empty
        for path in [folder, *(path for path in above if folder.startswith(f"{path}/"))]:
            os.rmdir(path)
    return gone
