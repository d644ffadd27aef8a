"""Eight servers load a set of kernels: cold, warm, published. benchmarks/jit_servers.py [--processes 8] [MODULE...]

Wall time, CPU time and compiles of each, and their ratios, from one run. Real compilers, in tests/toolkit's lab.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".collections"), str(ROOT / "tests/jit"), str(ROOT / "tests/toolkit")]

import lab  # noqa: E402
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_state import compiled, snapshot  # noqa: E402
from kernels import BUILDS, SYSTEM, Kernels  # noqa: E402


def serve(kernels: Kernels, modules: list[str], processes: int, **more: str) -> tuple[float, float, int]:
    """Start the processes at once; return wall and CPU seconds, and how many modules they compiled."""
    environment = {**kernels.environment, **more}
    before, used = snapshot(environment), resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    argv = [kernels.env.python, str(BUILDS / "serve.py"), "getter", *modules]
    running = [
        subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _number in range(processes)
    ]
    if any(process.wait() for process in running):
        raise SystemExit("a process failed")
    wall, now = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return wall, cpu, len(compiled(before, snapshot(environment)))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("modules", nargs="*", default=["silu_and_mul", "page"])
    given = parser.parse_args()
    made = lab.Lab(Path(os.environ.get("TOOLKIT_LAB") or ROOT / ".cache/toolkit").resolve())
    env = made.environment("bench", "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.2.*", flashinfer="0.7.2.post1")
    home = env.module().result["cuda_home"]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            Path(folder, name).mkdir()
        cold, ahead = Kernels(env, home, Path(folder, "cold")), Kernels(env, home, Path(folder, "warm"))
        rows = {"cold": serve(cold, given.modules, given.processes)}
        built = ahead.warm(modules=given.modules, publish_dir=f"{folder}/kernels")
        if built.get("failed"):
            raise SystemExit(built["msg"])
        rows["warm"] = serve(ahead, given.modules, given.processes)
        serving = {"PYTHONPATH": f"{folder}/kernels", "FLASHINFER_DISABLE_JIT": "1"}
        serving.update(FLASHINFER_WORKSPACE_BASE=f"{folder}/log", PATH=SYSTEM, CUDA_HOME="/nonexistent")
        rows["published"] = serve(ahead, given.modules, given.processes, **serving)
    made.discard(env)
    print(f"{given.processes} processes load {', '.join(given.modules)}; built ahead in {built['took']:.1f} s")
    print("| | wall s | of cold | CPU s | of cold | compiles |\n|---|---|---|---|---|---|")
    for name, (wall, cpu, count) in rows.items():
        of_wall, of_cpu = wall / rows["cold"][0], cpu / rows["cold"][1]
        print(f"| {name} | {wall:.1f} | {of_wall:.2f} | {cpu:.1f} | {of_cpu:.2f} | {count} |")


if __name__ == "__main__":
    main()
