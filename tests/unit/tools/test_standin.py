"""The stand-in engine, started for real on loopback: its HTTP answers against recorded ones, and its ways to die."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
ENGINE = TOP / "tests" / "standin-engine"
KEYS = json.loads((TOP / "tests" / "fixtures" / "http_keys.json").read_text(encoding="utf-8"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Run:
    """One stand-in."""

    def __init__(self, folder: Path, *args: str, fault: str = "", port: int = 0, **env: str) -> None:
        self.port = port or free_port()
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "model.safetensors").touch()
        argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "model"), "--device", "cpu"]
        environment = {**os.environ, "PYTHONPATH": str(ENGINE), "STANDIN_SPEED": "2000", "STANDIN_FAULT": fault, **env}
        self.log = folder / f"{self.port}-{time.monotonic_ns()}.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*argv, "--port", str(self.port), "--max-total-tokens", "8192", *args],
                cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def ask(self, method: str, path: str, body: object = None, timeout: float = 5, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def ready(self, limit: float = 10) -> Run:
        stop = time.monotonic() + limit
        while time.monotonic() < stop:
            assert self.process.poll() is None, self.text()
            with contextlib.suppress(OSError):
                if self.ask("GET", "/ready")[0] == 200:
                    return self
            time.sleep(0.02)
        raise AssertionError(self.text())

    def wait_for(self, line: str, limit: float = 10) -> None:
        stop = time.monotonic() + limit
        while line not in self.text():
            assert time.monotonic() < stop, self.text()
            time.sleep(0.02)

    def children(self) -> dict[str, int]:
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return {Path(f"/proc/{p}/cmdline").read_bytes().rstrip(b"\0").decode(): int(p) for p in pids}

    def ended(self, limit: float = 10) -> int:
        return self.process.wait(limit)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@pytest.fixture
def start(tmp_path):
    runs = []

    def make(*args, **kwargs):
        runs.append(Run(tmp_path, *args, **kwargs))
        return runs[-1]

    yield make
    for run in runs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait(5)


def assert_keys(recorded: object, got: object, at: str) -> None:
    if isinstance(recorded, dict):
        assert isinstance(got, dict) and set(recorded) <= set(got), f"{at}: lacks {set(recorded) - set(got or {})}"
        for key, value in recorded.items():
            if got[key] is not None:
                assert_keys(value, got[key], f"{at}.{key}")
    elif isinstance(recorded, list) and recorded:
        assert_keys(recorded[0], got[0], f"{at}[0]")


CHAT = {"model": "x", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
BODIES = [
    ("GET", "/v1/models", None, "v1_models"),
    ("GET", "/model_info", None, "model_info"),
    ("GET", "/server_info", None, "server_info"),
    ("GET", "/v1/loads", None, "v1_loads"),
    ("POST", "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 8}}, "generate"),
    ("POST", "/v1/chat/completions", CHAT, "chat"),
    ("POST", "/v1/completions", {"model": "x", "prompt": "hello", "max_tokens": 8}, "completions"),
]


def test_answers_have_the_keys_of_the_recorded_ones(start):
    began = time.monotonic()
    run = start("--enable-metrics").ready()
    assert time.monotonic() - began < 20  # 0.2 s alone; the real one takes 20 and more
    for method, path, body, name in BODIES:
        status, data = run.ask(method, path, body)
        assert status == 200, path
        assert_keys(KEYS[name], json.loads(data), name)
    assert json.loads(run.ask("GET", "/server_info")[1])["max_total_num_tokens"] == 8192
    assert b"sglang:max_total_num_tokens{" in run.ask("GET", "/metrics")[1]
    assert run.ask("GET", "/health") == (200, b"")
    assert run.ask("GET", "/get_load")[0] == 404
    assert run.ask("GET", "/generate")[0] == 405
    assert set(run.children()) == {"sglang::scheduler", "sglang::detokenizer"}
    assert "The server is fired up and ready to roll!" in run.text()


@pytest.mark.parametrize("path, body", [("/generate", BODIES[4][2]), ("/v1/chat/completions", CHAT)])
def test_streams(start, path, body):
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    status, data = start().ready().ask("POST", path, request)
    events = [line[6:] for line in data.decode().split("\n\n") if line]
    assert status == 200 and events.pop() == "[DONE]"
    parsed = [json.loads(event) for event in events]
    if path == "/generate":
        assert [len(e["output_ids"]) for e in parsed] == list(range(1, 9))
        assert parsed[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert parsed[0]["meta_info"]["finish_reason"] is None
    else:
        assert parsed[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in parsed if e["choices"]).count(" ") == 8
        assert parsed[-1]["usage"]["completion_tokens"] == 8


def test_nothing_listens_while_it_loads_and_sigterm_ends_it(start):
    run = start(fault="hang-loading")
    run.wait_for("Load weight begin")
    with pytest.raises(ConnectionRefusedError):
        run.ask("GET", "/v1/models")
    run.process.terminate()
    assert run.ended(2) == -signal.SIGTERM


def test_sigterm_drains(start):
    run = start(STANDIN_TOKENS_PER_SECOND="10").ready()
    connection = http.client.HTTPConnection("127.0.0.1", run.port, timeout=10)
    connection.request("POST", "/generate", json.dumps({"text": "x", "sampling_params": {"max_new_tokens": 8}}))
    time.sleep(0.2)
    run.process.terminate()
    run.wait_for("Draining requests")
    time.sleep(0.15)
    assert run.ask("GET", "/health")[0] == 503
    assert run.ask("GET", "/ready")[0] == 503
    assert json.loads(connection.getresponse().read())["meta_info"]["completion_tokens"] == 8
    assert run.ended() == 0
    assert "Remaining number of requests 1" in run.text()


@pytest.mark.parametrize("name, subprocess_name", [("scheduler", "scheduler_0"), ("detokenizer", "detokenizer")])
def test_a_killed_child_takes_the_server_down(start, name, subprocess_name):
    run = start().ready()
    os.kill(run.children()[f"sglang::{name}"], signal.SIGKILL)
    assert run.ended() == -signal.SIGKILL
    assert f"Subprocess {subprocess_name} (pid=" in run.text() and "crashed with exit code -9" in run.text()


ENDS = [
    ("no-weights", -9, "Cannot find any model weights with"),
    ("model-missing", 1, "Repo id must be in the form"),
    ("attn-bad", 2, "argument --attention-backend: invalid choice: 'nope'"),
    ("exit2", 2, "unrecognized arguments: --no-such-option"),
    ("mem-fraction-small", -9, "Loaded weights leave no GPU memory for the KV cache"),
    ("kv-pool", -9, "Not enough memory. Please try to increase --mem-fraction-static"),
    ("gpu-oom-graphs", -9, "Capture cuda graph failed: CUDA out of memory"),
    ("jit-oom", -9, "FAILED: [code=137]"),
    ("jit-race", -9, "cannot find cuda_0.o"),
    ("killed-loading", 1, "Rank 0 scheduler died during initialization (exit code: -9)"),
    ("false-ready", 3, "The server is fired up and ready to roll!"),
    ("crash-after:0.2", -9, "Subprocess scheduler_0"),
]


@pytest.mark.parametrize("fault, code, line", ENDS, ids=[e[0] for e in ENDS])
def test_faults_that_end_it(start, fault, code, line):
    run = start(fault=fault)
    assert run.ended() == code, run.text()
    assert line in run.text()


def test_a_taken_port_hangs_deaf_then_dies(start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        run = start(port=other.getsockname()[1], STANDIN_BIND_HANG="6.5")
        run.wait_for("error while attempting to bind on address")
        run.process.terminate()
        time.sleep(0.5)
        assert run.process.poll() is None
        assert run.ended(12) == -signal.SIGKILL


def test_another_sglang_on_the_port_makes_it_say_ready_falsely(start):
    first = start().ready()
    second = start(port=first.port)
    assert second.ended() == 3
    assert "ready to roll!" in second.text()


def test_a_dead_scheduler(start):
    run = start(fault="dead-scheduler", SGLANG_HEALTH_CHECK_TIMEOUT="0.3").ready()
    assert run.ask("GET", "/v1/models")[0] == 200
    with pytest.raises(TimeoutError):
        run.ask("POST", "/generate", {"text": "x"}, timeout=0.5)
    assert run.ask("GET", "/health")[0] == 503
    assert run.ask("GET", "/ready")[0] == 503


def test_a_stopped_scheduler_hangs_and_recovers(start):
    run = start(SGLANG_HEALTH_CHECK_TIMEOUT="0.3").ready()
    scheduler = run.children()["sglang::scheduler"]
    os.kill(scheduler, signal.SIGSTOP)
    time.sleep(0.1)
    assert run.ask("GET", "/health")[0] == 503
    os.kill(scheduler, signal.SIGCONT)
    time.sleep(0.1)
    assert run.ask("GET", "/health")[0] == 200
    assert run.ask("GET", "/ready")[0] == 200


@pytest.mark.parametrize("fault", ["empty-answer", "garbage"])
def test_answers_that_are_none(start, fault):
    status, data = start(fault=fault).ready().ask("POST", "/generate", {"text": "x"})
    assert status == 200
    if fault == "garbage":
        with pytest.raises(ValueError):
            json.loads(data)
    else:
        assert json.loads(data)["output_ids"] == [] and json.loads(data)["text"] == ""


def test_silent_graphs_use_cpu(start):
    run = start(fault="silent-graphs:1.5")
    run.wait_for("Capture target decode CUDA graph begin")
    time.sleep(0.6)
    stat = Path(f"/proc/{run.children()['sglang::scheduler']}/stat").read_text().rpartition(")")[2].split()
    assert int(stat[11]) + int(stat[12]) > 10  # utime + stime, ticks
    run.ready()


def test_a_file_decides_over_the_environment(start, tmp_path):
    port = free_port()
    (tmp_path / f"standin-fault-{port}").write_text("exit2\n")
    assert start(port=port).ended() == 2
    (tmp_path / f"standin-fault-{port}").write_text("")
    start(port=port, fault="exit2").ready()


def test_api_key(start):
    run = start("--api-key", "k").ready()
    assert run.ask("GET", "/v1/models")[0] == 401
    assert run.ask("GET", "/v1/models", Authorization="Bearer k")[0] == 200
    assert run.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "flag, says",
    [("--cuda-graph-max-bs", "ambiguous option"), ("--mamba-scheduler-strategy", "unrecognized arguments")],
)
def test_renamed_flags_are_refused_as_the_engine_does(start, flag, says):
    run = start(flag, "8")
    assert run.ended() == 2
    assert says in run.text()
