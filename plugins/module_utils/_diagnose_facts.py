# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What is known about a server and its host beside the log, and what each fact is a sign of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ansible_collections.gpufleet.sglang.plugins.module_utils._answers import Answer, judge_answers
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_log import Log
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_rules import (
    CAUSE,
    HARDWARE_XID,
    HINT,
    SYMPTOM,
    Sign,
    xids,
)

HELD_MIB = 1024  # of GPU memory by others before the start that explain a shortage
SHM_MIB = 256
DISK_MIB = 64
NOT_INITIALISED = re.compile(
    r"\bError 802\b|system not yet initialized|SystemNotReady|SYSTEM_NOT_READY|CUDA initialization"
    r"|No CUDA GPUs are available|CUDA unknown error|cuInit",
    re.IGNORECASE,
)
BUS_ERROR = re.compile(r"\bBus error\b|\bSIGBUS\b|\bexit ?code:? ?-7\b", re.IGNORECASE)
COMPILERS = re.compile(r"cc1plus|cicc|ptxas|nvcc|cudafe|ninja|c\+\+|g\+\+")
_OWN = re.compile(r"this process has (\d+(?:\.\d+)?) GiB memory in use")
Add = Callable[[str, str, str, int], None]  # code, detail, evidence, strength


@dataclass(frozen=True)
class Facts:
    """All of it; None, '' and () mean: not known. Collected in the unit's environment, by _facts.py."""

    failed: bool | None = None  # it is known to have failed (True), to be well (False)
    phase: str = ""
    result: str = ""  # systemd's: timeout, oom-kill, exit-code, signal, watchdog ...
    exit_code: str = ""  # exited | killed | dumped
    exit_status: int | None = None
    restarts: int = 0
    device: str = ""  # cuda | cpu
    environment: Mapping[str, str] = field(default_factory=dict)
    oom_kills: int | None = None  # in the unit's control group since this start
    kernel: Sequence[str] = ()  # lines of the kernel's log since this start
    pci: str = ""  # bus id of this server's GPU: 0000:01:00
    compute_cap: str = ""  # 12.0
    unlike_gpus: bool = False  # the host has GPUs of several capabilities
    smi: str = ""  # ok | hung | missing | mismatch | failed
    gpu_error: str = ""  # what nvidia-smi says is wrong with this GPU
    nodes: Mapping[str, str] = field(default_factory=dict)  # device node: ok | missing | denied | hung
    module_version: str = ""  # of the kernel module
    library_version: str = ""  # of libcuda / libnvidia-ml
    fabric: str = ""  # failed | inactive, on a machine with NVSwitch
    gpu_mib: int | None = None  # the GPU's memory
    held_mib: int | None = None  # GPU memory that others hold, whether the driver names them or not
    holders: Sequence[str] = ()
    on_gpu: bool | None = None  # the server's process holds memory on its GPU
    other_gpu: str = ""  # ... or on this one instead
    port_holder: str = ""
    port_ours: bool = False
    disks: Mapping[str, int] = field(default_factory=dict)  # path: free MiB
    shm_mib: int | None = None
    unwritable: Sequence[str] = ()  # cache folders that the service user cannot write
    network_cache: str = ""  # a cache folder on a network file system
    proxy: str = ""  # a proxy variable that catches requests to loopback
    tools_missing: Sequence[str] = ()  # build tools not on the unit's PATH
    tools_beside: Sequence[str] = ()  # of these, those that lie beside the venv's python
    toolkit: Sequence[tuple[str, str]] = ()  # (code, what is wrong with the toolkit)
    packages: Sequence[str] = ()  # pins of the engine that are not met
    cubins_missing: str = ""  # what a prefetch of cubins left out
    sandbox: str = ""  # a property of the unit that keeps the GPU's devices or sockets away
    arch_list: str = ""  # what is wrong with an architecture list in the environment
    model_problem: tuple[str, str] = ("", "")  # (code, what is wrong with the model's folder)
    compiling: bool | None = None  # a compiler runs in the control group
    rebuilding: bool = False  # kernels that were built before are built again
    lock_wait: str = ""  # a lock file a process of the unit waits for
    several_starting: bool = False
    cache_damage: str = ""  # a broken or stale file in a kernel cache
    idle: bool | None = None  # no CPU time, no lines between two samples
    children_dead: Sequence[str] = ()  # processes of the engine that should be there
    health_ok: bool | None = None  # /health says 200
    unit_problem: str = ""  # HOME, User=, Environment= or the like in the unit
    jit_loading: bool = False  # it stands where compiled kernels are loaded
    effective_requests: int | None = None
    wanted_requests: int | None = None
    slower_than_siblings: str = ""
    answers: Sequence[Answer] = ()
    wrong: Mapping[str, str] = field(default_factory=dict)  # what the probe said: code, detail, evidence
    standing: str = ""  # requests run while no token comes
    symptom: str = ""  # how a server that runs was found not to answer


