"""Faults that are seen before anything is compiled."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_host as host
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_audit import Seals, audit
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import (
    candidates,
    check_cuda_home,
    layout_of,
    machine_folder,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_look import examine
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import Python, ask
from toolkits import Host, Site, system, tree, write

LINKS = ["lib64_missing", "libcudart_so_missing", "libcuda_stub_missing"]


def look(site):
    layout = layout_of(str(site.root), "pip")
    return examine(SubprocessRunner(), layout, site.python, audit(site.infos, str(site.root), Seals()))


def codes(toolkit):
    return [item.code for item in toolkit.findings]


def test_pips_tree_compiles_but_does_not_link(tmp_path):
    found = look(Site(tmp_path))
    assert codes(found) == LINKS
    assert found.versions == {
        "nvcc": "13.0.88", "ptxas": "13.0.88", "crt": "13.0.88", "nvvm": "13.0.88", "runtime": "13.0",
        "cccl": "3.0.1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("without", "more"),
    [
        ("bin/nvcc.profile", ["nvcc_profile_missing"]),
        ("bin/cudafe++", ["cudafe_missing"]),
        ("bin/ptxas", ["ptxas_missing"]),
        ("bin/fatbinary", ["fatbinary_missing"]),
        ("nvvm/bin", ["cicc_missing"]),
        ("nvvm", ["cicc_missing", "libdevice_missing"]),
        ("include/crt", ["crt_missing"]),
        ("include/cuda_runtime.h", ["runtime_missing"]),
        ("include/cuda.h", ["cuda_h_missing"]),
        ("lib/libcudart", ["libcudart_missing"]),
        ("lib/libcudadevrt", ["libcudadevrt_missing"]),
    ],
)
def test_a_part_that_is_missing(tmp_path, without, more):
    found = look(Site(tmp_path, without))
    assert set(codes(found)) == {*LINKS, *more}
    wrong = [item for item in found.findings if item.code in more]
    assert all('pip install "cuda-toolkit[' in item.remedy and "==13.0.*" in item.remedy for item in wrong)


def test_no_cccl(tmp_path):
    found = look(Site(tmp_path, "include/cccl", "include/nv"))
    assert codes(found) == [*LINKS, "nv_target_missing"]
    assert "cccl" not in found.versions


@pytest.mark.parametrize(("torch", "runs"), [("13.2", "torch runs on"), ("", "runtime wheels are of")])
def test_torchs_cuda_is_only_said_where_there_is_a_torch(tmp_path, torch, runs):
    found = look(Site(tmp_path, wheels={"nvidia_cuda_runtime": "13.2.86"}, torch_cuda=torch))
    assert found.versions.get("torch_cuda", "") == torch
    (text,) = [item.message for item in found.findings if item.code == "skew_torch_minor"]
    assert runs in text


def test_no_nvcc(tmp_path):
    found = look(Site(tmp_path, "bin"))
    assert codes(found) == ["nvcc_missing"]
    assert 'pip install "cuda-toolkit[nvcc,crt,nvvm,cccl]==13.0.*"' in found.findings[0].remedy


def test_nvcc_that_is_not_executable(tmp_path):
    site = Site(tmp_path)
    (site.root / "bin/nvcc").chmod(0o644)
    assert codes(look(site)) == ["nvcc_not_executable", *LINKS]


@pytest.mark.parametrize(
    ("versions", "wheels", "torch", "more"),
    [
        ({"nvcc": "13.5.37"}, {"nvidia_cuda_crt": "13.5.37", "nvidia_nvvm": "13.5.37"}, "13.0", ["skew_runtime"]),
        ({"nvcc": "13.2.86"}, {"nvidia_cuda_crt": "13.5.37", "nvidia_nvvm": "13.5.37"}, "",
         ["skew_runtime", "skew_crt", "skew_nvvm"]),
        ({}, {"nvidia_nvvm": "13.5.37"}, "13.0", ["skew_nvvm"]),
        ({}, {"nvidia_cuda_crt": "13.5.37"}, "13.0", ["skew_crt"]),
        ({"cudart": "13020"}, {}, "13.0", ["skew_runtime"]),
        ({}, {}, "12.9", ["skew_torch"]),
        ({}, {}, "13.2", ["skew_torch_minor"]),
        ({}, {}, "13.0", []),
    ],
)  # fmt: skip
def test_versions_that_do_not_fit(tmp_path, versions, wheels, torch, more):
    found = look(Site(tmp_path, wheels=wheels, torch_cuda=torch, **versions))
    assert codes(found)[3:] == more
    assert all("pip install" in i.remedy or "Use a toolkit" in i.remedy for i in found.findings[3:])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("include/cccl/cuda/argument", ""),  # cp -rn of a newer CCCL into include/cccl: orphans
        ("include/cuda/std/__cccl/version.h", "#define CCCL_VERSION 3006000\n"),  # into include: it shadows
        ("include/cccl/cub/version.cuh", "#define CUB_VERSION 300200\n"),
    ],
)
def test_two_cccl_over_each_other(tmp_path, name, text):
    site = Site(tmp_path)
    write(site.root / name, text)
    assert codes(look(site)) == [*LINKS, "cccl_mixed"]


def test_a_whole_system_toolkit(tmp_path):
    site = Site(tmp_path)
    root = system(tmp_path / "usr/local/cuda-13.0")
    assert codes(examine(SubprocessRunner(), layout_of(str(root), "system"), site.python)) == []


@pytest.mark.parametrize(
    ("value", "word"),
    [("cuda", "relative"), ("/a:/b", "colon"), ("/a b", "blanks"), ("/usr/local/cuda", ""), ("/a$b", "characters")],
)
def test_cuda_home_values(value, word):
    said = check_cuda_home(value)
    assert (word in said) if word else said == ""


def test_places_and_their_order(tmp_path):
    site = Site(tmp_path)
    one, two = system(tmp_path / "root/usr/local/cuda-13.0"), system(tmp_path / "root/usr/local/cuda-13.2")
    (tmp_path / "root/usr/local/cuda").symlink_to(one)
    other = system(tmp_path / "other")
    for path in (one, two, other):  # scripts would be taken for wrappers
        (path / "bin/nvcc").write_text("#!/bin/sh\necho release 13.0, V13.0.88\n")
    environment = {"CUDA_HOME": f"{other}/", "PATH": f"{two}/bin"}
    found, problems = candidates(site.python, "", environment, str(tmp_path / "root"))
    assert [(item.root, item.origin) for item in found] == [
        (str(site.root), "pip"), (str(other), "environment"), (str(one), "system"), (str(two), "system"),
    ]  # fmt: skip
    assert problems == []
    asked, _problems = candidates(site.python, str(other), environment, str(tmp_path / "root"))
    assert [item.origin for item in asked] == ["explicit"]


def test_bad_values_and_wrappers_are_told(tmp_path):
    site = Site(tmp_path)
    write(tmp_path / "local/bin/nvcc", '#!/bin/sh\nexec /usr/local/cuda/bin/nvcc "$@"\n')
    environment = {"CUDA_HOME": "/a:/b", "PATH": str(tmp_path / "local/bin")}
    found, problems = candidates(site.python, "", environment, str(tmp_path / "root"))
    assert [item.root for item in found] == [str(site.root)]
    assert [(item.code, item.severity) for item in problems] == [
        ("cuda_home_bad", "warning"), ("nvcc_wrapper", "warning"),
    ]  # fmt: skip
    _none, problems = candidates(site.python, "rel/cuda", {}, str(tmp_path / "root"))
    assert [(item.code, item.severity) for item in problems] == [("cuda_home_bad", "error")]


def test_a_cuda_home_that_is_not_there_is_told(tmp_path):
    site = Site(tmp_path)
    found, problems = candidates(
        site.python, "", {"CUDA_HOME": "/nonexistent/cuda", "PATH": "/nonexistent"}, str(tmp_path / "root")
    )
    assert [item.root for item in found] == [str(site.root)]
    assert [(item.code, item.severity) for item in problems] == [("cuda_home_gone", "warning")]


def test_layouts(tmp_path):
    conda = tmp_path / "conda"
    write(conda / "conda-meta/history")
    assert layout_of(str(conda), "conda").includes[0] == f"{conda}/targets/{machine_folder()}/include"
    write(tmp_path / "deb/usr/lib/nvidia-cuda-toolkit/bin/nvcc")
    layout = layout_of(str(tmp_path / "deb/usr"), "system", str(tmp_path / "deb"))
    assert (layout.kind, layout.shared) == ("debian", True)
    assert layout_of("/x/site-packages/nvidia/cu13", "pip").kind == "pip"
    assert layout_of("/usr/local/cuda", "system").kind == "nvidia"


@pytest.mark.parametrize(
    ("given", "caps", "nvcc", "archs", "problem"),
    [
        (["12.0f"], "", "13.0.88", ["12.0f"], []),
        (["9.0a 12.0f", "9.0a"], "", "13.0.88", ["9.0a", "12.0f"], []),
        (["9.0a,12.0f"], "", "13.0.88", [], ["arch_list_bad"]),
        (["sm_90"], "", "13.0.88", [], ["arch_list_bad"]),
        (["\uff11\uff12.\uff10f"], "", "13.0.88", [], ["arch_list_bad"]),
        ([], "", "13.0.88", [], ["arch_unknown"]),
        ([], "12.0\n12.0\n9.0\n8.9\n", "13.0.88", ["12.0f", "9.0a", "8.9"], []),
        ([], "12.0\n", "12.8.93", ["12.0a"], []),
    ],
)
def test_architectures(given, caps, nvcc, archs, problem):
    found, problems = host.archs_of(Host(caps=caps), given, nvcc)
    assert (found, [item.code for item in problems]) == (archs, problem)


@pytest.mark.parametrize(
    ("arch", "nvcc", "old"),
    [("12.0a", "12.6.1", True), ("12.0a", "12.8.93", False), ("12.0f", "12.8.93", True), ("12.0f", "12.9.86", False),
     ("9.0a", "11.5.1", True), ("9.0a", "12.4.1", False), ("8.9", "11.8.1", False)],
)  # fmt: skip
def test_nvcc_too_old_for_the_gpu(arch, nvcc, old):
    found = host.arch_findings([arch], nvcc, "/cuda")
    assert [item.code for item in found] == (["nvcc_too_old"] if old else [])


def test_tools_on_the_units_path(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "SYSTEM_PATH", "/nonexistent")
    site = Site(tmp_path)
    toolkit = look(site)
    needs = host.Needs()
    bindir = tmp_path / "venv/bin"
    for name in ("gcc", "c++"):
        write(bindir / name)
    assert host.tool_findings(Host(), site.python, toolkit, needs) == []
    (new,) = host.tool_findings(Host(gcc="16.1.0"), site.python, toolkit, needs)
    assert (new.code, "Install g++-15" in new.remedy) == ("gcc_too_new", True)
    write(bindir / "g++-14")
    (new,) = host.tool_findings(Host(gcc="16.1.0"), site.python, toolkit, needs)
    assert "CC=gcc-14" in new.remedy
    (bindir / "ninja").unlink()
    (bindir / "gcc").unlink()
    python = replace(site.python, include="/nonexistent")
    found = host.tool_findings(Host(), python, toolkit, needs)
    assert [item.code for item in found] == ["ninja_missing", "gcc_missing", "python_h_missing"]
    write(bindir / "gcc")
    (bindir / "c++").unlink()
    assert "cxx_missing" in [item.code for item in host.tool_findings(Host(), python, toolkit, needs)]


def test_caches_and_space(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    needs = host.Needs(user="nobody", cache_dirs=(str(cache),), folder=str(tmp_path / "cuda"))
    found = host.place_findings(needs, str(tmp_path))
    assert [item.code for item in found] == ["cache_readonly"]
    cache.chmod(0o777)
    assert host.place_findings(needs, str(tmp_path)) == []
    monkeypatch.setattr(host, "_free", lambda folder: 10)
    assert [item.code for item in host.place_findings(needs, str(tmp_path))] == ["no_space"] * 3
    tmp_path.chmod(0o700)
    assert "not_reachable" in [item.code for item in host.reach_findings([str(tmp_path / "cuda")], "nobody")]


@pytest.mark.parametrize(
    ("version", "count"), [("0.6.9", 1), ("0.6.10", 1), ("0.6.11", 0), ("0.7.2.post1", 0), ("", 0)]
)
def test_build_ninja_that_pins_another_home(tmp_path, version, count):
    for name, home in (("page", "/old"), ("norm", "/new")):
        write(tmp_path / f".cache/flashinfer/0.6.9/120f/cached_ops/{name}/build.ninja", f"cuda_home = {home}\n")
    found = host.stale_ninja([str(tmp_path)], "/new", version)
    assert [Path(path).parent.name for path in found] == ["page"] * count


def test_a_real_interpreter_is_asked():
    found = ask(SubprocessRunner(), sys.executable)
    assert isinstance(found, Python)
    assert found.version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert found.packages
    assert "does not run" in str(ask(SubprocessRunner(), "/nonexistent/python"))


@pytest.mark.parametrize(
    ("fields", "cuda", "wanted"),
    [
        ({"torch_cuda": "13.0", "torch_pin": "13.0.2"}, "13.0", "==13.0.2"),
        ({"torch_cuda": "13.0"}, "13.0", "==13.0.*"),
        ({"packages": {"nvidia-cuda-runtime": "13.0.96"}}, "13.0", "==13.0.*"),
        ({"packages": {"cuda-toolkit": "13.2.2"}}, "13.2", "==13.2.2"),
        ({"packages": {"nvidia-cuda-nvcc-cu12": "12.8.93"}}, "12.8", "==12.8.*"),
        ({}, "", ""),
    ],
)
def test_the_cuda_that_torch_runs_on(fields, cuda, wanted):
    python = Python("/p", "/v", **fields)
    assert (python.cuda, python.wanted) == (cuda, wanted)


def test_tree_helper(tmp_path):
    assert (tree(tmp_path / "x") / "bin/nvcc").exists()
