# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Writing a composed CUDA_HOME: beside its place, then renamed; a killed run leaves the old tree or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_compose import Entry
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import RECORD

MARK = ".gpufleet-cuda"  # in a folder that is ours
LOCK = ".lock"
LOCK_TIMEOUT = 1800.0
_EXCHANGE = 2


class ApplyError(Exception):
    """The tree cannot be written; the message names the folder and the remedy."""


def check_folder(folder: str, uid: int) -> str:
    """Return why the folder of trees is not safe to write to, "" when it is (or is not there yet)."""
    if not folder.startswith("/") or ":" in folder or any(char.isspace() for char in folder):
        return f"{folder}: the folder must be absolute, without colons and blanks"
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is {'a link' if stat.S_ISLNK(status.st_mode) else 'no folder'}: name the folder itself"
    if status.st_uid not in (uid, 0):
        return (
            f"{folder} belongs to user {status.st_uid}: they could swap what is compiled with. Use a folder of its own"
        )
    if status.st_mode & 0o022:
        return f"{folder} can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}): take that away"
    for name in ("wheels", "in-place", MARK, ".users"):
        if os.path.islink(f"{folder}/{name}"):
            return f"{folder}/{name} is a link: nothing is written through it"
    try:
        if not os.path.isfile(f"{folder}/{MARK}") and set(os.listdir(folder)) - {LOCK}:
            return f"{folder} holds files that are not ours. Name an empty folder, or one that does not exist"
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    return ""


@contextlib.contextmanager
def locked(folder: str, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Hold the folder's lock; made with its parents when it is not there, readable for the servers' user."""
    problem = check_folder(folder, os.geteuid())
    if problem:
        raise ApplyError(problem)
    try:
        for path in reversed([Path(folder), *Path(folder).parents]):
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
        mark = Path(folder, MARK)
        if not mark.exists():
            mark.write_text(
                "made by gpufleet.sglang: CUDA_HOME folders composed of links, safe to remove\n", encoding="utf-8"
            )
        _sweep(folder)
        yield
    finally:
        os.close(handle)


def _sweep(folder: str) -> None:
    """Take away what killed runs left."""
    for path in [*Path(folder).glob("*.new"), *Path(folder).glob("*.old"), *Path(folder, "wheels").glob("*.new")]:
        remove_tree(str(path))


def intact(path: str, entries: Sequence[Entry]) -> bool:
    """Tell whether a tree is there, has every entry as planned, and every link leads somewhere."""
    if os.path.islink(path) or not os.path.isfile(f"{path}/{RECORD}"):
        return False
    for entry in entries:
        name = f"{path}/{entry.path}"
        if entry.kind == "link":
            try:
                if os.readlink(name) != entry.target or not os.path.exists(name):
                    return False
            except OSError:
                return False
        elif os.path.islink(name) or not os.path.isfile(name) or not os.access(name, os.X_OK):
            return False
    return True


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
        with open(f"{new}/{RECORD}", "w", encoding="utf-8") as file:
            json.dump(dict(record), file, indent=2, sort_keys=True)
            file.write("\n")
        os.chmod(f"{new}/{RECORD}", 0o644)
        sync(new)
        _swap(new, path)
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


def _swap(new: str, path: str) -> None:
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
    """Return the composed trees in a folder."""
    try:
        return sorted(
            str(path) for path in Path(folder).iterdir() if not path.is_symlink() and (path / RECORD).is_file()
        )
    except OSError:
        return []


def private_sets(folder: str) -> list[str]:
    """Return the private sets of wheels in a folder."""
    try:
        return sorted(str(path) for path in Path(folder, "wheels").iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return []


def linked_from(folder: str, names: Sequence[str]) -> set[str]:
    """Return which of the folders the remaining trees link to."""
    found: set[str] = set()
    for tree in trees(folder):
        for base, folders, files in os.walk(tree):
            for name in [*folders, *files]:
                path = f"{base}/{name}"
                target = os.readlink(path) if os.path.islink(path) else ""
                found.update(item for item in names if target.startswith(f"{item}/"))
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
    gone = [*trees(folder), *(path for path in (f"{folder}/wheels", f"{folder}/in-place") if os.path.isdir(path))]
    _sweep(folder)
    for path in gone:
        discard(path)
    for name in (MARK, ".users", LOCK):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/{name}")
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return gone
