# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The environment of a server: what the plan sets, and what a user may add."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TORCH_STORE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
DIGEST_VARIABLE = "GPUFLEET_CONFIG"  # ties a running process to the files it was started with
_SECRET = re.compile(r"(^|_)(TOKEN|API_?KEY|KEY|SECRET|PASSWORD|PASSWD)(_|$)", re.IGNORECASE)
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_RESERVED = {
    "CUDA_VISIBLE_DEVICES": "List the GPUs in sglang_server_gpus",
    "CUDA_DEVICE_ORDER": "List the GPUs in sglang_server_gpus",
    DIGEST_VARIABLE: "Leave it out: it carries the configuration's fingerprint",
}


def base_environment(
    *, device: str, venv: str, state_dir: str, cache_dir: str, cuda_home: str | None, gpu: str | None, offline: bool
) -> dict[str, str]:
    """Return what every server gets; gpu is its UUID (or index) for CUDA, None on device cpu.

    The caches are shared by the fleet on purpose: what one server compiled, the others load.
    """
    cuda_bin = f":{cuda_home}/bin" if cuda_home else ""
    environment = {
        "HOME": state_dir,
        "PATH": f"{venv}/bin{cuda_bin}:{_SYSTEM_PATH}",
        "VIRTUAL_ENV": venv,
        "PYTHONUNBUFFERED": "1",
        "HF_HOME": f"{state_dir}/huggingface",
        "XDG_CACHE_HOME": f"{cache_dir}/xdg",
        "SGLANG_CACHE_DIR": cache_dir,
        "SGLANG_JIT_CACHE_DIR": f"{cache_dir}/jit",  # does not follow SGLANG_CACHE_DIR by itself
        "FLASHINFER_WORKSPACE_BASE": cache_dir,
        "TRITON_CACHE_DIR": f"{cache_dir}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache_dir}/inductor",
        "TILELANG_CACHE_DIR": f"{cache_dir}/tilelang",
        "TVM_FFI_CACHE_DIR": f"{cache_dir}/tvm-ffi",
        # One server is one process group of one: torch's store can be a file, which vanishes with the unit's
        # private /tmp. As a TCP server it listens on all interfaces, whatever address it is given; and gloo
        # and NCCL listen on the host's own address.
        TORCH_STORE: "file:///tmp/torch-store",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # With the engine's defaults a server whose child died holds its port for 65 s more.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
    }
    if device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    else:
        environment["CUDA_CACHE_PATH"] = f"{cache_dir}/nv"
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["CUDA_VISIBLE_DEVICES"] = gpu or ""
    if cuda_home:
        environment["CUDA_HOME"] = cuda_home
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def published_environment(kernels_dir: str, state_dir: str, python_path: str) -> dict[str, str]:
    """Return what makes a server load published kernels and compile none; FlashInfer still writes a log."""
    return {
        "PYTHONPATH": ":".join(part for part in (kernels_dir, python_path) if part),
        "FLASHINFER_DISABLE_JIT": "1",
        "SGLANG_CRASH_ON_JIT_COMPILE": "1",
        "FLASHINFER_WORKSPACE_BASE": f"{state_dir}/flashinfer",
    }


def check_environment(
    values: Mapping[str, Any], where: str, gpu: int | None = None
) -> tuple[dict[str, str], list[Finding]]:
    """Return a user's variables as text (a null one is left out) with everything that is wrong with them."""
    texts: dict[str, str] = {}
    findings: list[Finding] = []
    for name in sorted(values, key=str):
        value = values[name]
        label = f"{where}environment {name}"
        if not _NAME.fullmatch(str(name)):
            findings.append(
                Finding("env_name", f"{label}: not a name of a variable", "Use letters, digits and _ only", gpu=gpu)
            )
        elif name == "LD_LIBRARY_PATH":
            text = f"{label}: it makes the engine load other libraries than the ones torch was built with"
            findings.append(
                Finding("env_library_path", text, "Leave it out: the wheels find their own libraries", gpu=gpu)
            )
        elif name in _RESERVED:
            findings.append(Finding("env_reserved", f"{label}: the plan sets it", _RESERVED[name], gpu=gpu))
        elif _SECRET.search(str(name)):
            text = f"{label} looks like a secret, and plan.json and diffs show the environment"
            findings.append(Finding("env_secret", text, "Put it into sglang_server_secret_environment", gpu=gpu))
        elif isinstance(value, (list, dict, tuple)):
            findings.append(Finding("env_value", f"{label}: the value must be text", gpu=gpu))
        elif value is not None:
            text = ("true" if value else "false") if isinstance(value, bool) else str(value)
            if any(char in text for char in "\n\r\0"):
                findings.append(Finding("env_value", f"{label}: the value must be one line", gpu=gpu))
            else:
                texts[str(name)] = text
    return texts, findings
