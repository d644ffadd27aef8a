"""A report (a line of reports.jsonl) as what the collectors would have brought: log lines, facts, answers.

Read are only what a host could have told: log_excerpt, stage, component and versions; never cause, fix, code, detail
or detector. Text in ( ) is a description where the program printed nothing useful, and what it describes is turned
into the fact that a collector of plugins/module_utils/_facts.py brings on a real host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._answers import Answer, text_garbage
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts

# Compute capability by product, as nvidia-smi tells it.
CAPABILITY = (
    (r"\bsm_?(\d{1,2})(\d)[af]?\b", None),
    (r"RTX PRO [456]000|RTX ?50\d0|5090|5080|5070|5060", "12.0"),
    (r"GB10|DGX Spark|Thor", "12.1"),
    (r"B300|GB300", "10.3"),
    (r"B200|GB200|B100", "10.0"),
    (r"H100|H200|H800|H20\b|GH200", "9.0"),
    (r"RTX ?40\d0|4090|L40S?|\bL4\b|6000 Ada", "8.9"),
    (r"\bA10\b|A10G|A40|A6000|RTX ?30\d0|3090|A30\d0", "8.6"),
    (r"A100|A800|A30\b", "8.0"),
    (r"\bT4\b|RTX ?20\d0|2080", "7.5"),
    (r"V100", "7.0"),
)
STAGES = (
    (r"serving|ready|running|request", "ready"),
    (r"warm.?up|health", "warmup"),
    (r"graph", "graphs"),
    (r"kv|profile|sizing", "kv_pool"),
    (r"weight|load", "weights"),
)


def inputs(report: Mapping[str, Any]) -> tuple[list[str], Facts]:
    """Return the log lines and the facts of a report."""
    excerpt, stage = str(report.get("log_excerpt") or ""), str(report.get("stage") or "")
    about = f"{report.get('component') or ''}; {report.get('versions') or ''}"
    told = described(excerpt)
    silent = re.compile(r"\s*\((?:no (?:further )?(?:line|output)|nothing|\.\.\.)[^()]*\)\s*")
    lines = [re.sub(r"^\s*\((.*)\)\s*$", r"\1", line) for line in excerpt.split("\n") if not silent.fullmatch(line)]
    known: dict[str, Any] = {
        "phase": next((phase for pattern, phase in STAGES if re.search(pattern, stage, re.I)), ""),
        "compute_cap": capability(about),
    }
    said = f"{told}; {stage}"
    names = re.findall(
        r"(?:RTX|A\d+|H\d+|B\d+|L\d+|T4|V100)[\w ]*?\d+\w*(?: \(sm_\d+\))? ?\+ ?(?:RTX ?)?\d{3,4}\w*"
        r"|sm_(\d+)\W.{0,30}sm_(?!\1)\d+",
        about,
    )
    known["unlike_gpus"] = bool(names)
    held = re.findall(r"(?:sglang|vllm|python|scheduler|EngineCore|Worker)\S*\s+(\d{4,})\s*MiB", excerpt, re.I)
    if held:
        known["held_mib"] = max(int(size) for size in held)
    if re.search(
        r"(?:GPU|CUDA)\b.{0,20}\bnot (?:seen|found|visible|detected)|CPU only|no GPU", told, re.I
    ) and re.search(r"shell|systemd|as a service|unit", told, re.I):
        known["nodes"] = {"/dev/nvidia0": "denied"}
    tools = [
        tool
        for tool in ("ninja", "gcc", "g++")
        if re.search(rf"\b{re.escape(tool)}\b.{{0,30}}(?:not found|missing|not on)", told, re.I)
    ]
    known["tools_missing"] = tools
    known["tools_beside"] = [tool for tool in tools if re.search(r"same env|venv|installed", told, re.I)]
    if re.search(
        r"/dev/nvidia-uvm\S* (?:is )?(?:missing|gone|absent)|(?:GPU|device)s? (?:absent|missing"
        r"|not visible) (?:in|from) (?:the )?(?:container|LXC)",
        told,
        re.I,
    ):
        known["nodes"] = {"/dev/nvidia-uvm": "missing"}
    if re.search(
        r"\bre-?(?:build|built|compil)\w*|compil\w+ (?:again|everything|every start|at (?:every"
        r"|each))|(?:unexpected|long|cold).{0,20}compil|compil\w* for \d+ ?(?:min|s\b)",
        said,
        re.I,
    ):
        known["rebuilding"] = True
    if re.search(
        r"pre-?compil|compiling|JIT compil\w+ (?:runs|running|in progress)|first use\b.{0,20}compil", said, re.I
    ):
        known["compiling"] = True
    if re.search(
        r"\b(?:several|parallel|concurrent\w*|simultaneous\w*|multiple|many|all) \w*\s?(?:start"
        r"|server|process|launch|engine|instance|replica)\w*|\b(?:start|launch|r[ua]n|build|compil)\w*\b.{0,90}"
        r"\bat (?:once|the same time)|under parallel",
        told,
        re.I,
    ):
        known["several_starting"] = True
    if re.search(r"\bLFS pointer", told):
        known["model_problem"] = ("weights_corrupt", told)
    if re.search(r"\b(?:old|stale|outdated) (?:kernel|\.so|module|cubin|cache)", told, re.I):
        known["cache_damage"] = told
    if re.search(
        r"scheduler (?:is )?(?:already )?(?:dead|died|gone|killed)|while starting|still (?:starting"
        r"|loading)|dead scheduler",
        told,
        re.I,
    ) and re.search(r"\b200\b", excerpt):
        known["children_dead"], known["health_ok"] = ["scheduler"], True
    if re.search(
        r"no further|never (?:becomes|opens|returns|finish|ready)|\bhang\w*|hung|stuck|waits? without"
        r"|no tokens? (?:is |are )?(?:generated|comes?)"
        r"|stay\w* at (?:zero|0)|nothing (?:more|happens)|stands still|waits? for ever",
        said,
        re.I,
    ):
        known["idle"] = True
    if re.search(
        r"(?:no|0) (?:process|GPU memory|MiB)\b.{0,30}(?:on|in|of|by) (?:the )?(?:GPU|nvidia-smi)"
        r"|CPU fall-?back|(?:runs|running|ran|came up|serves|computes) on (?:the )?CPU|wrong GPU"
        r"|(?:on|uses?) (?:GPU|another GPU|the other GPU)\b.{0,20}instead|all .{0,20}on GPU 0"
        r"|GPU (?:util\w*|usage|stays).{0,12}\b0 ?%",
        said,
        re.I,
    ) and not known.get("nodes"):
        known["on_gpu"] = False
        if re.search(r"wrong GPU|instead|another|all .{0,20}on GPU 0", told, re.I):
            known["other_gpu"] = "another GPU"
    if re.search(
        r"lands? on|ends? up on|(?:on|uses?|sees) (?:the )?(?:wrong|another|different|other) (?:GPU"
        r"|device|card)|another GPU than",
        told,
        re.I,
    ):
        known["on_gpu"], known["other_gpu"] = False, "another GPU"
    known["jit_loading"] = bool(re.search(r"\bJIT\b", stage))
    if re.search(
        r"\b(?:PrivateDevices|DevicePolicy|DeviceAllow|RestrictAddressFamilies|IPAddressDeny"
        r"|ProtectClock|ProtectKernel\w+|SystemCallFilter|MemoryDenyWriteExecute)\b",
        excerpt,
    ):
        known["sandbox"] = told or excerpt
    if re.search(
        r"\bEnvironment(?:File)?=|override\.conf|drop-in|/etc/profile|\.bashrc|login shell|\bUser="
        r"|\bHOME\b.{0,30}(?:unset|not set|missing|differs)",
        told,
        re.I,
    ):
        known["unit_problem"] = told
    if re.search(r"prefetch", stage, re.I) or re.search(
        r"\d+ (?:\.so|cubins?)\b.{0,20}(?:absent|missing)|(?:cubins?|artifacts?"
        r"|headers?)\b.{0,20}(?:absent|missing|incomplete)",
        told,
        re.I,
    ):
        known["cubins_missing"] = told
    if re.search(r"(?:TORCH|FLASHINFER)_CUDA_ARCH_LIST ?=", about):
        known["arch_list"] = about
    known["packages"] = packages(about)
    if re.search(r"nvidia-smi (?:hangs|does not|never)", told, re.I):
        known["smi"] = "hung"
    known["answers"] = answers(excerpt, told, stage)
    return lines, Facts(**known)


def packages(about: str) -> list[str]:
    """Return what is wrong with the versions: the parts of flashinfer must be of one version."""
    parts = re.findall(r"(?:flashinfer[-_ ]?)?\b(python|cubin|jit-cache)\b[ =]+(\d+\.\d+\.\d+)", about)
    whole = re.findall(r"\bflashinfer[ =]+(\d+\.\d+\.\d+)", about)
    versions = {version for _name, version in parts if version.startswith("0.")} | (set(whole[:1]) if parts else set())
    return [f"flashinfer's packages differ: {', '.join(sorted(versions))}"] if len(versions) > 1 else []


def described(excerpt: str) -> str:
    """Return the text in parentheses, outermost ones."""
    parts, depth, begin = [], 0, 0
    for at, char in enumerate(excerpt):
        if char == "(":
            begin, depth = (at + 1 if depth == 0 else begin), depth + 1
        elif char == ")" and depth:
            depth -= 1
            if depth == 0:
                parts.append(excerpt[begin:at])
    return "; ".join(part for part in parts if " " in part.strip())


def capability(about: str) -> str:
    """Return the GPU's compute capability."""
    for pattern, value in CAPABILITY:
        found = re.search(pattern, about, re.IGNORECASE)
        if found:
            return value or f"{found.group(1)}.{found.group(2)}"
    return ""


