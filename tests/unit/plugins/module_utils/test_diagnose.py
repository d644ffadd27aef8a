# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._answers import Answer, judge_answers, same_sample
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import RULES, diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_codes import CODES
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_remedy import REMEDIES, flag
from ansible_collections.gpufleet.sglang.tests.unit.plugins.module_utils.engines import engine
from ansible_collections.gpufleet.sglang.tests.unit.replay import LOGS, lines_of

ROOT = Path(__file__).resolve().parents[4]
REPORTS = ROOT.parent / "shared/failures/reports.jsonl"
HEALTHY = ("cpu-api-key", "cpu-mem-fraction-small", "cpu-tp2", "gpu-h200-cold", "gpu-h200-w0", "gpu-h200-warm")
FAILED = {
    "cpu-attn-bad": "unit_misconfigured",
    "cpu-dp2": "unit_misconfigured",
    "cpu-model-hub-offline": "model_unavailable",
    "cpu-model-missing": "model_unavailable",
    "cpu-no-env": "package_mismatch",
    "cpu-no-weights": "model_unavailable",
    "cpu-port-in-use": "port_in_use",
    "cpu-port-in-use-sglang": "port_in_use",
    "gpu-h200-broken-package": "package_mismatch",
    "gpu-h200-w1": "kv_pool_too_small",
}
DIED = Facts(failed=True, exit_code="killed", exit_status=9, oom_kills=0)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TABLE = [
    # lines, facts -> code
    ([], Facts(), None),
    (["The server is fired up and ready to roll!"], Facts(), None),
    ([], DIED, "process_killed"),
    ([], Facts(failed=True, exit_code="killed", exit_status=9), "unknown_failure"),  # nobody knows who killed it
    ([], Facts(failed=True, result="timeout", exit_code="killed", exit_status=9), "unit_misconfigured"),
    ([], Facts(failed=True, result="oom-kill", oom_kills=1), "host_oom"),
    ([], Facts(failed=True, oom_kills=1, kernel=("Killed process 7 (cc1plus) oom-kill:",)), "jit_compile_oom"),
    ([OOM], Facts(failed=True), "gpu_oom"),
    ([OOM], Facts(failed=True, held_mib=30000, holders=("pid 7",)), "gpu_memory_in_use"),
    (
        [OOM],
        Facts(failed=True, kernel=("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",)),
        "gpu_hardware_fault",
    ),
    ([OOM, "CUDA_HOME is not set"], Facts(failed=True), "nvcc_not_found"),
    (["CUDA error: an illegal memory access was encountered"], Facts(failed=True), "cuda_kernel_fault"),
    (
        ["CUDA error: an illegal memory access"],
        Facts(failed=True, packages=("torch is 2, wants 3",)),
        "package_mismatch",
    ),
    (["SomethingError: nobody has seen this"], Facts(failed=True, tools_missing=("ninja",)), "unknown_failure"),
    (["nvcc fatal   : Unsupported gpu architecture 'compute_120a'"], Facts(compute_cap="8.6"), "arch_list_wrong"),
    (["nvcc fatal   : Unsupported gpu architecture 'compute_120a'"], Facts(compute_cap="12.0"), "nvcc_too_old_for_gpu"),
    (["no kernel image is available for execution on the device"], Facts(unlike_gpus=True), "jit_cache_bad"),
    (["/usr/bin/ld: cannot find -lcuda: No such file or directory"], Facts(), "toolkit_incomplete"),
    (["FAILED: [code=137] a.o", "/usr/bin/ld: cannot find a.o: No such file"], Facts(), "jit_compile_oom"),
    (["[Errno 28] No space left on device: '/dev/shm/x'"], Facts(), "dev_shm_too_small"),
    (["OSError: [Errno 28] No space left on device"], Facts(), "disk_full"),
    (["NVRM: Xid (PCI:0000:01:00): 45, pid=1"], Facts(failed=True), "unknown_failure"),
    ([], Facts(failed=True, wrong={"code": "output_wrong", "detail": "x", "evidence": "NaN"}), "output_wrong"),
    ([], Facts(failed=False, on_gpu=False), "wrong_device"),
    ([], Facts(failed=False, unwritable=("/x",), shm_mib=64), None),  # oddities of a host whose server is well
    (["Init torch distributed begin."], Facts(failed=True, idle=True), "engine_stalled"),
    (["flashinfer.jit: Loading JIT ops: x"], Facts(failed=True, idle=True), "jit_contention"),
]


@pytest.mark.parametrize(("lines", "facts", "code"), TABLE)
def test_decision(lines, facts, code):
    found = diagnose(lines, facts)
    assert (found.code if found else None) == code


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_logs_have_no_diagnosis(name):
    assert diagnose(lines_of(name)) is None


@pytest.mark.parametrize("name", HEALTHY)
def test_the_beginning_of_a_healthy_log_says_nothing_either(name):
    lines = lines_of(name)
    ready = next(at for at, line in enumerate(lines) if "fired up and ready" in line)
    for at in range(10, ready, 10):
        found = diagnose(lines[:at])
        assert found is None or found.code in ("unknown_failure", "engine_stalled", "state_busy"), (at, found)


