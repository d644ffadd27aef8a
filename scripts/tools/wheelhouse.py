"""Build the wheel folder from which a test host without network installs its engine, as an air-gapped user would.

The controller's pip downloads exactly the lock's pins for the host's interpreter (Debian 12's Python 3.11),
whatever Python the controller has, and builds the local projects (the CPU shim, or the stand-in engine).
A folder is finished when its .complete file, written last, holds the fingerprint of everything that went in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

TOP = Path(__file__).resolve().parent.parent.parent
GLIBC = [36, 35, 34, 33, 32, 31, 28, 27, 26, 24, 17, 12, 5]  # Debian 12 has 2.36
CUDA_BUILD_SIZE = "about 3 GB to download and 6 GB in the host"


class WheelhouseError(Exception):
    """The folder can't be built; the message says why and what to do."""


@dataclass(frozen=True)
class Recipe:
    """What goes into one folder."""

    folder: Path
    lock: Path
    projects: tuple[Path, ...]  # local projects, each named by a pin of the lock
    also: tuple[str, ...] = ()  # other versions of pinned packages, as name==version


# The older engine runs on the newer one's dependencies: upgrade and rollback are tested between the two.
CPU_ENGINE = Recipe(
    TOP / ".cache/wheels",
    TOP / "tests/cpu-engine/requirements.lock",
    (TOP / "tests/cpu-engine/shim",),
    ("sglang==0.5.22",),
)
STANDIN = Recipe(
    TOP / ".cache/wheels-standin", TOP / "tests/standin-engine/requirements.lock", (TOP / "tests/standin-engine",)
)


def read_pins(text: str) -> dict[str, str]:
    """Return {canonical name: version} of a lock's lines; raises WheelhouseError for a line that is no `==` pin."""
    pins: dict[str, str] = {}
    for raw in text.splitlines():
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        name, equals, version = line.partition("==")
        if not equals or not version.strip() or ";" in version:
            raise WheelhouseError(f"not a pin: {raw.strip()!r}")
        pins[str(canonicalize_name(name.strip()))] = version.strip()
    return pins


def missing_pins(pins: dict[str, str], wheels: Sequence[str]) -> list[str]:
    """Return the pins that no wheel satisfies; a pin without a local version takes any (2.13.0: 2.13.0+cpu)."""
    have: dict[str, list[Version]] = {}
    for wheel in wheels:
        name, version, _build, _tags = parse_wheel_filename(wheel)
        have.setdefault(str(name), []).append(version)

    def matches(pin: str, found: Version) -> bool:
        want = Version(pin)
        return found == want or (want.local is None and Version(found.public) == want)

    return [f"{name}=={pin}" for name, pin in pins.items() if not any(matches(pin, v) for v in have.get(name, []))]


def is_cuda_build(metadata: dict[str, Any]) -> bool:
    """Say whether a torch distribution, by its metadata, brings CUDA along."""
    if "+cpu" in metadata["version"]:
        return False
    names = (req.replace("_", "-").lower() for req in metadata.get("requires_dist", []) if "extra ==" not in req)
    return any(name.startswith(("nvidia-", "cuda-")) for name in names)


def target_options(python: str, machine: str) -> list[str]:
    """Return pip's options that choose wheels for CPython `python` on a Debian 12 of this machine's architecture."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC]
    platforms += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    tag = "cp" + python.replace(".", "")
    options = ["--only-binary=:all:", "--no-deps", "--implementation=cp", f"--python-version={python}"]
    options += [f"--abi={abi}" for abi in (tag, "abi3", "none")]
    return options + [f"--platform={name}" for name in platforms]


def fingerprint(recipe: Recipe, python: str, index: str) -> str:
    """Return a digest of everything that decides what the folder holds."""
    digest = hashlib.sha256(f"{python}|{index}|{platform.machine()}".encode())
    files = [Path(__file__), recipe.lock]
    for project in recipe.projects:
        files += sorted(p for p in project.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    for path in files:
        digest.update(f"{path.relative_to(TOP)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def is_complete(folder: Path, want: str) -> bool:
    """Say whether the folder was finished for this fingerprint and still holds every file, whole by its size."""
    try:
        seal = json.loads((folder / ".complete").read_text(encoding="utf-8"))
        return seal["fingerprint"] == want and all(
            (folder / name).stat().st_size == size for name, size in seal["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def pip(*args: str, capture: bool = False) -> str:
    """Run the controller's pip; raises WheelhouseError with its last lines."""
    argv = [sys.executable, "-m", "pip", *args]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = [line for line in done.stderr.splitlines() if "WARNING" not in line][-6:]
        raise WheelhouseError(f"pip {args[0]} failed:\n  " + "\n  ".join(tail))
    return done.stdout if capture else ""


def torch_metadata(pin: str, target: list[str], index: str) -> dict[str, Any]:
    """Ask pip which torch it would take, without downloading the wheel."""
    where = ["--index-url", index] if index else []
    report = pip(
        "install", "--dry-run", "--quiet", "--ignore-installed", "--target=unused", "--use-feature=fast-deps",
        "--report=-", *target, *where, f"torch=={pin}", capture=True,
    )  # fmt: skip
    metadata: dict[str, Any] = json.loads(report)["install"][0]["metadata"]
    return metadata


