"""Toolkits as pip, the distribution and NVIDIA's installer lay them out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result, SubprocessRunner

WHEELS = {
    "nvidia_cuda_nvcc": "13.0.88",
    "nvidia_cuda_crt": "13.0.88",
    "nvidia_nvvm": "13.0.88",
    "nvidia_cuda_runtime": "13.0.96",
}


def tree(root: Path, *without: str, version="13.0.88", cudart="13000", links=True, cccl="3000001"):
    """Write a toolkit whose programs are scripts that tell their version."""
    files = {
        "bin/nvcc": f"#!/bin/sh\necho Cuda compilation tools, release 13.0, V{version}\n",
        "bin/ptxas": f"#!/bin/sh\necho Cuda compilation tools, release 13.0, V{version}\n",
        "nvvm/bin/cicc": "",
        "include/crt/host_config.h": "#if __GNUC__ > 15\n#error\n#endif\n",
        "include/cuda_runtime.h": "",
        "include/cuda_runtime_api.h": f"#define CUDART_VERSION  {cudart}\n",
        "include/cccl/nv/target": "",
        "include/cccl/cuda/std/__cccl/version.h": f"#define CCCL_VERSION {cccl}\n",
    }
    if links:
        files.update({"lib64/libcudart.so": "", "lib64/stubs/libcuda.so": ""})
    for name, text in files.items():
        if not name.startswith(without):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
    return str(root)


def site(tmp_path, wheels):
    folder = tmp_path / "site"
    folder.mkdir(exist_ok=True)
    for name, version in wheels.items():
        (folder / f"{name}-{version}.dist-info").mkdir()
    return folder


def look(tmp_path, path, packages=None, torch="13.0.96", origin="system"):
    return _toolkit.examine(SubprocessRunner(), path, origin, packages or {}, torch, str(tmp_path / "root"))


def test_a_whole_toolkit(tmp_path):
    found = look(tmp_path, tree(tmp_path / "cuda"))
    assert found.findings == []
    assert found.complete
    assert found.versions == {"nvcc": "13.0.88", "ptxas": "13.0.88", "runtime": "13.0", "cccl": "3.0.1"}


def test_the_raw_tree_of_pip_does_not_link(tmp_path):
    found = look(tmp_path, tree(tmp_path / "cu13", links=False), WHEELS, origin="pip")
    assert [item.code for item in found.findings] == ["lib64_missing", "libcuda_stub_missing"]
    assert not found.complete


def test_the_drivers_development_link_serves_as_a_stub(tmp_path):
    lib = tmp_path / "root/usr/lib/x86_64-linux-gnu"
    lib.mkdir(parents=True)
    (lib / "libcuda.so").write_text("")
    found = look(tmp_path, tree(tmp_path / "cuda", "lib64/stubs"))
    assert found.complete
    assert found.parts["libcuda_stub"] == str(lib / "libcuda.so")


@pytest.mark.parametrize(
    ("without", "code"),
    [
        ("bin/nvcc", "nvcc_missing"),
        ("bin/ptxas", "ptxas_missing"),
        ("nvvm", "cicc_missing"),
        ("include/crt", "crt_missing"),
        ("include/cuda_runtime.h", "runtime_missing"),
        ("include/cccl/nv", "nv_target_missing"),
        ("lib64/libcudart.so", "libcudart_so_missing"),
        ("lib64/stubs", "libcuda_stub_missing"),
    ],
)
def test_a_part_that_is_missing(tmp_path, without, code):
    found = look(tmp_path, tree(tmp_path / "cuda", without))
    assert [item.code for item in found.findings] == [code]
    assert not found.complete


@pytest.mark.parametrize(
    ("tree_args", "packages", "torch", "codes"),
    [
        ({"cudart": "13020"}, {}, "13.0.96", ["skew_runtime"]),
        ({"version": "13.5.37", "cudart": "13000"}, {}, "13.0.96", ["skew_runtime"]),
        ({}, {"nvidia-cuda-crt": "13.5.37"}, "13.0.96", ["skew_crt"]),
        ({}, {"nvidia-nvvm": "13.5.37"}, "13.0.96", ["skew_nvvm"]),
        ({}, {"nvidia-cuda-crt": "13.0.96", "nvidia-nvvm": "13.0.1"}, "13.0.96", []),
        ({"version": "12.9.86", "cudart": "12090"}, {}, "13.0.96", ["skew_torch"]),
        ({"version": "12.9.86", "cudart": "12090"}, {}, "", []),
    ],
)
def test_versions_that_do_not_fit(tmp_path, tree_args, packages, torch, codes):
    found = look(tmp_path, tree(tmp_path / "cuda", **tree_args), packages, torch, "pip")
    assert [item.code for item in found.findings] == codes


def test_nvcc_that_does_not_run(tmp_path):
    path = tree(tmp_path / "cuda")
    (tmp_path / "cuda/bin/nvcc").chmod(0o644)
    assert [item.code for item in look(tmp_path, path).findings] == ["nvcc_broken"]


def test_cub_tells_the_version_where_cccl_does_not(tmp_path):
    path = tree(tmp_path / "cuda", "include/cccl/cuda")
    (tmp_path / "cuda/include/cub").mkdir()
    (tmp_path / "cuda/include/cub/version.cuh").write_text("#define CUB_VERSION 200500\n")
    assert look(tmp_path, path).versions["cccl"] == "2.5.0"


@pytest.mark.parametrize(("folder", "layout"), [("cu13", "cu13"), ("cuda_runtime", "split"), ("nccl", "none")])
def test_layout(tmp_path, folder, layout):
    (tmp_path / "nvidia" / folder).mkdir(parents=True)
    assert _toolkit.pip_layout(str(tmp_path)) == layout


def test_packages(tmp_path):
    folder = site(tmp_path, {**WHEELS, "apache_tvm_ffi": "0.1.11", "torch": "2.14.1", "requests": "2.0"})
    assert _toolkit.nvidia_packages(str(folder)) == {
        "apache-tvm-ffi": "0.1.11",
        "nvidia-cuda-crt": "13.0.88",
        "nvidia-cuda-nvcc": "13.0.88",
        "nvidia-cuda-runtime": "13.0.96",
        "nvidia-nvvm": "13.0.88",
        "torch": "2.14.1",
    }


class Venv(SubprocessRunner):
    """Answers for the venv's interpreter, runs everything else."""

    def __init__(self, folder, gcc="12"):
        self.folder, self.gcc = folder, gcc

    def run(self, argv, **kwargs):
        if argv[1:3] == ["-I", "-c"]:
            return Result(0, json.dumps(str(self.folder)))
        if argv[1:] == ["-dumpversion"]:
            return Result(0, f"{self.gcc}\n")
        return super().run(argv, **kwargs)


