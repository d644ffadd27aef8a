# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The stable codes of a diagnosis: what each means, how bad it is, whether trying again helps, who wins."""

from __future__ import annotations

from dataclasses import dataclass

# In order of precedence: a code of an earlier group explains one of a later group, not the other way round.
GROUPS = (
    "device",
    "unit",
    "build",
    "cache",
    "library",
    "gpu",
    "memory",
    "port",
    "model",
    "fault",
    "answer",
    "stall",
    "ended",
    "state",
)
RETRY_NO = "no"
RETRY_ONCE = "once"  # a person, or systemd, may try once more
RETRY_AFTER = "after_remedy"  # it helps when something was done first
RETRY_AUTO = "auto"  # the gate tries once more by itself, one server at a time


@dataclass(frozen=True)
class Code:
    """One code. rank orders codes inside a group; phases are those it can be seen in (() = all)."""

    name: str
    group: str
    severity: str  # hardware | fatal | transient | degraded | warning | info
    retry: str
    says: str  # what it means, in a few words
    rank: int = 50
    phases: tuple[str, ...] = ()


_ALL = (
    Code("gpu_hardware_fault", "device", "hardware", RETRY_NO, "the GPU is faulty", 10),
    Code(
        "driver_library_mismatch",
        "device",
        "fatal",
        RETRY_NO,
        "the driver's libraries and its kernel module are of different versions",
        20,
    ),
    Code("gpu_access_denied", "device", "fatal", RETRY_NO, "the server may not open the GPU's devices", 30),
    Code("driver_too_old", "device", "fatal", RETRY_NO, "the driver does not fit the engine's CUDA", 35),
    Code("driver_unavailable", "device", "fatal", RETRY_ONCE, "the driver or the GPU is not there", 40),
    Code("wrong_device", "device", "fatal", RETRY_NO, "the server does not run on the GPU that was meant", 45),
    Code("unit_misconfigured", "unit", "fatal", RETRY_NO, "the unit is not set up right"),
    Code("build_tools_missing", "build", "fatal", RETRY_NO, "a build tool is missing", 10),
    Code("nvcc_not_found", "build", "fatal", RETRY_NO, "there is no nvcc where it is looked for", 11),
    Code("cuda_home_invalid", "build", "fatal", RETRY_NO, "CUDA_HOME is not one usable folder", 20),
    Code("toolkit_incomplete", "build", "fatal", RETRY_NO, "the CUDA toolkit lacks parts", 30),
    Code("cuda_version_skew", "build", "fatal", RETRY_NO, "parts of the CUDA toolkit are of different versions", 40),
    Code("nvcc_too_old_for_gpu", "build", "fatal", RETRY_NO, "the compiler does not know this GPU", 50),
    Code("arch_list_wrong", "build", "fatal", RETRY_NO, "the list of GPU architectures to build for is wrong", 55),
    Code("jit_compile_oom", "build", "fatal", RETRY_AFTER, "a compiler was killed for want of memory", 60),
    Code("jit_build_failed", "build", "fatal", RETRY_NO, "a kernel could not be built", 90),
    Code("jit_cache_not_writable", "cache", "fatal", RETRY_NO, "a cache folder cannot be written", 10),
    Code("jit_cache_bad", "cache", "fatal", RETRY_AFTER, "a cached kernel is broken or stale", 20),
    Code("jit_contention", "cache", "transient", RETRY_AUTO, "several processes built the same kernels", 30),
    Code("cubin_unavailable", "cache", "fatal", RETRY_ONCE, "precompiled kernels could not be had", 40),
    Code("runtime_lib_shadowed", "library", "fatal", RETRY_NO, "another copy of a CUDA library is loaded first", 10),
    Code("runtime_lib_missing", "library", "fatal", RETRY_NO, "a shared library is missing", 20),
    Code("package_mismatch", "library", "fatal", RETRY_NO, "installed packages do not fit each other", 30),
    Code("no_kernel_image", "gpu", "fatal", RETRY_NO, "a package has no code for this GPU", 20),
    Code("backend_unsupported_on_gpu", "gpu", "fatal", RETRY_NO, "the chosen backend does not exist for this GPU", 30),
    Code("gpu_memory_in_use", "memory", "fatal", RETRY_AFTER, "other processes hold the GPU's memory", 10),
    Code("state_cache_too_small", "memory", "fatal", RETRY_NO, "the state (Mamba) cache is too small", 20),
    Code("dev_shm_too_small", "memory", "fatal", RETRY_NO, "/dev/shm is too small", 25),
    Code("host_oom", "memory", "fatal", RETRY_ONCE, "the host ran out of memory", 30),
    Code("kv_pool_too_small", "memory", "fatal", RETRY_NO, "the KV pool is too small", 40),
    Code("gpu_oom", "memory", "fatal", RETRY_NO, "the GPU ran out of memory", 50),
    Code("port_in_use", "port", "fatal", RETRY_AFTER, "another process has the port", 10),
    Code("loopback_via_proxy", "port", "fatal", RETRY_NO, "requests to the server itself went to a proxy", 20),
    Code("disk_full", "model", "fatal", RETRY_NO, "a disk is full", 10),
    Code("weights_corrupt", "model", "fatal", RETRY_NO, "a weight file is damaged", 20),
    Code("model_unavailable", "model", "fatal", RETRY_NO, "the model is not there", 30),
    Code("model_unsupported", "model", "fatal", RETRY_NO, "the engine does not know this model", 40),
    Code("cuda_kernel_fault", "fault", "fatal", RETRY_ONCE, "a kernel crashed on the GPU", 50),
    Code("output_wrong", "answer", "degraded", RETRY_NO, "the answers are wrong", 10),
    Code("content_empty", "answer", "degraded", RETRY_NO, "the answers are empty", 20),
    Code("engine_stalled", "stall", "fatal", RETRY_ONCE, "the engine stands still"),
    Code("process_killed", "ended", "fatal", RETRY_ONCE, "a process of the server was killed from outside"),
    Code("unknown_failure", "ended", "fatal", RETRY_ONCE, "not known", 90),
    Code("state_health_unreliable", "state", "info", RETRY_NO, "the health endpoint says 200 for a dead server", 10),
    Code("state_busy", "state", "info", RETRY_NO, "busy: compiling or serving, not dead", 20),
    Code("state_degraded", "state", "warning", RETRY_NO, "runs slower than it could", 30),
)
CODES: dict[str, Code] = {code.name: code for code in _ALL}


def order(name: str) -> tuple[int, int]:
    """Return the place of a code in the order of precedence, lowest first."""
    code = CODES[name]
    return GROUPS.index(code.group), code.rank


def is_state(name: str) -> bool:
    """Say whether a code is a state and not a failure."""
    return CODES[name].group == "state"