def build(recipe: Recipe, python: str, index: str) -> None:
    """Fill recipe.folder; an interrupted run keeps its downloads for the next one, and is never taken for finished."""
    pins = read_pins(recipe.lock.read_text(encoding="utf-8"))
    target = target_options(python, platform.machine())
    part = recipe.folder.with_name(recipe.folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    _reuse(recipe.folder, part)
    for project in recipe.projects:
        pip("wheel", "--quiet", "--no-deps", f"--wheel-dir={part}", str(project))
    local = {str(parse_wheel_filename(p.name)[0]) for p in part.glob("*.whl")} & {
        str(canonicalize_name(_project_name(project))) for project in recipe.projects
    }
    remote = {name: pin for name, pin in pins.items() if name not in local}
    if "torch" in remote:
        pin = remote.pop("torch")
        metadata = torch_metadata(pin, target, index)
        if is_cuda_build(metadata):
            raise WheelhouseError(
                f"pip finds no CPU build of torch {pin} for Python {python} here: it would take {metadata['version']},"
                f" a CUDA build ({CUDA_BUILD_SIZE}).\n"
                "Nothing was downloaded. Name an index that has CPU builds: DEMO_TORCH_INDEX=URL make demo"
            )
        where = ["--index-url", index] if index else []
        pip("download", "--quiet", f"--dest={part}", *target, *where, f"torch=={pin}")
    if remote:
        pip("download", "--quiet", f"--dest={part}", *target, *(f"{n}=={v}" for n, v in remote.items()))
    for pin in recipe.also:
        pip("download", "--quiet", f"--dest={part}", *target, pin)
    also = read_pins("\n".join(recipe.also))
    wheels = _wanted(part, pins) + _wanted(part, also)
    lost = missing_pins(pins, [p.name for p in wheels]) + missing_pins(also, [p.name for p in wheels])
    if lost:
        raise WheelhouseError(f"not in the folder after the download: {', '.join(lost)}")
    _publish(recipe.folder, wheels, fingerprint(recipe, python, index))
    shutil.rmtree(part)


def _reuse(folder: Path, part: Path) -> None:
    """Offer pip the wheels that an earlier run finished, so that a changed lock downloads only what is new."""
    try:
        sealed = json.loads((folder / ".complete").read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return
    for name, size in sealed.items():
        wheel = folder / name
        if wheel.exists() and wheel.stat().st_size == size and not (part / name).exists():
            (part / name).hardlink_to(wheel)


def _project_name(project: Path) -> str:
    for line in (project / "pyproject.toml").read_text(encoding="utf-8").splitlines():
        key, _equals, value = line.partition("=")
        if key.strip() == "name":
            return value.strip().strip('"')
    raise WheelhouseError(f"{project}/pyproject.toml names no project")


def _wanted(part: Path, pins: dict[str, str]) -> list[Path]:
    """Leave out what an interrupted run for an older lock left behind."""
    names = {p: str(parse_wheel_filename(p.name)[0]) for p in sorted(part.glob("*.whl"))}
    return [p for p, n in names.items() if n in pins and not missing_pins({n: pins[n]}, [p.name])]


def _publish(folder: Path, wheels: list[Path], print_: str) -> None:
    """Move the wheels in; the folder itself stays, as a running host may have it bound."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".complete").unlink(missing_ok=True)
    keep = {p.name for p in wheels}
    for old in folder.glob("*.whl"):
        if old.name not in keep:
            old.unlink()
    for wheel in wheels:
        wheel.replace(folder / wheel.name)
    seal = {"fingerprint": print_, "files": {name: (folder / name).stat().st_size for name in sorted(keep)}}
    temporary = folder / ".complete.part"
    temporary.write_text(json.dumps(seal, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / ".complete")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="scripts/wheelhouse", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--standin", action="store_true", help="the stand-in engine instead of the real one on CPU")
    parser.add_argument("--python", default="3.11", help="Python version of the host (default: 3.11, Debian 12's)")
    args = parser.parse_args(argv)
    recipe = STANDIN if args.standin else CPU_ENGINE
    index = os.environ.get("DEMO_TORCH_INDEX", "")
    start = time.monotonic()
    try:
        if is_complete(recipe.folder, fingerprint(recipe, args.python, index)):
            return 0
        print(f"wheelhouse: filling {recipe.folder.relative_to(TOP)}", file=sys.stderr)
        build(recipe, args.python, index)
    except WheelhouseError as exc:
        print(f"wheelhouse: {exc}", file=sys.stderr)
        return 1
    size = sum(p.stat().st_size for p in recipe.folder.glob("*.whl"))
    count = len(list(recipe.folder.glob("*.whl")))
    print(f"wheelhouse: {count} wheels, {size / 1e6:.0f} MB, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
