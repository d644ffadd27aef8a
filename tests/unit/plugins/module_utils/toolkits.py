"""Toolkits as pip, NVIDIA's installer, conda and Debian lay them out, whose programs are scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_finish as finish
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_run as tool
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result, SubprocessRunner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_build import Settings
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_host import Needs
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import Python

WHEELS = {
    "nvidia_cuda_nvcc": ("bin/", "13.0.88"),
    "nvidia_cuda_crt": ("include/crt", "13.0.88"),
    "nvidia_nvvm": ("nvvm", "13.0.88"),
    "nvidia_cuda_runtime": (("include/cuda", "lib/"), "13.0.96"),
    "nvidia_cuda_cccl": (("include/cccl", "include/nv"), "13.0.85"),
}
PROFILE = "SYSTEM_INCLUDES += -isystem $(TOP)/include/cccl\n"
PARTS = (  # what makes up a pip tree
    "bin/nvcc",
    "bin/ptxas",
    "bin/cudafe++",
    "bin/fatbinary",
    "bin/nvcc.profile",
    "bin/crt/link.stub",
    "nvvm/bin/cicc",
    "nvvm/libdevice/libdevice.10.bc",
    "include/crt/host_config.h",
    "include/cuda_runtime.h",
    "include/cuda_runtime_api.h",
    "include/cuda.h",
    "include/cccl/nv/target",
    "include/cccl/cuda/std/version",
    "include/cccl/cuda/std/__cccl/version.h",
    "include/cccl/cub/cub.cuh",
    "include/cccl/thrust/version.h",
    "include/nv/target",
    "lib/libcudart.so.13",
    "lib/libcudadevrt.a",
)


def text_of(name: str, nvcc: str, cudart: str, cccl: str, gcc: str) -> str:
    if name in ("bin/nvcc", "bin/ptxas"):
        return f"#!/bin/sh\necho Cuda compilation tools, release {nvcc[:4]}, V{nvcc}\n"
    return {
        "bin/nvcc.profile": PROFILE,
        "include/crt/host_config.h": f"#if __GNUC__ > {gcc}\n#error\n#endif\n",
        "include/cuda_runtime_api.h": f"#define CUDART_VERSION  {cudart}\n",
        "include/cuda.h": "CUresult CUDAAPI cuInit(unsigned int Flags);\n",
        "include/cccl/cuda/std/__cccl/version.h": f"#define CCCL_VERSION {cccl}\n",
    }.get(name, name)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def tree(root: Path, *without: str, nvcc="13.0.88", cudart="13000", cccl="3000001", gcc="15") -> Path:
    """Write a toolkit as pip lays it out."""
    for name in PARTS:
        if not without or not name.startswith(without):
            write(root / name, text_of(name, nvcc, cudart, cccl, gcc))
    return root


def system(root: Path, *without: str, **versions) -> Path:
    """Write a toolkit as NVIDIA's installer does, linkable."""
    tree(root, *without, **versions)
    (root / "lib").rename(root / "lib64")
    (root / "lib64/libcudart.so").symlink_to("libcudart.so.13")
    write(root / "lib64/stubs/libcuda.so", "not an ELF file: its name is not asked for")
    return root