def fact_signs(facts: Facts, log: Log) -> list[Sign]:
    """Return what the facts alone are signs of; how much they weigh depends on what the log says."""
    signs: list[Sign] = []

    def add(code: str, detail: str, evidence: str, strength: int) -> None:
        signs.append(Sign(code, detail, strength, evidence, fact=True))

    _device(facts, log, add)
    _memory(facts, log, add)
    if facts.result == "timeout":
        add("unit_misconfigured", "systemd_start_timeout", "systemd ended the unit: result timeout", CAUSE)
    if facts.result == "watchdog":
        add("unit_misconfigured", "systemd_watchdog", "systemd ended the unit: result watchdog", CAUSE)
    if facts.exit_code == "exited" and facts.exit_status is not None and 200 <= facts.exit_status <= 243:
        add("unit_misconfigured", "unit_exec_failed", f"systemd could not start it: status {facts.exit_status}", CAUSE)
    if facts.unit_problem:
        add("unit_misconfigured", "unit_env_missing", facts.unit_problem, HINT)
    if facts.port_holder:
        add("port_in_use", "port_in_use", f"the port is held by {facts.port_holder}", HINT)
    _build(facts, log, add)
    if facts.proxy:
        add("loopback_via_proxy", "loopback_via_proxy", facts.proxy, SYMPTOM)
    if facts.model_problem[0]:
        add(facts.model_problem[0], "model_folder", facts.model_problem[1], HINT)
    for path, free in facts.disks.items():
        if free < DISK_MIB:
            add("disk_full", "disk_full", f"{path}: {free} MiB free", SYMPTOM)
    for line in facts.packages:
        add("package_mismatch", "pins_not_met", line, SYMPTOM)
    _life(facts, log, add)
    if facts.wrong:
        add(facts.wrong["code"], facts.wrong["detail"], facts.wrong["evidence"], CAUSE)
    if facts.standing:
        add("engine_stalled", "tokens_stand_still", facts.standing, HINT)
    found = judge_answers(facts.answers)
    if found:
        add(found.code, found.detail, found.evidence, CAUSE)
    return signs


def _bus_error(facts: Facts, log: Log) -> bool:
    """Say whether a process ended by SIGBUS: a page of a mapped file, or of /dev/shm, was not there."""
    main = (facts.exit_code in ("killed", "dumped") and facts.exit_status == 7) or (
        facts.exit_code == "exited" and facts.exit_status == 135
    )
    return main or any(BUS_ERROR.search(event.text) for event in log.events)