def survey(tmp_path, folder, monkeypatch, cuda_home=None, environment=None, gcc="12"):
    bindir = tmp_path / "venv/bin"
    bindir.mkdir(parents=True)
    for name in ("ninja", "gcc", "g++"):
        (bindir / name).write_text("")
        (bindir / name).chmod(0o755)
    monkeypatch.setattr(_toolkit, "SYSTEM_PATH", "/nonexistent")
    env = {"PATH": "/nonexistent", **(environment or {})}
    return _toolkit.survey(Venv(folder, gcc), str(bindir / "python"), cuda_home, env, str(tmp_path / "root"))


def test_the_first_complete_toolkit_is_chosen(tmp_path, monkeypatch):
    folder = site(tmp_path, WHEELS)
    tree(folder / "nvidia/cu13", links=False)
    system = tree(tmp_path / "root/usr/local/cuda")
    seen = survey(tmp_path, folder, monkeypatch)
    assert [(item.origin, item.complete) for item in seen.toolkits] == [("pip", False), ("system", True)]
    assert seen.findings == []
    assert seen.record() == {
        "schema": 1,
        "cuda_home": system,
        "versions": {"nvcc": "13.0.88", "ptxas": "13.0.88", "runtime": "13.0", "cccl": "3.0.1"},
        "findings": [],
        "repairs": [],
    }


def test_without_a_complete_one_the_wheels_faults_are_told(tmp_path, monkeypatch):
    folder = site(tmp_path, WHEELS)
    tree(folder / "nvidia/cu13", links=False)
    seen = survey(tmp_path, folder, monkeypatch)
    assert seen.record()["cuda_home"] is None
    assert [item.code for item in seen.findings] == ["lib64_missing", "libcuda_stub_missing"]


def test_places_to_look(tmp_path, monkeypatch):
    folder = site(tmp_path, {})
    explicit, env, path = tree(tmp_path / "a"), tree(tmp_path / "b"), tree(tmp_path / "c")
    seen = survey(tmp_path, folder, monkeypatch, explicit, {"CUDA_HOME": env + "/", "PATH": f"{path}/bin"})
    assert [(item.root, item.origin) for item in seen.toolkits] == [
        (explicit, "explicit"), (env, "environment"), (path, "path"),
    ]  # fmt: skip


def test_the_same_toolkit_is_looked_at_once(tmp_path, monkeypatch):
    folder = site(tmp_path, {})
    path = tree(tmp_path / "root/usr/local/cuda")
    seen = survey(tmp_path, folder, monkeypatch, None, {"CUDA_HOME": path, "PATH": f"{path}/bin"})
    assert len(seen.toolkits) == 1


@pytest.mark.parametrize(("folder", "word"), [("cuda_runtime", "CUDA 12 wheels"), ("nccl", "no nvcc")])
def test_no_toolkit_at_all(tmp_path, monkeypatch, folder, word):
    packages = site(tmp_path, {})
    (packages / "nvidia" / folder).mkdir(parents=True)
    (finding,) = survey(tmp_path, packages, monkeypatch).findings
    assert finding.code == "toolkit_absent"
    assert word in finding.message


def test_a_host_compiler_newer_than_the_toolkit_takes(tmp_path, monkeypatch):
    folder = site(tmp_path, {})
    tree(tmp_path / "root/usr/local/cuda")
    seen = survey(tmp_path, folder, monkeypatch, gcc="16.1.0")
    assert [item.code for item in seen.findings] == ["gcc_too_new"]


def test_tools_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(_toolkit, "SYSTEM_PATH", "/nonexistent")
    seen = _toolkit.survey(Venv(site(tmp_path, {})), "/nonexistent/python", None, {"PATH": ""}, str(tmp_path))
    assert [item.code for item in seen.findings] == ["ninja_missing", "gcc_missing", "toolkit_absent"]


def test_no_venv(runner):
    seen = _toolkit.survey(runner, "/nonexistent/python", None, {})
    assert [item.code for item in seen.findings] == ["venv_missing"]
    assert seen.record()["cuda_home"] is None


def test_a_real_interpreter_is_asked():
    seen = _toolkit.survey(SubprocessRunner(), sys.executable, None, {})
    assert Path(seen.site_packages).is_dir()
