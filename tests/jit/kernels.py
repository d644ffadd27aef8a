"""The folders of one deploy, and what can be done in them: warm up, serve, look."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_job import Job
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_state import compiled, snapshot
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner

TOP = Path(__file__).resolve().parents[2]
BUILDS = Path(__file__).parent / "builds"
SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody writes below the folder meanwhile, root neither."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@dataclass
class Served:
    """What a server's calls came to."""

    rc: int
    said: dict | list  # seconds by module, or the libraries that were loaded
    compiled: list
    output: str


class Kernels:
    """One cache, one configuration folder, one environment."""

    def __init__(self, env, home: str, folder: Path, arch: str = "12.0f") -> None:
        self.env, self.home, self.folder, self.arch = env, home, folder, arch
        self.cache = folder / "cache"
        self.cache.mkdir(exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """What a unit would have."""
        return {
            "PATH": f"{self.env.folder}/venv/bin:{self.home}/bin:{SYSTEM}",
            "HOME": str(self.folder),
            "CUDA_HOME": self.home,
            "FLASHINFER_WORKSPACE_BASE": str(self.cache),
            "SGLANG_JIT_CACHE_DIR": f"{self.cache}/jit",
            "TVM_FFI_CACHE_DIR": f"{self.cache}/tvm-ffi",
            "FLASHINFER_CUDA_ARCH_LIST": self.arch,
            # the CPU torch brings no runtime; with torch for CUDA it is loaded before any kernel
            "LD_LIBRARY_PATH": str(self.env.tree / "lib"),
            "LC_ALL": "C.UTF-8",
        }

    def arguments(self, **more) -> dict:
        given = {"python": self.env.python, "derive": False, "arch_list": [self.arch], "model": "/models/x"}
        given.update(cache_dir=str(self.cache), config_dir=f"{self.folder}/etc", environment=self.environment)
        return {**given, **more, "environment": {**self.environment, **more.get("environment", {})}}

    def start(self, **more) -> subprocess.Popen:
        """Start the module and don't wait."""
        process = subprocess.Popen(
            [sys.executable, str(BUILDS / "warm.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=TOP,
            env={**os.environ, "PYTHONPATH": ".collections"},
        )
        process.stdin.write(json.dumps(self.arguments(**more)))
        process.stdin.close()
        return process

    def warm(self, **more) -> dict:
        """Run the module itself, as Ansible does, in a process of its own."""
        began = time.monotonic()
        process = self.start(**more)
        said, wrong = process.stdout.read(), process.stderr.read()
        process.wait()
        if not said.strip():
            raise RuntimeError(wrong)
        return {**json.loads(said.strip().splitlines()[-1]), "took": time.monotonic() - began}

    def states(self, **more) -> dict[str, str]:
        """Run it and return the state of each module."""
        return {row["name"]: row["state"] for row in self.warm(**more)["modules"]}

    def stamps(self) -> dict:
        return snapshot(self.environment)

    def serve(self, how: str, *names: str, script: str = "serve.py", **environment: str) -> Served:
        """Load modules as a server does, and see what that compiled."""
        before = self.stamps()
        done = subprocess.run(
            [self.env.python, str(BUILDS / script), how, *names],
            capture_output=True,
            check=False,
            text=True,
            cwd="/",
            env={**self.environment, **environment},
        )
        said = done.stdout.strip().splitlines()
        last = json.loads(said[-1]) if done.returncode == 0 and said else {}
        return Served(done.returncode, last, compiled(before, self.stamps()), done.stdout + done.stderr)

    def library(self, name: str) -> Path:
        (found,) = self.cache.glob(f".cache/flashinfer/*/*/cached_ops/{name}/{name}.so")
        return found

    def job(self) -> Job:
        return Job(SubprocessRunner(), str(self.cache))

    def worker_pid(self) -> int:
        """Return the worker's pid once it is there (on a machine without systemd)."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.job().alive():
                return int((self.job().folder / "pid").read_text().split()[0])
            time.sleep(0.05)
        raise RuntimeError("no worker was started")
