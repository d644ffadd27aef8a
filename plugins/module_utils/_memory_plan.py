# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The memory plan of a host: what every server will have, what binds it, and what is worth a warning."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _memory, _memory_model
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import Gpu
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance, Plan
from ansible_collections.gpufleet.sglang.plugins.module_utils._memory import Asked, Forecast, Room
from ansible_collections.gpufleet.sglang.plugins.module_utils._memory_model import Footprint, ModelUnknown
from ansible_collections.gpufleet.sglang.plugins.module_utils._spellings import VERSIONS
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import unit_of_pid

_SPECULATIVE = "speculative-algorithm"
UNEVEN_MIB = 1024  # a GPU that has so much less than the others is named
COSTLY = 0.75  # a strategy that gives less than this share of the best one's requests is named


def gpu_rooms(gpus: Sequence[Gpu], instances: Sequence[Instance]) -> dict[int, Room]:
    """Return each server's room from what the driver says."""
    rooms = {}
    by_index = {gpu.index: gpu for gpu in gpus}
    for item in instances:
        gpu = by_index.get(item.gpu)
        if gpu is None or not gpu.memory_total_mib:
            continue
        own = [process for process in gpu.processes if process.unit == item.unit]
        others = [process for process in gpu.processes if process.unit != item.unit]
        free = gpu.memory_free_mib
        if free is None:
            free = gpu.memory_total_mib - (gpu.memory_used_mib or 0)
        # where the driver does not tell sizes, all that is used is ours if nobody else is there
        unknown = any(process.used_mib is None for process in own)
        ours = (gpu.memory_used_mib or 0) if unknown and not others else sum(item.used_mib or 0 for item in own)
        holders = tuple(
            f"pid {process.pid} ({process.command}, {process.unit or 'no unit'}{', orphan' if process.orphan else ''})"
            f" {'an unknown amount' if process.used_mib is None else f'{process.used_mib} MiB'}"
            for process in others
        )
        rooms[item.gpu] = Room(gpu.memory_total_mib, free + ours, holders=holders)
    return rooms


