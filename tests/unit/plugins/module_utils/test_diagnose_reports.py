# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reports from public threads, and what compilers really said.

tests/fixtures/fresh_reports.jsonl: own short excerpts, labelled before they were scored; rules were widened and
narrowed after each first look. Right / wrong / silent at first sight: N01 to N87 70/6/11, M01 to M14 14/0/0, then the
sets named in first_look: A 40/3/3, B 43/2/2, C (other engines and programs among them) 25/2/5.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "tests"))
from score_diagnosis import score  # noqa: E402

REPORTS = [json.loads(line) for line in (ROOT / "tests/fixtures/fresh_reports.jsonl").read_text().splitlines()]
LOGS = ROOT / "tests/unit/fixtures/logs/toolkit"


def half(seed, which):
    order = list(range(len(REPORTS)))
    random.Random(seed).shuffle(order)
    return [REPORTS[at] for at in order[which::2]]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_random_halves_score_alike(seed, which):
    part = half(seed, which)
    counts = score(part, quiet=True)
    assert counts["right"] >= 0.85 * len(part)
    assert counts["wrong"] <= 0.02 * len(part)


def test_reports_are_distinct_and_labelled():
    assert len({report["url"] for report in REPORTS}) == len({report["id"] for report in REPORTS}) == len(REPORTS)
    assert len(REPORTS) > 90


def wanted(name):
    if "skew-0.7" in name:
        return "cuda_version_skew"
    tool = {"no-cxx": "build_tools_missing", "no-gcc": "build_tools_missing", "nvcc": "nvcc_not_found"}
    tool["cuda-home"] = "nvcc_not_found"
    return next((code for part, code in tool.items() if part in name), "toolkit_incomplete")


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_what_compilers_really_said(path):
    """Each fault of a toolkit, header skew among them, as nvcc, ptxas, ld and ninja put it."""
    found = diagnose(path.read_text(errors="replace").splitlines(), Facts(failed=True))
    assert found.code == wanted(path.stem), found


UNKNOWN = ["Traceback (most recent call last):", '  File "/v/x.py", line 1, in run', "OddError: nobody knows"]
TABLE = [
    (
        ["ImportError: /tmp/torchinductor_a/triton/0/x/__triton_launcher.so: undefined symbol: cuLaunchKernel"],
        {},
        "jit_cache_bad",
    ),
    (["include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device"], {}, "dev_shm_too_small"),
    (
        ["NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)", *UNKNOWN],
        {},
        "unknown_failure",
    ),
    (["ImportError: /v/x.so: undefined symbol: cuGreenCtxStreamCreate"], {}, "driver_too_old"),
    (["ImportError: /v/x.so: undefined symbol: cublasLtCreate"], {}, "runtime_lib_shadowed"),
    (["RuntimeError: NCCL error: unhandled system error"], {"shm_mib": 64}, "dev_shm_too_small"),
    (["RuntimeError: NCCL error: unhandled system error"], {"shm_mib": 64000}, "unknown_failure"),
    (["Failed to decode JPEG on GPU, falling back to CPU.", *UNKNOWN], {}, "unknown_failure"),
    (["NVFP4 requires compute capability >= 10.0; serving weight-only instead.", *UNKNOWN], {}, "unknown_failure"),
    (
        [
            "Ignore import error when loading sglang.srt.models.glm4v_moe: No module named 'transformers.x'",
            "ValueError: Model architectures ['Glm4vMoeForConditionalGeneration'] are not supported for now.",
        ],
        {},
        "package_mismatch",
    ),
    (
        [
            "Ignore import error when loading sglang.srt.models.qwen9: No module named 'x'",
            "ValueError: Model architectures ['OddForCausalLM'] are not supported for now.",
        ],
        {},
        "model_unsupported",
    ),
]


@pytest.mark.parametrize(("lines", "facts", "code"), TABLE)
def test_decision(lines, facts, code):
    assert diagnose(lines, Facts(failed=True, **facts)).code == code


def test_nvrm_lines_of_hosts_that_are_well_are_no_cause():
    """One such line goes with every start on a GB10, also with those that end well (vllm 56824)."""
    line = (
        "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from _memdesc"
    )
    assert diagnose(UNKNOWN, Facts(failed=True, kernel=(line,))).code == "unknown_failure"
    assert diagnose(["The server is fired up and ready to roll!"], Facts(failed=False, kernel=(line,))) is None


def test_a_server_that_runs_and_does_not_answer_shows_how():
    lines = ["The server is fired up and ready to roll!", "INFO: Uvicorn running on http://127.0.0.1:1"]
    found = diagnose(lines, Facts(failed=True, symptom="POST /generate answered 500: no"))
    assert (found.code, found.evidence[0]) == ("unknown_failure", "POST /generate answered 500: no")
