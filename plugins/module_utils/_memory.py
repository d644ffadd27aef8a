# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""SGLang's own memory arithmetic, before it starts: KV tokens and concurrent requests of one server.

The engine measures the free memory M when its process is up, loads the weights W, and keeps M * (1 - fraction)
for graphs and activations: M * fraction - W is left for KV cache and state slots. Read in 0.5.10 to 0.5.23
(0.5.23: mem_cache/kv_cache_configurator.py, arg_groups/memory_hook.py); measured on a CPU and an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._memory_model import Footprint
from ansible_collections.gpufleet.sglang.plugins.module_utils._spelling import number

CONTEXT_MIB = 680  # what torch and the CUDA context hold when the engine measures; H200, driver 580
CPU_ENGINE_MIB = 1300  # what its own processes hold when the CPU engine measures
STATE_SHARE = 0.9  # --mamba-full-memory-ratio
SLOTS = {"none": 1, "no_buffer": 3, "extra_buffer": 5, "extra_buffer_lazy": 4}  # state slots per running request
_GIB = 1024
# GPU memory below (GiB), chunked prefill size, largest decode graph
_DEFAULTS = ((20, 2048, 8), (35, 4096, 48), (60, 4096, 32), (160, 8192, 256), (math.inf, 16384, 512))
_OLD_DEFAULTS = ((20, 2048, 8), (35, 2048, 24), *_DEFAULTS[2:])


@dataclass(frozen=True)
class Room:
    """The memory a server is started into, MiB; what its own running process holds counts as free."""

    total: float
    free: float
    device: str = "cuda"
    measured: bool = True
    holders: tuple[str, ...] = ()  # who holds the rest


@dataclass(frozen=True)
class Asked:
    """What the flags of a server say about memory."""

    version: str
    fraction: float | None = None
    max_tokens: int | None = None
    max_requests: int | None = None
    context: int | None = None
    chunk: int | None = None
    decode_batch: int | None = None
    decode_graphs: bool = True
    prefill_graphs: bool = True
    strategy: str = "auto"
    radix: bool = True
    overlap: bool = True
    skip_decode_lock: bool = False
    state_slots: int | None = None  # --max-mamba-cache-size
    state_share: float = STATE_SHARE
    page: int = 1


@dataclass(frozen=True)
class Forecast:
    """What one server will have, before it is started; sizes in MiB."""

    gpu: int
    total_mib: int
    free_mib: int
    weights_mib: int
    kv_token_bytes: int
    fraction: float
    fraction_from: str  # set | engine
    budget_mib: int  # for KV cache and state
    left_mib: int  # for graphs and activations
    reserve_mib: int  # what the engine's own rule would keep for them
    kv_tokens: int
    max_running_requests: int
    binds_tokens: str
    binds_requests: str
    lowest_fraction: float
    state_slots: int = 0
    slots_per_request: int = 0
    strategy: str = ""
    holders: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a module's result."""
        return {**asdict(self), "holders": list(self.holders), "notes": list(self.notes)}


def reserve_mib(asked: Asked, room: Room) -> float:
    """Return what the engine keeps for graphs and activations when no fraction is given."""
    table = _OLD_DEFAULTS if number(asked.version) < (0, 5, 18) else _DEFAULTS
    chunk, batch = next((chunk, batch) for below, chunk, batch in table if room.total < below * _GIB)
    chunk = asked.chunk or chunk
    batch = 32 if room.device == "cpu" else batch
    batch = asked.decode_batch or min(batch, asked.max_requests or batch)
    size = 512 + max(chunk if chunk > 0 else 16384, 2048) * 1.5 + _GIB / 8
    if asked.decode_graphs:
        size += batch * 2
    if asked.prefill_graphs and room.device != "cpu":
        size += 8 * _prefill_graphs(chunk if chunk > 0 else 16384)
    return max(size, 10 * _GIB) if room.total > 60 * _GIB else size


def _prefill_graphs(tokens: int) -> int:
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for step in steps for size in range(*step))


def strategy(asked: Asked, model: Footprint, device: str) -> str:
    """Return the state strategy that the engine takes."""
    if not asked.radix:
        return "none"
    if asked.strategy != "auto":
        return asked.strategy
    wanted = (asked.overlap or asked.page > 1) and number(asked.version) >= (0, 5, 14)
    return "extra_buffer" if wanted and model.extra_buffer and device != "cpu" else "no_buffer"


def slots_per_request(asked: Asked, chosen: str) -> int:
    """Return how many state slots one running request takes."""
    slots = SLOTS[chosen]
    if chosen == "extra_buffer" and not asked.overlap:
        slots -= 1
    return slots - 1 if asked.skip_decode_lock and chosen.startswith("extra") else slots