def _device(facts: Facts, log: Log, add: Add) -> None:
    # a server that loaded its model had the GPU: what looks odd about it since then is at most a symptom
    worked = facts.device != "cpu" and log.phase not in ("none", "process")
    usual = SYMPTOM if worked else HINT
    for line in facts.kernel:
        ours = not facts.pci or "PCI:" not in line or facts.pci.lower()[:10] in line.lower()
        if ours and any(number in HARDWARE_XID for number in xids(line)):
            add("gpu_hardware_fault", "gpu_hardware_fault", line, CAUSE)
    if facts.gpu_error:
        add("gpu_hardware_fault", "gpu_hardware_fault", facts.gpu_error, CAUSE)
    if facts.smi == "hung":
        add("gpu_hardware_fault", "gpu_wedged", "nvidia-smi does not return", HINT)
    mismatch = facts.module_version and facts.library_version and facts.module_version != facts.library_version
    if facts.smi == "mismatch" or mismatch:
        versions = f": kernel module {facts.module_version}, libraries {facts.library_version}" if mismatch else ""
        add("driver_library_mismatch", "driver_library_mismatch", f"driver and libraries differ{versions}", CAUSE)
    absent = facts.nodes.get("/dev/nvidiactl") == "missing" and not facts.module_version
    for node, state in facts.nodes.items():
        if absent:
            add("driver_unavailable", "driver_not_loaded", f"{node} is missing and no driver is loaded", usual)
        elif state in ("missing", "denied"):
            detail = "uvm_device_missing" if "uvm" in node and state == "missing" else "device_cgroup_denied"
            add("gpu_access_denied", detail, f"{node}: {state}", usual)
    if facts.sandbox:
        add("gpu_access_denied", "unit_sandbox_blocks_gpu", facts.sandbox, usual)
    # idle on many a machine with NVSwitch, containers and single GPUs of it among them: only with CUDA's own word
    if facts.fabric and not worked and any(NOT_INITIALISED.search(event.text) for event in log.events):
        add("driver_unavailable", "fabric_manager_not_running", f"nvidia-fabricmanager is {facts.fabric}", HINT)
    if facts.on_gpu is False:
        where = f"on {facts.other_gpu} instead of its GPU" if facts.other_gpu else "on no GPU at all"
        detail = "gpu_selection_wrong" if facts.other_gpu else "silent_cpu_fallback"
        add("wrong_device", detail, f"the server's process is {where}", CAUSE)


def _was_its_own(facts: Facts, log: Log) -> bool:
    """Say whether what is in use now was the server's own: a driver counts it for seconds after the process has ended.

    The engine said at first how much was free, or PyTorch in the end how much the process had.
    """
    own = [float(hit[1]) for event in log.events for hit in [_OWN.search(event.text)] if hit]
    most = max([log.free_gib or 0.0, *own]) * 1024
    return facts.gpu_mib is not None and most > 0.9 * facts.gpu_mib


def _memory(facts: Facts, log: Log, add: Add) -> None:
    killed = [line for line in facts.kernel if re.search(r"oom[-_]kill|Out of memory: Killed|Memory cgroup out", line)]
    if facts.oom_kills or facts.result == "oom-kill":
        said = killed[-1] if killed else f"the kernel killed {facts.oom_kills or 1} process(es) of the unit for memory"
        if any(COMPILERS.search(line) for line in killed):
            add("jit_compile_oom", "jit_compile_oom", said, CAUSE)
        else:
            add("host_oom", "host_oom_killed", said, CAUSE)
    if facts.held_mib is not None and facts.held_mib > HELD_MIB:
        held = ", ".join(facts.holders) or "other processes"
        short = any(
            re.search(r"out of memory|Not enough memory|KV ?cache|leave no", event.text) for event in log.events
        )
        add(
            "gpu_memory_in_use",
            "gpu_memory_in_use",
            f"{facts.held_mib} MiB of the GPU held by {held}",
            CAUSE if short and not _was_its_own(facts, log) else HINT,
        )
    if facts.shm_mib is not None and facts.shm_mib < SHM_MIB:
        nccl = re.compile(r"NCCL.{0,40}unhandled system error|ncclSystemError")
        sure = any(nccl.search(event.text) for event in log.events) or _bus_error(facts, log)
        strength = CAUSE if sure and not facts.cache_damage else SYMPTOM
        add("dev_shm_too_small", "dev_shm_too_small", f"/dev/shm has {facts.shm_mib} MiB", strength)
    if (
        facts.effective_requests is not None
        and facts.wanted_requests
        and facts.effective_requests < facts.wanted_requests
    ):
        text = f"{facts.effective_requests} requests run at once where {facts.wanted_requests} were asked for"
        add("state_cache_too_small", "state_cache_too_small", text, SYMPTOM)


