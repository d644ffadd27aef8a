# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Stable settings and free flags, turned into the command line of the engine that is installed."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _spelling
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._options import EngineOptions


@dataclass(frozen=True)
class Setting:
    """A stable setting: its kind, and the flags that carry it, newest first.

    when (bool settings only) is the value that needs a flag; the other one is the engine's default.
    """

    kind: str  # str | fraction | count | tokens | seconds | seed | bool
    flags: tuple[str, ...]
    when: bool = True


# In the order in which they appear on the command line.
SETTINGS: dict[str, Setting] = {
    "context_length": Setting("count", ("context-length",)),
    "dtype": Setting("str", ("dtype",)),
    "quantization": Setting("str", ("quantization",)),
    "load_format": Setting("str", ("load-format",)),
    "trust_remote_code": Setting("bool", ("trust-remote-code",)),
    "kv_cache_dtype": Setting("str", ("kv-cache-dtype",)),
    "mem_fraction_static": Setting("fraction", ("mem-fraction-static",)),
    "max_running_requests": Setting("count", ("max-running-requests",)),
    "max_total_tokens": Setting("count", ("max-total-tokens",)),
    "chunked_prefill_size": Setting("tokens", ("chunked-prefill-size",)),
    "attention_backend": Setting("str", ("attention-backend",)),
    "sampling_backend": Setting("str", ("sampling-backend",)),
    "mamba_strategy": Setting("str", ("mamba-radix-cache-strategy", "mamba-scheduler-strategy")),
    "reasoning_parser": Setting("str", ("reasoning-parser",)),
    "tool_call_parser": Setting("str", ("tool-call-parser",)),
    "decode_graph_max_batch": Setting("count", ("cuda-graph-max-bs-decode", "cuda-graph-max-bs")),
    "decode_graphs": Setting("bool", ("disable-decode-cuda-graph", "disable-cuda-graph"), when=False),
    "prefill_graphs": Setting("bool", ("disable-prefill-cuda-graph", "disable-piecewise-cuda-graph"), when=False),
    "metrics": Setting("bool", ("enable-metrics",)),
    "sleep_on_idle": Setting("bool", ("sleep-on-idle",)),
    "watchdog_timeout": Setting("seconds", ("watchdog-timeout",)),
    "log_level": Setting("str", ("log-level",)),
    "random_seed": Setting("seed", ("random-seed",)),
}

_ONE_PER_GPU = "this collection runs one server per GPU"
# Flags the plan decides, or that must not be on a command line, with the reason and the remedy.
OWNED: dict[str, tuple[str, str]] = {
    "model-path": ("the plan sets it", "Set sglang_server_model"),
    "model": ("the plan sets it", "Set sglang_server_model"),
    "served-model-name": ("the plan sets it", "Set sglang_server_served_model_name"),
    "host": ("the plan sets it", "Set sglang_server_host"),
    "port": ("the plan sets it", "Set sglang_server_base_port, or port of the GPU in sglang_server_instances"),
    "device": ("the plan sets it", "Set sglang_server_device"),
    "base-gpu-id": ("each server sees its own GPU only", "List the GPUs in sglang_server_gpus"),
    "gpu-id-step": ("each server sees its own GPU only", "List the GPUs in sglang_server_gpus"),
    "config": (
        "it would bring in flags that the plan has not checked",
        "Write its options into sglang_server_extra_args",
    ),
    "help": ("it ends the engine", "Leave it out"),
    "h": ("it ends the engine", "Leave it out"),
    "api-key": (
        "SGLang prints it in its first log line and every user sees it in the process list",
        "Keep keys in the router in front of the servers",
    ),
    "admin-api-key": (
        "SGLang prints it in its first log line and every user sees it in the process list",
        "Keep keys in the router in front of the servers",
    ),
    "ssl-keyfile-password": ("the process list shows it", "Put TLS into the router in front of the servers"),
    "ssl-keyfile": ("the servers are asked over plain HTTP", "Put TLS into the router in front of the servers"),
    "ssl-certfile": ("the servers are asked over plain HTTP", "Put TLS into the router in front of the servers"),
}
# More than one of these means several GPUs for one server.
PARALLEL: dict[str, str] = {
    "tp-size": "tp-size",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp-size": "dp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "pp-size": "pp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "nnodes": "nnodes",
}
# Two servers with the same value of one of these do not both start.
UNIQUE = ("nccl-port", "dist-init-addr", "grpc-port")


