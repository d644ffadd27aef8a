# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Proof that a CUDA_HOME works: a kernel is compiled for each architecture, linked as FlashInfer links, and loaded."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_elf import needed
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_errors import recognise

TIMEOUT = 600.0
LINK, HEADERS = "link", "headers"
SOURCES = {
    # What FlashInfer's and tvm-ffi's sources include, and a call into each of the two libraries.
    LINK: r"""
#include <nv/target>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda/std/type_traits>
#include <cuda/std/limits>
__global__ void probe_kernel(__nv_bfloat16* out) {
  NV_IF_TARGET(NV_IS_DEVICE, (out[threadIdx.x] = __float2bfloat16(cuda::std::numeric_limits<float>::max());))
}
extern "C" int probe_runtime() { int version = 0; cudaRuntimeGetVersion(&version); return version; }
extern "C" int probe_driver() { return (int)cuInit(0); }
extern "C" int probe_launch(void* out) { probe_kernel<<<1, 32>>>((__nv_bfloat16*)out); return (int)cudaGetLastError(); }
""",
    # One CCCL, whole: parts of two do not compile together.
    HEADERS: r"""
#include <cub/block/block_reduce.cuh>
#include <cub/device/device_reduce.cuh>
#include <cuda/atomic>
#include <cuda/std/tuple>
#include <thrust/device_ptr.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/tuple.h>
__global__ void sum(int* out) {
  typedef cub::BlockReduce<int, 128> Reduce;
  __shared__ typename Reduce::TempStorage storage;
  int value = Reduce(storage).Sum(threadIdx.x);
  if (!threadIdx.x) *out = value;
}
void reduce(int* in, int* out, int count, void* storage, size_t& bytes) {
  cub::DeviceReduce::Sum(storage, bytes, thrust::device_pointer_cast(in), out, count);
}
""",
}
# As in a server: the runtime that torch brings is there already; without a driver its stub stands in.
LOADER = r"""
import ctypes, os, sys
library, runtime, stub = sys.argv[1:]
ctypes.CDLL(runtime, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
try:
    ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    driver = "driver"
except OSError:
    ctypes.CDLL(stub, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    driver = "stub"
probe = ctypes.CDLL(library, mode=os.RTLD_NOW)
print(driver, probe.probe_runtime())
"""


@dataclass(frozen=True)
class Bench:
    """What a probe runs with: the CUDA_HOME, the interpreter, the unit's environment, the runtime torch loads."""

    home: str
    python: str
    environment: Mapping[str, str]
    runtime: str = ""


@dataclass(frozen=True)
class Proof:
    """What one probe showed; text is the compiler's, linker's or loader's when it failed."""

    probe: str
    arch: str
    ok: bool
    seconds: float
    step: str = ""
    text: str = ""
    driver: str = ""

    def findings(self) -> list[Finding]:
        """Return what the failure means."""
        if self.ok:
            return []
        known = recognise(self.text)
        if known:
            return known
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"error|fatal|cannot|undefined|denied|not found", line, re.I)]
        said = (telling or lines or ["no output"])[0][:300]
        text = f"the {self.probe} probe for {self.arch} failed to {self.step}: `{said}`"
        return [Finding("probe_failed", text, "Read the compiler's message; the toolkit is not used")]


def nvcc_arch(arch: str) -> str:
    """Return nvcc's spelling of an architecture: 12.0f -> 120f, 9.0a -> 90a, 8.9 -> 89."""
    return arch.replace(".", "")


def commands(bench: Bench, probe: str, arch: str, folder: str) -> list[tuple[str, list[str]]]:
    """Return the steps of a probe; the compile line is tvm-ffi's (no CCCL of its own), the link line FlashInfer's."""
    name, env = nvcc_arch(arch), bench.environment
    compiler = ["-ccbin", env["CC"]] if env.get("CC") else []
    argv = [f"{bench.home}/bin/nvcc", "-std=c++17", f"-gencode=arch=compute_{name},code=sm_{name}", *compiler]
    steps = [("compile", [*argv, "-Xcompiler", "-fPIC", "-c", f"{folder}/probe.cu", "-o", f"{folder}/probe.o"])]
    if probe == LINK:
        libs = [f"-L{bench.home}/lib64", f"-L{bench.home}/lib64/stubs", "-lcudart", "-lcuda"]
        link = [env.get("CXX") or "c++", f"{folder}/probe.o", "-shared", *libs, "-o", f"{folder}/probe.so"]
        stub = f"{bench.home}/lib64/stubs/libcuda.so"
        load = [bench.python, "-I", "-c", LOADER, f"{folder}/probe.so", bench.runtime or runtime_of(bench.home), stub]
        steps += [("link", link), ("load", load)]
    return steps


def runtime_of(home: str) -> str:
    """Return the numbered libcudart of a toolkit."""
    found = sorted(Path(home, "lib64").glob("libcudart.so.*"))
    return str(found[0]) if found else f"{home}/lib64/libcudart.so"


def prove(runner: Runner, bench: Bench, probe: str, arch: str, clock: Callable[[], float] = time.monotonic) -> Proof:
    """Run one probe for one architecture."""
    started = clock()
    with tempfile.TemporaryDirectory(prefix="gpufleet-probe-") as folder:
        Path(folder, "probe.cu").write_text(SOURCES[probe], encoding="utf-8")
        said = ""
        for step, argv in commands(bench, probe, arch, folder):
            program = argv[0] if argv[0].startswith("/") else shutil.which(argv[0], path=bench.environment["PATH"])
            clean = ["/usr/bin/env", "-i", *(f"{key}={value}" for key, value in sorted(bench.environment.items()))]
            done = runner.run([*clean, f"TMPDIR={folder}", program or argv[0], *argv[1:]], timeout=TIMEOUT, cwd=folder)
            said = done.stdout.strip()
            if done.rc != 0:
                text = f"{done.stdout}\n{done.stderr}".replace(f"{folder}/", "")  # a name of this run only
                return Proof(probe, arch, False, round(clock() - started, 1), step, text)
            if step == "link" and "libcuda.so" in needed(f"{folder}/probe.so"):
                text = f"NEEDED libcuda.so: the stub in {bench.home} has no SONAME libcuda.so.1"
                return Proof(probe, arch, False, round(clock() - started, 1), step, text)
    return Proof(probe, arch, True, round(clock() - started, 1), driver=said.split(" ")[0])


def proof_key(bench: Bench, probe: str, arch: str, identity: str) -> str:
    """Return a digest of all that a proof depends on: as long as it stays the same, the proof holds."""
    parts = [identity, probe, arch, SOURCES[probe], LOADER, bench.home, bench.runtime]
    parts += [f"{key}={value}" for key, value in sorted(bench.environment.items()) if key in ("CC", "CXX", "PATH")]
    for name in ("cc", "c++", "gcc", "g++", "ld", bench.environment.get("CC", ""), bench.environment.get("CXX", "")):
        path = shutil.which(name, path=bench.environment["PATH"]) if name else None
        if path:
            real = os.path.realpath(path)
            status = os.stat(real)
            parts.append(f"{name} {real} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def known_proofs(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the proofs that a toolkit.json holds."""
    proofs = record.get("proofs")
    return {str(k): str(v) for k, v in proofs.items()} if isinstance(proofs, dict) else {}


def name_of(probe: str, arch: str) -> str:
    """Return a proof's name in toolkit.json."""
    return f"{probe} {arch}"


def wanted(probes: Sequence[str], archs: Sequence[str]) -> list[tuple[str, str]]:
    """Return all probes that are to be run."""
    return [(probe, arch) for probe in probes for arch in archs]
