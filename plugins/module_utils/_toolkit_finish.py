# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The end of a run: toolkit.json, units that drift, trees that nobody needs any more, and taking all of it back."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_apply as apply
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_host as host
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_inplace as inplace
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_probe as probes
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_state as state
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import (
    FileError,
    FileSpec,
    file_changes,
    write_files,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_build import NONE, Settings
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_folder import MARK, one_spelling
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_outcome import Outcome

PASSING = {"ninja_pinned", "wheels_damaged"}  # mended for good: the next run has nothing to say of them


def finish(settings: Settings, out: Outcome, before: Mapping[str, Any], check: bool) -> Outcome:
    """Write toolkit.json, see which units drift, prune trees that nobody needs."""
    kept = str(before.get("cuda_home") or "")
    same = before.get("python") == settings.python  # what was proven for another environment proves nothing here
    whole = bool(kept) and all(os.path.exists(f"{kept}/{name}") for name in ("bin/nvcc", "lib64/libcudart.so"))
    if not out.proven:
        out.cuda_home = kept if same and whole else None  # what running units have stays when a run fails
    known = out.known if out.proven or not out.cuda_home else {**probes.known_proofs(before), **out.known}
    cleared = host.stale_ninja(settings.needs.cache_dirs, out.cuda_home or "", out.flashinfer) if out.proven else []
    if cleared:
        out.findings += host.ninja_finding(cleared, check)
        out.repaired |= set() if check else {"ninja_pinned"}
        out.changed = True
    _write(settings, out, known, cleared, before, check)
    if out.cuda_home:
        out.drift = state.drift(settings.config_dir, out.cuda_home)
    if out.proven and not check and settings.repair != NONE:  # the folder's lock is held
        keep = [out.cuda_home or "", str(out.details.get("private") or "")]
        try:
            out.pruned = prune(settings.folder, settings.config_dir, keep)
        except OSError as exc:  # it is in nobody's way
            text = f"{exc.filename}: {exc.strerror}: a folder that nobody needs any more could not be removed"
            out.findings.append(Finding("not_pruned", text, "Remove it", WARNING))
    return out


def _write(
    settings: Settings, out: Outcome, known: Mapping[str, str], cleared: Sequence[str], before: Mapping[str, Any],
    check: bool,
) -> None:  # fmt: skip
    gone = bool(before.get("cuda_home")) and any(item.code == "venv_missing" for item in out.findings)
    if not out.details:
        out.details = {"how": settings.repair, "arch_list": list(settings.archs), "python": settings.python}
    # a run that failed on another folder does not take from the record where the home lies that it keeps
    folder = settings.folder if out.proven or not out.cuda_home else str(before.get("folder", settings.folder))
    findings = [_lasting(item) for item in out.listed() if item["code"] not in PASSING]
    record = state.record(
        cuda_home=out.cuda_home,
        versions=out.versions,
        findings=findings,
        repairs=out.repairs,
        details={**out.details, "folder": folder, "proven": out.proven, "proofs": dict(known)},
    )
    if gone:  # a mistyped venv takes nothing from the servers of the one that is there
        record = state.dump({**before, "failed": {"python": settings.python, "findings": findings}})
    spec = FileSpec(f"{settings.config_dir}/{state.NAME}", record)
    try:
        changes = file_changes([spec])
        if changes:
            out.changed = True
            out.diff += [change.diff for change in changes]
        if check:
            return
        if changes:
            _make(settings.config_dir)
            write_files([spec])
        _sweep(settings.config_dir)
        for path in cleared:
            os.unlink(path)
    except (FileError, OSError) as exc:
        out.findings.append(
            Finding("record_unwritable", f"{settings.config_dir}: {exc}", "Run as root, or give another config_dir")
        )


def _lasting(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finding without what differs from run to run: a record that says the same is the same."""
    return {**item, "message": re.sub(r"\d+ MiB free", "too little free", item["message"])}


def _make(folder: str) -> None:
    if not os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o755)


def _sweep(config_dir: str, age: float = 600.0) -> None:
    """Take away what a killed run left of its record."""
    for path in Path(config_dir).glob(f".{state.NAME}.*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= age:
                path.unlink()


def prune(folder: str, config_dir: str, keep: Sequence[str]) -> list[str]:
    """Remove trees and private sets that no configuration, unit, process or tree names any more."""
    gone = []
    config_dirs = {config_dir, *state.users(folder)}
    for group in (apply.trees(folder), apply.private_sets(folder)):
        names = [path for path in group if path not in keep]
        needed = state.references(names, config_dirs)
        linked = apply.linked_from(folder, names)
        for path in names:
            if not needed[path] and path not in linked:
                apply.discard(path)
                gone.append(path)
    return gone


def remove(folder: str, config_dir: str, *, check: bool = False) -> Outcome:
    """Take back everything: trees, private sets, additions to wheels, toolkit.json; what others use stays.

    Raises ApplyError, with the remedy, when a server still has one of the trees as its CUDA_HOME.
    """
    out = Outcome()
    folder, config_dir = one_spelling(folder), os.path.realpath(config_dir)
    path = f"{config_dir}/{state.NAME}"
    ours = os.path.isfile(f"{folder}/{MARK}") and not os.path.islink(folder)
    names = (
        [*apply.trees(folder), *apply.private_sets(folder), *inplace.records(folder), *inplace.garbage(folder)]
        if ours
        else []
    )
    recorded = state.load(config_dir)
    # also that of a later run which failed on another folder and kept this home
    inside = _within(str(recorded.get("cuda_home")), folder)
    garbage = not recorded and os.path.lexists(path) and not os.path.isdir(path)
    if garbage or (recorded and (inside or one_spelling(str(recorded.get("folder", folder))) == folder)):
        names.append(path)
    if not ours and not names:
        return out
    out.changed = True
    text = "".join(f"{path}\n" for path in names)
    out.diff.append({"before_header": folder, "after_header": folder, "before": text, "after": ""})
    out.findings += _unrecorded(folder, recorded, ours)
    if check:
        return out
    if ours:
        _in_use(folder, config_dir)
        with apply.locked(folder):
            out.pruned = _take_back(folder, config_dir)
    if names and names[-1] == path:  # last: a run that is killed is taken up again
        with contextlib.suppress(FileNotFoundError):
            os.unlink(names[-1])
        _sweep(config_dir, 0.0)
        for place in (config_dir, folder):  # when nothing else is in it; the folder: of a removal that was killed
            with contextlib.suppress(OSError):
                os.rmdir(place)
    return out


def _unrecorded(folder: str, recorded: Mapping[str, Any], ours: bool) -> list[Finding]:
    """Name additions in place that stay, for their record is gone; of a tree that nothing names, the record."""
    tree = str(recorded.get("source") or recorded.get("cuda_home") or "")
    lost = inplace.lost(folder, tree, recorded)
    found = [inplace.unrecorded(folder, tree, lost)] if lost else []
    for path in inplace.garbage(folder) if ours else ():
        if path != inplace.record_path(folder, tree):
            text = (
                f"{path} is unreadable: what it said was added to an environment's nvidia/cu* in place was left there"
            )
            remedy = "Deploy that environment with repair in_place, and remove again"
            found.append(Finding(inplace.UNRECORDED, text, remedy, WARNING))
    return found


def _within(path: str, folder: str) -> bool:
    return os.path.realpath(path).startswith(f"{os.path.realpath(folder)}/")


def _take_back(folder: str, config_dir: str) -> list[str]:
    others = [item for item in state.users(folder) if item != config_dir and os.path.exists(f"{item}/{state.NAME}")]
    needed = {os.path.realpath(str(state.load(item).get("cuda_home"))) for item in others}
    for path in inplace.records(folder):
        if os.path.realpath(inplace.root_of(path)) not in needed:
            inplace.undo(path)
    for path in inplace.garbage(folder):
        os.unlink(path)
    if not others:
        return apply.remove_all(folder)
    state.set_users(folder, others)
    return prune(folder, others[0], [])


def _in_use(folder: str, config_dir: str) -> None:
    """Refuse to take away what a server compiles with."""
    roots = {os.path.realpath(inplace.root_of(path)) for path in inplace.records(folder)}
    users = [
        f"{item.unit} ({item.cuda_home})"
        for item in state.drift(config_dir, "")
        if _within(item.cuda_home, folder) or os.path.realpath(item.cuda_home) in roots
    ]
    if users:
        raise apply.ApplyError(
            f"{folder}: nothing was removed, for {', '.join(users)} compiles with it. Remedy: remove the servers too "
            "(playbooks/remove.yml without tags), or deploy them with another CUDA_HOME first"
        )
