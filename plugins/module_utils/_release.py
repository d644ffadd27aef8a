# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What a release is: its inputs, its folder's state, its record."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._lock import (
    LockError,
    Pin,
    lock_version,
    parse_lock,
    same_version,
)

RECORD = "gpufleet-release.json"  # written last: the release is complete
PART = "gpufleet-release.part"  # written first: the folder is ours and unfinished
SCHEMA = 1
INTERESTING = (
    "sglang",
    "torch",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "sglang-kernel",
    "sgl-kernel",
    "transformers",
    "triton",
    "apache-tvm-ffi",
    "cuda-toolkit",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
    "ninja",
)
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,127}$")


class ReleaseError(Exception):
    """The release can't be made or used; `problems` are all the reasons found, each with its remedy."""

    def __init__(self, problems: Sequence[str], log: str = "") -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)
        self.log = log


@dataclass(frozen=True)
class Spec:
    """What the user wants."""

    name: str = ""
    releases_dir: str = "/opt/sglang/releases"
    venv: str = ""
    python: str = ""
    version: str = ""
    requirements: tuple[str, ...] = ()
    lock: str = ""
    wheel_dir: str = ""
    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    installer: str = "auto"
    options_dir: str = "/etc/sglang"
    device: str = "cuda"
    read_options: bool = True

    @property
    def existing(self) -> bool:
        """True when the user brings a venv: it is only verified."""
        return bool(self.venv)

    @property
    def release_name(self) -> str:
        """The release's name; by default the version, or the folder of the user's venv."""
        return self.name or (Path(self.venv).name if self.venv else self.version)

    @property
    def folder(self) -> str:
        """The venv."""
        return self.venv.rstrip("/") or f"{self.releases_dir.rstrip('/')}/{self.release_name}"

    @property
    def python_path(self) -> str:
        """The venv's interpreter."""
        return f"{self.folder}/bin/python"

    @property
    def log_path(self) -> str:
        """Where the installer's output is kept."""
        return f"{self.folder}.log"

    @property
    def options_path(self) -> str:
        """The cached option list."""
        return f"{self.options_dir.rstrip('/')}/options-{self.release_name}.json"


def check_spec(spec: Spec) -> list[Pin]:
    """Check the inputs against each other and return the lock's pins; raises ReleaseError with all problems."""
    problems: list[str] = []
    pins: list[Pin] = []
    if spec.lock.strip():
        try:
            pins = parse_lock(spec.lock)
        except LockError as exc:
            problems += [f"lock: {problem}" for problem in exc.problems]
    elif spec.lock:
        problems.append("lock: it is empty")
    pinned = lock_version(pins, "sglang")
    if pins and not pinned:
        problems.append("lock: it doesn't pin sglang; a lock is complete")
    if pinned and spec.version and not same_version(spec.version, pinned):
        problems.append(f"lock: it pins sglang {pinned}, but the version asked for is {spec.version}: make them agree")
    if spec.requirements and spec.lock and not spec.existing:
        problems.append("requirements and lock exclude each other: a lock is complete, add the packages to it")
    if not spec.existing and not spec.lock and not spec.version:
        problems.append("one of version, lock or venv is needed")
    if not spec.release_name and (spec.lock or spec.existing):
        problems.append("name is needed with a lock and no version")
    if spec.release_name and not _NAME.match(spec.release_name):
        problems.append(
            f"name {spec.release_name!r}: letters, digits and ._+- only, and no dot or dash at its beginning"
        )
    for label, path in (("venv", spec.venv), ("wheel_dir", spec.wheel_dir), ("releases_dir", spec.releases_dir)):
        if path and not path.startswith("/"):
            problems.append(f"{label} {path!r}: an absolute path is needed")
    if problems:
        raise ReleaseError(problems)
    return pins


def inputs_of(spec: Spec, pins: Sequence[Pin]) -> dict[str, Any]:
    """Return what makes two releases the same, in plain data."""
    if pins:
        return {
            "lock": sorted(f"{pin.name}=={pin.version}" + (f" ; {pin.marker}" if pin.marker else "") for pin in pins)
        }
    return {"version": spec.version, "requirements": sorted(spec.requirements)}


