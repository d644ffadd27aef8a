# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What would make every build fail, seen before anything is imported. Run by the engine's own Python."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import sys
from collections.abc import Sequence

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding


def obstacles(cache_dirs: Sequence[str]) -> list[Finding]:
    """Return what would make every build fail, or the import itself."""
    found = []
    user = pwd.getpwuid(os.geteuid()).pw_name
    bad: list[str] = []
    for folder in cache_dirs:
        if any(folder.startswith(f"{outer}/") for outer in bad):
            continue  # said already
        probe = f"{folder}/.gpufleet-jit.{os.getpid()}"
        try:
            os.makedirs(folder, exist_ok=True)
            with open(probe, "wb") as file:
                file.write(b"\0" * 65536)
        except OSError as exc:
            found.append(_no_write(folder, user, exc))
            bad.append(folder)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(probe)
    return found


def tools() -> list[Finding]:
    """Return which tools building needs and lacks."""
    found = []
    path = os.environ.get("PATH", "")
    if not shutil.which("ninja"):
        text = f"ninja is not on the unit's PATH ({path})"
        found.append(Finding("ninja_missing", text, f"Install it: {sys.executable} -m pip install ninja"))
    home = os.environ.get("CUDA_HOME", "")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or ""
    if not nvcc or not os.access(nvcc, os.X_OK):
        text = f"there is no compiler at {nvcc}" if nvcc else "CUDA_HOME is not set and no nvcc is on PATH"
        found.append(Finding("nvcc_missing", text, "Run the deploy with --tags toolkit,cccl"))
    compiler = os.environ.get("CXX") or "c++"
    if not shutil.which(compiler):
        found.append(Finding("cxx_missing", f"{compiler} is not on the unit's PATH", "Install g++, or correct CXX"))
    return found


def _no_write(folder: str, user: str, exc: OSError) -> Finding:
    text = f"the kernel cache {folder} cannot be written to by {user}: {exc.strerror}"
    with contextlib.suppress(OSError, KeyError):
        text += f" (it belongs to {pwd.getpwuid(os.stat(folder).st_uid).pw_name})"
    if exc.errno == 28:
        return Finding("no_space", text, "Free space on that file system")
    return Finding("cache_readonly", text, f"Mount it writable, or chown {user} {folder}")
