# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What else compiling kernels needs of a host: host compiler, ninja, Python.h, an architecture, caches, space."""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import SYSTEM_PATH, gcc_limit
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_look import Toolkit, minor
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import Python, read

MIB = 1024 * 1024
SPACE = {"trees": 64, "cache": 512, "scratch": 256}  # MiB
# The first nvcc that knows an architecture; a family target (f) came with 12.9.
FIRST = {(9, 0): (11, 8), (10, 0): (12, 8), (10, 3): (12, 9), (11, 0): (13, 0), (12, 0): (12, 8), (12, 1): (12, 9)}
FAMILY = (12, 9)
LAST_PINNED = (0, 6, 10)  # FlashInfer up to this never rewrites a build.ninja
_ARCH = re.compile(r"([0-9]+)\.([0-9])([af]?)")
CACHES = ("{0}/.cache/flashinfer", "{0}/flashinfer")


@dataclass(frozen=True)
class Needs:
    """What the servers run with: their PATH's parts, CC and CXX, their user, their caches."""

    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    cache_dirs: tuple[str, ...] = ()
    folder: str = ""  # of the composed trees


def unit_environment(python: Python, home: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that kernels are compiled in: the unit's, without what only a running server needs."""
    base = {
        "PATH": f"{os.path.dirname(python.path)}:{home}/bin:{SYSTEM_PATH}"
        if home
        else f"{os.path.dirname(python.path)}:{SYSTEM_PATH}",
        "CUDA_HOME": home,
        "HOME": "/nonexistent",
        "LC_ALL": "C.UTF-8",
    }
    names = ("PATH", "CC", "CXX", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "LIBRARY_PATH")
    return {**base, **{key: str(extra[key]) for key in names if extra.get(key)}}


def archs_of(runner: Runner, given: Sequence[str], nvcc: str) -> tuple[list[str], list[Finding]]:
    """Return the architectures to prove, as 12.0f; given ones, else those of the host's GPUs."""
    found: list[str] = []
    problems = []
    for item in given:
        for text in str(item).split():
            if not _ARCH.fullmatch(text):
                hint = "separate them by blanks, without commas" if "," in text else "as 9.0a, 10.0f or 12.0f"
                problems.append(
                    Finding("arch_list_bad", f"architecture {text!r} cannot be read: {hint}", "Correct the list")
                )
            elif text not in found:
                found.append(text)
    if found or problems:
        return found, problems
    done = runner.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], timeout=30.0)
    caps = [line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"\d+\.\d", line.strip())]
    if done.rc != 0 or not caps:
        text = "no architecture to compile for: nvidia-smi names no GPU, and no list is given"
        return [], [Finding("arch_unknown", text, "Give one: -e cuda_toolkit_fix_arch_list=12.0f")]
    version = minor(nvcc) or (0, 0)
    for cap in caps:
        major = int(cap.split(".")[0])
        suffix = "" if major < 9 else "a" if major == 9 or version < FAMILY else "f"
        if f"{cap}{suffix}" not in found:
            found.append(f"{cap}{suffix}")
    return found, []


def arch_findings(archs: Sequence[str], nvcc: str, root: str) -> list[Finding]:
    """Compare architectures with what this nvcc knows."""
    version, found = minor(nvcc), []
    for arch in archs:
        match = _ARCH.fullmatch(arch)
        if not match or not version:
            continue
        first = FIRST.get((int(match.group(1)), int(match.group(2))), (0, 0))
        first = max(first, FAMILY) if match.group(3) == "f" else first
        if version < first:
            text = f"nvcc {nvcc} in {root} does not know {arch}: `Unsupported gpu architecture`"
            found.append(Finding("nvcc_too_old", text, f"Use a toolkit of CUDA {first[0]}.{first[1]} or newer"))
    return found


def tool_findings(runner: Runner, python: Python, toolkit: Toolkit | None, needs: Needs) -> list[Finding]:
    """Look for ninja, the host compiler and Python.h as a server would."""
    env = unit_environment(python, "", needs.environment)
    found = []
    if not shutil.which("ninja", path=env["PATH"]):
        text = f"ninja is not on the unit's PATH ({env['PATH']}): `No such file or directory: 'ninja'`"
        found.append(Finding("ninja_missing", text, f"Install it: {python.path} -m pip install ninja"))
    gcc, gxx = env.get("CC") or "gcc", env.get("CXX") or "c++"
    missing = [name for name in (gcc, gxx) if not shutil.which(name, path=env["PATH"])]
    if missing:
        text = f"{' and '.join(missing)} not on the unit's PATH: nvcc needs a host compiler, and linking c++"
        code = "gcc_missing" if gcc in missing else "cxx_missing"
        found.append(Finding(code, text, "Install gcc and g++ (Debian: g++), or correct CC and CXX"))
    elif toolkit:
        found += _gcc_age(runner, toolkit, gcc, env)
    if python.include and not Path(python.include, "Python.h").exists():
        text = f"{python.include} has no Python.h: Triton's launcher and FlashInfer's bindings do not build"
        found.append(
            Finding("python_h_missing", text, f"Install python{python.version}-dev, or use a Python that brings it")
        )
    return found


