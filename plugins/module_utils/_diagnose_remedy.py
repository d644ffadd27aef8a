# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What to do about each code, with flags spelled as the installed engine spells them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ansible_collections.gpufleet.sglang.plugins.module_utils._flags import SETTINGS
from ansible_collections.gpufleet.sglang.plugins.module_utils._options import EngineOptions

if TYPE_CHECKING:
    from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts

# Flags that are no stable setting of ours: the spellings to look for, newest first.
OTHER_FLAGS = {
    "moe_runner_backend": ("moe-runner-backend", "moe-backend"),
    "mamba_ratio": ("mamba-full-memory-ratio",),
    "mamba_size": ("max-mamba-cache-size",),
    "custom_all_reduce": ("disable-custom-all-reduce",),
    "nccl_port": ("nccl-port",),
}
HOLDER = (
    ". Find it with nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv, in a container on the "
    "container's host: from inside one only its own processes can be seen; or with fuser -v /dev/nvidia*"
)
# {name} = a flag as the installed engine spells it, with sglang_server_ before stable settings.
REMEDIES: dict[str, str] = {
    "gpu_hardware_fault": "Take this GPU out of sglang_server_gpus and leave the others; reset it (nvidia-smi "
    "--gpu-reset) or reboot; if it comes back, have the hardware tested",
    "driver_library_mismatch": "Bring the kernel module and the driver's libraries to one version (in a container: the "
    "host's) and pin it; reload the module or reboot",
    "driver_unavailable": "Load the driver and pass the GPU in; on NVSwitch machines start nvidia-fabricmanager of the "
    "driver's version; order the unit after nvidia-persistenced",
    "gpu_access_denied": "Make the device nodes (nvidia-modprobe -u -c=0 at boot, on the host before the container) "
    "and allow their current major numbers (lxc.cgroup2.devices.allow, DeviceAllow=); with "
    "SELinux container_use_devices",
    "driver_too_old": "Install a newer driver, or an engine built for an older CUDA; take cuda/compat out of "
    "LD_LIBRARY_PATH",
    "wrong_device": "Name the GPU by its UUID in sglang_server_gpus, and let nothing else set CUDA_VISIBLE_DEVICES",
    "unit_misconfigured": "Correct the unit: see systemctl cat and the drop-ins of this unit (HOME, PATH, LimitNOFILE, "
    "TimeoutStartSec)",
    "port_in_use": "Stop the process that has the port, or choose another sglang_server_base_port; ports of one "
    "host must differ",
    "loopback_via_proxy": "Add NO_PROXY and no_proxy with 127.0.0.1,localhost,0.0.0.0 to sglang_server_environment, or "
    "take the proxy away",
    "nvcc_not_found": "Run the deploy with --tags toolkit and set CUDA_HOME to the toolkit it makes",
    "cuda_home_invalid": "Set CUDA_HOME to one absolute folder that holds bin/nvcc, not /usr and no list",
    "toolkit_incomplete": "Run the deploy with --tags toolkit,cccl; or install the missing nvidia-cuda-* wheel in the "
    "minor version of the others",
    "cuda_version_skew": "Bring all nvidia-cuda-* packages (nvcc, runtime, cccl, nvvm, crt) to one minor version",
    "nvcc_too_old_for_gpu": "Use nvcc 12.8 or newer for sm_120, 12.9 or newer for sm_121",
    "arch_list_wrong": "Take FLASHINFER_CUDA_ARCH_LIST and TORCH_CUDA_ARCH_LIST out of sglang_server_environment, "
    "or name this GPU's architecture, single blanks between",
    "build_tools_missing": "Put <venv>/bin on the unit's PATH and install ninja, a C++ compiler that this nvcc "
    "supports (build-essential; CC, CXX) and the Python headers (python3-dev)",
    "jit_compile_oom": "Compile with fewer jobs: MAX_JOBS and FLASHINFER_NVCC_THREADS=1 in "
    "sglang_server_environment, one server first",
    "jit_build_failed": "Correct what the compiler's first error line says",
    "jit_contention": "Compile once before the fleet starts (--tags jit), on a local disk; remove only a lock file "
    "without a living owner",
    "jit_cache_bad": "Delete the folder of that module in the cache and let it be built again",
    "jit_cache_not_writable": "Give the service user a cache folder it may write (sglang_server_cache_dir, and "
    "ReadWritePaths= of the unit)",
    "cubin_unavailable": "Install flashinfer-cubin of flashinfer's version, or run flashinfer download-cubin where "
    "there is a network",
    "runtime_lib_missing": "Install the package that holds the library, in torch's CUDA major version",
    "runtime_lib_shadowed": "Take the toolkit out of LD_LIBRARY_PATH of the unit: torch brings its own libraries",
    "package_mismatch": "Install one locked set of packages (sglang_server_lock_file); never switch the version "
    "check off",
    "no_kernel_image": "Install wheels that were built for this GPU's architecture",
    "backend_unsupported_on_gpu": "Choose another {attention_backend} or {moe_runner_backend}, or another "
    "quantisation of the model",
    "gpu_memory_in_use": "Stop the process that holds the GPU's memory, that one only",
    "gpu_oom": "Take a smaller model or a quantised one",
    "gpu_oom/graphs": "Lower {mem_fraction_static} or {decode_graph_max_batch}",
    "gpu_oom/ready": "Lower {chunked_prefill_size} or {mem_fraction_static}",
    "kv_pool_too_small": "Raise {mem_fraction_static}; if that ends in gpu_oom, lower {context_length}, set "
    "{kv_cache_dtype} to an fp8 type, or take a smaller model",
    "state_cache_too_small": "Raise {mamba_ratio} or {mamba_size}, or lower {max_running_requests}",
    "host_oom": "Give the host (or the container, or the unit) more memory, or start fewer servers at once",
    "dev_shm_too_small": "Enlarge /dev/shm (mount option size=, or the container's shm size)",
    "model_unavailable": "Correct sglang_server_model, fetch the model before the start, or give HF_TOKEN in "
    "sglang_server_secret_environment",
    "weights_corrupt": "Fetch the damaged weight file again",
    "disk_full": "Make room on the file system that the line names, or move sglang_server_state_dir or "
    "sglang_server_cache_dir",
    "model_unsupported": "Take an engine version that knows this model, or a matching quantisation; "
    "{trust_remote_code} only for code you have read",
    "cuda_kernel_fault": "Try another {attention_backend}; CUDA_LAUNCH_BLOCKING=1 shows the kernel; if one GPU does "
    "it again and again, test it",
    "output_wrong": "Try another {attention_backend}, {kv_cache_dtype} or {sampling_backend}",
    "content_empty": "Correct {reasoning_parser} or the model's chat template",
    "engine_stalled": "Restart it once; if it stands still again, py-spy dump --pid of the scheduler shows where",
    "process_killed": "Find who killed it (a person, a script, systemd-oomd) and start it again",
    "unknown_failure": "Read the lines above; the whole log is in the journal",
    "state_busy": "Wait",
    "state_health_unreliable": "Trust a real request, not the health endpoint",
    "state_degraded": "Align the flashinfer packages, or tune the kernels",
}


