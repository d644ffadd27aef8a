# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Collecting the facts of a diagnosis, in the unit's environment; every look has a time limit and none may hang us."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _model
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts
from ansible_collections.gpufleet.sglang.plugins.module_utils._facts_cache import cut_off
from ansible_collections.gpufleet.sglang.plugins.module_utils._facts_packages import unmet_pins
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import errors
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import (
    Gpu,
    device_nodes,
    kernel_module_version,
    query,
    with_processes,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._host import Host, disks, shared_memory_mib
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import TIMED_OUT, Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import cgroup_pids, unit_of_pid

LIMIT = 2.5  # s for one look; all looks run side by side
CACHES = (
    "SGLANG_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "SGLANG_JIT_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "HF_HOME",
    "HOME",
)
NETWORK_FS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.glusterfs", "9p", "beegfs", "gpfs", "fuse.sshfs")
BLOCKING = {"PrivateDevices": "yes", "PrivateNetwork": "yes", "MemoryDenyWriteExecute": "yes"}
PROPERTIES = (
    "User,Group,ReadWritePaths,ProtectSystem,ProtectHome,PrivateDevices,PrivateNetwork,MemoryDenyWriteExecute,"
    "DevicePolicy,DeviceAllow,LimitNOFILE,MainPID,ControlGroup"
)
_ACCESS = """
import os, sys
uid, gid = int(sys.argv[1]), int(sys.argv[2])
if os.getuid() == 0:
    os.setgroups([gid]); os.setgid(gid); os.setuid(uid)
for path in sys.argv[3:]:
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there) or "/"
    print(path, "ok" if os.access(there, os.W_OK | os.X_OK) else "no", flush=True)
"""


@dataclass(frozen=True)
class Seen:
    """What the watch knows of a server already."""

    failed: bool
    phase: str
    result: str = ""
    exit_code: str = ""
    exit_status: int | None = None
    restarts: int = 0
    started: float = 0.0  # CLOCK_MONOTONIC
    now: float = 0.0
    oom_kills: int | None = None
    port_holder: str = ""
    compiling: bool = False
    idle: bool = False
    health_ok: bool | None = None
    wrong: Mapping[str, str] = field(default_factory=dict)
    children_dead: Sequence[str] = ()
    standing: str = ""
    symptom: str = ""


def collect(runner: Runner, instance: Instance, seen: Seen, proc: str = "/proc") -> Facts:
    """Collect all facts side by side; what does not come in time is not known."""
    found: dict[str, Any] = {}
    jobs: list[Callable[[], dict[str, Any]]] = [
        lambda: _kernel(runner, seen),
        lambda: _unit(runner, instance),
        lambda: _folders(runner, instance, proc),
        lambda: _packages(instance),
        lambda: _weights(instance),
    ]
    if seen.failed and not seen.compiling:  # a compiler's output is not whole while it is written
        jobs.append(lambda: {"cache_damage": cut_off(instance.environment, LIMIT)})
    cuda = device_of(instance) == "cuda"
    if cuda:
        jobs += [lambda: _gpu(runner, instance, proc), lambda: _tools(instance), lambda: _fabric(runner, proc)]

    def run(job: Callable[[], dict[str, Any]]) -> None:
        try:
            found.update(job())
        except Exception:  # a fact that cannot be had must not cost the diagnosis
            return

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LIMIT + 1.0  # for all together: a host that is slow is slow in each
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    killed = seen.oom_kills
    if killed is None and seen.failed and (found.get("kernel") or unified_memory()):
        killed = 0 if seen.result != "oom-kill" else 1  # systemd reads the counter itself and says so
    in_time = dict(found)  # those that are late still write
    known = {key: value for key, value in in_time.items() if key in Facts.__dataclass_fields__}
    return Facts(
        failed=seen.failed,
        phase=seen.phase,
        result=seen.result,
        exit_code=seen.exit_code,
        exit_status=seen.exit_status,
        restarts=seen.restarts,
        device="cuda" if cuda else "cpu",
        environment=instance.environment,
        oom_kills=killed,
        port_holder=seen.port_holder,
        compiling=seen.compiling,
        idle=seen.idle,
        health_ok=seen.health_ok,
        wrong=seen.wrong,
        children_dead=seen.children_dead,
        standing=seen.standing,
        symptom=seen.symptom,
        proxy=proxy_problem(instance.environment),
        **known,
    )


def _option(instance: Instance, name: str) -> str:
    """Return the value an option has on the command line, "" when it is not there."""
    words = instance.argv
    return words[words.index(name) + 1] if name in words[:-1] else ""


def device_of(instance: Instance) -> str:
    """Return cuda or cpu, as the command line has it."""
    device = _option(instance, "--device")
    if device:
        return device
    return "cpu" if instance.environment.get("SGLANG_USE_CPU_ENGINE") == "1" else "cuda"


def oom_kills(control_group: str, root: str = "/sys/fs/cgroup") -> int | None:
    """Return how many processes of a control group were killed for memory; None when it cannot be told."""
    if not control_group:
        return None
    for path in (
        f"{root}{control_group}/memory.events",
        f"{root}/unified{control_group}/memory.events",
        f"{root}/memory{control_group}/memory.oom_control",
    ):
        try:
            text = Path(path).read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        found = re.search(r"^oom_kill (\d+)", text, re.MULTILINE)
        if found:
            return int(found.group(1))
    return None


def unified_memory(root: str = "/sys/fs/cgroup") -> bool:
    """Say whether systemd can see OOM kills: the memory controller is in cgroup2."""
    try:
        return "memory" in Path(f"{root}/cgroup.controllers").read_text(encoding="ascii").split()
    except OSError:
        return False


def proxy_problem(environment: Mapping[str, str]) -> str:
    """Say when requests of the server to itself go to a proxy."""
    lowered = {key.lower(): value for key, value in environment.items()}
    proxy = next((key for key in ("http_proxy", "all_proxy") if lowered.get(key)), "")
    spared = {item.strip() for item in lowered.get("no_proxy", "").split(",")}
    if not proxy or "*" in spared or "127.0.0.1" in spared:
        return ""
    return f"{proxy} is set and no_proxy lacks 127.0.0.1"


def _kernel(runner: Runner, seen: Seen) -> dict[str, Any]:
    since = max(0.0, seen.now - seen.started) + 5.0 if seen.started else 600.0
    done = runner.run(
        ["journalctl", "-k", "--quiet", "--no-pager", "-o", "cat", f"--since=-{since:.0f}s", "--lines=2000"],
        timeout=LIMIT,
    )
    wanted = re.compile(r"NVRM|Xid|oom|Out of memory|blocked for more|avc:|AER:")
    return {"kernel": tuple(line for line in done.stdout.splitlines() if wanted.search(line))[:50]}


def _unit(runner: Runner, instance: Instance) -> dict[str, Any]:
    values = _show(runner, instance)
    blocking = [f"{name}={value}" for name, value in BLOCKING.items() if values.get(name) == value]
    cuda = device_of(instance) == "cuda"
    found: dict[str, Any] = {"sandbox": ", ".join(blocking) if cuda else ""}
    home = instance.environment.get("HOME", "")
    if instance.environment and not home:
        found["unit_problem"] = "HOME is not set in the unit's environment"
    elif home and not Path(home).is_dir():
        found["unit_problem"] = f"HOME is {home}, which is no folder"
    return found


def _show(runner: Runner, instance: Instance) -> dict[str, str]:
    done = runner.run(["systemctl", "show", "--no-pager", "-p", PROPERTIES, "--", instance.unit], timeout=LIMIT)
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def _folders(runner: Runner, instance: Instance, proc: str) -> dict[str, Any]:
    environment = instance.environment
    paths = list(dict.fromkeys(environment[name] for name in CACHES if environment.get(name, "").startswith("/")))
    host = Host(runner, proc)
    wanted = [*paths, "/tmp"]
    found: dict[str, Any] = {
        "disks": {
            item["path"]: item["free_mib"] for item in disks(host, wanted, LIMIT) if item["free_mib"] is not None
        },
        "shm_mib": shared_memory_mib(host),
    }
    values = _show(runner, instance)
    user, group = values.get("User", ""), values.get("Group", "")
    try:
        uid = pwd.getpwnam(user).pw_uid if user else 0
        gid = grp.getgrnam(group).gr_gid if group else pwd.getpwuid(uid).pw_gid
    except KeyError:
        return {**found, "unit_problem": f"the unit's user {user} or group {group} does not exist"}
    done = runner.run([sys.executable, "-c", _ACCESS, str(uid), str(gid), *paths], timeout=LIMIT)
    told = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if " " in line)
    allowed = values.get("ReadWritePaths", "").split()
    strict = values.get("ProtectSystem") == "strict"
    outside = [
        path
        for path in paths
        if strict and not any(_inside(path, top) for top in allowed) and path != environment.get("HOME")
    ]
    found["unwritable"] = [path for path in paths if told.get(path) == "no"] + [
        f"{path} (not in ReadWritePaths=)" for path in outside if told.get(path) == "ok"
    ]
    mounts = [line.split() for line in Path(f"{proc}/self/mounts").read_text().splitlines()]
    for path in paths:
        best = max((m for m in mounts if len(m) > 2 and _inside(path, m[1])), key=lambda m: len(m[1]), default=None)
        if best and best[2] in NETWORK_FS:
            found["network_cache"] = f"{path} ({best[2]})"
    return found