@dataclass(frozen=True)
class Flag:
    """One option of the command line; no values means a bare flag."""

    name: str
    values: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """Return the command line's elements; a text that begins with a dash is tied to its flag (argparse)."""
        if len(self.values) == 1 and self.values[0].startswith("-") and _number(self.values[0]) is None:
            return [f"--{self.name}={self.values[0]}"]
        return [f"--{self.name}", *self.values]


def normalise(flag: str) -> str:
    """Return a flag as the tables spell it: no leading dashes, dashes instead of underscores."""
    return str(flag).strip().lstrip("-").replace("_", "-")


def as_bool(value: Any) -> bool | None:
    """Return a YAML or command-line boolean as bool, None when it is not one."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in ("true", "yes", "on") else False if text in ("false", "no", "off") else None


def typed(kind: str, value: Any) -> tuple[Any, str | None]:
    """Return a setting's value in its own type, or what it should have been."""
    if kind == "bool":
        flag = as_bool(value)
        return flag, None if flag is not None else "must be true or false"
    if kind == "str":
        if isinstance(value, (bool, list, dict)) or not str(value).strip() or "\n" in str(value):
            return None, "must be one word of text"
        return str(value), None
    number = None if isinstance(value, (bool, list, dict)) else _number(str(value))
    if number is None:
        return None, "must be a number"
    if kind == "fraction":
        return number, None if 0 < number < 1 else "must lie between 0 and 1, both excluded"
    if kind == "seconds":
        return int(number) if number == int(number) else number, None if number > 0 else "must be greater than 0"
    if number != int(number):
        return None, "must be a whole number"
    whole = int(number)
    if kind == "tokens":
        return whole, None if whole > 0 or whole == -1 else "must be greater than 0, or -1 to switch it off"
    if kind == "seed":
        return whole, None if whole >= 0 else "must be 0 or greater"
    return whole, None if whole > 0 else "must be greater than 0"


def settings_flags(
    settings: Mapping[str, Any],
    options: EngineOptions | None,
    where: str,
    gpu: int | None = None,
    version: str = "",
) -> tuple[list[Flag], list[Finding]]:
    """Turn stable settings into flags that the installed engine knows.

    Without its option list the table of releases says what version calls them, and without an answer there
    the newest names are taken. where names the variables in messages
    (sglang_server_* or the GPU's entry of sglang_server_instances).
    """
    flags: list[Flag] = []
    findings: list[Finding] = []
    for name, setting in SETTINGS.items():
        raw = settings.get(name)
        if raw is None or raw == "":
            continue
        value, wrong = typed(setting.kind, raw)
        if wrong:
            findings.append(Finding("bad_value", f"{where}{name} is {raw!r}: it {wrong}", gpu=gpu))
            continue
        if setting.kind == "bool" and value is not setting.when:
            continue
        chosen: str | None
        if options is None:
            chosen = _spelling.spelling(setting.flags, version) or setting.flags[0]
        else:
            chosen = next((flag for flag in setting.flags if _usable(flag, options)), None)
        if chosen is None:
            findings.append(_no_flag(name, setting, options, where, gpu))
            continue
        flag = Flag(chosen) if setting.kind == "bool" else Flag(chosen, (_text(value),))
        findings.extend(_checked(flag, options, f"{where}{name}", gpu))
        flags.append(flag)
    return flags, findings


def extra_flags(
    extra: Mapping[str, Any], taken: Sequence[Flag], options: EngineOptions | None, where: str, gpu: int | None = None
) -> tuple[list[Flag], list[Finding]]:
    """Turn extra_args into flags, sorted by name; refuses what the plan owns, does not know or already has."""
    flags: list[Flag] = []
    findings: list[Finding] = []
    known = {_canonical(flag.name, options): f"the setting that became --{flag.name}" for flag in taken}
    for raw in sorted(extra, key=normalise):
        name, value = normalise(raw), extra[raw]
        option = options.find(name) if options else None
        if value is False and option is not None and option.negation:
            name, value = normalise(option.negation), True
        if value is None or value is False:
            continue
        refused = _refused(name, value, options)
        if refused:
            findings.append(Finding("owned_flag", f"{where}extra_args: --{name}: {refused[0]}", refused[1], gpu=gpu))
            continue
        if options is not None and option is None:
            findings.append(_unknown(name, options, where, gpu))
            continue
        same = known.get(_canonical(name, options))
        if same:
            text = f"{where}extra_args: --{name} is given twice: {same} is the same option"
            findings.append(Finding("flag_twice", text, "Keep one", gpu=gpu))
            continue
        known[_canonical(name, options)] = f"extra_args {raw}"
        values, wrong = _values(value)
        if wrong:
            findings.append(Finding("bad_value", f"{where}extra_args: --{name}: {wrong}", gpu=gpu))
            continue
        flag = Flag(name, values)
        findings.extend(_checked(flag, options, f"{where}extra_args", gpu))
        findings.extend(_deprecated(name, options, where, gpu))
        flags.append(flag)
    return flags, findings


