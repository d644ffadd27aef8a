# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""toolkit.json, which units still depend on another CUDA_HOME, and which composed trees nobody needs any more."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileSpec, write_files
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import read_applied

NAME = "toolkit.json"
USERS = ".users"
SCHEMA = 2
UNIT_DIR = "/etc/systemd/system"
_HOME = re.compile(rb"CUDA_HOME[\"']?\s*[=:]\s*[\"']?(/[^\s\"'\0]+)")


@dataclass(frozen=True)
class Drift:
    """A unit that was rendered with another CUDA_HOME than the one that is proven now."""

    unit: str
    cuda_home: str  # "" when it has none

    def to_dict(self) -> dict[str, str]:
        """Return plain data for a module's result."""
        return {"unit": self.unit, "cuda_home": self.cuda_home}


def load(config_dir: str) -> dict[str, Any]:
    """Return what an earlier run wrote down; empty when there is nothing usable."""
    try:
        data = json.loads(Path(config_dir, NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def drift(config_dir: str, cuda_home: str) -> list[Drift]:
    """Return the units whose rendered environment has another CUDA_HOME."""
    found = []
    for instance in read_applied(config_dir).values():
        home = instance.environment.get("CUDA_HOME", "")
        if home != cuda_home and "SGLANG_USE_CPU_ENGINE" not in instance.environment:
            found.append(Drift(instance.unit, home))
    return found


def references(
    names: Sequence[str], config_dirs: Iterable[str], unit_dir: str = UNIT_DIR, proc: str = "/proc"
) -> dict[str, list[str]]:
    """Return who names each folder: configurations, known-good copies, units with drop-ins, running processes.

    Named is also a folder that is spelled otherwise (its own name has a fingerprint), or that a link leads to.
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    files = [path for folder in config_dirs for path in _files(folder)]
    files += [path for path in _files(unit_dir) if "sglang" in str(path)]
    for path in [*files, *Path(proc).glob("[0-9]*/environ")] if names else ():
        try:
            text = path.read_bytes()
        except OSError:
            continue
        homes = {os.path.realpath(os.fsdecode(home)) for home in _HOME.findall(text)}
        for name in names:
            if f"/{os.path.basename(name)}".encode() in text or os.path.realpath(name) in homes:
                found[name].append(str(path))
    return found


def _files(folder: str) -> list[Path]:
    found = [Path(base, name) for base, _folders, names in os.walk(folder) for name in names]
    return [path for path in found if path.is_file() and path.stat().st_size < 4_000_000]


def users(folder: str) -> list[str]:
    """Return the configuration folders whose toolkit.json may name a tree of this folder."""
    try:
        lines = Path(folder, USERS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({os.path.realpath(item) for item in lines if item.startswith("/") and "\0" not in item})


def set_users(folder: str, config_dirs: Sequence[str]) -> None:
    """Write them down; the folder's lock is held."""
    if sorted(config_dirs) != users(folder):
        write_files([FileSpec(f"{folder}/{USERS}", "".join(f"{item}\n" for item in sorted(config_dirs)))])


def record(
    *,
    cuda_home: str | None,
    versions: Mapping[str, str],
    findings: Sequence[Mapping[str, Any]],
    repairs: Sequence[str],
    details: Mapping[str, Any],
) -> str:
    """Return the text of toolkit.json; equal results give equal bytes."""
    data = {
        "schema": SCHEMA,
        "cuda_home": cuda_home,
        "path": f"{cuda_home}/bin" if cuda_home else None,
        "versions": dict(versions),
        "findings": list(findings),
        "repairs": list(repairs),
        **details,
    }
    return dump(data)


def dump(data: Mapping[str, Any]) -> str:
    """Return toolkit.json's text: equal data, equal bytes."""
    return json.dumps(data, indent=2, sort_keys=True) + "\n"