def _inside(path: str, top: str) -> bool:
    top = top.lstrip("-+").rstrip("/") or "/"
    return path == top or path.startswith(top if top == "/" else f"{top}/")


def _packages(instance: Instance) -> dict[str, Any]:
    python = instance.argv[0] if instance.argv else ""
    return {"packages": unmet_pins(Path(python).parent.parent)} if python.startswith("/") else {}


def _weights(instance: Instance) -> dict[str, Any]:
    """Look at the model's folder: what is not whole there ends in errors of many kinds."""
    path = _option(instance, "--model-path")
    if not path.startswith("/"):
        return {}
    found = errors(_model.problems(_model.inspect(path), {_option(instance, "--load-format")}, offline=False))
    if not found:
        return {}
    pointer = next((item for item in found if item.code == "model_pointers"), None)
    return {"model_problem": ("weights_corrupt" if pointer else "model_unavailable", (pointer or found[0]).message)}


def _tools(instance: Instance) -> dict[str, Any]:
    environment = instance.environment
    path = environment.get("PATH", os.defpath)
    missing = [tool for tool in ("ninja", "c++", "gcc") if shutil.which(tool, path=path) is None]
    beside = str(Path(instance.argv[0]).parent) if instance.argv else ""
    found: dict[str, Any] = {
        "tools_missing": missing,
        "tools_beside": [tool for tool in missing if beside and Path(beside, tool).exists()],
        "toolkit": toolkit_problems(environment.get("CUDA_HOME", "")),
    }
    lists = {name: environment.get(name, "") for name in ("FLASHINFER_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST")}
    wrong = [f"{name}={value}" for name, value in lists.items() if re.search(r"[,;]|  ", value) and "FLASH" in name]
    if wrong:
        found["arch_list"] = ", ".join(wrong)
    return found