def remedy(
    code: str, detail: str, phase: str, evidence: Sequence[str], facts: Facts, options: EngineOptions | None
) -> str:
    """Return what to do, in the installed engine's words."""
    text = REMEDIES.get(f"{code}/{phase}") or REMEDIES.get(f"{code}/{'ready' if phase == 'warmup' else phase}")
    text = text or REMEDIES[code]
    if detail == "wrong_flag":
        text = "Correct the flag in sglang_server_extra_args or the setting it came from"
        if evidence and options:
            text += _near(evidence[0], options)
    if detail == "systemd_start_timeout":
        text = "Set TimeoutStartSec above the longest start, compiling included (this collection's units have none)"
    if code == "gpu_memory_in_use":
        text += f" ({', '.join(facts.holders)})" if facts.holders else HOLDER
    if code == "build_tools_missing" and facts.tools_missing:
        text += f". Missing now: {', '.join(facts.tools_missing)}"
    return re.sub(r"\{(\w+)\}", lambda hit: flag(hit.group(1), options), text)


def flag(name: str, options: EngineOptions | None) -> str:
    """Return a setting as people set it here, with the flag it becomes in the installed engine."""
    names = SETTINGS[name].flags if name in SETTINGS else OTHER_FLAGS[name]
    known = [item for item in names if options is not None and options.has(item)]
    spelled = f"--{(known or list(names))[0]}"
    if options is not None and not known:
        spelled = f"{spelled} (not in SGLang {options.version})"
    return f"sglang_server_{name} ({spelled})" if name in SETTINGS else spelled


def _near(line: str, options: EngineOptions) -> str:
    wrong = re.search(r"(?:unrecognized arguments: |ambiguous option: |argument )(--[\w-]+)", line)
    near = options.suggest(wrong.group(1)) if wrong and not options.has(wrong.group(1)) else []
    return f": did you mean {' or '.join(near)}?" if near else ""
