# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""How many compilers work at once, in which order, and by how much each gives way. Run by the engine's own Python."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_calls import Module

SECONDS = {"sampling": 104, "_sm90": 95, "batch_prefill": 53, "norm": 50, "batch_decode": 40}  # H200 host, 16 cores
LONG = 90


def workers_for(modules: int, cores: int, available: int, per_worker: int, wish: int = 0) -> tuple[int, int]:
    """Return how many modules to build at once, and how many compilers each may run: memory is the hard limit."""
    room = max(1, available // max(1, per_worker))
    workers = max(1, min(modules, wish or min(cores, room)))
    return workers, max(1, min(cores, room // workers))


def weight(module: Module) -> int:
    """Return about how many seconds a module takes on a large machine: the longest are begun first."""
    if module.spec is None:
        return 20
    return next((seconds for word, seconds in SECONDS.items() if word in module.name), 30)


def niceness(module: Module) -> int:
    """Return by how much a module gives way: to those that end last, and to those that a server cannot wait for."""
    return 0 if module.spec is None or weight(module) >= LONG else 5


def available_memory(meminfo: str = "/proc/meminfo") -> int:
    """Return how many bytes can be had without swapping; a container's limit counts too."""
    free = 1 << 62
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in Path(meminfo).read_text().splitlines() if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free


def split_compile() -> str:
    """Return nvcc's flag for optimising the kernels of one file side by side; "" where nvcc or the memory forbids it.

    For the modules that end last, when other cores are idle. It is no part of the build file, where a server that has
    no such flag would see a change.
    """
    jobs = int(os.environ.get("MAX_JOBS") or 1)
    if jobs < 2:
        return ""
    argv = [f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc", "--help"]
    try:  # the engine's Python runs this, where there is no Ansible and no run_command
        said = subprocess.run(argv, capture_output=True, text=True, check=False)  # pylint: disable=ansible-bad-function
    except OSError:
        return ""
    return f"--split-compile={jobs}" if "--split-compile " in said.stdout else ""
