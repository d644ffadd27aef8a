# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Whether a folder of composed trees is safe: nobody but root and us can swap what kernels are compiled with."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

MARK = ".gpufleet-cuda"  # in a folder that is ours
LOCK = ".lock"
FOLDERS, FILES = ("wheels", "in-place"), (".users", ".seals.json", LOCK, MARK)  # beside the trees; the mark goes last
ELSEWHERE = "Use a folder below one that only root (or the user that runs this) can write to"


def one_spelling(path: str) -> str:
    """Return a path with all above it as it really lies: links and `..` above give a folder no second name."""
    head, tail = os.path.split(path.rstrip("/"))
    if not path.startswith("/") or tail in ("", ".", ".."):
        return os.path.realpath(path) if path.startswith("/") else path  # a relative one is refused
    return os.path.join(os.path.realpath(head), tail)


def foreign(path: str) -> str:
    """Say how others own something or can write to it, "" when they cannot."""
    status = os.lstat(path)
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {status.st_uid}"
    if not stat.S_ISLNK(status.st_mode) and _writable_by_others(status):
        return f"{path} can be written to by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def check_folder(folder: str, uid: int) -> str:
    """Return why the folder of trees is not safe to write to, "" when it is (or is not there yet)."""
    folder = folder.rstrip("/")  # with it a link is looked through
    if not folder:
        return "/ cannot be the folder of the trees: name one of its own, as /opt/sglang/cuda"
    if not folder.startswith("/") or ":" in folder or any(char.isspace() for char in folder):
        return f"{folder}: the folder must be absolute, without colons and blanks"
    above = _check_above(folder, uid)
    if above:
        return above
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
    if _writable_by_others(status):
        return f"{folder} can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}): take that away"
    for name in (*FOLDERS, *FILES):
        path = f"{folder}/{name}"
        if os.path.islink(path):
            return f"{path} is a link: nothing is written through it. Remove it"
        if os.path.lexists(path) and foreign(path):
            return f"{foreign(path)}: chown it to the user that runs this, and chmod go-w"
    try:
        if not os.path.isfile(f"{folder}/{MARK}") and set(os.listdir(folder)) - {LOCK}:
            return f"{folder} holds files that are not ours. Name an empty folder, or one that does not exist"
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    return ""


def _check_above(folder: str, uid: int) -> str:
    """Look at every folder above, as it is named and as it really lies: who can rename one of them can swap all."""
    named, real = Path(folder), Path(os.path.realpath(folder))
    pairs = [pair for leaf in (named, real) for pair in zip(leaf.parents, [leaf, *leaf.parents])]
    for path, child in dict.fromkeys(pairs):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # to be made by us, in one that is looked at too
        except OSError as exc:
            return f"{path}: {exc.strerror}, so {folder} cannot be judged. {ELSEWHERE}"
        if not stat.S_ISDIR(status.st_mode):
            return f"{path} is no folder. {ELSEWHERE}"
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        if status.st_uid not in (uid, 0):
            return (
                f"{path}, above {folder}, belongs to user {status.st_uid}, who could swap what is compiled with. "
                f"{ELSEWHERE}, or run this as that user (-e ansible_become=false)"
            )
        if not _writable_by_others(status):
            continue
        if not status.st_mode & stat.S_ISVTX:
            return f"{path}, above {folder}, can be written to by others ({mode}): chmod go-w {path}. Or: {ELSEWHERE}"
        # in a sticky folder (/tmp) nobody renames what is another's, but anybody makes what is not there
        try:
            if os.lstat(child).st_uid in (uid, 0):
                continue
        except OSError:
            pass
        reason = f"is open to everybody ({mode}), and {child} is not there yet or another's"
        return f"{path}, above {folder}, {reason}. {ELSEWHERE}"
    return ""


def _writable_by_others(status: os.stat_result) -> bool:
    """Tell whether others than the owner can write: a group of the owner's own (umask 002) is nobody else."""
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP or status.st_gid == 0:
        return False
    try:
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    return group.gr_name != owner or bool(set(group.gr_mem) - {owner})
