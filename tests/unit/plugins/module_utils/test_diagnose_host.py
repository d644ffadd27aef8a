# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _remedies
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts
from ansible_collections.gpufleet.sglang.plugins.module_utils._facts import (
    LIMIT,
    Seen,
    collect,
    device_of,
    on_its_gpu,
    oom_kills,
    proxy_problem,
    toolkit_problems,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._facts_packages import accepts, parts_differ, unmet_pins
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe_checks import chat, expected, samples
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import TIMED_OUT, Result
from ansible_collections.gpufleet.sglang.plugins.module_utils._siblings import stand_out
from ansible_collections.gpufleet.sglang.plugins.module_utils._why import PARSED, read_lines

INSTANCE = Instance(
    0, "u0.service", "127.0.0.1", 30000, ["/v/bin/python", "-m", "x"], {"HOME": "/"}, "", "", uuid="GPU-0"
)


class Runner:
    def __init__(self, **answers):
        self.answers = answers

    def run(self, argv, *, timeout=30.0, env=None, cwd=None):
        return self.answers.get(argv[0], Result(127))


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"x/memory.events": "low 0\noom 1\noom_kill 2\n"}, 2),
        ({"memory/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"}, 1),
        ({"x/memory.events": "oom_kill 0\n"}, 0),
        ({}, None),
    ],
)
def test_oom_kills(tmp_path, files, count):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills("/x", str(tmp_path)) == count


def test_a_hung_nvidia_smi_hangs_nothing():
    runner = Runner(**{"nvidia-smi": Result(TIMED_OUT)})
    facts = collect(runner, INSTANCE, Seen(failed=True, phase="weights", oom_kills=0))
    assert (facts.smi, facts.failed, facts.device, facts.oom_kills) == ("hung", True, "cuda", 0)


class Slow(Runner):
    def run(self, argv, *, timeout=30.0, env=None, cwd=None):
        time.sleep(min(timeout, 1.5))
        return Result(TIMED_OUT)


def test_a_slow_host_costs_one_limit_and_not_one_for_each_look():
    begun = time.monotonic()
    facts = collect(Slow(), INSTANCE, Seen(failed=True, phase="weights", oom_kills=0))
    assert (facts.failed, time.monotonic() - begun < LIMIT + 2) == (True, True)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
WHOLE = {"config.json": "{}", "tokenizer.json": "{}", "model-1.safetensors": "x"}