class Site:
    """A site-packages with NVIDIA's wheels and their RECORDs, and a double for the interpreter."""

    def __init__(self, top: Path, *without: str, torch_cuda="", wheels=None, flashinfer=False, **versions) -> None:
        self.folder = top / "venv/lib/python3.11/site-packages"
        self.root = tree(self.folder / "nvidia/cu13", *without, **versions)
        self.packages, self.infos = {}, {}
        for name, (prefix, version) in WHEELS.items():
            version = (wheels or {}).get(name, version)
            if version:
                self.wheel(name, prefix, version)
        engine = self.folder / "flashinfer"
        if flashinfer:
            for part in ("libcudacxx/include/nv/target", "cub/cub/cub.cuh", "thrust/thrust/t.h"):
                write(engine / "data/cccl" / part)
            write(engine / "data/cccl/libcudacxx/include/cuda/std/__cccl/version.h", "#define CCCL_VERSION 3006000\n")
        write(top / "venv/include/Python.h")
        write(top / "venv/bin/ninja")
        self.python = Python(
            path=str(top / "venv/bin/python"),
            prefix=str(top / "venv"),
            version="3.11",
            include=str(top / "venv/include"),
            packages=self.packages,
            infos=self.infos,
            trees=(str(self.root),),
            flashinfer=str(engine) if flashinfer else "",
            torch_cuda=torch_cuda,
        )

    def wheel(self, name: str, prefix, version: str) -> None:
        info = self.folder / f"{name}-{version}.dist-info"
        lines = []
        for path in sorted(self.root.rglob("*")):
            relative = str(path.relative_to(self.root))
            if path.is_file() and relative.startswith(prefix):
                lines.append(line_of(relative, path))
        write(info / "RECORD", "\n".join(lines) + "\n")
        dist = name.replace("_", "-")
        self.packages[dist], self.infos[dist] = version, str(info)

    def renew(self, relative: str, text: str) -> None:
        """Replace a file as another build of its wheel would: the RECORD knows it."""
        path = write(self.root / relative, text)
        for info in self.infos.values():
            lines = Path(info, "RECORD").read_text().splitlines()
            lines = [line_of(relative, path) if line.startswith(f"nvidia/cu13/{relative},") else line for line in lines]
            write(Path(info, "RECORD"), "\n".join(lines) + "\n")


def line_of(relative: str, path: Path) -> str:
    """Return a RECORD's line."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
    return f"nvidia/cu13/{relative},sha256={digest},{path.stat().st_size}"


class Host(SubprocessRunner):
    """Answers for the compilers; everything else (the scripts of a tree) runs."""

    def __init__(self, gcc="12", caps="", probe=0, said="") -> None:
        self.gcc, self.caps, self.probe, self.said, self.calls = gcc, caps, probe, said, []

    def run(self, argv, **kwargs):
        self.calls.append(list(argv))
        if argv[1:] == ["-dumpversion"]:
            return Result(0, f"{self.gcc}\n")
        if argv[0] == "nvidia-smi":
            return Result(0, self.caps) if self.caps else Result(127)
        if argv[0] == "/usr/bin/env":
            return Result(self.probe, "stub 13000", self.said)
        if "-E" in argv:
            return Result(0, "CUresult cuInit(unsigned int); CUresult cuMemAlloc_v2(int);")
        if "-shared" in argv:
            shutil.copyfile(argv[-1], argv[argv.index("-o") + 1])
            return Result(0)
        return super().run(argv, **kwargs)


class Desk:
    """One host: a site, settings, a runner."""

    def __init__(self, top: Path, monkeypatch, *without, runner=None, **site) -> None:
        self.top, self.runner = top, runner or Host()
        self.site = Site(top, *without, **site)
        write(top / "venv/bin/gcc")
        write(top / "venv/bin/c++")
        self.python = self.site.python
        monkeypatch.setattr(tool, "ask", lambda runner, path: replace(self.python, path=path))
        self.settings = Settings(
            python=self.python.path,
            folder=str(top / "cuda"),
            config_dir=str(top / "etc"),
            archs=("12.0f",),
            base=str(top / "root"),
            needs=Needs(cache_dirs=(str(top),)),
        )

    def run(self, check=False, **changes):
        settings = replace(self.settings, **changes)
        return tool.run(settings, self.runner, {"PATH": "/nonexistent"}, check=check)

    def remove(self, check=False):
        return finish.remove(self.settings.folder, self.settings.config_dir, check=check)

    def record(self):
        return json.loads((self.top / "etc/toolkit.json").read_text())


def snapshot(folder):
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in sorted(Path(folder).rglob("*"))
    }


def codes(out, repaired=None):
    return {i["code"] for i in out.listed() if repaired is None or i["repaired"] == repaired}