def cpu_rooms(instances: Sequence[Instance], proc: str = "/proc", sys: str = "/sys") -> dict[int, Room]:
    """Return each server's room on a CPU: what the engine itself reads, plus what the servers of the plan hold."""
    values = {}
    for line in _read(f"{proc}/meminfo").splitlines():
        cells = line.replace(":", " ").split()
        if len(cells) >= 2 and cells[1].isdigit():
            values[cells[0]] = int(cells[1]) / 1024
    if "MemTotal" not in values:
        return {}
    total, free = values["MemTotal"], values.get("MemAvailable", values["MemTotal"])
    limit, used = (_read(f"{sys}/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit) / (1 << 20))
        free = min(free, max(int(limit) - int(used), 0) / (1 << 20))
    units = {item.unit for item in instances}
    held = sum(_held(Path(proc) / pid) for pid in _pids(proc) if unit_of_pid(int(pid), proc) in units)
    nodes = [node for node in Path(f"{sys}/devices/system/node").glob("node[0-9]*") if _read(f"{node}/cpulist").strip()]
    count = max(len(nodes), 1)
    return {item.gpu: Room(total / count, (free + held) / count, "cpu") for item in instances}


def _pids(proc: str) -> list[str]:
    return [path.name for path in Path(proc).iterdir() if path.name.isdigit()]


def _held(process: Path) -> float:
    """Return what a process would give back, MiB; pages of files are free already, as the kernel counts."""
    cells = [line.split() for line in _read(f"{process}/smaps_rollup").splitlines()]
    return sum(int(cell[1]) for cell in cells if cell and cell[0] in ("Pss_Anon:", "Pss_Shmem:")) / 1024


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def foresee(plan: Plan, rooms: Mapping[int, Room], version: str) -> tuple[list[Forecast], list[Finding], list[str]]:
    """Return what each server of the plan will have, what is to be said about it, and why nothing is foretold."""
    forecasts: list[Forecast] = []
    unknown: list[str] = []
    found: list[Finding] = []
    taken = 0.0
    for item in sorted(plan.instances, key=lambda one: not one.canary):
        room = rooms.get(item.gpu)
        if room is None:
            continue
        if plan.device == "cpu":
            room = replace(room, free=max(room.free - taken, 1))  # slots share the host's memory
        asked = _memory.asked_from(item.argv, item.environment, version or VERSIONS[-1])
        try:
            model = _footprint(plan.model, item)
        except ModelUnknown as exc:
            unknown.append(f"no memory plan: {exc}")
            continue
        told = _memory.forecast(item.gpu, room, model, asked)
        if plan.device == "cpu":
            used = told.kv_tokens * told.kv_token_bytes / (1 << 20)
            taken += _memory.CPU_ENGINE_MIB + told.weights_mib + used
        forecasts.append(told)
        found.extend(_judge(told, room, model, asked))
    found = _shared(found) if plan.device == "cpu" else [*found, *_uneven(forecasts)]
    return sorted(forecasts, key=lambda one: one.gpu), list(dict.fromkeys(found)), list(dict.fromkeys(unknown))


def _footprint(model: str, item: Instance) -> Footprint:
    flags = _memory.read_flags(item.argv)
    if _SPECULATIVE in flags:
        raise ModelUnknown("what a speculative draft takes is not known here")
    folder = _memory_model.locate(model, item.environment)
    if folder is None:
        raise ModelUnknown(f"the files of {model} are not on the host yet")
    return _memory_model.footprint(
        folder,
        kv_dtype=flags.get("kv-cache-dtype", "auto"),
        load_format=flags.get("load-format", "auto"),
        quantization=flags.get("quantization", ""),
        ssm_dtype=flags.get("mamba-ssm-dtype") or item.environment.get("SGLANG_MAMBA_SSM_DTYPE", ""),
        sliding_ratio=float(flags.get("swa-full-tokens-ratio", 0.8)),
    )


def _judge(told: Forecast, room: Room, model: Footprint, asked: Asked) -> list[Finding]:
    where = f"{'slot' if room.device == 'cpu' else 'GPU'} {told.gpu}"
    held = f"; held by {', '.join(told.holders)}" if told.holders else ""
    if told.budget_mib <= 0 or told.kv_tokens <= 0:
        text = (
            f"{where}: the weights take {_gib(told.weights_mib)}, and mem_fraction_static {told.fraction:g} of "
            f"{_gib(told.free_mib)} free leaves nothing for the KV cache{held}"
        )
        fits = f"mem_fraction_static above {told.lowest_fraction:g} in sglang_server_instances"
        remedy = f"Give it {fits}" if told.lowest_fraction < 0.95 else "Take a smaller model, or free the memory"
        return [Finding("memory_too_small", text, remedy, gpu=told.gpu)]
    found = []

    def warn(code: str, text: str, remedy: str) -> None:
        found.append(Finding(code, f"{where}: {text}", remedy, WARNING, told.gpu))

    if asked.max_tokens and told.kv_tokens < asked.max_tokens // asked.page * asked.page:
        text = f"max_total_tokens is {asked.max_tokens}, and its memory holds {told.kv_tokens}{held}"
        warn("memory_tokens", text, "The engine takes what fits: lower it, or raise mem_fraction_static")
    if asked.max_requests and told.max_running_requests < asked.max_requests:
        text = (
            f"max_running_requests is {asked.max_requests}, and {told.binds_requests} allow {told.max_running_requests}"
        )
        warn("memory_requests", text, "Raise mem_fraction_static, or take a strategy with fewer state slots a request")
    others = _memory.by_strategy(told.gpu, room, model, asked)
    best = max(others, key=lambda name: others[name], default="")
    if best and told.strategy != "none" and told.max_running_requests < COSTLY * others[best]:
        text = (
            f"mamba_strategy {told.strategy} costs concurrency: {told.max_running_requests} requests at once "
            f"({told.slots_per_request} state slots each) instead of {others[best]} with {best}"
        )
        price = " (without the overlap schedule)" if best == "no_buffer" else ""
        warn("memory_strategy", text, f"sglang_server_mamba_strategy: {best}{price}, if requests wait in the queue")
    if told.left_mib < told.reserve_mib / 2 and room.device != "cpu":
        text = f"mem_fraction_static {told.fraction:g} leaves {_gib(told.left_mib)} for graphs and activations"
        warn("memory_graphs", text, f"SGLang's own rule keeps {_gib(told.reserve_mib)}: lower it if the start fails")
    return found


def _shared(found: Sequence[Finding]) -> list[Finding]:
    """Say once that slots on a CPU take each other's memory: who is first gets most."""
    small = [item.gpu for item in found if item.code == "memory_too_small"]
    rest = [item for item in found if item.code != "memory_too_small"]
    if not small:
        return rest
    text = f"slots {', '.join(map(str, small))} find no memory left for a KV cache: the others take a fraction each"
    return [*rest, Finding("memory_shared", text, "Give the fleet a cap: sglang_server_max_total_tokens", WARNING)]


def _uneven(forecasts: Sequence[Forecast]) -> list[Finding]:
    if len(forecasts) < 2:
        return []
    usual = statistics.median(told.free_mib for told in forecasts)
    tokens = round(statistics.median(told.kv_tokens for told in forecasts))
    found = []
    for told in forecasts:
        if usual - told.free_mib >= UNEVEN_MIB:
            held = f", held by {', '.join(told.holders)}" if told.holders else f", of {_gib(told.total_mib)} in all"
            text = (
                f"GPU {told.gpu} has {_gib(usual - told.free_mib)} less than the others{held}: "
                f"{told.kv_tokens} KV tokens instead of {tokens}, {told.max_running_requests} requests at once"
            )
            remedy = "Its fraction counts from its own free memory; set it apart in sglang_server_instances if need be"
            found.append(Finding("memory_less", text, remedy, WARNING, told.gpu))
    return found


def table(forecasts: Sequence[Forecast], device: str) -> list[str]:
    """Return the memory plan as lines of equal columns."""
    if not forecasts:
        return []
    head = [
        "SLOT" if device == "cpu" else "GPU",
        "TOTAL", "FREE", "WEIGHTS", "FRACTION", "LEFT", "KV TOKENS", "BOUND BY", "REQUESTS", "BOUND BY",
    ]  # fmt: skip
    rows = [head]
    for told in forecasts:
        fraction = f"{told.fraction:g}{'' if told.fraction_from == 'set' else ' (engine)'}"
        by = told.binds_requests
        by += f" ({told.state_slots}, {told.slots_per_request} each)" if by == "state slots" else ""
        sizes = [_gib(size) for size in (told.total_mib, told.free_mib, told.weights_mib)]
        counts = [_gib(told.left_mib), str(told.kv_tokens), told.binds_tokens, str(told.max_running_requests), by]
        rows.append([str(told.gpu), *sizes, fraction, *counts])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    held = [f"GPU {told.gpu}: held by {', '.join(told.holders)}" for told in forecasts if told.holders]
    return [*lines, *held, *dict.fromkeys(note for told in forecasts for note in told.notes)]


def _gib(size: float) -> str:
    return f"{size / 1024:.1f} GiB"


def beside(
    forecasts: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]], limit: float
) -> dict[str, Any]:
    """Set the engines' own figures beside the forecasts; a gap above limit percent is a finding."""
    real = {server.get("gpu"): server for server in servers}
    rows, findings = [], []
    for told in forecasts:
        server = real.get(told["gpu"]) or {}
        tokens = server.get("kv_tokens")
        if server.get("state") != "ready" or not tokens:
            continue
        gap = round(_memory.gap_percent(int(told["kv_tokens"]), int(tokens)), 1)
        row = {"gpu": told["gpu"], "predicted": told["kv_tokens"], "kv_tokens": tokens, "gap_percent": gap}
        row["predicted_requests"] = told["max_running_requests"]
        row["max_running_requests"] = server.get("max_running_requests")
        rows.append(row)
        if gap > limit:
            findings.append(
                f"GPU {told['gpu']}: {tokens} KV tokens, and {told['kv_tokens']} were foretold ({gap:g} % off, "
                f"{limit:g} % allowed): its memory was not what the plan saw when it started"
            )
    lines = [
        f"GPU {row['gpu']}: KV tokens {row['kv_tokens']} (foretold {row['predicted']}, {row['gap_percent']:g} % off), "
        f"requests at once {row['max_running_requests']} (foretold {row['predicted_requests']})"
        for row in rows
    ]
    return {"rows": rows, "lines": lines, "findings": findings}