@pytest.mark.parametrize(
    ("files", "code", "said"),
    [
        (WHOLE, "", ""),
        ({**WHOLE, "model-1.safetensors": POINTER}, "weights_corrupt", "LFS pointers"),
        ({**WHOLE, "config.json": "{", "model-1.safetensors": POINTER}, "weights_corrupt", "LFS pointers"),
        ({**WHOLE, "model.safetensors.index.json": INDEX}, "model_unavailable", "model-2"),
        ({"config.json": "{}"}, "model_unavailable", "no weights"),
        (None, "model_unavailable", "does not exist"),
    ],
)
def test_what_is_not_whole_in_the_model_folder_is_a_fact(tmp_path, files, code, said):
    folder = tmp_path / "model"
    for name, text in (files or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    instance = replace(INSTANCE, argv=[*INSTANCE.argv, "--model-path", str(folder)])
    found = collect(Runner(), instance, Seen(failed=True, phase="weights", oom_kills=0)).model_problem
    assert found[0] == code and said in found[1]
    # a text read as a header asks for any amount of memory
    log = ["MemoryError"] if code == "weights_corrupt" else []
    assert not code or diagnose(log, Facts(failed=True, model_problem=found)).code == code


def test_device_and_proxy():
    cpu = Instance(0, "u", "127.0.0.1", 1, ["p", "--device", "cpu"], {}, "", "")
    assert (device_of(cpu), device_of(INSTANCE)) == ("cpu", "cuda")
    assert proxy_problem({"HTTP_PROXY": "http://p", "NO_PROXY": "localhost"})
    assert not proxy_problem({"HTTP_PROXY": "http://p", "no_proxy": "127.0.0.1,localhost"})
    assert not proxy_problem({})


def test_toolkit(tmp_path):
    assert toolkit_problems("") == []
    assert toolkit_problems("/a:/b")[0][0] == "cuda_home_invalid"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert {code for code, _text in toolkit_problems(str(tmp_path))} == {"toolkit_incomplete"}


def test_on_its_gpu(monkeypatch):
    module = "ansible_collections.gpufleet.sglang.plugins.module_utils._facts.unit_of_pid"
    monkeypatch.setattr(module, {7: "u0.service", 8: "other.service"}.get)
    asked = [INSTANCE]
    assert on_its_gpu(Runner(**{"nvidia-smi": Result(0, "GPU-0, 7\n")}), asked) == {"u0.service": (True, "")}
    assert on_its_gpu(Runner(**{"nvidia-smi": Result(0, "GPU-1, 7\n")}), asked) == {"u0.service": (False, "GPU-1")}
    assert on_its_gpu(Runner(**{"nvidia-smi": Result(0, "GPU-1, 8\n")}), asked) == {"u0.service": (False, "")}
    assert on_its_gpu(Runner(**{"nvidia-smi": Result(0, "")}), asked) == {}  # a container that sees no pids


@pytest.mark.parametrize(
    ("spec", "version", "fits"),
    [
        ("==2.14.1", "2.14.1+cu130", True),
        ("==2.14.1", "2.13.0", False),
        (">=0.1.10,<0.2", "0.1.15.post2", True),
        (">=0.1.10,<0.2", "0.2.0", False),
        ("==4.*", "4.8.0", True),
        ("", "1", True),
    ],
)
def test_accepts(spec, version, fits):
    assert accepts(spec, version) is fits


def test_pins(tmp_path):
    site = tmp_path / "lib/python3.11/site-packages"
    for name, text in (
        ("sglang-0.5.23", "Name: sglang\nRequires-Dist: torch==2.14.1\nRequires-Dist: numpy==1\n"),
        ("torch-2.13.0", ""),
        ("numpy-2.0", ""),
    ):
        (site / f"{name}.dist-info").mkdir(parents=True)
        (site / f"{name}.dist-info/METADATA").write_text(text)
    assert unmet_pins(tmp_path) == ["torch is 2.13.0, the engine wants ==2.14.1"]
    assert parts_differ({"flashinfer-python": "0.7.2.post1", "flashinfer-cubin": "0.7.2"}) == []
    assert parts_differ({"flashinfer-python": "0.7.2", "flashinfer-jit-cache": "0.7.1+cu130"})


class Asker:
    def __init__(self, status, document):
        self.answer = (status, json.dumps(document).encode())

    def post(self, path, document, timeout):
        return self.answer


def drawn(tokens, value=-6.0):
    return {"text": "x", "meta_info": {"output_token_logprobs": [[value, token, None] for token in tokens]}}


def test_probe_checks():
    assert samples(Asker(200, [drawn(range(10)), drawn(range(10, 20))]), "p", 1) is None
    assert samples(Asker(200, [drawn(range(10)), drawn(range(10))]), "p", 1).code == "output_wrong"
    assert samples(Asker(200, [drawn(range(10), None)]), "p", 1).detail == "output_nan"
    assert samples(Asker(200, [drawn([5] * 10)]), "p", 1).detail == "output_garbage"
    assert samples(Asker(400, {}), "p", 1) is None  # an engine that does not know the request
    assert samples(Asker(200, {"text": "one answer"}), "p", 1) is None
    assert samples(Asker(500, {}), "p", 1).detail == "sampling_failed"
    assert expected("Paris, of course", "paris") is None
    assert expected("claus claus", "Paris").code == "output_wrong"

    def said(content, reasoning, finish="stop"):
        message = {"content": content, "reasoning_content": reasoning}
        return Asker(
            200, {"choices": [{"message": message, "finish_reason": finish}], "usage": {"completion_tokens": 9}}
        )

    assert chat(said("", "Hello."), "m", 64, 1).code == "content_empty"
    assert chat(said("Hello.", None), "m", 64, 1) is None
    assert chat(said("", "still thinking", "length"), "m", 64, 1) is None


def server(unit, text="abcdef", rate=100.0, **more):
    return {
        "unit": unit, "state": "ready", "model": "m", "text": text, "decode_tokens_per_second": rate, "uuid": "GPU-0",
        "reason": "", "diagnosis": None, **more,
    }  # fmt: skip


def test_siblings():
    fleet = [server(f"u{at}") for at in range(4)]
    assert [item["diagnosis"] for item in stand_out(fleet, {})] == [None] * 4
    slow = stand_out([*fleet[:3], server("u3", rate=10.0)], {})[3]
    assert (slow["state"], slow["diagnosis"]["detail"]) == ("ready", "slower_than_siblings")
    other = stand_out([*fleet[:3], server("u3", text="zzzz")], {})[3]
    assert other["diagnosis"]["detail"] == "differs_from_siblings"
    lost = stand_out(fleet, {"u1": (False, "")})[1]
    assert (lost["state"], lost["diagnosis"]["code"]) == ("unhealthy", "wrong_device")
    nan = stand_out([server("u0")], {}, {"u0": "NaN detected in sampler"})[0]
    assert nan["diagnosis"]["detail"] == "output_nan"
    assert stand_out([server("u0"), server("u1", text="zz")], {})[1]["diagnosis"] is None  # too few to say who is wrong


def test_a_long_journal_keeps_its_beginning_and_its_end():
    lines = [b"[2026-12-01 02:16:58] Load weight begin. avail mem=20.57 GB"]
    lines += [b"[2026-12-01 02:16:58] Decode batch, #running-req: 1"] * 1000
    lines += [b"[2026-12-01 02:16:58] line %d of something" % at for at in range(3 * PARSED)]
    lines += [b"OSError: [Errno 28] No space left on device"]
    log = read_lines(lines)
    assert (log.phase, log.count) == ("weights", 2 * PARSED)
    assert log.events[-1].text.startswith("OSError")


def failed(code, phase="graphs", evidence="x"):
    return {"gpu": 3, "state": "failed", "diagnosis": {"code": code, "phase": phase, "evidence": [evidence]}}


@pytest.mark.parametrize(
    ("server", "limits", "current", "after"),
    [
        (failed("gpu_oom"), {"gpu_oom": 0.7}, 0.85, 0.8),
        (failed("gpu_oom"), {"gpu_oom": 0.82}, 0.85, None),  # beyond the limit
        (failed("gpu_oom"), {}, 0.85, None),  # not allowed
        (failed("gpu_oom", "weights"), {"gpu_oom": 0.5}, 0.85, None),  # a smaller pool does not make weights smaller
        (failed("kv_pool_too_small"), {"kv_pool_too_small": 0.92}, 0.85, 0.88),
        (
            failed("kv_pool_too_small", evidence="Raise --mem-fraction-static above 0.103"),
            {"kv_pool_too_small": 0.9},
            0.1,
            0.13,
        ),
        (
            failed("kv_pool_too_small", evidence="Raise --mem-fraction-static above 0.503"),
            {"kv_pool_too_small": 0.9},
            0.1,
            0.523,
        ),
        (failed("jit_compile_oom"), {"jit_compile_oom": 1}, None, 8.0),
        (failed("host_oom"), {"host_oom": 1}, None, None),
    ],
)
def test_the_next_value(server, limits, current, after):
    found = _remedies.choose(server, limits, current, 16)
    assert (found.after if found else None) == after


def test_a_remedy_holds_while_the_inventory_asks_for_what_failed(tmp_path):
    item = _remedies.Remedy(3, "gpu_oom", "mem_fraction_static", 0.85, 0.8)
    (tmp_path / _remedies.NAME).write_text(_remedies.to_json({3: item}))
    known = _remedies.read(str(tmp_path))
    limits = {"gpu_oom": 0.7}
    assert known == {3: item}
    assert _remedies.valid(known, limits, [], {"mem_fraction_static": "0.85"}, {}) == known
    assert _remedies.valid(known, limits, [], {"mem_fraction_static": 0.9}, {}) == {}
    assert (
        _remedies.valid(known, limits, [{"gpu": "3", "mem_fraction_static": 0.6}], {"mem_fraction_static": 0.85}, {})
        == {}
    )
    assert _remedies.valid(known, {}, [], {"mem_fraction_static": 0.85}, {}) == {}
    assert _remedies.merged([{"gpu": "1", "port": 9}], known) == [
        {"gpu": "1", "port": 9},
        {"gpu": "3", "mem_fraction_static": 0.8},
    ]
    assert "0.8 instead of 0.85" in item.text()
    assert _remedies.read(str(tmp_path / "nothing")) == {}


def test_a_remedy_finds_its_gpu_by_uuid_and_leaves_one_that_is_gone():
    item = _remedies.Remedy(3, "gpu_oom", "mem_fraction_static", 0.85, 0.8, uuid="GPU-3aa1-22")
    limits, settings = {"gpu_oom": 0.7}, {"mem_fraction_static": 0.85}
    assert _remedies.valid({3: item}, limits, [], settings, {}, ["GPU-3aa1", "1"]) == {3: item}
    assert _remedies.valid({3: item}, limits, [], settings, {}, ["0", "1"]) == {}
    own = [{"gpu": "GPU-3AA1", "port": 9}]
    assert _remedies.merged(own, {3: item}) == [{"gpu": "GPU-3AA1", "port": 9, "mem_fraction_static": 0.8}]
    assert _remedies.valid({3: item}, limits, [{**own[0], "mem_fraction_static": 0.6}], settings, {}) == {}