def _gcc_age(runner: Runner, toolkit: Toolkit, gcc: str, env: Mapping[str, str]) -> list[Finding]:
    limit = gcc_limit(toolkit.layout)
    program = shutil.which(gcc, path=env["PATH"])
    if not limit or not program:
        return []
    version = runner.run([program, "-dumpversion"], timeout=10.0).stdout.strip().split(".")[0]
    if not version.isdigit() or int(version) <= limit:
        return []
    older = next((f"{number}" for number in range(limit, 8, -1) if shutil.which(f"g++-{number}", path=env["PATH"])), "")
    text = f"{program} is version {version}, and the toolkit in {toolkit.root} takes none newer than {limit}"
    values = f"CC=gcc-{older or limit} and CXX=g++-{older or limit} in sglang_server_environment"
    remedy = f"Set {values}" if older else f"Install g++-{limit} and set {values}"
    return [Finding("gcc_too_new", f"{text}: `#error -- unsupported GNU version!`", remedy)]


def place_findings(needs: Needs, scratch: str, wheels: int = 0) -> list[Finding]:
    """Look at the folders that are written to: caches by the servers' user, trees, MiB of wheels and scratch by us."""
    found = []
    account = _account(needs.user)
    for folder in needs.cache_dirs:
        if account and os.path.isdir(folder) and not _writable(folder, *account):
            text = f"{folder} cannot be written to by {needs.user}: FlashInfer writes there even when all is built"
            found.append(Finding("cache_readonly", text, f"chown {needs.user} {folder}"))
    places = [
        (needs.folder, SPACE["trees"] + wheels, "set cuda_toolkit_fix_dir to a folder on another one"),
        (scratch, SPACE["scratch"], "set TMPDIR to a folder on another one"),
        *((folder, SPACE["cache"], "put the servers' caches on another one") for folder in needs.cache_dirs),
    ]
    for folder, wanted, other in places:
        free = _free(folder)
        if free is not None and free < wanted:
            text = f"{folder}: {free} MiB free, {wanted} needed: `No space left on device`"
            found.append(Finding("no_space", text, f"Free space on that file system, or {other}"))
    return found


def reach_findings(paths: Sequence[str], user: str) -> list[Finding]:
    """Tell which folders the servers' user cannot get into."""
    account = _account(user)
    if not account or account[0] == 0:
        return []
    found = []
    for path in paths:
        for folder in [*reversed(Path(path).parents), Path(path)]:
            try:
                status = folder.stat()
            except OSError:
                break
            shift = 6 if status.st_uid == account[0] else 3 if status.st_gid in account[1] else 0
            if folder.is_dir() and not (status.st_mode >> shift) & 1:
                text = f"{user} cannot get into {folder} (mode {status.st_mode & 0o7777:04o}), where the toolkit lies"
                found.append(Finding("not_reachable", text, f"chmod o+x {folder}, or use another folder"))
                break
    return list(dict.fromkeys(found))


def stale_ninja(cache_dirs: Sequence[str], home: str, flashinfer: str) -> list[str]:
    """Return build.ninja files that pin another CUDA_HOME for ever: FlashInfer <= 0.6.10 does not rewrite them."""
    version = tuple(int(part) for part in re.findall(r"\d+", flashinfer)[:3])
    if not version or version > LAST_PINNED:
        return []
    found = []
    for base in cache_dirs:
        for place in CACHES:
            for path in sorted(Path(place.format(base)).glob("*/*/cached_ops/*/build.ninja")):
                match = re.search(r"^cuda_home = (.*)$", read(path), re.MULTILINE)
                if match and match.group(1).strip() != home and not path.is_symlink():
                    found.append(str(path))
    return found


def ninja_finding(paths: Sequence[str], check: bool = False) -> list[Finding]:
    """Say what pinned files were found, and that they were deleted (or will be)."""
    if not paths:
        return []
    text = f"{len(paths)} build.ninja of an old FlashInfer pin another CUDA_HOME for ever, as {paths[0]}"
    done = "To be deleted (check mode)" if check else "Deleted"
    return [Finding("ninja_pinned", text, f"{done}: the next build writes them anew", WARNING)]


def _account(user: str) -> tuple[int, tuple[int, ...]] | None:
    try:
        entry = pwd.getpwnam(user)
        return entry.pw_uid, tuple(os.getgrouplist(user, entry.pw_gid))
    except (KeyError, OSError, ValueError):
        return None


def _writable(folder: str, uid: int, gids: tuple[int, ...]) -> bool:
    if uid == 0:
        return os.access(folder, os.W_OK)
    try:
        status = os.stat(folder)
    except OSError:
        return False
    shift = 6 if status.st_uid == uid else 3 if status.st_gid in gids else 0
    readonly = os.statvfs(folder).f_flag & os.ST_RDONLY
    return bool((status.st_mode >> shift) & 2) and not readonly


def _free(folder: str) -> int | None:
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize // MIB
