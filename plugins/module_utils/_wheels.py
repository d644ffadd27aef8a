# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""A local wheel folder: does it hold every pinned package, for this Python and this machine?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.gpufleet.sglang.plugins.module_utils._lock import Pin, normalize_name, same_version

_LEGACY = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
_SDIST = (".tar.gz", ".zip", ".tar.bz2")


@dataclass(frozen=True)
class Target:
    """What a wheel has to fit."""

    python: tuple[int, int]  # (3, 11)
    machine: str  # x86_64, aarch64
    glibc: tuple[int, int] | None  # None = unknown: not judged


def parse_wheel(filename: str) -> tuple[str, str, str, str, str] | None:
    """Split a wheel's name into name, version, python tags, abi tags, platform tags; None when it is no wheel."""
    if not filename.endswith(".whl"):
        return None
    parts = filename[:-4].split("-")
    if len(parts) not in (5, 6):
        return None
    version = parts[1] if "+" in parts[1] else parts[1].replace("_", "+", 1)
    return normalize_name(parts[0]), version, parts[-3], parts[-2], parts[-1]


def misfit(filename: str, target: Target) -> str | None:
    """Say why a wheel can't be installed here (other Python, other machine, newer glibc), or None."""
    parsed = parse_wheel(filename)
    if parsed is None:
        return "not a wheel"
    _name, _version, pythons, abis, platforms = parsed
    if not any(_python_fits(p, a, target.python) for p in pythons.split(".") for a in abis.split(".")):
        return f"is for {pythons}, this Python is {target.python[0]}.{target.python[1]}"
    reasons = [_platform_misfit(platform, target) for platform in platforms.split(".")]
    return None if None in reasons else str(reasons[0])


def _python_fits(tag: str, abi: str, python: tuple[int, int]) -> bool:
    match = re.match(r"^(py|cp)(\d)(\d*)$", tag)
    if match is None or int(match[2]) != python[0] or re.match(r"^cp\d+t", abi):  # cp313t: free-threaded builds
        return False
    minor = int(match[3]) if match[3] else None
    if match[1] == "py":
        return minor is None or minor <= python[1]
    if abi == "abi3":
        return minor is None or minor <= python[1]
    return minor is None or minor == python[1]


def _platform_misfit(platform: str, target: Target) -> str | None:
    if platform == "any":
        return None
    if not platform.endswith("_" + target.machine):
        return f"is for {platform}, this machine is {target.machine}"
    base = platform[: -len(target.machine) - 1]
    match = re.match(r"^manylinux_(\d+)_(\d+)$", base)
    needed = (int(match[1]), int(match[2])) if match else _LEGACY.get(base)
    if needed is None:
        return None if base == "linux" else f"is for {platform}, this is a glibc system"
    if target.glibc is not None and needed > target.glibc:
        return f"needs glibc {needed[0]}.{needed[1]}, this machine has {target.glibc[0]}.{target.glibc[1]}"
    return None


def wheel_problems(pins: Sequence[Pin], files: Sequence[str], target: Target | None) -> list[str]:
    """Say for which pins the folder has no file, and which files don't fit: at most one line each, all named.

    Pins with an environment marker may not be needed here and are left to the installer.
    """
    missing: list[str] = []
    misfits: list[str] = []
    for pin in pins:
        if pin.marker:
            continue
        named = matching_files(pin, files)
        if not named:
            other = sorted(f for f in files if (parse_wheel(f) or ("",))[0] == pin.name)
            hint = f" (there is {', '.join(other[:3])})" if other else ""
            missing.append(f"{pin.name}=={pin.version}{hint}")
            continue
        wheels = [name for name in named if name.endswith(".whl")]
        if target is None or len(wheels) < len(named):
            continue
        reasons = [misfit(name, target) for name in wheels]
        if None not in reasons:
            misfits.append(f"{wheels[0]} {reasons[0]}")
    problems = [f"no file for {len(missing)} of {len(pins)} pinned packages: {', '.join(missing)}"] if missing else []
    return problems + ([f"{len(misfits)} file(s) don't fit: {'; '.join(misfits)}"] if misfits else [])


def matching_files(pin: Pin, files: Sequence[str]) -> list[str]:
    """Return the files of a folder that hold this pin, whatever machine they are for; sorted."""
    found = []
    for name in files:
        parsed = parse_wheel(name)
        if parsed is not None:
            if parsed[0] == pin.name and same_version(pin.version, parsed[1]):
                found.append(name)
            continue
        stem = next((name[: -len(end)] for end in _SDIST if name.endswith(end)), None)
        if stem and "-" in stem:
            dist, _sep, version = stem.rpartition("-")
            if normalize_name(dist) == pin.name and same_version(pin.version, version):
                found.append(name)
    return sorted(found)


def bytes_of(pins: Sequence[Pin], sizes: Mapping[str, int]) -> int:
    """Return the size of the files that would be installed: the largest candidate of each pin."""
    names = list(sizes)
    return sum(max((sizes[name] for name in matching_files(pin, names)), default=0) for pin in pins)
