# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Kernels of releases that are gone: those that no release left on the host was built with, and what was published."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_state as kept
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_publish import RECORD
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_worker import LOCK


@dataclass
class Pruned:
    """What went, or in check mode would go."""

    releases: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def folders_of(library: str, cache_dir: str) -> list[str]:
    """Return what a module occupies: its own folder, and with FlashInfer that of its sources; [] outside the cache."""
    folder = os.path.dirname(library)
    if not folder.startswith(f"{cache_dir}/") or ".." in folder.split("/"):
        return []
    if f"/cached_ops/{os.path.basename(folder)}" in folder:
        return [folder, folder.replace("/cached_ops/", "/generated/")]
    others = [path for path in Path(folder).rglob("*.so") if str(path) != library]
    return [library] if others else [folder]


def prune(settings: Mapping[str, str], *, check: bool = False) -> Pruned:
    """Remove them. Needed: cache_dir, config_dir, releases_dir, release (the present one), kernels_dir."""
    state = kept.load(settings["config_dir"])
    libraries: Mapping[str, Sequence[str]] = state.get("libraries") or {}
    here = {settings["release"]}
    with contextlib.suppress(OSError):
        here |= set(os.listdir(settings["releases_dir"]))
    out = Pruned()
    gone = [name for name in libraries if name not in here]
    needed = {path for name in libraries if name in here for path in libraries[name]}
    doomed = sorted({path for name in gone for path in libraries[name]} - needed)
    found = [folder for path in doomed for folder in folders_of(path, settings["cache_dir"])]
    published = []
    for path in sorted(Path(settings["kernels_dir"]).glob(f"*/{RECORD}")) if settings["kernels_dir"] else ():
        if path.parent.name not in here:
            gone.append(path.parent.name)
            published.append(str(path.parent))
    out.releases = sorted(set(gone))
    out.paths = [path for path in dict.fromkeys([*found, *published]) if os.path.lexists(path)]
    if not out.releases:
        out.lines.append("no kernels of releases that are gone")
        return out
    out.lines.append(f"kernels of {', '.join(out.releases)}: {len(out.paths)} folders")
    if check:
        return out
    with _quiet(settings["cache_dir"]) as free:
        if not free:
            return Pruned(lines=["a warm-up is at work: kernels of releases that are gone stay for now"])
        with _as_owner(settings["cache_dir"]):
            _remove([path for path in out.paths if path not in published])
        _remove(published)
    left = {name: paths for name, paths in libraries.items() if name in here}
    state = kept.forget(state, sorted(here))
    kept.save(
        settings["config_dir"], {**{key: item for key, item in state.items() if key != "schema"}, "libraries": left}
    )
    return out


def remember(state: Mapping[str, Any], release: str, libraries: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """Return the libraries of each release, with those that a warm-up of this one has loaded."""
    known = {name: list(paths) for name, paths in (state.get("libraries") or {}).items()}
    if libraries:
        known[release] = sorted({*known.get(release, ()), *(str(item[0]) for item in libraries.values())})
    return known


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


@contextlib.contextmanager
def _as_owner(folder: str) -> Iterator[None]:
    """Remove as the servers' user: the paths come from its worker, and the folders between are its own to swap."""
    before = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError):
        status = os.stat(folder)
        if before[0] == 0 and status.st_uid:
            os.setegid(status.st_gid)
            os.seteuid(status.st_uid)
    try:
        yield
    finally:
        os.seteuid(before[0])
        os.setegid(before[1])


@contextlib.contextmanager
def _quiet(cache_dir: str) -> Iterator[bool]:
    """Hold the warm-up's lock, or tell that somebody has it."""
    try:
        handle = os.open(f"{cache_dir}/{LOCK}", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield True  # there was never a warm-up, or its cache is gone
        return
    with os.fdopen(handle) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
