# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Copies of configurations that answered, by release: what a rollback puts back, without a network or a plan."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._files import (
    FileSpec,
    file_changes,
    read_text,
    write_files,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import (
    Instance,
    Plan,
    PlanFileError,
    instance_from_dict,
    read_plan,
)

FOLDER = "releases"
DIGEST = "GPUFLEET_CONFIG="


class KeptError(Exception):
    """There is no release to go back to; the message says what there is."""


def uses(venv: str, instance: Instance) -> bool:
    """Say whether a server runs from this venv."""
    return any(word.startswith(venv.rstrip("/") + "/") for word in instance.argv)


def folder_of(config_dir: str, release: str) -> Path:
    """Return where a release's copies lie."""
    return Path(config_dir) / FOLDER / release


def keep(config_dir: str, gpu: int, files: Sequence[tuple[str, str]]) -> bool:
    """Copy a server's installed files (path, text) for its release; returns whether anything was new.

    The release is the plan's, when the server runs from it; otherwise (it was restored) nothing is copied.
    """
    plan_file = Path(config_dir) / "plan.json"
    try:
        plan = read_plan(str(plan_file))
        text = next(content for path, content in files if path.endswith(f"/{gpu}.json"))
        if not uses(plan.release.venv, instance_from_dict(json.loads(text))):
            return False
    except (PlanFileError, StopIteration, ValueError):
        return False
    base = folder_of(config_dir, plan.release.name)
    specs = [FileSpec(str(base / str(gpu) / os.path.basename(path)), content, 0o600, True) for path, content in files]
    specs.append(FileSpec(str(base / "plan.json"), read_text(str(plan_file)) or "", 0o600))
    changes = file_changes(specs)
    if changes:
        (base / str(gpu)).mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (base.parent, base, base / str(gpu)):
            path.chmod(0o700)
        write_files([change.spec for change in changes])
    wanted = {spec.path for spec in specs}
    stale = [path for path in (base / str(gpu)).glob("*") if str(path) not in wanted]
    for path in stale:
        path.unlink()
    os.utime(base / "plan.json")  # used last now
    return bool(changes or stale)


def kept_releases(config_dir: str) -> list[str]:
    """Return the releases that have copies, the one used last first."""
    plans = sorted(Path(config_dir, FOLDER).glob("*/plan.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent.name for path in plans]


def previous(config_dir: str, wanted: str = "") -> str:
    """Return the release to go back to: the wanted one, or the last used that is not the plan's. Raises KeptError."""
    kept = kept_releases(config_dir)
    try:
        current = read_plan(str(Path(config_dir) / "plan.json")).release.name
    except PlanFileError as exc:
        raise KeptError(str(exc)) from exc
    if wanted:
        if wanted not in kept:
            raise KeptError(
                f"no server has answered under release {wanted} here; there are: {', '.join(kept) or 'none'}"
            )
        return wanted
    others = [name for name in kept if name != current]
    if not others:
        raise KeptError(
            f"release {current} is the only one whose servers have answered here: there is none to go back to"
        )
    return others[0]


def kept_plan(config_dir: str, release: str) -> Plan:
    """Return the plan of a kept release, with the servers that have copies, as they answered. Raises PlanFileError."""
    base = folder_of(config_dir, release)
    plan = read_plan(str(base / "plan.json"))
    instances = []
    for item in plan.instances:
        text = read_text(str(base / str(item.gpu) / f"{item.gpu}.json"))
        if text is not None:
            data = {**json.loads(text), "canary": item.canary}
            instances.append(instance_from_dict(data))
    return Plan(plan.host, plan.device, plan.model, plan.release, instances, plan.target, plan.schema)


def kept_files(config_dir: str, release: str, instance: Instance) -> tuple[list[FileSpec], str]:
    """Return a server's files as they answered under a release, and their digest."""
    base = folder_of(config_dir, release) / str(instance.gpu)
    wanted = {
        f"{instance.gpu}.env": (instance.environment_file, 0o600),
        f"{instance.gpu}.secrets": (str(Path(config_dir) / f"{instance.gpu}.secrets"), 0o600),
        f"{instance.gpu}.json": (str(Path(config_dir) / f"{instance.gpu}.json"), 0o600),
        os.path.basename(instance.unit_file): (instance.unit_file, 0o644),
    }
    specs, digest = [], ""
    for name, (path, mode) in wanted.items():
        text = read_text(str(base / name))
        if text is None:
            continue
        specs.append(FileSpec(path, text, mode, secret=name.endswith(".secrets")))
        if name.endswith(".env"):
            digest = next((line[len(DIGEST) :] for line in text.splitlines() if line.startswith(DIGEST)), "")
    return specs, digest


def forget(config_dir: str, release: str) -> None:
    """Remove a release's copies."""
    shutil.rmtree(folder_of(config_dir, release), ignore_errors=True)
