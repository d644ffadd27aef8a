"""Real environments for the toolkit's tests: NVIDIA's wheels as pip installs them, FlashInfer, tvm-ffi, a CPU torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
BUILDS = Path(__file__).parent / "builds"
PYTHON = "3.11"  # of the CPU build of torch in .cache/wheels
ARCH = "12.0f"
BASE = ("torch==2.13.0", "apache-tvm-ffi==0.1.11", "ninja==1.13.0", "filelock", "einops", "click", "tabulate", "tqdm")
BASE_MORE = ("requests", "packaging>=24.2", "nvidia-ml-py", "numpy")
SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def interpreter() -> str:
    """Return a Python of the version that the torch wheel is for, headers included."""
    stamp = TOP / ".cache/venv-2.19/.python"
    named = [os.environ.get("TOOLKIT_PYTHON", ""), stamp.read_text().split("\n")[0] if stamp.exists() else ""]
    for name in [*named, f"python{PYTHON}", sys.executable, "/usr/bin/python3"]:
        ask = "import sys, sysconfig, os; print('%d.%d' % sys.version_info[:2], sysconfig.get_path('include'))"
        done = (
            subprocess.run([name, "-c", ask], capture_output=True, check=False, text=True)
            if shutil.which(name)
            else None
        )
        said = done.stdout.split() if done and done.returncode == 0 else ["", ""]
        if said[0] == PYTHON and Path(said[1], "Python.h").exists():
            return name
    raise RuntimeError(f"no Python {PYTHON} with headers: scripts/bootstrap --python {PYTHON} --venv .cache/venv-2.19")


@dataclass
class Built:
    """One build: whether it passed, what it said, how long it took."""

    ok: bool
    output: str
    seconds: float


@dataclass
class Run:
    """One run of the module."""

    result: dict
    seconds: float

    @property
    def codes(self) -> list[str]:
        return [item["code"] for item in self.result.get("findings", [])]


@dataclass
class Environment:
    """A venv with NVIDIA's wheels, and the folders of one deploy beside it."""

    folder: Path
    caches: list[Path] = field(default_factory=list)

    @property
    def python(self) -> str:
        return f"{self.folder}/venv/bin/python"

    @property
    def site(self) -> Path:
        return self.folder / f"venv/lib/python{PYTHON}/site-packages"

    @property
    def tree(self) -> Path:
        return self.site / "nvidia/cu13"

    @property
    def config(self) -> Path:
        return self.folder / "etc"

    @property
    def cuda(self) -> Path:
        return self.folder / "cuda"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def record(self) -> dict:
        return json.loads((self.config / "toolkit.json").read_text())

    def files(self) -> str:
        """Return a digest of every file and link that the wheels brought."""
        digest = hashlib.sha256()
        for path in sorted((self.site / "nvidia").rglob("*")):
            digest.update(str(path.relative_to(self.site)).encode())
            digest.update(os.readlink(path).encode() if path.is_symlink() else b"")
            if path.is_file() and not path.is_symlink():
                digest.update(hashlib.sha256(path.read_bytes()).digest())
                digest.update(str(path.stat().st_mtime_ns).encode())
        return digest.hexdigest()

    def module(self, **arguments) -> Run:
        """Run the module itself, as Ansible does, in a process of its own."""
        given = {
            "python": self.python,
            "cuda_home": str(self.tree),  # not what the machine may have below /usr/local
            "arch_list": [ARCH],
            "folder": str(self.cuda),
            "config_dir": str(self.config),
            "cache_dirs": [str(self.cache)],
            **arguments,
        }
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(BUILDS / "module.py")],
            input=json.dumps(given),
            capture_output=True,
            check=False,
            text=True,
            cwd=TOP,
            env={**os.environ, "PYTHONPATH": ".collections"},
        )
        if not done.stdout.strip():
            raise RuntimeError(done.stderr)
        return Run(json.loads(done.stdout.strip().splitlines()[-1]), time.monotonic() - started)

    def start(self, **arguments) -> subprocess.Popen:
        """Start the module and don't wait."""
        given = {"python": self.python, "cuda_home": str(self.tree), "arch_list": [ARCH], "folder": str(self.cuda)}
        given.update(config_dir=str(self.config), **arguments)
        process = subprocess.Popen(
            [sys.executable, str(BUILDS / "module.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=TOP,
            env={**os.environ, "PYTHONPATH": ".collections"},
            start_new_session=True,
        )
        process.stdin.write(json.dumps(given))
        process.stdin.close()
        return process

    def tags(self, *more: str, tags: str = "toolkit,cccl", playbook: str = "deploy") -> tuple[int, float, str]:
        """Run a playbook with tags; returns how many tasks changed, seconds, output."""
        values = {
            "sglang_server_venv": f"{self.folder}/venv",
            "sglang_server_config_dir": str(self.config),
            "sglang_server_cache_dir": str(self.cache),
            "cuda_toolkit_fix_dir": str(self.cuda),
            "cuda_toolkit_fix_cuda_home": str(self.tree),
            "cuda_toolkit_fix_arch_list": [ARCH],
        }
        argv = ["ansible-playbook", f"playbooks/{playbook}.yml", "-i", "localhost,", "-c", "local", "--tags", tags]
        started = time.monotonic()
        done = subprocess.run(
            [*argv, "-e", json.dumps(values), "-e", f"ansible_python_interpreter={sys.executable}", *more],
            capture_output=True,
            check=False,
            text=True,
            cwd=TOP,
            env={**os.environ, "ANSIBLE_NOCOLOR": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )
        recap = re.search(r"changed=(\d+) .*failed=(\d+)", done.stdout)
        if not recap or recap.group(2) != "0":
            raise RuntimeError(done.stdout + done.stderr)
        return int(recap.group(1)), time.monotonic() - started, done.stdout

    def build(self, script: str, home: str, *arguments: str) -> Built:
        """Build and load a kernel with a CUDA_HOME, in the environment that a unit has."""
        env = {
            "PATH": f"{self.folder}/venv/bin:{home}/bin:{SYSTEM}",
            "HOME": str(self.folder),
            "CUDA_HOME": home,
            "FLASHINFER_WORKSPACE_BASE": str(self.cache),
            "FLASHINFER_CUDA_ARCH_LIST": ARCH,
            "TVM_FFI_CUDA_ARCH_LIST": "12.0",
            # the CPU torch brings no runtime; with torch for CUDA it is loaded before any kernel
            "LD_LIBRARY_PATH": str(self.tree / "lib"),
            "LC_ALL": "C.UTF-8",
        }
        self.cache.mkdir(exist_ok=True)
        started = time.monotonic()
        done = subprocess.run(
            [self.python, str(BUILDS / script), *arguments],
            capture_output=True,
            check=False,
            text=True,
            env=env,
            cwd="/",
        )
        output = done.stdout + done.stderr
        return Built(done.returncode == 0 and "PASS" in done.stdout, output, time.monotonic() - started)

    def flashinfer(self, home: str | Path, module: str = "page") -> Built:
        return self.build("flashinfer_module.py", str(home), module)

    def tvm_ffi(self, home: str | Path) -> Built:
        folder = self.folder / "tvm-ffi"
        shutil.rmtree(folder, ignore_errors=True)
        return self.build("tvm_ffi_inline.py", str(home), str(folder))


class Lab:
    """Makes environments; torch and its company are installed once and shared through a .pth file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = folder / "base"

    def pip(self, *arguments: str, python: Path | None = None) -> None:
        target = ["--python", str(python)] if python else []
        argv = [f"{self.base}/bin/python", "-m", "pip", *target, "install", "-q", "--no-input"]
        done = subprocess.run(
            [*argv, "--disable-pip-version-check", *arguments], capture_output=True, check=False, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{arguments}: {done.stderr[-3000:]}")

    def prepare(self) -> None:
        """Install what all environments share."""
        if (self.base / ".done").exists():
            return
        subprocess.run([interpreter(), "-m", "venv", "--clear", str(self.base)], check=True)
        wheels = TOP / ".cache/wheels"
        self.pip(*(["--find-links", str(wheels)] if wheels.is_dir() else []), *BASE, *BASE_MORE)
        (self.base / ".done").touch()

    def shared(self, name: str, *requirements: str) -> Path:
        """Install packages without their dependencies into a folder that environments share."""
        folder = self.folder / name
        if not (folder / ".done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            self.pip("--no-deps", "--no-compile", "--target", str(folder), *requirements)
            (folder / ".done").touch()
        return folder

    def environment(self, name: str, *wheels: str, flashinfer: str = "", torch: bool = True) -> Environment:
        """Make a venv with NVIDIA's wheels, as pip resolves or lays them out."""
        self.prepare()
        env = Environment(self.folder / "env" / name)
        shutil.rmtree(env.folder, ignore_errors=True)
        venv = env.folder / "venv"
        subprocess.run([f"{self.base}/bin/python", "-m", "venv", "--without-pip", str(venv)], check=True)
        if wheels:
            self.pip("--no-compile", *wheels, python=venv / "bin/python")
        paths = [str(self.shared(f"flashinfer-{flashinfer}", f"flashinfer-python=={flashinfer}"))] if flashinfer else []
        paths += [str(self.base / f"lib/python{PYTHON}/site-packages")] if torch else []
        (env.site / "shared.pth").write_text("".join(f"{path}\n" for path in paths))
        if torch:
            (venv / "bin/ninja").symlink_to(self.base / "bin/ninja")
        return env

    def discard(self, env: Environment) -> None:
        shutil.rmtree(env.folder)