def toolkit_problems(home: str) -> list[tuple[str, str]]:
    """Return what the folder CUDA_HOME lacks."""
    if not home:
        return []
    if ":" in home or not home.startswith("/") or not Path(home).is_dir() or home == "/usr":
        return [("cuda_home_invalid", f"CUDA_HOME={home} is not one absolute toolkit folder")]
    wanted = (
        ("nvcc_not_found", "bin/nvcc"),
        ("toolkit_incomplete", "lib64/libcudart.so"),
        ("toolkit_incomplete", "include/cuda_runtime.h"),
        ("toolkit_incomplete", "include/crt/host_config.h"),
    )
    return [(code, f"{home}/{name} is missing") for code, name in wanted if not Path(home, name).exists()]


def _gpu(runner: Runner, instance: Instance, proc: str) -> dict[str, Any]:
    gpus, problems = query(runner, LIMIT)
    codes = {problem.code: problem for problem in problems}
    states = {"nvidia_smi_hung": "hung", "nvidia_smi_missing": "missing", "driver_mismatch": "mismatch"}
    found: dict[str, Any] = {
        "smi": next((state for code, state in states.items() if code in codes), "failed" if problems else "ok"),
        "module_version": kernel_module_version(proc),
        "unlike_gpus": len({gpu.compute_cap for gpu in gpus}) > 1,
    }
    ours = next((gpu for gpu in gpus if instance.uuid and gpu.uuid == instance.uuid), None)
    ours = ours or next((gpu for gpu in gpus if gpu.index == instance.gpu), None)
    found["nodes"] = {node: "ok" if Path(node).exists() else "missing" for node in device_nodes([ours] if ours else [])}
    if not ours:
        if gpus and instance.uuid:
            found["gpu_error"] = f"nvidia-smi does not list GPU {instance.uuid} any more"
        return found
    found["compute_cap"] = ours.compute_cap
    found["pci"] = ours.pci_bus_id[-12:]
    found["gpu_mib"] = ours.memory_total_mib
    listed, failed = with_processes(runner, [ours], proc, LIMIT)
    if not failed:
        others = [item for item in listed[0].processes if item.unit != instance.unit]
        found["held_mib"] = sum(item.used_mib or 0 for item in others)
        found["holders"] = [
            f"pid {item.pid} ({item.command}{', ' + item.unit if item.unit else ''})" for item in others
        ]
    if not found.get("held_mib"):
        # of a slice the driver tells what all slices use
        unlisted = 0 if (instance.uuid or "").startswith("MIG-") else _unlisted(ours)
        if unlisted and _down(runner, instance):
            found["held_mib"], found["holders"] = unlisted, []
    return found