def forecast(gpu: int, room: Room, model: Footprint, asked: Asked) -> Forecast:
    """Do the engine's arithmetic for one server."""
    free = max(room.free - (CPU_ENGINE_MIB if room.device == "cpu" else CONTEXT_MIB), 1.0)
    reserve = reserve_mib(asked, room)
    fraction = asked.fraction if asked.fraction is not None else round((room.total - reserve) / room.total, 3)
    weights = model.weights / (1 << 20)
    budget = free * fraction - weights
    if model.multimodal and number(asked.version) >= (0, 5, 20) and room.device != "cpu":
        budget -= 100 + 1024  # the engine's own cache of pictures, and the pool they travel through
    rest, slots, chosen, each = _state(budget * (1 << 20), model, asked, room.device)
    fits = max(int(rest // model.kv_token) if model.kv_token else 0, 0)
    tokens = min(fits, asked.max_tokens or fits) // asked.page * asked.page
    context = asked.context or model.context or 1
    limits = {"KV tokens": tokens // 2, "the engine's limit": max(min(int(tokens / context * 512), 4096), 2048)}
    if asked.max_requests is not None:
        limits["max_running_requests"] = asked.max_requests
        del limits["the engine's limit"]
    if model.state_slot:
        limits["state slots"] = slots // each
    requests = min(limits.values())
    return Forecast(
        gpu=gpu,
        total_mib=round(room.total),
        free_mib=round(room.free),
        weights_mib=math.ceil(weights),
        kv_token_bytes=round(model.kv_token),
        fraction=fraction,
        fraction_from="engine" if asked.fraction is None else "set",
        budget_mib=round(budget),
        left_mib=round(free * (1 - fraction)),
        reserve_mib=round(reserve),
        kv_tokens=tokens if budget > 0 else 0,
        max_running_requests=max(requests, 0) if budget > 0 else 0,
        binds_tokens="max_total_tokens" if asked.max_tokens and asked.max_tokens <= fits else "mem_fraction_static",
        binds_requests=next(name for name, value in limits.items() if value == requests),
        lowest_fraction=math.ceil(weights / free * 1000 + 1) / 1000,
        state_slots=slots,
        slots_per_request=each,
        strategy=chosen,
        holders=room.holders,
        notes=model.notes,
    )


def _state(budget: float, model: Footprint, asked: Asked, device: str) -> tuple[float, int, str, int]:
    """Split a hybrid model's budget (bytes): what is left for the KV cache, state slots, strategy, slots a request."""
    if not model.state_slot:
        return budget, 0, "", 0
    chosen = strategy(asked, model, device)
    each = slots_per_request(asked, chosen)
    if asked.state_slots is not None:
        slots = asked.state_slots
    elif chosen == "none" and asked.max_requests is not None:
        slots = asked.max_requests
    else:
        share = budget * asked.state_share / (1 + asked.state_share)
        slots = max(int((share - model.state_slot) // model.state_slot), 0)  # one more is the pool's padding
    return budget - (slots + 1) * model.state_slot, slots, chosen, each


def by_strategy(gpu: int, room: Room, model: Footprint, asked: Asked) -> dict[str, int]:
    """Return the concurrent requests that each state strategy would give."""
    if not model.state_slot:
        return {}
    found = {}
    for name in ("no_buffer", "extra_buffer", "extra_buffer_lazy"):
        if name == "no_buffer" or (model.extra_buffer and room.device != "cpu"):
            other = replace(asked, strategy=name, radix=True)
            found[name] = forecast(gpu, room, model, other).max_running_requests
    return found


def gap_percent(predicted: int, real: int) -> float:
    """Return how far the engine's own figure lies from the forecast, in percent of the engine's."""
    return abs(predicted - real) / real * 100 if real else math.inf


def read_flags(argv: Sequence[str]) -> dict[str, str]:
    """Return a command line's options by name, a bare one as "true"."""
    found: dict[str, str] = {}
    words = list(argv)
    for position, word in enumerate(words):
        if word.startswith("--"):
            name, tied, value = word[2:].partition("=")
            following = words[position + 1] if position + 1 < len(words) else "--"
            found[name] = value if tied else "true" if following.startswith("--") else following
    return found


def asked_from(argv: Sequence[str], environment: Mapping[str, str], version: str) -> Asked:
    """Read what a server's command line and environment say about memory."""
    flags = read_flags(argv)

    def value(kind: Callable[[str], Any], *names: str) -> Any:
        text = next((flags[name] for name in names if name in flags), None)
        try:
            return None if text is None else kind(text)
        except ValueError:
            return None  # the plan has said so already

    return Asked(
        version=version,
        fraction=value(float, "mem-fraction-static"),
        max_tokens=value(int, "max-total-tokens"),
        max_requests=value(int, "max-running-requests"),
        context=value(int, "context-length"),
        chunk=value(int, "chunked-prefill-size"),
        decode_batch=value(int, "cuda-graph-max-bs-decode", "cuda-graph-max-bs"),
        decode_graphs=not flags.keys() & {"disable-cuda-graph", "disable-decode-cuda-graph"},
        prefill_graphs=not flags.keys()
        & {"disable-cuda-graph", "disable-prefill-cuda-graph", "disable-piecewise-cuda-graph"},
        strategy=flags.get("mamba-radix-cache-strategy") or flags.get("mamba-scheduler-strategy") or "auto",
        radix="disable-radix-cache" not in flags,
        overlap="disable-overlap-schedule" not in flags,
        skip_decode_lock=environment.get("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "").lower() in ("1", "true", "yes"),
        state_slots=value(int, "max-mamba-cache-size"),
        state_share=value(float, "mamba-full-memory-ratio") or STATE_SHARE,
        page=value(int, "page-size") or 1,
    )
