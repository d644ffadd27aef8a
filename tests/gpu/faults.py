"""Faults provoked on the GPU: each is named by our diagnosis, by its code, with the line that shows it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from box import CACHE, Box, ask

PORT = 32000
CUT = 100_000  # bytes that are left of a module
NEEDED = 60.0  # s that a fault, or the repair, takes at most as a rule
UNIT = """[Service]
Type=exec
User=sglang
WorkingDirectory=/var/lib/sglang
EnvironmentFile=/etc/sglang/fault.env
ExecStart={command}
KillMode=mixed
"""
HOLD = """
import sys, time, torch
torch.cuda.set_device(int(sys.argv[2]))
free, total = torch.cuda.mem_get_info()
keep = torch.empty(int(free - float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(600)
"""


# A container whose GPUs were passed in badly: what lies over which path instead, and the code that is right.
CONTAINER = {
    "whole": ("", "", ""),
    "uvm_is_a_file": ("/etc/hostname", "/dev/nvidia-uvm", "device_node_no_node"),
    "control_is_a_file": ("/etc/hostname", "/dev/nvidiactl", "device_node_no_node"),
    "smi_hangs": ("/tmp/hangs", "nvidia-smi", "nvidia_smi_hung"),
}


@dataclass(frozen=True)
class Fault:
    """One fault: what differs from a server that works, what is done to it, and the codes that are right."""

    codes: tuple[str, ...]
    args: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    hold_gib: float | None = None  # another process takes all of the GPU but this
    before: Callable[[Box], str] | None = None
    ready: Callable[[Box, str], str] | None = None  # done once it has answered


def cut_module(box: Box) -> str:
    """Cut a cached FlashInfer module off, as a full disk or a lost machine leaves it."""
    found = sorted((box.root / CACHE.lstrip("/")).rglob("cached_ops/*/*.so"))
    module = next((path for path in found if "prefill" in path.name), found[0] if found else None)
    if module is None:
        return "there is no cached module"
    with module.open("r+b") as file:
        file.truncate(CUT)
    return str(module.relative_to(box.root))


def damaged(box: Box) -> list[str]:
    """Return the cached FlashInfer modules that are as short as the cut one."""
    found = (box.root / CACHE.lstrip("/")).rglob("cached_ops/*/*.so")
    return sorted(str(path.relative_to(box.root)) for path in found if path.stat().st_size <= CUT)


def hold(left_gib: float, gpu: int = 0) -> subprocess.Popen[str]:
    """Start a process that takes all of a GPU's memory but this; returns it once it has it."""
    words = [sys.executable, "-c", HOLD, str(left_gib), str(gpu)]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder


def kill_scheduler(box: Box, unit: str) -> str:
    """Kill the process that serves the GPU."""
    cgroup = box.property(unit, "ControlGroup")
    for pid in box.run("cat", f"/sys/fs/cgroup{cgroup}/cgroup.procs").stdout.split():
        if "scheduler" in box.run("cat", f"/proc/{pid}/cmdline").stdout.replace("\0", " "):
            box.run("kill", "-KILL", pid)
            return f"killed {pid}"
    return "there is no scheduler"


# The model's weights are 0.1 of 140 GiB: a fraction of 0.0005 (0.07 GiB) leaves nothing for the pool, one of 0.999
# nothing for graphs. SGLang sets FlashInfer's architectures itself, but only after FlashInfer was imported: a list with
# another separator than a blank ends there. The module that is cut off comes last: the next server would die of it too.
FAULTS = {
    "memory_held": Fault(("gpu_memory_in_use",), {"--mem-fraction-static": "0.1"}, hold_gib=0.6),
    "fraction_too_small": Fault(("kv_pool_too_small",), {"--mem-fraction-static": "0.0005"}),
    "wrong_arch_list": Fault(("arch_list_wrong",), environment={"FLASHINFER_CUDA_ARCH_LIST": "9.0a;12.0f"}),
    "graph_capture_oom": Fault(("gpu_oom",), {"--mem-fraction-static": "0.999"}),
    "scheduler_killed": Fault(("process_killed",), ready=kill_scheduler),
    "module_cut_off": Fault(("jit_cache_bad",), before=cut_module),
}


def instance(box: Box, fault: Fault) -> dict[str, Any]:
    """Return the server as sglang_health wants it: the plan's first, changed."""
    plan = json.loads((box.root / "etc/sglang/plan.json").read_text(encoding="utf-8"))
    first = plan["instances"][0]
    argv = list(first["argv"])
    for flag, value in {"--port": str(PORT), **fault.args}.items():
        argv[argv.index(flag) + 1] = value
    environment = {**first["environment"], **fault.environment}
    return {**first, "unit": "fault.service", "port": PORT, "argv": argv, "environment": environment}


def provoke(box: Box, name: str, logs: Path, limit: float = 80.0) -> dict[str, Any]:
    """Start a server with a fault and ask our health module what is wrong with it."""
    fault = FAULTS[name]
    server = instance(box, fault)
    data: dict[str, Any] = {"wanted": list(fault.codes)}
    holder = None
    if fault.hold_gib is not None:
        holder = hold(fault.hold_gib)
    try:
        if fault.before:
            data["before"] = fault.before(box)
        command = " ".join('"' + word.replace('"', '\\"').replace("%", "%%") + '"' for word in server["argv"])
        unit = box.root / "etc/systemd/system/fault.service"
        unit.write_text(UNIT.format(command=command), encoding="utf-8")
        lines = (f'{key}="{value}"\n' for key, value in server["environment"].items())
        (box.root / "etc/sglang/fault.env").write_text("".join(lines), encoding="utf-8")
        box.run("systemctl", "daemon-reload", check=True)
        box.run("systemctl", "start", "fault.service", check=True)
        if fault.ready:
            deadline = time.monotonic() + limit
            while ask(PORT, "/health") is None and time.monotonic() < deadline:
                time.sleep(0.5)
            data["act"] = fault.ready(box, "fault.service")
        data |= diagnose(box, server, logs / f"fault-{name}.log", limit)
    finally:
        if holder:
            holder.kill()
            holder.wait()
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"fault-{name}-journal.log").write_text(box.journal("fault.service"), encoding="utf-8")
        box.run("systemctl", "kill", "-s", "KILL", "fault.service")
        box.run("systemctl", "stop", "fault.service")
    data["right"] = data.get("code") in fault.codes
    return data


def diagnose(box: Box, server: dict[str, Any], log: Path, limit: float) -> dict[str, Any]:
    """Ask sglang_health, as the deploy's gate does."""
    answer = Path("/opt/proof/health.json")
    answer.unlink(missing_ok=True)
    health = {"instances": [server], "wait": True, "timeout": int(limit), "progress_timeout": int(limit)}
    play = {
        "hosts": "all", "gather_facts": False,
        "tasks": [
            {"gpufleet.sglang.sglang_health": health, "register": "health", "ignore_errors": True},
            {"ansible.builtin.copy": {"content": "{{ health | to_json }}", "dest": str(answer), "mode": "0644"}},
        ],
    }  # fmt: skip
    played = box.play("", {}, log, timeout=limit + 60, play=play)
    if not answer.exists():
        return {"why": played.text[-800:]}
    servers = json.loads(answer.read_text(encoding="utf-8")).get("servers") or [{}]
    said = servers[0].get("diagnosis") or {}
    return {"seconds": played.seconds, "state": servers[0].get("state"), "code": said.get("code"),
            "evidence": (said.get("evidence") or [""])[:2], "remedy": said.get("remedy")}  # fmt: skip


def all_faults(box: Box, logs: Path, say: Callable[[str], None], left: Callable[[], float]) -> dict[str, Any]:
    """Provoke every fault there is time for; the kernels that were cut off are built again by the next deploy."""
    found: dict[str, Any] = {}
    for name in FAULTS:
        if left() < 2 * NEEDED:
            found[name] = {"right": False, "why": f"{left():.0f} s were left: not provoked"}
            continue
        try:
            found[name] = provoke(box, name, logs)
        except Exception as exc:
            found[name] = {"right": False, "why": f"{type(exc).__name__}: {exc}"[:500]}
        say(f"{name}: {json.dumps(found[name])[:600]}")
    return {"faults": found, "right": sum(item["right"] for item in found.values()), "of": len(found)}


def container(box: Box) -> dict[str, Any]:
    """Spoil a container's way to its GPUs, and ask our preflight what is wrong."""
    box.run("sh", "-c", "printf '#!/bin/sh\\nexec sleep 600\\n' > /tmp/hangs && chmod +x /tmp/hangs", check=True)
    smi = box.run("sh", "-c", "readlink -f $(command -v nvidia-smi)").stdout.strip()
    found: dict[str, Any] = {}
    for name, (over, path, code) in CONTAINER.items():
        place = smi if path == "nvidia-smi" else path
        if over:
            box.run("mount", "--bind", over, place, check=True)
        answer = Path("/opt/proof/host.json")
        answer.unlink(missing_ok=True)
        play = {
            "hosts": "all", "gather_facts": False,
            "tasks": [
                {"gpufleet.sglang.sglang_host_info": {"device": "cuda"}, "register": "host"},
                {"ansible.builtin.copy": {"content": "{{ host | to_json }}", "dest": str(answer), "mode": "0644"}},
            ],
        }  # fmt: skip
        try:
            played = box.play("", {}, Path(f"/opt/proof/logs/container-{name}.log"), timeout=90, play=play)
        finally:
            if over:
                box.run("umount", place, check=True)
        said = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {"msg": played.text[-500:]}
        errors = [item for item in said.get("problems", []) if item["severity"] == "error"]
        codes = [item["code"] for item in errors]
        right = bool(said.get("ok")) if not code else code in codes
        found[name] = {"right": right, "codes": codes, "said": said.get("msg", "")[:600], "seconds": played.seconds}
    return found
