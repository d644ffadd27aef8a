# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Why a server failed: one code out of its log and the facts, with its evidence. No side effects here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_codes import CODES, is_state, order
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts, fact_signs
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_log import BY_SIGNAL, WRAPPER, Event, Log, read
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_remedy import remedy
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_rules import (
    CAUSE,
    DEVICE_RULES,
    HINT,
    SYMPTOM,
    UNIT_RULES,
    Rule,
    Sign,
    match,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_rules_build import BUILD_RULES
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_rules_cache import CACHE_RULES, LIBRARY_RULES
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_rules_run import (
    GPU_RULES,
    MEMORY_RULES,
    MODEL_RULES,
    RUN_RULES,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._options import EngineOptions

RULES: tuple[Rule, ...] = (
    *DEVICE_RULES,
    *UNIT_RULES,
    *BUILD_RULES,
    *CACHE_RULES,
    *LIBRARY_RULES,
    *GPU_RULES,
    *MEMORY_RULES,
    *MODEL_RULES,
    *RUN_RULES,
)
MAX_EVIDENCE = 4
MAX_CHARS = 400
_PROCESS = re.compile(r"Process \d+ has (?P<size>[\d.]+) (?P<unit>[GM])iB memory in use")
_TOTAL = re.compile(
    r"total capacity of (?P<total>[\d.]+ [GM])iB of which (?P<free>[\d.]+ [GM])iB is free\."
    r".*this process has (?P<own>[\d.]+ [GM])iB memory in use"
)
_ARCH = re.compile(r"(?:compute|sm)_(?P<arch>\d+)[af]?")
_STALL_LINE = re.compile(r"Init torch distributed begin|Init parallel begin|sglang is using nccl|Load weight begin")
_BUSY_LINE = re.compile(
    r"Building JIT module|can take several minutes|JIT (?:Pre-?Compile|code generation)|Compiling .*kernels?\b"
    r"|Try DeepGEMM",
    re.I,
)
_HEALTH = re.compile(r"Health check failed|couldn.t get a response from detokenizer")


@dataclass(frozen=True)
class Diagnosis:
    """Why, in words for people and codes for machines."""

    code: str
    detail: str
    severity: str
    retry: str
    says: str
    evidence: list[str]
    remedy: str
    also_seen: list[str]
    phase: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def line(self) -> str:
        """Return one line: code and what shows it."""
        return f"{self.code}: {self.evidence[0]}" if self.evidence else f"{self.code}: {self.says}"


def diagnose(
    log: Log | Iterable[str], facts: Facts | None = None, options: EngineOptions | None = None
) -> Diagnosis | None:
    """Return why a server failed, None when nothing is wrong with it."""
    facts = facts or Facts()
    read_log = log if isinstance(log, Log) else read(log)
    phase = facts.phase or read_log.phase
    alive = facts.failed is None and read_log.phase == "ready" and not read_log.ended
    signs = [] if facts.failed is False or alive else log_signs(read_log, facts)
    signs += fact_signs(facts, read_log)
    if facts.failed is False:
        signs = [sign for sign in signs if sign.strength == CAUSE]
    signs = _combine(signs, read_log, facts, phase)
    if not signs:
        well = facts.failed is False or (
            facts.failed is None and ((read_log.phase == "ready" and not read_log.ended) or not read_log.count)
        )
        if well or (read_log.stopping and not facts.failed):
            return None
        return _unknown(read_log, facts, phase, options)
    best = _choose(signs)
    seen = [best.code]
    for sign in sorted(signs, key=_key):
        if sign.code not in seen and sign.strength > SYMPTOM:
            seen.append(sign.code)
    evidence = [best.evidence, *_more(best, signs)]
    return _make(best.code, best.detail, evidence, seen[1:], phase, facts, options)


def log_signs(log: Log, facts: Facts) -> list[Sign]:
    """Return what the log alone is a sign of."""
    events = log.events
    signs = match(RULES, events)
    for event in events:
        signs += _others_memory(event)
    last = log.last_line
    if _STALL_LINE.search(last) and facts.failed is not False and not any(e.kind == "exception" for e in events):
        signs.append(Sign("engine_stalled", "nccl_init_hang", SYMPTOM, last, log.count))
    if re.search(r"(?:^|/)(?:cicc|nvcc|ptxas|cc1plus) +-", last) and not any(e.kind != "log" for e in events):
        signs.append(Sign("state_busy", "jit_compiling", SYMPTOM, last, log.count))
    busy = next((line for line in list(log.last)[:-4:-1] if _BUSY_LINE.search(line)), "")
    if busy and not any(sign.strength == CAUSE for sign in signs):
        signs.append(Sign("state_busy", "jit_compiling", SYMPTOM, busy, log.count))
    waited = next((e for e in events if re.search(r"Loading JIT ops", e.text)), None)
    if waited and any(s.code == "engine_stalled" for s in signs) and not any(s.strength == CAUSE for s in signs):
        signs.append(Sign("jit_contention", "jit_lock_wait", HINT, waited.text, waited.line))
    health = next((e for e in events if _HEALTH.search(e.text)), None)
    if health and facts.compiling:
        signs.append(Sign("state_busy", "busy_not_dead", HINT, health.text, health.line))
    elif health and facts.idle:
        signs.append(Sign("engine_stalled", "engine_stalled", HINT, health.text, health.line))
    return signs


def _others_memory(event: Event) -> list[Sign]:
    """Read PyTorch's account of who has the GPU's memory: another process, or this one seen from outside."""
    if "this process has" not in event.text:
        return []
    mib = sum(float(hit["size"]) * (1024 if hit["unit"] == "G" else 1) for hit in _PROCESS.finditer(event.text))
    account = _TOTAL.search(event.text)
    if account:
        total, free, own = (_mib(account[name]) for name in ("total", "free", "own"))
        # a tenth: what the driver keeps for itself is far less
        mib = max(mib, total - free - own if total - free - own > total / 10 else 0)
    if mib < 1024:
        return []
    return [Sign("gpu_memory_in_use", "gpu_memory_in_use", CAUSE, event.text, event.line, event.wrapped)]


def _mib(text: str) -> float:
    size, unit = text.split()
    return float(size) * (1024 if unit == "G" else 1)


def _combine(signs: Sequence[Sign], log: Log, facts: Facts, phase: str) -> list[Sign]:
    """Apply what one sign means for another."""
    found = list(signs)
    codes = {sign.code for sign in found if sign.strength == CAUSE}
    oom = "jit_compile_oom" in codes
    out = []
    killed = any(sign.code == "process_killed" for sign in found)
    by_signal = killed or any(BY_SIGNAL.search(event.text) for event in log.events)
    if by_signal:  # how the process ended outranks what is odd about its host, and what it says it coped with
        found = [
            replace(sign, strength=SYMPTOM)
            if (sign.fact and sign.strength == HINT and sign.code != "process_killed")
            or (sign.chatter and sign.strength == CAUSE)
            else sign
            for sign in found
        ]
    for sign in found:
        if sign.code == "nvcc_too_old_for_gpu" and facts.compute_cap:
            named = {hit["arch"] for hit in _ARCH.finditer(sign.evidence)}
            if named and facts.compute_cap.replace(".", "") not in named:
                sign = replace(sign, code="arch_list_wrong", detail="arch_list_wrong")
        hidden = _not_imported(sign.evidence, log) if sign.code == "model_unsupported" else ""
        if hidden and re.search(r"No module named|cannot import name|undefined symbol|has no attribute", hidden):
            sign = replace(sign, code="package_mismatch", detail="package_broken", evidence=hidden)
        elif hidden and "returned non-zero exit status" in hidden:
            sign = replace(sign, code="jit_build_failed", detail="jit_build_failed", evidence=hidden)
        weak = sign.code == "host_oom" and sign.strength == SYMPTOM
        if weak and (facts.oom_kills is not None or phase in ("ready", "warmup", "graphs")):
            continue  # exit code -9 alone: only while weights are loaded, and only as long as nothing else is known
        if sign.code == "package_mismatch" and sign.fact and "cuda_kernel_fault" in codes:
            sign = replace(sign, strength=CAUSE)  # pins that differ explain a kernel that crashes
        if sign.code == "arch_list_wrong" and facts.arch_list and sign.strength == SYMPTOM:
            sign = replace(sign, strength=CAUSE)
        if sign.code == "gpu_oom" and codes & {"gpu_memory_in_use", "state_cache_too_small"}:
            sign = replace(sign, strength=HINT)
        if sign.code == "host_oom" and not sign.fact and facts.model_problem[0] == "weights_corrupt":
            sign = replace(sign, strength=SYMPTOM)  # a text read as a header asks for any amount of memory
        if sign.code == "no_kernel_image" and facts.unlike_gpus and sign.strength == CAUSE:
            # one folder of cached kernels for unlike GPUs: built for the one, loaded on the other
            sign = replace(sign, code="jit_cache_bad", detail="jit_cache_wrong_arch")
        if (
            oom
            and sign.code in ("toolkit_incomplete", "jit_contention")
            and re.search(r"cannot find|\bld\b", sign.evidence)
        ):
            continue  # what the killed compiler left behind is missing at the link
        if sign.code == "no_kernel_image" and re.search(r"cached_ops|\.cache/|torch_extensions", sign.evidence):
            sign = replace(sign, code="jit_cache_bad", detail="jit_cache_wrong_arch")
        if is_state(sign.code) and sign.code == "state_busy" and (facts.failed or log.ended):
            continue
        if sign.code == "jit_cache_not_writable" and codes & {"model_unavailable"} and "config" in sign.evidence:
            continue
        if (
            sign.fact
            and sign.code == "package_mismatch"
            and sign.strength == SYMPTOM
            and "package_mismatch" not in codes
        ):
            continue  # pins that are not met explain some failures, not any
        out.append(sign)
    if by_signal and all(sign.fact and sign.strength == SYMPTOM for sign in out):
        return []
    explained = {sign.line for sign in out}
    if any(
        event.kind == "exception" and event.line not in explained and not BY_SIGNAL.search(event.text)
        for event in log.events
    ):
        # an exception that nothing explains: chatter is no reason to guess, nor are the host's oddities alone
        out = [sign for sign in out if not sign.chatter]
        if all(sign.fact and sign.strength < CAUSE for sign in out):
            return []
    return out


def _not_imported(evidence: str, log: Log) -> str:
    """Return why the engine has no code for an architecture that it knows: its module could not be imported."""
    wanted = re.search(r"\['(?P<family>[A-Z][a-z]+)", evidence)
    if not wanted or "not supported for now" not in evidence:
        return ""
    module = re.compile(rf"when loading \S*\.models\.{wanted['family'].lower()}\w*[.:]")
    return next((line for line in log.ignored if module.search(line)), "")


def _key(sign: Sign) -> tuple[int, bool, tuple[int, int], int]:
    return -sign.strength, sign.wrapped, order(sign.code), sign.line


def _choose(signs: Sequence[Sign]) -> Sign:
    strongest = max(sign.strength for sign in signs)
    return min((sign for sign in signs if sign.strength == strongest), key=_key)


def _more(best: Sign, signs: Sequence[Sign]) -> list[str]:
    said = []
    for sign in signs:
        if sign.code == best.code and sign.evidence != best.evidence and sign.evidence not in said:
            said.append(sign.evidence)
    return said[: MAX_EVIDENCE - 1]


def _unknown(log: Log, facts: Facts, phase: str, options: EngineOptions | None) -> Diagnosis:
    events = [event for event in log.events if not WRAPPER.search(event.text)]
    first = next((event for event in events if event.kind in ("exception", "fatal") and not event.wrapped), None)
    if first is None:
        kinds = ("compiler", "linker", "nvcc", "shell", "argparse", "kernel", "exception")
        first = next((event for event in events if event.kind in kinds), None)
    if first is None:
        first = next((event for event in log.events if BY_SIGNAL.search(event.text)), None)
    if first is None:
        words = re.compile(r"\b(?:error|fatal|failed|cannot|exception)\b", re.IGNORECASE)
        first = next((event for event in events if words.search(event.text)), None)
    lines = [first.text] if first else []
    if first and first.frames:
        lines.append(f"in {first.frames[-1]}")
    if not lines and facts.symptom:
        lines = [facts.symptom]
    if not lines:
        lines = (log.before_wrapper or list(log.last))[-2:]
    if facts.exit_code and not first:
        lines.insert(0, f"{facts.exit_code} {facts.exit_status}, with no line that says why")
    return _make("unknown_failure", "unknown_failure", lines, [], phase, facts, options)


def _make(
    code: str,
    detail: str,
    evidence: Sequence[str],
    seen: Sequence[str],
    phase: str,
    facts: Facts,
    options: EngineOptions | None,
) -> Diagnosis:
    known = CODES[code]
    cut = [" ".join(line.split())[:MAX_CHARS] for line in evidence if line][:MAX_EVIDENCE]
    text = remedy(code, detail, phase, cut, facts, options)
    return Diagnosis(code, detail, known.severity, known.retry, known.says, cut, text, list(seen), phase)