def answers(excerpt: str, told: str, stage: str) -> list[Answer]:
    """Return what the probe would have got."""
    wrong = re.search(
        r"wrong output|garbage|gibberish|nonsense|incoherent|corrupt\w* output|repeat|degenerat",
        f"{stage}; {told}",
        re.I,
    )
    nonsense = re.search(
        r"random (?:\w+ )?(?:tokens?|characters?|text|words)|gibberish|garbage|nonsense|mojibake"
        r"|byte-identical|(?:only|all|endless|repeated)\W+(?:!+|\w+ tokens?)|!{5,}",
        excerpt,
        re.I,
    )
    if wrong or nonsense:
        return [Answer(text=excerpt, reads_wrong=True)]
    if re.search(
        r"\bcontent['\"]?\s*[:=]\s*(?:null|None|''|\"\"|$)|content:? [\"']{2}|(?:empty|no|null"
        r"|blank) (?:\w+ )?content|content (?:is |was )?(?:empty|null|None|missing)|(?:empty"
        r"|blank) (?:answer|response|output|completion|message)",
        excerpt,
        re.I,
    ):
        return [Answer(text="", chat=True, finish="stop")]
    if re.search(r"NaN", told) and re.search(r"logit|prob|output", told, re.I):
        return [Answer(text=excerpt, logprobs=(float("nan"),))]
    quoted = re.findall(
        r"(?:content|text|output|answer|reply)['\"]?\s*[:=]\s*[\"'](.+?)[\"']\s*(?:$|\n|,|})", excerpt, re.I | re.S
    )
    lone = (
        [excerpt]
        if re.fullmatch(r"ready|serving.*", stage, re.I) and not re.search(r"\w+Error|\d\d\d\b|:\s", excerpt)
        else []
    )
    return [Answer(text=text, chat=True) for text in quoted] + [
        Answer(text=text, reads_wrong=_nonsense(text)) for text in lone
    ]


def _nonsense(text: str) -> bool:
    """Say whether a text that is an answer and nothing else is not language."""
    if text_garbage(text):
        return True
    marks = len(re.findall(r"[!?#]{1,3}(?=\s|$)", text))
    return marks >= 3 and marks >= len(text.split()) / 3