def _unlisted(gpu: Gpu) -> int:
    """Return the GPU's memory in use, 0 when it is no more than the driver keeps for itself.

    In a container of its own pids the driver lists no process at all, and the memory is in use none the less.
    """
    used, total = gpu.memory_used_mib or 0, gpu.memory_total_mib or 0
    return used if used > total / 10 else 0


def _down(runner: Runner, instance: Instance) -> bool:
    """Say whether no process of the unit is left: memory in use then is not its own."""
    values = _show(runner, instance)
    return values.get("MainPID") == "0" and not cgroup_pids(values.get("ControlGroup", ""))


def on_its_gpu(runner: Runner, instances: Sequence[Instance], timeout: float = LIMIT) -> dict[str, tuple[bool, str]]:
    """Say for each unit with a UUID whether its processes hold memory on that GPU, and where else they do.

    A unit is left out when the driver shows no processes at all (a container without the host's pids).
    """
    done = runner.run(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"], timeout=timeout)
    if done.rc != 0 or done.rc == TIMED_OUT:
        return {}
    where: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        uuid, _sep, pid = line.partition(",")
        unit = unit_of_pid(int(pid)) if pid.strip().isdigit() else None
        if unit:
            where.setdefault(unit, set()).add(uuid.strip())
    if not where:
        return {}
    told = {}
    for item in instances:
        if item.uuid:
            seen = where.get(item.unit, set())
            told[item.unit] = (item.uuid in seen, ", ".join(sorted(seen - {item.uuid})))
    return told


def _fabric(runner: Runner, proc: str) -> dict[str, Any]:
    if not Path(f"{proc}/driver/nvidia-nvswitch").exists():
        return {}
    done = runner.run(["systemctl", "is-active", "nvidia-fabricmanager"], timeout=LIMIT)
    state = done.stdout.strip()
    return {"fabric": "" if state == "active" else state or "unknown"}
