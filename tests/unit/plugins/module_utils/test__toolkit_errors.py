"""What compilers, linkers and loaders really said, fault by fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_errors import SIGNS, recognise

LOGS = Path(__file__).resolve().parents[2] / "fixtures/logs/toolkit"
CASES = {
    "0.6.7.post3-13.2.2-12.0f": ["lib64_missing", "libcuda_stub_missing"],
    "0.7.2.post1-13.2.2-12.0f": ["lib64_missing", "libcuda_stub_missing"],
    "fault-cuda-home-missing": ["nvcc_missing"],
    "fault-no-cicc": ["cicc_missing"],
    "fault-no-crt": ["crt_missing"],
    "fault-no-cudafe": ["cudafe_missing"],
    "fault-no-cxx": ["cxx_missing"],
    "fault-no-fatbinary": ["fatbinary_missing"],
    "fault-no-gcc-for-nvcc": ["gcc_missing"],
    "fault-no-nvcc": ["nvcc_missing"],
    "fault-no-nvvm": ["cicc_missing"],
    "fault-no-profile": ["cudafe_missing"],
    "fault-no-ptxas": ["ptxas_missing"],
    "fault-no-runtime-headers": ["runtime_missing"],
    "fault-nvcc-noexec": ["nvcc_not_executable"],
    "skew-0.6.9-nocccl132": ["nv_target_missing"],
    "skew-0.7.2.post1-skewA": ["skew_runtime", "skew_nvvm"],
    "skew-0.7.2.post1-skewB": ["skew_runtime"],
    "skew-0.7.2.post1-skewC": ["skew_runtime"],
    "skew-0.7.2.post1-skewD": ["skew_nvvm"],
}
LINES = [  # measured, without a log of its own
    ("/usr/bin/ld: cannot find -lcudadevrt: No such file or directory", "lib64_missing"),
    ("/usr/bin/ld: cannot find -lcublasLt: No such file or directory", "library_missing"),
    ("OSError: page.so: undefined symbol: cuInit", "libcuda_stub_empty"),
    ("NEEDED libcuda.so: the stub in /x has no SONAME libcuda.so.1", "libcuda_stub_soname"),
    ("include/cccl/cub/util_device.cuh:757:28: error: missing binary operator before token \"(\"", "cccl_mixed"),
    ("common/cudaUtils.h:25:10: fatal error: cublasLt.h: No such file or directory", "cublas_headers_missing"),
    ("x.cu:3:10: fatal error: cuda/std/version: No such file or directory", "cccl_missing"),
    ("#error -- unsupported GNU version! gcc versions later than 15 are not supported!", "gcc_too_new"),
    ("nvcc fatal   : Unsupported gpu architecture 'compute_120f'", "nvcc_too_old"),
    ("ValueError: invalid literal for int() with base 10: '0,12'", "arch_list_bad"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'", "ninja_missing"),
    ("Fatal error: can't write 3 bytes to section .text of cuda.o: No space left on device", "no_space"),
    ("OSError: [Errno 30] Read-only file system: '/c/.cache/flashinfer/flashinfer_jit.log'", "cache_readonly"),
    ("PermissionError: [Errno 13] Permission denied: '/c/cached_ops/tmp/page.lock'", "cache_readonly"),
    ("RuntimeError: page.so: file too short", "object_truncated"),
    ("x.c:1:10: fatal error: Python.h: No such file or directory", "python_h_missing"),
]  # fmt: skip


def test_every_log_is_a_case():
    assert sorted(path.stem for path in LOGS.glob("*.log")) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_log_is_recognised_named_and_has_a_remedy(name):
    found = recognise((LOGS / f"{name}.log").read_text(encoding="utf-8"))
    assert [item.code for item in found] == CASES[name]
    for item in found:
        assert item.remedy
        assert "`" in item.message


@pytest.mark.parametrize(("line", "code"), LINES)
def test_a_line_is_recognised(line, code):
    (found,) = recognise(f"[1/2] nvcc ...\n{line}\nninja: build stopped: subcommand failed.\n")
    assert found.code == code
    assert found.remedy


def test_no_false_alarm():
    assert recognise("ptxas info    : 0 bytes gmem\n[3/3] c++ page.o -shared -lcudart -lcuda -o page.so\n") == []


def test_every_sign_is_tested():
    tested = {code for codes in CASES.values() for code in codes} | {code for _line, code in LINES}
    assert {sign.code for sign in SIGNS} == tested
