# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Damage in the caches of compiled kernels, as far as it can be seen without loading them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_elf import broken

# Where kernels are kept, by variable, below it: HOME holds far more than kernels.
FOLDERS = (
    ("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"),
    ("HOME", ".cache/flashinfer"),
    ("SGLANG_JIT_CACHE_DIR", ""),
    ("TVM_FFI_CACHE_DIR", ""),
    ("TRITON_CACHE_DIR", ""),
    ("TORCH_EXTENSIONS_DIR", ""),
)
MOST = 5000  # libraries looked at


def cut_off(environment: Mapping[str, str], seconds: float) -> str:
    """Name the first cached library that is not whole, "" when there is none or none was found in time."""
    until = time.monotonic() + seconds
    for count, path in enumerate(_libraries(environment)):
        if count >= MOST or time.monotonic() > until:
            break
        why = broken(path)
        if why:
            return f"{path}: {why}"
    return ""


def _libraries(environment: Mapping[str, str]) -> Iterator[str]:
    done: set[str] = set()
    for name, below in FOLDERS:
        base = environment.get(name, "")
        folder = os.path.join(base, below)
        if not base.startswith("/") or folder in done:
            continue
        done.add(folder)
        for where, _folders, files in os.walk(folder):
            yield from (os.path.join(where, file) for file in sorted(files) if file.endswith(".so"))
