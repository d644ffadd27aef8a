# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What compilers, linkers and loaders say when a toolkit is incomplete or mixed, and what it means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding

REPAIR = "Run the deploy with --tags toolkit,cccl: it composes a CUDA_HOME that has it"
INSTALL = (
    "Install nvcc, crt, nvvm and runtime in one version (cuda-toolkit[nvcc,crt,nvvm,cccl]), or let --tags toolkit do it"
)


@dataclass(frozen=True)
class Sign:
    """A text that tells one fault."""

    code: str
    pattern: str
    meaning: str
    remedy: str


SIGNS = (
    Sign("lib64_missing", r"cannot find -lcudart\b", "the linker finds no lib64/libcudart.so in CUDA_HOME", REPAIR),
    Sign("libcuda_stub_missing", r"cannot find -lcuda\b", "the linker finds no lib64/stubs/libcuda.so", REPAIR),
    Sign("lib64_missing", r"cannot find -lcudadevrt\b", "nvcc as a linker finds no lib64", REPAIR),
    Sign(
        "library_missing",
        r"cannot find -l(cublas|cublasLt|nvrtc|curand)\b",
        "a CUDA library has no name without number",
        REPAIR,
    ),
    Sign(
        "libcuda_stub_soname", r"NEEDED libcuda\.so:", "the stub of the driver's library has no name of its own", REPAIR
    ),
    Sign("libcuda_stub_empty", r"undefined symbol: cu[A-Z]\w+", "the stub of the driver's library is empty", REPAIR),
    Sign("nv_target_missing", r"nv/target: No such file", "the toolkit has no CCCL (CUDA C++ headers)", REPAIR),
    Sign("cccl_missing", r"(cuda/std/\S+|cub/\S+|thrust/\S+): No such file", "a CCCL header is missing", REPAIR),
    Sign("cccl_mixed", r"cub/\S+: error: missing binary operator", "headers of two CCCL lie over each other", REPAIR),
    Sign(
        "cublas_headers_missing",
        r"cublas\w*\.h: No such file",
        "the headers of cublas are missing",
        "Install nvidia-cublas",
    ),
    Sign(
        "skew_runtime",
        r"CUDA compiler and CUDA toolkit headers are incompatible",
        "nvcc and the runtime's headers are of different versions",
        INSTALL,
    ),
    Sign("skew_nvvm", r"ptxas.*Unsupported \.version", "nvvm (cicc) is newer than ptxas", INSTALL),
    Sign("cicc_missing", r"nvvm/bin/cicc: not found", "the toolkit has no nvvm", INSTALL),
    Sign(
        "cudafe_missing",
        r"cudafe\+\+: not found",
        "nvcc does not find cudafe++: it or nvcc.profile is missing",
        INSTALL,
    ),
    Sign("ptxas_missing", r"ptxas: not found", "the toolkit has no ptxas", INSTALL),
    Sign("fatbinary_missing", r"fatbinary: not found", "the toolkit has no fatbinary", INSTALL),
    Sign("crt_missing", r"crt/host_config\.h: No such file", "the toolkit has no crt headers", INSTALL),
    Sign("runtime_missing", r"cuda_runtime\.h: No such file", "no runtime headers, or nvcc is a lone link", INSTALL),
    Sign(
        "nvcc_not_executable",
        r"Permission denied: '[^']*/nvcc'|/nvcc: Permission denied",
        "nvcc is not executable",
        REPAIR,
    ),
    Sign(
        "nvcc_missing",
        r"nvcc not found and PyTorch is not built with CUDA|/bin/nvcc['\"]?: (not found|No such file)",
        "CUDA_HOME has no nvcc",
        INSTALL,
    ),
    Sign(
        "gcc_too_new",
        r"unsupported GNU version",
        "the host's gcc is newer than this nvcc takes",
        "Install an older g++ and set CC and CXX in sglang_server_environment",
    ),
    Sign(
        "gcc_missing",
        r"Failed to preprocess host compiler properties|gcc: No such file",
        "nvcc finds no host compiler",
        "Install gcc and g++, or correct CC",
    ),
    Sign(
        "cxx_missing",
        r"/c\+\+: not found|(^|\s)(g|c)\+\+: (not found|No such file)",
        "the linker's driver (c++) is missing",
        "Install g++, or correct CXX",
    ),
    Sign(
        "nvcc_too_old",
        r"Unsupported gpu architecture|is not defined for option 'gpu-architecture'",
        "this nvcc does not know the GPU's architecture",
        "Use a newer toolkit: sm_120 from 12.8, 120f from 12.9",
    ),
    Sign(
        "arch_list_bad",
        r"could not convert string to float|invalid literal for int|Invalid CUDA arch",
        "the architecture list cannot be read",
        "Separate architectures by blanks: FLASHINFER_CUDA_ARCH_LIST='9.0a 12.0f'",
    ),
    Sign(
        "ninja_missing",
        r"No such file or directory: 'ninja'|ninja: not found",
        "ninja is not on the unit's PATH",
        "Install ninja into the venv",
    ),
    Sign(
        "no_space",
        r"No space left on device",
        "a file system is full (cache, TMPDIR)",
        "Free space; the next start goes on from there",
    ),
    Sign(
        "cache_readonly",
        r"(Permission denied|Read-only file system): '[^']*(flashinfer|cached_ops|tvm-ffi)[^']*'",
        "the kernel cache cannot be written to",
        "Give the folder to the servers' user; it is needed even when warm",
    ),
    Sign(
        "object_truncated",
        r"file too short|SIGBUS|rc 135",
        "a compiled kernel was cut off",
        "Delete that .so: it is linked again",
    ),
    Sign(
        "python_h_missing",
        r"Python\.h: No such file",
        "Python's headers are missing",
        "Install python3-dev of the venv's Python",
    ),
)


def recognise(text: str) -> list[Finding]:
    """Return what a failed build's output means, most telling first, each with its evidence; empty when unknown."""
    found: dict[str, Finding] = {}
    for sign in SIGNS:
        match = re.search(sign.pattern, text, re.MULTILINE)
        if match and sign.code not in found:
            start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            line = text[start : end if end >= 0 else len(text)].strip()
            if len(line) > 240:  # the compiler's whole command: only the part that says it
                line = match.group(0)
            found[sign.code] = Finding(sign.code, f"{sign.meaning}: `{line}`", sign.remedy)
    return list(found.values())
