# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What servers said on a real GPU (an H200 in a container) when they were broken on purpose, shortened."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts
from ansible_collections.gpufleet.sglang.plugins.module_utils._facts import Seen, collect
from ansible_collections.gpufleet.sglang.plugins.module_utils._facts_cache import cut_off
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result

HOST = {"failed": True, "device": "cuda", "fabric": "inactive"}  # the run's host: no fabric manager in the container
NINE = {"exit_code": "killed", "exit_status": 9, "result": "signal", "oom_kills": 0}
READY = "[2026-12-01 13:55:00] The server is fired up and ready to roll!"
SCHEDULER_KILLED = [
    READY,
    "[2026-12-01 13:55:02] Subprocess scheduler_0 (pid=4682) crashed with exit code -9. Triggering SIGQUIT for cleanup",
    "[2026-12-01 13:55:02] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
    "[2026-12-01 13:55:02] kill_process_tree called: parent_pid=4627, include_parent=True, pid=4627",
]
SITE = "/opt/engine/lib/python3.12/site-packages"
BUS = [
    "Capturing num tokens (num_tokens=4096 avail_mem=124.44 GB):   0%|    | 0/50 [?it/s]Fatal Python error: Bus error",
    "",
    "Thread 0x00007f86ebfff6c0 (most recent call first):",
    '  File "/usr/lib/python3.12/threading.py", line 359 in wait',
    f'  File "{SITE}/tqdm/_monitor.py", line 69 in run',
    "",
    "Current thread 0x00007f8fde1e9140 (most recent call first):",
]
LOADING = [
    f'  File "{SITE}/tvm_ffi/module.py", line 474 in load_module',
    f'  File "{SITE}/flashinfer/jit/core.py", line 305 in load',
    f'  File "{SITE}/flashinfer/prefill.py", line 2417 in plan',
    *(f'  File "{SITE}/sglang/srt/x.py", line {number} in f{number}' for number in range(20)),
]
ELSEWHERE = [f'  File "{SITE}/safetensors/torch.py", line 1 in load_file']
EOF = [
    "Extension modules: numpy._core._multiarray_umath, psutil._psutil_linux",
    "[2026-12-01 13:56:00] kill_process_tree called: parent_pid=4948, include_parent=False, pid=4948",
    "Traceback (most recent call last):",
    f'  File "{SITE}/sglang/srt/entrypoints/engine.py", line 1702, in _wait_for_scheduler_ready',
    "    data = scheduler_pipe_readers[i].recv()",
    '  File "/usr/lib/python3.12/multiprocessing/connection.py", line 399, in _recv',
    "    raise EOFError",
    "EOFError",
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    "Traceback (most recent call last):",
    f'  File "{SITE}/sglang/srt/entrypoints/engine.py", line 1704, in _wait_for_scheduler_ready',
    "    raise _scheduler_died_error(i, scheduler_procs[i])",
    "RuntimeError: Rank 0 scheduler died during initialization (exit code: {}). If exit code is -9 (SIGKILL), a common "
    "cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
]
HELP = "Search for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/x.html for more information."
MEMORY_HELD = [
    "[2026-12-01 13:51:42] Init torch distributed begin.",
    "[2026-12-01 13:51:42] Scheduler hit an exception: Traceback (most recent call last):",
    f'  File "{SITE}/sglang/srt/distributed/parallel_state.py", line 1811, in init_world_group',
    "    return GroupCoordinator(",
    f'  File "{SITE}/sglang/srt/distributed/parallel_state.py", line 359, in __init__',
    "    active_ranks = torch.ones(",
    "torch.AcceleratorError: CUDA error: out of memory",
    HELP,
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be incorrect.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "",
    "[2026-12-01 13:51:42] Received sigquit from a child process. It usually means the child failed.",
]
PLAIN_OOM = ["torch.AcceleratorError: CUDA error: out of memory", HELP]
ACCOUNT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 278.00 MiB. GPU 0 has a total capacity of 139.80 GiB"
    " of which {} is free. Including non-PyTorch memory, this process has {} memory in use."
)
NO_ACCESS = "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
CAPPED = (  # a healthy hybrid model's
    "max_running_requests is capped to 214 by the mamba state cache (max_mamba_cache_size=1072, 5 state slots per "
    "request). To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size."
)
FULL = "Not enough space for mamba cache: requests are capped, the rest is ignored"
DAMAGE = "/c/x.so: cut off: 512 of 1024 bytes"


def died(status):
    return [line.replace("{}", str(status)) for line in EOF]


