"""The life of a stand-in server: load, serve, drain, and each way to die."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.server_args import prepare_server_args
from sglang.standin import faults as fault_list
from sglang.standin import processes, replay
from sglang.standin.http_api import Server
from sglang.standin.replay import raw, say

BAD_OPTIONS = {"exit2": ["--no-such-option"], "attn-bad": ["--attention-backend", "nope"]}


class Died(Exception):
    """A child ended; carries its title and exit code."""


class Engine:
    """One server: what the HTTP side asks, and the main thread drives."""

    def __init__(self, args: argparse.Namespace, faults: dict[str, float], speed: float) -> None:
        self.args, self.faults, self.speed = args, faults, speed
        self.state = "Starting"
        self.draining = False
        self.in_flight: set[str] = set()
        self.leaked: list[bytes] = []
        self.moving: set[str] = set()  # those that get tokens
        self.lock = threading.Lock()
        self.children: dict[str, int] = {}
        cpu = args.device == "cpu"
        self.log = "cpu-start.log" if cpu else "cuda-start.log"
        self.kv_tokens = args.max_total_tokens or (1_000_000 if cpu else 10_903_115)
        self.max_running = args.max_running_requests or (2048 if cpu else 64)
        self.values: dict[str, Any] = {
            "model": args.model_path, "host": args.host, "port": args.port, "pid": os.getpid(),
            "kv_tokens": self.kv_tokens, "mem_fraction": args.mem_fraction_static or 0.1, "args": vars(args),
        }  # fmt: skip

    @property
    def dead(self) -> bool:
        """The scheduler answers nobody: by fault, or because someone stopped it (SIGSTOP)."""
        if self.state == "Starting":
            return False
        if "dead-scheduler" in self.faults:
            return True
        try:
            stat = Path(f"/proc/{self.children['sglang::scheduler']}/stat").read_text(encoding="utf-8")
        except (OSError, KeyError):
            return True
        return stat.rpartition(")")[2].split()[0] == "T"

    # --- loading ---------------------------------------------------------------------------------

    def load(self) -> None:
        """Replay the start up to the point where the port is bound."""
        self.check_model()
        steps = ["server_args=", "Load weight begin", "Load weight end", "Memory pool end", ""]
        before = [self.spawn, self.weights, self.weights_loaded, self.pool_ready]
        skip = ""
        for until, then in zip(steps, [*before, None]):
            replay.play(self.log, self.values, self.speed, until=until, skip=skip, sleep=self.pause)
            skip = until
            if then:
                then()

    def check_model(self) -> None:
        """A folder that is none, a hub id without a hub, and a folder without weights fail as they do in the engine."""
        model = self.args.model_path
        local = model.startswith(("/", ".", "~"))
        if "model-missing" in self.faults or (local and not Path(model).is_dir()):
            self.fail("model-missing.log", 1)
        if not local:
            self.fail("model-hub-offline.log", 1)
        if self.args.load_format != "dummy" and not list(Path(model).glob("*.safetensors")):
            self.faults["no-weights"] = 0

    def spawn(self) -> None:
        """Start the two children the engine has."""
        burn = self.faults.get("silent-graphs", 0.0)
        self.children["sglang::scheduler"] = processes.spawn("sglang::scheduler", burn)
        self.children["sglang::detokenizer"] = processes.spawn("sglang::detokenizer")

    def weights(self) -> None:
        """Faults that show while weights load."""
        if "no-weights" in self.faults:
            self.fail("no-weights.log", 137)
        if "hang-loading" in self.faults:
            while True:
                self.pause(3600)
        if "killed-loading" in self.faults:
            os.kill(self.children["sglang::scheduler"], signal.SIGKILL)
            self.pause(5)
        self.pause(self.faults.get("slow", 0.0))

    def weights_loaded(self) -> None:
        """Faults of the KV pool; kv-pool:F goes away from fraction F on."""
        if "mem-fraction-small" in self.faults:
            self.fail("mem-fraction-small.log", 137)
        if "kv-pool" in self.faults and self.fraction < (self.faults["kv-pool"] or 1.0):
            self.fail("kv-pool.log", 137)

    def pool_ready(self) -> None:
        """Faults of kernels and graph capture; gpu-oom-graphs:F goes away below F, jit-oom:N with at most N jobs.

        jit-race:N shows in the first N starts. silent-graphs uses CPU in the scheduler and says nothing meanwhile.
        """
        jobs = float(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        if "jit-oom" in self.faults and jobs > self.faults["jit-oom"]:
            self.fail("jit-oom.log", 137)
        if "jit-race" in self.faults and self.start_number() <= (self.faults["jit-race"] or float("inf")):
            self.fail("jit-race.log", 137)
        out_of_memory = "gpu-oom-graphs" in self.faults and self.fraction > self.faults["gpu-oom-graphs"]
        if "silent-graphs" in self.faults or out_of_memory:
            say("Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=2.41 GB")
        if out_of_memory:
            self.fail("gpu-oom-graphs.log", 137)
        if "silent-graphs" in self.faults:
            self.pause(self.faults["silent-graphs"])
            say("Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=1.00 s, mem usage=0.15 GB.")

    @property
    def fraction(self) -> float:
        """The static fraction; the engine chooses about this on a GPU when it is not told."""
        return float(self.args.mem_fraction_static or 0.85)

    def start_number(self) -> int:
        """Count the starts of this port, in a file below the working directory."""
        path = Path.cwd() / f"standin-starts-{self.args.port}"
        count = 1 + (int(path.read_text(encoding="utf-8")) if path.exists() else 0)
        path.write_text(str(count), encoding="utf-8")
        return count

    def fail(self, log: str, code: int) -> None:
        """Say the last lines and end as the engine does: by exception (1), or by SIGKILL to everybody (137)."""
        replay.play(log, self.values, self.speed, sleep=time.sleep)
        self.end(code)

    def end(self, code: int) -> None:
        """Leave no child, then end this process."""
        for pid in self.children.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if code == 137:
            processes.die_by_sigkill()
        sys.stderr.flush()
        os._exit(code)

    # --- serving ---------------------------------------------------------------------------------

    def serve(self) -> None:
        """Bind, warm up, answer until told to stop."""
        if {"bind-hang", "false-ready"} & set(self.faults):
            self.port_taken("false-ready" in self.faults)
        try:
            server = Server(self)
        except OSError:
            self.port_taken(self.other_is_sglang())
            return
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: self.terminate())
        say(f"INFO:     Uvicorn running on http://{self.args.host}:{self.args.port} (Press CTRL+C to quit)")
        self.pause(1 / self.speed)
        if not self.args.skip_server_warmup:
            say(f'INFO:     {self.args.host}:40000 - "GET /model_info HTTP/1.1" 200 OK')
            server.say_prefill(27)
            say(f'INFO:     {self.args.host}:40002 - "POST /generate HTTP/1.1" 200 OK')
        say("The server is fired up and ready to roll!")
        self.state = "Up"
        crash = time.monotonic() + self.faults["crash-after"] if "crash-after" in self.faults else None
        while not self.draining:
            self.pause(0.1)
            if crash and time.monotonic() >= crash:
                os.kill(self.children["sglang::scheduler"], signal.SIGKILL)
                crash = None
        self.drain()

    def pause(self, seconds: float) -> None:
        """Wait, and notice within 50 ms when a child ends; raises Died."""
        stop = time.monotonic() + seconds
        while True:
            for title, pid in self.children.items():
                code = processes.exit_code(pid)
                if code is not None:
                    raise Died(title, pid, code)
            left = stop - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.05))

    def child_died(self, title: str, pid: int, code: int) -> None:
        """While loading the parent raises; later it tears everything down by SIGKILL."""
        self.children.pop(title)
        if self.state == "Starting" and title == "sglang::scheduler":
            raw(
                "Traceback (most recent call last):\nRuntimeError: Rank 0 scheduler died during initialization "
                f"(exit code: {code}). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. "
                "Run `dmesg -T | grep -i oom` to check."
            )
            self.end(1)
        name = "scheduler_0" if title.endswith("scheduler") else "detokenizer"
        say(f"Subprocess {name} (pid={pid}) crashed with exit code {code}. Triggering SIGQUIT for cleanup...")
        say("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        if os.environ.get("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "true").lower() not in ("false", "0"):
            say("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
            time.sleep(5 / self.speed)
            if name == "detokenizer":
                say("Waiting 60.0 seconds for CUDA coredumps before exiting.")
                time.sleep(60 / self.speed)
            else:
                say("No live scheduler processes found; skipping py-spy and CUDA coredump.")
        say(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
        self.end(137)

    def port_taken(self, by_sglang: bool) -> None:
        """Another SGLang there: a false "ready" and exit 3. Anything else: a hang that ignores SIGTERM, then 137."""
        if by_sglang:
            self.fail("false-ready.log", 3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hang = float(os.environ.get("STANDIN_BIND_HANG", "122"))
        replay.play("bind-hang.log", self.values, 121 / hang if hang else 1e9, sleep=time.sleep)
        self.end(137)

    def other_is_sglang(self) -> bool:
        """Ask whoever holds the port what it is, as the warm-up does."""
        try:
            connection = http.client.HTTPConnection(self.args.host, self.args.port, timeout=5)
            connection.request("GET", "/model_info")
            return "model_path" in json.loads(connection.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException, TypeError):
            return False

    # --- stopping --------------------------------------------------------------------------------

    def terminate(self) -> None:
        """SIGTERM while serving."""
        if self.state == "UnHealthy":
            say("Signal SIGTERM received while health check failed. Force exiting.")
            time.sleep(5 / self.speed)
            self.end(137)
        say("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        self.draining = True

    def drain(self) -> None:
        """Wait for requests in flight, without bound, then end with 0."""
        while True:
            self.pause(5 / self.speed)
            with self.lock:
                left = sorted(self.in_flight)
            count = f"Remaining number of requests {len(left)}."
            say(f"Gracefully exiting... {count} Remaining requests remaining_rids={left}.")
            if not left:
                break
        say(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=False, pid={os.getpid()}")
        for line in ("Shutting down", "Waiting for application shutdown.", "Application shutdown complete."):
            say(f"INFO:     {line}")
        say(f"INFO:     Finished server process [{os.getpid()}]")
        self.end(0)


def run(argv: Sequence[str]) -> int:
    """Be a server; returns only on errors of the command line (argparse ends the process itself)."""
    args = prepare_server_args(argv)
    faults = fault_list.read(args.port)
    for name, extra in BAD_OPTIONS.items():
        if name in faults:
            prepare_server_args([*argv, *extra])
    engine = Engine(args, faults, float(os.environ.get("STANDIN_SPEED", "20")))
    try:
        engine.load()
        engine.serve()
    except Died as exc:
        engine.child_died(*exc.args)
    return 0