def fingerprint_of(inputs: Mapping[str, Any], python_minor: str) -> str:
    """Return a short hash of a release's inputs and its Python."""
    text = json.dumps([SCHEMA, python_minor, inputs], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def expected_packages(spec: Spec, pins: Sequence[Pin]) -> dict[str, str]:
    """Return what is known beforehand about the packages to come."""
    return {pin.name: pin.version for pin in pins} if pins else {"sglang": spec.version}


@dataclass(frozen=True)
class Record:
    """The content of gpufleet-release.json."""

    name: str
    fingerprint: str
    inputs: dict[str, Any]
    python: str  # 3.11
    packages: dict[str, str]
    installer: str  # pip | uv
    installed_at: str  # UTC, ISO 8601
    seconds: float = 0.0
    schema: int = SCHEMA

    def to_json(self) -> str:
        """Return the record's text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Folder:
    """A release's folder as found."""

    state: str  # absent | complete | partial | foreign | damaged
    record: Record | None = None
    packages: dict[str, str] = field(default_factory=dict)


def look(folder: str) -> Folder:
    """Look at a release's folder: only a readable record makes it complete, only our marker makes it ours to remove."""
    path = Path(folder)
    if not path.is_dir():
        return Folder("foreign" if path.exists() or path.is_symlink() else "absent")
    try:
        data = json.loads((path / RECORD).read_text(encoding="utf-8"))
        if data.get("schema") == SCHEMA:
            record = Record(**data)
            if record.fingerprint != fingerprint_of(record.inputs, record.python):
                return Folder("damaged")
            return Folder("complete", record, record.packages)
        return Folder("damaged")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, AttributeError):
        return Folder("damaged")
    if (path / PART).exists():
        return Folder("partial")
    return Folder("foreign" if any(path.iterdir()) else "absent")


def refusal(spec: Spec, pins: Sequence[Pin], found: Folder, python_minor: str = "") -> str | None:
    """Say why this folder can't become or serve as the release asked for, or None.

    python_minor: of the interpreter the user named; "" when any will do.
    """
    where = f"release {spec.release_name}: {spec.folder}"
    if found.state == "foreign":
        return (
            f"{where} exists and was not made by this collection. Remedy: choose another release name or releases_dir; "
            "to use a venv you made yourself, name it as the existing venv (sglang_server_venv)"
        )
    if found.state == "damaged":
        return (
            f"{where}/{RECORD} can't be read or was changed. Remedy: choose another release name, "
            "or remove the folder when no server runs from it"
        )
    if found.record is None:
        return None
    changes = _changes(found.record.inputs, inputs_of(spec, pins))
    if python_minor and python_minor != found.record.python:
        changes.append(f"Python {found.record.python} -> {python_minor}")
    if not changes:
        return None
    shown = changes[:10] + ([f"and {len(changes) - 10} more"] if len(changes) > 10 else [])
    return (
        f"{where} is complete and was made from other inputs: {'; '.join(shown)}. A release is immutable, "
        "servers may be running from it. Remedy: choose a new release name (sglang_server_release)"
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    if ("lock" in before) != ("lock" in after):
        return [f"{'a lock' if 'lock' in before else 'no lock'} -> {'a lock' if 'lock' in after else 'no lock'}"]
    changes = []
    if before.get("version") != after.get("version"):
        changes.append(f"sglang {before.get('version')} -> {after.get('version')}")
    key = "lock" if "lock" in after else "requirements"
    old, new = _by_name(before.get(key, ())), _by_name(after.get(key, ()))
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            changes.append(f"{old.get(name) or 'no ' + name} -> {new.get(name) or 'no ' + name}")
    return changes


def _by_name(lines: Sequence[str]) -> dict[str, str]:
    names: dict[str, list[str]] = {}
    for line in lines:
        names.setdefault(re.split(r"[\s=<>!~;\[]", line, maxsplit=1)[0], []).append(line)
    return {name: " or ".join(sorted(found)) for name, found in names.items()}


def packages_diff(spec: Spec, before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return Ansible's diff of the packages in a release."""

    def text(packages: Mapping[str, str]) -> str:
        return "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))

    return {
        "before_header": spec.folder,
        "after_header": spec.folder,
        "before": text(before),
        "after": text(after),
    }