def companions(flags: Sequence[Flag]) -> list[Flag]:
    """Return what the engine insists on beside these flags.

    From 0.5.14 on it dies on a no_buffer that is asked for by name while requests overlap (auto sets both, older
    engines the second by themselves). Without the radix cache there is no state to keep, and both go together.
    """
    names = {flag.name for flag in flags}
    strategy = SETTINGS["mamba_strategy"].flags
    by_name = any(flag.name in strategy and flag.values == ("no_buffer",) for flag in flags)
    needed = by_name and not names & {"disable-overlap-schedule", "disable-radix-cache"}
    return [Flag("disable-overlap-schedule")] if needed else []


def nearest(word: str, words: Sequence[str]) -> str:
    """Return ', did you mean X?' or nothing."""
    close = difflib.get_close_matches(word, words, n=1)
    return f", did you mean {close[0]}?" if close else ""


def _refused(name: str, value: Any, options: EngineOptions | None) -> tuple[str, str] | None:
    names = {name, *_aliases(name, options)}
    for owned in sorted(names & set(OWNED)):
        return OWNED[owned]
    for parallel in sorted(names & set(PARALLEL)):
        if str(value) != "1":
            return (f"{_ONE_PER_GPU}, {PARALLEL[parallel]} {value} needs several", "Leave it out, or set it to 1")
    return None


def _usable(flag: str, options: EngineOptions) -> bool:
    found = options.find(flag)
    return found is not None and not found.refused


def _deprecated(name: str, options: EngineOptions | None, where: str, gpu: int | None) -> list[Finding]:
    option = options.find(name) if options else None
    if options is None or option is None or option.refused:
        return []
    instead = option.message or _spelling.deprecated(name, options.version)
    if not instead and "Deprecated" not in option.action:
        return []
    text = f"{where}extra_args: --{name} is deprecated in SGLang {options.version}" + (
        f": {instead}" if instead else ""
    )
    return [Finding("flag_deprecated", text, "It works now; the next release may refuse it", WARNING, gpu)]


def _unknown(name: str, options: EngineOptions, where: str, gpu: int | None) -> Finding:
    near = [f"--{normalise(item)}" for item in options.suggest(name)]
    stable = next((key for key, setting in SETTINGS.items() if name in setting.flags), None)
    if stable:
        remedy = f"Set sglang_server_{stable}, which becomes this engine's own flag"
    else:
        remedy = f"Did you mean {' or '.join(near)}" if near else "The engine's option list lies beside plan.json"
    text = f"{where}extra_args: --{name} is not an option of SGLang {options.version}"
    past = _spelling.history(name, options.version)
    text += f" ({past})" if past else ""
    return Finding("unknown_flag", text, remedy, gpu=gpu)


def _no_flag(name: str, setting: Setting, options: EngineOptions | None, where: str, gpu: int | None) -> Finding:
    tried = " or ".join(f"--{flag}" for flag in setting.flags)
    text = f"{where}{name}: SGLang {options.version if options else ''} has no {tried}"
    return Finding("no_flag", text, f"Leave {name} out for this engine, or give its own option in extra_args", gpu=gpu)


def _checked(flag: Flag, options: EngineOptions | None, where: str, gpu: int | None) -> list[Finding]:
    if options is None:
        return []
    value: Any = True if not flag.values else flag.values[0] if len(flag.values) == 1 else list(flag.values)
    wrong = options.check(flag.name, value)
    return [Finding("bad_value", f"{where}: {wrong}", gpu=gpu)] if wrong else []


def _aliases(name: str, options: EngineOptions | None) -> set[str]:
    found = options.find(name) if options else None
    return {normalise(item) for item in found.opts} if found else set()


def _canonical(name: str, options: EngineOptions | None) -> str:
    aliases = _aliases(name, options)
    return min(aliases) if aliases else name


def _values(value: Any) -> tuple[tuple[str, ...], str | None]:
    if value is True:
        return (), None
    if isinstance(value, dict):
        return (json.dumps(value, sort_keys=True, separators=(",", ":")),), None
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if not items:
        return (), "an empty list: leave the option out, or set it to true for a bare flag"
    if any(isinstance(item, (list, dict, tuple)) or item is None for item in items):
        return (), "a list must hold plain values"
    texts = tuple(_text(item) for item in items)
    if any("\n" in text or "\0" in text for text in texts):
        return (), "a value must be one line"
    return texts, None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
