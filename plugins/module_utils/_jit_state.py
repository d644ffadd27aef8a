# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""jit.json: what servers compiled themselves, by model and release, the last report, and what the caches held then."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileSpec, file_changes, write_files
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_sets import Entry, entry_of, merge

NAME = "jit.json"
SCHEMA = 1
Snapshot = dict[str, list[int]]


def load(config_dir: str) -> dict[str, Any]:
    """Return what an earlier run wrote down; empty when there is nothing usable."""
    try:
        data = json.loads(Path(config_dir, NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) and data.get("schema") == SCHEMA else {}


def save(config_dir: str, data: Mapping[str, Any]) -> bool:
    """Write it down; returns whether it differed."""
    text = json.dumps({"schema": SCHEMA, **data}, indent=2, sort_keys=True) + "\n"
    changes = file_changes([FileSpec(f"{config_dir}/{NAME}", text)])
    write_files([item.spec for item in changes])
    return bool(changes)


def roots(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the folders below which kernels are compiled into, by kind."""
    home = environment.get("HOME", "/nonexistent")
    return {
        "flashinfer": environment.get("FLASHINFER_WORKSPACE_BASE", home) + "/.cache/flashinfer",
        "sglang": environment.get("SGLANG_JIT_CACHE_DIR", f"{home}/.cache/sglang/jit"),
        "tvm-ffi": environment.get("TVM_FFI_CACHE_DIR", f"{home}/.cache/tvm-ffi"),
    }


def snapshot(environment: Mapping[str, str]) -> Snapshot:
    """Return every compiled library with size, time and inode."""
    found: Snapshot = {}
    for folder in dict.fromkeys(roots(environment).values()):
        for base, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".staging-")]
            for name in names:
                if name.endswith(".so"):
                    path = f"{base}/{name}"
                    try:
                        status = os.stat(path)
                    except OSError:  # gone between listing and looking
                        continue
                    found[path] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return found


def compiled(before: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of the modules that were compiled in between."""
    changed = [path for path, stamp in now.items() if list(before.get(path, [])) != list(stamp)]
    return sorted({os.path.basename(path)[: -len(".so")] for path in changed})


def manifest(state: Mapping[str, Any], model: str, release: str) -> list[Entry]:
    """Return what servers of this model compiled themselves: in this release, else in the last one that taught us."""
    learned = (state.get("manifests") or {}).get(model) or {}
    if release in learned:
        return list(learned[release])
    return list(learned[next(reversed(learned))]) if learned else []


def teach(state: Mapping[str, Any], model: str, release: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the state with further modules in the manifest of a model and release."""
    entries = merge(manifest(state, model, release), [entry_of(name) for name in names])
    manifests = {key: dict(value) for key, value in (state.get("manifests") or {}).items()}
    manifests.setdefault(model, {}).pop(release, None)
    manifests[model][release] = entries
    return {**state, "manifests": manifests}


def forget(state: Mapping[str, Any], releases: Sequence[str]) -> dict[str, Any]:
    """Return the state without the manifests of releases that are gone, the last one of each model kept."""
    manifests: dict[str, Any] = {}
    for model, learned in (state.get("manifests") or {}).items():
        kept = {name: entries for name, entries in learned.items() if name in releases}
        manifests[model] = kept or dict(list(learned.items())[-1:])
    return {**state, "manifests": manifests}
