# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""A stand-in for the driver's library at link time: its name libcuda.so.1, and every function that cuda.h declares."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner

SONAME = "libcuda.so.1"
ERROR_STUB_LIBRARY = 34
MARK = "stub of libcuda.so.1, made by gpufleet.sglang"  # in it: it is known as ours without a record
# The names a program may be linked with: plain, of older interfaces, of per-thread default streams.
_VARIANTS = ((), ("-D__CUDA_API_VERSION_INTERNAL",), ("-DCUDA_API_PER_THREAD_DEFAULT_STREAM",))
_DECLARED = re.compile(r"\bCUresult\s+(?:__stdcall\s+|CUDAAPI\s+)?(cu[A-Z]\w*)\s*\(")


class StubError(Exception):
    """The stub could not be made; the message says why."""


def symbols(runner: Runner, include: str, compiler: str) -> list[str]:
    """Return the functions that cuda.h declares, with the versions that its macros turn them into."""
    found: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="gpufleet-stub-") as folder:
        source = f"{folder}/names.c"
        Path(source).write_text("#include <cuda.h>\n", encoding="utf-8")
        for defines in _VARIANTS:
            done = runner.run([compiler, "-E", "-P", "-x", "c", *defines, f"-I{include}", source], timeout=60.0)
            if done.rc != 0:
                said = (done.stderr.strip().splitlines() or [f"rc {done.rc}"])[-1]
                raise StubError(f"{compiler} does not preprocess {include}/cuda.h: {said}")
            found.update(_DECLARED.findall(done.stdout))
    if "cuInit" not in found:
        raise StubError(f"{include}/cuda.h declares no cuInit")
    return sorted(found)


def make_stub(runner: Runner, include: str, out: str, compiler: str) -> int:
    """Compile the stub to out; returns how many functions it has."""
    names = symbols(runner, include, compiler)
    with tempfile.TemporaryDirectory(prefix="gpufleet-stub-") as folder:
        lines = [f"int {name}(void) {{ return {ERROR_STUB_LIBRARY}; }}" for name in names]
        lines.append(f'const char gpufleet_sglang_stub[] = "{MARK}";')
        Path(folder, "stub.c").write_text("\n".join(lines) + "\n", encoding="utf-8")
        argv = [compiler, "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{SONAME}", "-o", f"{folder}/stub.so"]
        done = runner.run([*argv, f"{folder}/stub.c"], timeout=60.0)
        if done.rc != 0:
            said = (done.stderr.strip().splitlines() or [f"rc {done.rc}"])[-1]
            raise StubError(f"{compiler} does not build the stub of libcuda.so: {said}")
        shutil.copyfile(f"{folder}/stub.so", out)
        os.chmod(out, 0o755)
    return len(names)