@pytest.mark.parametrize("name", FAILED)
def test_real_failures(name):
    found = diagnose(lines_of(name), Facts(failed=True))
    assert found.code == FAILED[name], found
    assert found.evidence
    assert found.remedy


def test_every_rule_and_remedy_has_a_code():
    assert {rule.code for rule in RULES} <= set(CODES)
    assert set(CODES) == {code for code in REMEDIES if "/" not in code}
    assert len({rule.code for rule in RULES}) >= 38


def test_old_tracebacks_do_not_count():
    lines = ["OSError: [Errno 28] No space left on device", "", "The server is fired up and ready to roll!", OOM]
    assert diagnose(lines, Facts(failed=True)).code == "gpu_oom"


def test_chained_exceptions_give_the_innermost():
    found = diagnose(lines_of("cpu-model-hub-offline"), Facts(failed=True))
    assert "LocalEntryNotFoundError" in found.evidence[0]


def test_unknown_failure_shows_the_causal_line_and_the_phase():
    lines = [
        "[2026-12-01 02:16:58] Load weight begin. avail mem=20.57 GB",
        "[2026-12-01 02:16:58] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/v/site-packages/sglang/x.py", line 1, in run',
        "OddError: a thing nobody knows",
        "",
        "[2026-12-01 02:16:59] Received sigquit from a child process. It usually means the child failed.",
    ]
    found = diagnose(lines, Facts(failed=True))
    assert (found.code, found.phase) == ("unknown_failure", "weights")
    assert found.evidence[0] == "OddError: a thing nobody knows"


def test_remedies_speak_the_installed_engines_flags():
    assert "--cuda-graph-max-bs-decode" in flag("decode_graph_max_batch", engine("0.5.23"))
    assert "--cuda-graph-max-bs " not in flag("decode_graph_max_batch", engine("0.5.23"))
    assert "--cuda-graph-max-bs)" in flag("decode_graph_max_batch", engine("0.5.12"))
    found = diagnose([OOM], Facts(failed=True, phase="graphs"), engine("0.5.12"))
    assert "--mem-fraction-static" in found.remedy
    assert re.search(r"--cuda-graph-max-bs\b(?!-)", found.remedy)


RANDOM = Answer(temperature=1.0, tokens=tuple(range(10)), logprobs=(-6.0,) * 10)
ANSWERS = [
    (RANDOM, ""),
    (Answer(text="\ufffd\ufffd8n8n8n8n8n8n8n8n", tokens=(1,) * 10), ""),  # greedy, random weights: gibberish is theirs
    (Answer(temperature=1.0, tokens=(1,) * 10, logprobs=(-0.01,) * 10), ""),  # a model that is sure of itself
    (Answer(temperature=1.0, tokens=(1,) * 10, logprobs=(-5.0,) * 10), "output_wrong"),
    (Answer(temperature=1.0, tokens=tuple(range(10)), logprobs=(None,) * 10), "output_wrong"),
    (Answer(temperature=1.0, tokens=tuple(range(10)), logprobs=(float("nan"),) * 10), "output_wrong"),
    (Answer(text="claus claus claus claus claus claus", chat=True), "output_wrong"),
    (Answer(text="", reasoning="Paris.", finish="stop", chat=True), "content_empty"),
    (Answer(text="Hello!", reasoning="hm", finish="stop", chat=True), ""),
]


@pytest.mark.parametrize(("answer", "code"), ANSWERS)
def test_answers(answer, code):
    found = judge_answers([answer])
    assert (found.code if found else "") == code


def test_two_equal_samples():
    assert same_sample([RANDOM, RANDOM]).code == "output_wrong"
    assert same_sample([RANDOM, Answer(temperature=1.0, tokens=tuple(range(9, -1, -1)), logprobs=(-6.0,) * 10)]) is None


@pytest.mark.skipif(not REPORTS.exists(), reason="the collected reports are not part of the repository")
def test_score():
    told = subprocess.run(
        [sys.executable, str(ROOT / "tests/score_diagnosis.py"), str(REPORTS)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    right, wrong, silent = map(int, re.fullmatch(r"total: (\d+) right, (\d+) wrong, (\d+) silent", told[-1]).groups())
    count = right + wrong + silent
    assert count == len(REPORTS.read_text().splitlines())
    assert right >= 0.85 * count
    assert wrong <= 0.02 * count


def test_the_score_of_any_file(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"id": "X1", "kind": "Z", "code": "gpu_oom", "log_excerpt": OOM}) + "\n")
    told = subprocess.run(
        [sys.executable, str(ROOT / "tests/score_diagnosis.py"), str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert told.splitlines()[-1] == "total: 1 right, 0 wrong, 0 silent"


def test_all_healthy_logs_are_looked_at():
    assert set(HEALTHY) <= {path.stem for path in LOGS.glob("*.log")}
