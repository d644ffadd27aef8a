# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What a host is like, GPUs apart: disks, memory, tools, systemd, Python; no look may hang."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import TIMED_OUT, Runner

BUILD_TOOLS = ("gcc", "g++", "ninja", "nvcc")
DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
PYTHONS = ("python3.12", "python3.11", "python3")
_DISK = """
import os, sys
for path in sys.argv[1:]:
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there) or "/"
    s = os.statvfs(there)
    print(path, there, s.f_bavail * s.f_frsize >> 20, s.f_blocks * s.f_frsize >> 20, sep="\\t", flush=True)
"""


@dataclass(frozen=True)
class Host:
    """Where to look, replaced in tests: a runner for commands, and the roots of the kernel's file systems."""

    runner: Runner
    proc: str = "/proc"
    dev: str = "/dev"
    cgroup: str = "/sys/fs/cgroup"
    search_path: str = os.defpath


def disks(host: Host, paths: Sequence[str], timeout: float = 20.0) -> list[dict[str, Any]]:
    """Return free and total MiB of the file system each path lies on or would lie on; None where the mount hangs."""
    if not paths:
        return []
    done = host.runner.run([sys.executable, "-c", _DISK, *paths], timeout=timeout)
    said = {}
    for line in done.stdout.splitlines():
        cells = line.split("\t")
        if len(cells) == 4:
            said[cells[0]] = {"exists": cells[1], "free_mib": int(cells[2]), "total_mib": int(cells[3])}
    unknown = {"exists": None, "free_mib": None, "total_mib": None}
    return [
        {"path": path, **said.get(path, unknown), "hung": path not in said and done.rc == TIMED_OUT} for path in paths
    ]


def memory(host: Host) -> dict[str, int | None]:
    """Return total and available RAM and the tightest cgroup limit, in MiB."""
    values: dict[str, int] = {}
    for line in _read(f"{host.proc}/meminfo").splitlines():
        cells = line.replace(":", " ").split()
        if len(cells) >= 2 and cells[1].isdigit():
            values[cells[0]] = int(cells[1]) // 1024
    return {
        "total_mib": values.get("MemTotal"),
        "available_mib": values.get("MemAvailable"),
        "cgroup_limit_mib": cgroup_limit(host),
    }


def cgroup_limit(host: Host) -> int | None:
    """Return the tightest memory limit from this process's control group up to the root, in MiB; None without one."""
    limits = []
    for line in _read(f"{host.proc}/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            base, name = Path(host.cgroup), "memory.max"
        elif "memory" in controllers.split(","):
            base, name = Path(host.cgroup) / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each != base and base not in each.parents:
                break
            text = _read(str(each / name)).strip()
            # v1 says "no limit" with a number near 2**63
            if text.isdigit() and int(text) < 2**60:
                limits.append(int(text) >> 20)
    return min(limits, default=None)


def shared_memory_mib(host: Host) -> int | None:
    """Return the size of /dev/shm in MiB, None when there is none."""
    try:
        state = os.statvfs(f"{host.dev}/shm")
    except OSError:
        return None
    return state.f_blocks * state.f_frsize >> 20


def tools(host: Host, names: Sequence[str] = BUILD_TOOLS) -> dict[str, str | None]:
    """Return where each program lies on the search path."""
    return {name: shutil.which(name, path=host.search_path) for name in names}


def systemd(host: Host) -> dict[str, Any]:
    """Say whether systemd is PID 1, and its version."""
    version = None
    done = host.runner.run(["systemctl", "--version"], timeout=10.0)
    words = done.stdout.split()
    if done.rc == 0 and len(words) > 1 and words[1].isdigit():
        version = int(words[1])
    return {"pid1": _read(f"{host.proc}/1/comm").strip() == "systemd", "version": version}


def pythons(host: Host, names: Sequence[str] = PYTHONS) -> list[dict[str, Any]]:
    """Return the interpreters on the search path; a shim that does not run has no version."""
    found = []
    for name in names:
        path = shutil.which(name, path=host.search_path)
        if path is None:
            continue
        done = host.runner.run([path, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"], timeout=20.0)
        version = done.stdout.strip() if done.rc == 0 else None
        found.append({"name": name, "path": path, "version": version or None})
    return found


def driver_libraries(host: Host, names: Sequence[str] = DRIVER_LIBRARIES) -> dict[str, dict[str, Any]]:
    """Return the driver's libraries the loader would take, with versions, and whether the loader could be asked."""
    for program in ("ldconfig", "/sbin/ldconfig"):
        done = host.runner.run([program, "-p"], timeout=20.0)
        if done.rc == 0:
            break
    found: dict[str, dict[str, Any]] = {name: {"known": done.rc == 0, "path": None, "version": None} for name in names}
    for line in done.stdout.splitlines() if done.rc == 0 else []:
        entry, _arrow, path = line.partition(" => ")
        name = (entry.split() or [""])[0]
        if name in found and path and found[name]["path"] is None:
            # libcuda.so.1 is a link to libcuda.so.580.95.05: the file's name is the driver's version
            version = Path(os.path.realpath(path.strip())).name.partition(".so.")[2]
            found[name].update(path=path.strip(), version=version if "." in version else None)
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