FREE = "[2026-12-01 17:24:08] Load weight begin. avail mem=139.13 GB"
LATE = {"gpu_mib": 143771, "held_mib": 143013}  # the server's own, which the driver had not given back yet
TABLE = [
    # lines, facts -> code, what the evidence begins with
    (SCHEDULER_KILLED, {**HOST, **NINE}, "process_killed", "Subprocess scheduler_0"),
    (SCHEDULER_KILLED, {**HOST, **NINE, "nodes": {"/dev/nvidia-uvm": "missing"}}, "process_killed", "Subprocess"),
    (SCHEDULER_KILLED, {**HOST, **NINE, "smi": "hung", "unit_problem": "HOME is /x"}, "process_killed", "Subprocess"),
    (SCHEDULER_KILLED, {**HOST, **NINE, "cache_damage": DAMAGE}, "process_killed", "Subprocess"),
    (SCHEDULER_KILLED, HOST, "unknown_failure", "Subprocess scheduler_0"),  # nobody knows who did it
    (died(-9), {**HOST, "oom_kills": 0}, "process_killed", "RuntimeError: Rank 0"),
    ([CAPPED, *died(-9)], {**HOST, "oom_kills": 0}, "process_killed", "RuntimeError: Rank 0"),
    ([FULL, *SCHEDULER_KILLED[1:]], {**HOST, **NINE}, "process_killed", "Subprocess scheduler_0"),
    ([], {**HOST, **NINE}, "process_killed", "the main process"),
    ([NO_ACCESS], HOST, "driver_unavailable", "RuntimeError: Unexpected error"),
    ([], HOST, "unknown_failure", ""),  # an idle fabric manager alone is no reason
    ([*BUS, *LOADING, *died(-7)], HOST, "jit_cache_bad", "Fatal Python error: Bus error"),
    ([*BUS, *LOADING, *died(-7)], {**HOST, "cache_damage": DAMAGE}, "jit_cache_bad", DAMAGE),
    ([*BUS, *ELSEWHERE, *died(-7)], HOST, "unknown_failure", "Fatal Python error: Bus error"),
    (died(-7), HOST, "unknown_failure", "RuntimeError: Rank 0 scheduler died"),  # not the EOFError
    (died(-7), {**HOST, "cache_damage": DAMAGE}, "jit_cache_bad", DAMAGE),
    (died(-7), {**HOST, "shm_mib": 64}, "dev_shm_too_small", "/dev/shm"),
    ([], {**HOST, "exit_code": "dumped", "exit_status": 7, "cache_damage": DAMAGE}, "jit_cache_bad", DAMAGE),
    (MEMORY_HELD, HOST, "gpu_memory_in_use", "torch.AcceleratorError: CUDA error: out of memory"),
    (PLAIN_OOM, {**HOST, "held_mib": 142000}, "gpu_memory_in_use", "142000 MiB"),
    ([FREE, *PLAIN_OOM], {**HOST, **LATE}, "gpu_oom", "torch.AcceleratorError: CUDA error: out of memory"),
    ([FREE.replace("139.13", "30"), *PLAIN_OOM], {**HOST, **LATE}, "gpu_memory_in_use", "143013 MiB"),
    ([ACCOUNT.format("140.31 MiB", "139.65 GiB")], {**HOST, **LATE}, "gpu_oom", "torch.OutOfMemoryError"),
    (PLAIN_OOM, HOST, "gpu_oom", "torch.AcceleratorError: CUDA error: out of memory"),
    ([ACCOUNT.format("140.31 MiB", "139.65 GiB")], HOST, "gpu_oom", "torch.OutOfMemoryError"),
    ([ACCOUNT.format("140.31 MiB", "20.00 GiB")], HOST, "gpu_memory_in_use", "torch.OutOfMemoryError"),
]


@pytest.mark.parametrize(("lines", "facts", "code", "evidence"), TABLE)
def test_decision(lines, facts, code, evidence):
    found = diagnose(lines, Facts(**facts))
    assert found.code == code, found
    assert "".join(found.evidence[:1]).startswith(evidence)
    assert not any("Search for" in line for line in found.evidence)


def test_the_fabric_manager_counts_only_with_cudas_own_word_before_the_server_worked():
    fabric = "nvidia-fabricmanager is inactive"
    assert fabric in diagnose([NO_ACCESS], Facts(**HOST)).evidence
    assert fabric not in diagnose([READY, NO_ACCESS], Facts(**HOST)).evidence


def test_the_remedy_names_the_holder_or_how_to_find_it():
    assert "pid 7 (python)" in diagnose(PLAIN_OOM, Facts(**HOST, held_mib=9000, holders=("pid 7 (python)",))).remedy
    assert "--query-compute-apps" in diagnose(MEMORY_HELD, Facts(**HOST)).remedy


def test_a_cut_off_library_is_found(tmp_path):
    folder = tmp_path / ".cache/flashinfer/0.6/90a/cached_ops/x"
    folder.mkdir(parents=True)
    with open("/proc/self/exe", "rb") as file:
        whole = file.read()
    (folder / "a.so").write_bytes(whole)
    environment = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "HOME": "relative"}
    assert cut_off(environment, 5.0) == ""
    (folder / "b.so").write_bytes(whole[: len(whole) // 2])
    assert cut_off(environment, 5.0).startswith(f"{folder}/b.so: cut off: {len(whole) // 2} of")
    assert cut_off(environment, -1.0) == ""  # no time left
    assert cut_off({}, 5.0) == ""


class Host:
    """nvidia-smi lists no process, as in a container, and systemctl shows the unit."""

    def __init__(self, used, main):
        self.used, self.main = used, main

    def run(self, argv, *, timeout=30.0, env=None, cwd=None):
        if argv[0] == "systemctl" and "show" in argv:
            return Result(0, f"MainPID={self.main}\nControlGroup=\n")
        if argv[0] != "nvidia-smi":
            return Result(127)
        if "compute-apps" in argv[1]:
            return Result(0, "")
        asked = argv[1].split("=", 1)[1].split(",")
        known = {"index": "0", "uuid": "GPU-0", "name": "H200", "memory.total": "143771", "memory.used": self.used}
        return Result(0, ", ".join(known.get(name, "[N/A]") for name in asked) + "\n")


@pytest.mark.parametrize(
    ("used", "main", "uuid", "held"),
    [
        ("143100", 0, "GPU-0", 143100),
        ("143100", 77, "GPU-0", 0),  # it may be the unit's own
        ("600", 0, "GPU-0", 0),  # the driver's own
        ("143100", 0, "MIG-0", 0),  # other slices'
    ],
)
def test_memory_that_no_listed_process_holds(used, main, uuid, held):
    instance = Instance(0, "u0.service", "127.0.0.1", 30000, ["/v/bin/python"], {}, "", "", uuid=uuid)
    assert collect(Host(used, main), instance, Seen(failed=True, phase="process")).held_mib == held