def _build(facts: Facts, log: Log, add: Add) -> None:
    for tool in facts.tools_missing:
        beside = f", though {tool} lies beside the venv's python" if tool in facts.tools_beside else ""
        strength = HINT if beside else SYMPTOM
        add("build_tools_missing", f"{tool}_not_found", f"{tool} is not on the unit's PATH{beside}", strength)
    for code, text in facts.toolkit:
        add(code, "toolkit", text, SYMPTOM)
    if facts.arch_list:
        add("arch_list_wrong", "arch_list_wrong", facts.arch_list, HINT)
    for path in facts.unwritable:
        add("jit_cache_not_writable", "jit_cache_not_writable", f"the service user cannot write {path}", HINT)
    if facts.cubins_missing:
        add("cubin_unavailable", "cubin_prefetch_incomplete", facts.cubins_missing, HINT)
    if facts.cache_damage:
        add("jit_cache_bad", "jit_cache_corrupt", facts.cache_damage, CAUSE if _bus_error(facts, log) else HINT)
    if facts.network_cache:
        add(
            "jit_contention",
            "jit_cache_on_network_fs",
            f"cache on a network file system: {facts.network_cache}",
            SYMPTOM,
        )
    if facts.lock_wait:
        add("jit_contention", "jit_lock_wait", f"waits for {facts.lock_wait}", HINT)
    if facts.several_starting:
        add("jit_contention", "start_contention", "several servers started at the same time", SYMPTOM)


def _life(facts: Facts, log: Log, add: Add) -> None:
    if facts.children_dead and facts.failed:
        add("engine_stalled", "scheduler_dead", f"{', '.join(facts.children_dead)} gone, the HTTP server goes on", HINT)
    elif facts.children_dead and facts.health_ok:
        add(
            "state_health_unreliable",
            "health_false_positive",
            f"{', '.join(facts.children_dead)} dead, /health says 200",
            HINT,
        )
    waiting = re.search(r"Loading JIT ops|Waiting for lock|Acquir\w+ lock", log.last_line)
    if facts.idle and (waiting or facts.jit_loading):
        add("jit_contention", "jit_lock_wait", log.last_line, HINT)
    elif facts.idle:
        add("engine_stalled", "launch_stalled", f"no progress since: {log.last_line[:200] or 'the start'}", SYMPTOM)
    if facts.rebuilding or (facts.compiling and not facts.idle):
        add("state_busy", "jit_compiling", "kernels are being compiled", HINT)
    if facts.slower_than_siblings:
        add("wrong_device", "silent_cpu_fallback", facts.slower_than_siblings, SYMPTOM)
    if not facts.failed or facts.oom_kills != 0 or facts.result in ("timeout", "oom-kill", "watchdog"):
        return
    crashed = [
        event.text for event in log.events if re.search(r"crashed with exit code -9\b|exit code: -9\)", event.text)
    ]
    crashed += [line for line in log.last if re.search(r"Subprocess \S+ \(pid=\d+\) crashed with exit code -9\b", line)]
    if crashed:
        add("process_killed", "child_killed", crashed[0], HINT)
    elif facts.exit_code == "killed" and facts.exit_status == 9 and not any("kill_process_tree" in x for x in log.last):
        add("process_killed", "main_killed", "the main process was killed (signal 9), and not for memory", HINT)
