# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What an interpreter is and which distributions it sees, asked of the interpreter itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ansible_collections.gpufleet.sglang.plugins.module_utils._lock import normalize_name
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._wheels import Target

OLDEST = (3, 11)  # SGLang's Requires-Python
CANDIDATES = ("python3.12", "python3.11", "python3")

# The files the engine's parser is built from are only looked at (size and time), not imported.
SCRIPT = r"""
import hashlib, importlib.util, json, os, platform, sys
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (ValueError, OSError):
    libc = ""
def exists(name):
    try:
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None  # an emptied folder that was left behind has no origin
    except (ImportError, ValueError):
        return False
out = {"version": list(sys.version_info[:3]), "executable": sys.executable, "machine": platform.machine(), "libc": libc,
       "ensurepip": exists("ensurepip"), "venv": exists("venv"), "packages": {}, "engine": "", "fingerprint": ""}
if "packages" in sys.argv[1:]:
    import importlib.metadata as md
    for dist in md.distributions():
        name = dist.metadata["Name"]
        if name:
            out["packages"].setdefault(name, dist.version)
    try:
        spec = importlib.util.find_spec("sglang")
    except (ImportError, ValueError):
        spec = None
    root = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    if root:
        seen = hashlib.sha256()
        wanted = [root, os.path.join(root, "srt"), os.path.join(root, "cli")]
        wanted += [os.path.join(root, "srt", part) for part in ("parser", "function_call")]
        for top, folders, _files in os.walk(os.path.join(root, "srt", "arg_groups")):
            folders.sort()
            wanted.append(top)
        for folder in wanted:
            for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    stat = os.stat(path)
                    line = "%s %d %d\n" % (os.path.relpath(path, root), stat.st_size, int(stat.st_mtime))
                    seen.update(line.encode())
        out["engine"], out["fingerprint"] = root, seen.hexdigest()[:16]
print(json.dumps(out))
"""


@dataclass(frozen=True)
class Interpreter:
    """One interpreter that runs."""

    path: str
    version: tuple[int, int, int]
    machine: str = "x86_64"
    glibc: tuple[int, int] | None = None
    ensurepip: bool = True
    venv: bool = True
    packages: Mapping[str, str] = field(default_factory=dict)  # normalised name -> version
    engine: str = ""  # folder of the package sglang
    fingerprint: str = ""  # of the files the engine's parser is built from

    @property
    def minor(self) -> str:
        """Its language version: 3.11."""
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def target(self) -> Target:
        """What wheels have to fit."""
        return Target(self.version[:2], self.machine, self.glibc)


def probe(runner: Runner, python: str, *, packages: bool = False) -> Interpreter | str:
    """Run an interpreter and ask it; returns the reason in one line when it doesn't run (a dead shim, say)."""
    argv = [python, "-I", "-c", SCRIPT] + (["packages"] if packages else [])
    done = runner.run(argv, timeout=60.0, cwd="/")
    if done.rc != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        # a traceback's cause is its last line; a shell's or a shim's message is its first
        cause = (lines[-1] if "Traceback" in lines[0] else lines[0]) if lines else "does not run"
        return f"{cause if cause.startswith(python) else f'{python}: {cause}'} (rc {done.rc})"
    try:
        data = json.loads(done.stdout.strip().splitlines()[-1])
        version = tuple(data["version"])
        return Interpreter(
            path=python,
            version=(int(version[0]), int(version[1]), int(version[2])),
            machine=data["machine"],
            glibc=_glibc(data["libc"]),
            ensurepip=data["ensurepip"],
            venv=data["venv"],
            packages={normalize_name(name): str(found) for name, found in data["packages"].items()},
            engine=data["engine"],
            fingerprint=data["fingerprint"],
        )
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        return f"{python}: not a Python that answers ({exc})"


def _glibc(text: str) -> tuple[int, int] | None:
    parts = text.replace("glibc", "").strip().split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit() else None


def find_interpreters(
    runner: Runner, python: str, oldest: tuple[int, int] = OLDEST
) -> tuple[list[Interpreter], list[str]]:
    """Return the interpreters that run and are new enough, in order of preference, and why the others aren't.

    python: the one the user chose; "" tries the usual names.
    """
    good: list[Interpreter] = []
    bad: list[str] = []
    for candidate in [python] if python else CANDIDATES:
        found = probe(runner, candidate)
        if isinstance(found, str):
            bad.append(found)
        elif found.version[:2] < oldest:
            bad.append(f"{candidate}: Python {found.minor}, {oldest[0]}.{oldest[1]} or newer is needed")
        else:
            good.append(found)
    return good, bad


def of_interest(packages: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the named packages that are installed."""
    return {name: packages[name] for name in names if name in packages}
