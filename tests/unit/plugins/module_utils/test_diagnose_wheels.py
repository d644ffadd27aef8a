# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the rules rely on, against the wheels that are installed: a renamed message is noticed at the next upgrade."""

from __future__ import annotations

import ast
import functools
import os
import re
import zipfile
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_codes import is_state
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_log import WRAPPER

CACHE = Path(__file__).resolve().parents[4] / ".cache"
WHEELS = CACHE / "wheels"
# Words of the engine (and of what comes with it) that the rules and the reader are built on.
FRAGMENTS = {
    "sglang": [
        "Received sigquit from a child process",
        "SIGQUIT received",
        "crashed with exit code",
        "scheduler died during initialization",
        "Scheduler hit an exception",
        "Initialization failed. warmup error",
        "cuda graph failed",
        "Possible solutions:",
        "kill_process_tree called",
        "The server is fired up and ready to roll!",
        "Load weight begin",
        "Init parallel begin",
        "max_total_num_tokens=",
        "leave no GPU memory for the KV cache",
        "memory capacity is unbalanced",
        "Cannot find any model weights",
        "are not supported for now",
        "mem-fraction-static",
        "Not enough space for mamba",
        "NaN detected in",
        "Watchdog timeout",
        "is used by a process already",
        "is not available in",
        "Health check failed. Server couldn't get a response from detokenizer",
        "Performance might be sub-optimal",
        "minimum required version",
        "Prefill out of memory",
        "is only supported",
        "exceeds the maximum allowed length",
        "has no usable cached build",
    ],
    "transformers": ["does not recognize this architecture", "does not appear to have a file named"],
    "huggingface_hub": ["Repo id must be in the form", "GatedRepoError", "Cannot find the requested files"],
    "triton": ["Failed to find C compiler", "out of resource: "],
    "flashinfer": [
        "Ninja build failed.",
        " Ninja output:",
        "FlashInfer requires GPUs with sm75",
        "Ignoring incompatible",
    ],
    "apache_tvm_ffi": ["ninja exited with status"],
}
LEVELS = ("info", "warning", "debug", "warn", "info_once", "warning_once", "warning_rank0", "log_info_on_rank0")
CALLS = re.compile(rf"\b(?:{'|'.join(LEVELS)})\(")


@functools.lru_cache
def sources(name):
    """The Python files of a wheel (or of what tests/toolkit unpacked of it), {} when it is not there."""
    found = sorted(WHEELS.glob(f"{name}-*.whl")) or sorted(WHEELS.glob(f"{name}_python-*.whl"))
    if found:
        with zipfile.ZipFile(found[0]) as wheel:
            names = [item for item in wheel.namelist() if item.endswith(".py")]
            return {item: wheel.read(item).decode("utf-8", "replace") for item in names}
    folders = sorted((CACHE / "toolkit").glob(f"{name}-*/{name}"))
    files = [path for folder in folders[-1:] for path in folder.rglob("*.py") if "data" not in path.parts]
    return {str(path): path.read_text(errors="replace") for path in files}


def not_there(name):
    """Skip; or fail, where scripts/test has fetched it."""
    text = f"neither a wheel of {name} in .cache/wheels (scripts/wheelhouse) nor its files in .cache/toolkit"
    (pytest.fail if os.environ.get("WHEELS_ARE_THERE") else pytest.skip)(text)


def joined(text):
    """Source text with strings that were broken over lines put together again."""
    return re.sub(r"[\"']\s*\n\s*[rf]{0,2}[\"']", "", text)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_fragment_is_in_its_wheel(name):
    files = sources(name)
    if not files:
        not_there(name)
    whole = "\n".join(files.values())
    whole = (whole + joined(whole)).lower()
    assert [text for text in FRAGMENTS[name] if text.lower() not in whole] == []


def logged(files):
    """The texts that are logged below the level of an error, placeholders filled in."""
    for text in files.values():
        if not CALLS.search(text):  # 100 MB of tables of kernels
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if getattr(node.func, "attr", getattr(node.func, "id", "")) in LEVELS:
                said = literal(node.args[0])
                if said and len(said) > 8:
                    yield said


def literal(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[\d.]*[sdrf]", "7", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "7" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (literal(node.left) or "") + (literal(node.right) or "")
    return ""


STAMP = "[2026-12-01 02:16:58] "
# Warnings that are the cause more often than not (taxonomy, "a warning may be the cause"): what is left of them is
# named beside the exception that nothing explains.
MAY_BE_THE_CAUSE = {
    "arch_list_wrong",
    "driver_too_old",
    "driver_unavailable",
    "gpu_access_denied",
    "nvcc_too_old_for_gpu",
    "no_kernel_image",
}


# Said when it is so: that very thing is what is wrong with the model's files, the port, the cubins.
TRUE_WHEN_SAID = (
    "Corrupted safetensors file detected",
    "Index validation failed: missing shard",
    "Shard validation failed: missing shards",
    "Incomplete checkpoint for",
    "is in use, but we could not find the process",
    "Cubin directory does not exist",
    "Failed to remove corrupted file",
)
CHUNK = 40  # texts tried in one log; only where that says something is each tried alone


@functools.lru_cache
def texts_of(name):
    """The texts of a wheel that are logged below the level of an error."""
    texts = [text for text in sorted(set(logged(sources(name)))) if not WRAPPER.search(text)]
    if not texts:
        not_there(name)
    assert len(texts) > 200
    return texts


def false_causes(name, around):
    """The texts that are taken for a cause, in logs made of them by around(lines)."""
    texts = texts_of(name)

    def named(part):
        lines = [f"{STAMP}{line}" for text in part for line in text.split("\n")]
        codes = {said.code for log, facts in around(lines) if (said := diagnose(log, facts))}
        return sorted(code for code in codes if not is_state(code) and code != "unknown_failure")

    chunks = [texts[at : at + CHUNK] for at in range(0, len(texts), CHUNK)]
    found = {text[:160]: codes for part in chunks if named(part) for text in part if (codes := named([text]))}
    return len(texts), found


@pytest.mark.parametrize("name", ["sglang", "flashinfer"])
def test_no_text_of_a_healthy_server_is_a_diagnosis(name):
    """While it starts, and while it serves: a server that got ready, or goes on, has nothing that must be explained."""
    ready = f"{STAMP}The server is fired up and ready to roll!"
    count, found = false_causes(name, lambda lines: [([*lines, ready], None), ([ready, *lines], None)])
    print(f"{name}: {count} texts, {len(found)} diagnoses")
    assert found == {}


@pytest.mark.parametrize("name", ["sglang", "flashinfer"])
def test_a_healthy_text_is_not_the_cause_of_a_failure_below_it(name):
    """What a healthy server says too stands above an exception that no rule knows: nobody may guess it to be why."""
    below = [
        f"{STAMP}Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/v/site-packages/sglang/x.py", line 1, in run',
        "OddError: a thing nobody knows",
        "",
        f"{STAMP}Received sigquit from a child process. It usually means the child failed.",
    ]
    count, found = false_causes(name, lambda lines: [([*lines, *below], Facts(failed=True))])
    found = {text: codes for text, codes in found.items() if set(codes) - MAY_BE_THE_CAUSE}
    found = {text: codes for text, codes in found.items() if not any(said in text for said in TRUE_WHEN_SAID)}
    print(f"{name}: {count} texts, {len(found)} false causes")
    assert found == {}
