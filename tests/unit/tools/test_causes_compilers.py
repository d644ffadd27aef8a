# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Causes provoked with the real nvcc, linker and compiler of this machine; skipped where there is no CUDA toolkit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts

CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")).resolve()
pytestmark = pytest.mark.skipif(not (CUDA / "bin/nvcc").exists(), reason="no CUDA toolkit here")
KERNEL = "#include <cuda_fp16.h>\n__global__ void k(float* x) { x[0] = 1; }\nint main() { k<<<1, 1>>>(0); return 0; }\n"


@pytest.fixture
def toolkit(tmp_path):
    """A toolkit of links, to take things away from; the compiler's driver is a copy, for it looks beside itself."""
    home = tmp_path / "cuda"
    shutil.copytree(CUDA / "bin", home / "bin", symlinks=True)
    for name in ("nvvm", "lib64", "include", "targets"):
        if (CUDA / name).exists():
            (home / name).symlink_to((CUDA / name).resolve())
    return home


def compile_with(home, tmp_path, *args, path="/usr/bin:/bin", source=KERNEL):
    (tmp_path / "k.cu").write_text(source)
    done = subprocess.run(
        [str(home / "bin/nvcc"), "k.cu", "-o", "k.so", *args],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={"PATH": path, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode, done.stdout + done.stderr
    return (done.stdout + done.stderr).splitlines()


def code(lines, **facts):
    return diagnose(lines, Facts(failed=True, **facts)).code


def test_no_lib64(tmp_path):
    (tmp_path / "a.cpp").write_text("int main() { return 0; }\n")
    done = subprocess.run(
        ["c++", "a.cpp", "-L", str(tmp_path / "lib64"), "-lcudart", "-lcuda"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert code(done.stderr.splitlines()) == "toolkit_incomplete"


def test_no_cicc(toolkit, tmp_path):
    (toolkit / "nvvm").unlink()
    assert code(compile_with(toolkit, tmp_path)) == "toolkit_incomplete"


def test_unknown_architecture(tmp_path):
    lines = compile_with(CUDA, tmp_path, "-gencode=arch=compute_199,code=sm_199")
    assert code(lines) == "nvcc_too_old_for_gpu"
    assert code(lines, compute_cap="9.0") == "arch_list_wrong"


def test_missing_header(tmp_path):
    assert code(compile_with(CUDA, tmp_path, source="#include <curand_nothing.h>\n" + KERNEL)) == "toolkit_incomplete"


def test_no_host_compiler(tmp_path):
    lines = compile_with(CUDA, tmp_path, "-ccbin", "/nonexistent/gcc")
    assert code(lines) == "build_tools_missing"


def test_no_python_headers(tmp_path):
    (tmp_path / "main.c").write_text("#include <Python.h>\n")
    done = subprocess.run(
        ["gcc", "-nostdinc", "-c", "main.c"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert code(done.stderr.splitlines()) == "build_tools_missing"


def test_a_killed_compiler(tmp_path):
    """As the kernel does it when memory runs out: signal 9 to cc1plus."""
    (tmp_path / "a.cpp").write_text("int main() { return 0; }\n")
    wrapper = tmp_path / "cc1plus"
    wrapper.write_text("#!/bin/sh\nkill -9 $$\n")
    wrapper.chmod(0o755)
    done = subprocess.run(
        ["g++", "-B", f"{tmp_path}/", "a.cpp"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert code(done.stderr.splitlines()) == "jit_compile_oom"
