"""The demo: a Debian host with real systemd on this machine, the real engine on its CPUs, the real playbook."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent.parent
NAME, ADDRESS = "demo", "10.211.8.20"
TESTHOST = {"TESTHOST_BRIDGE": "gpufleet0", "TESTHOST_NET": "10.211.8", "TESTHOST_STATE": "/var/lib/gpufleet-demo"}
SERVER_GB, SPARE_GB = 1.6, 1.0
MODEL = TOP / ".cache/models/tiny"
STATE = TOP / ".cache/demo.json"
QUESTION = "What is the answer?"

# Runs in the host: asks each server of the plan one question, all at once.
ASK = """
import concurrent.futures, json, sys, time, urllib.request
plan = json.load(open("/etc/sglang/plan.json"))
def ask(i):
    body = {"model": "tiny", "messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 12, "temperature": 0}
    url = "http://127.0.0.1:%d/v1/chat/completions" % i["port"]
    start = time.monotonic()
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        text, ok = answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"] > 0
    except Exception as exc:
        text, ok = str(exc), False
    return {"gpu": i["gpu"], "port": i["port"], "ok": ok, "text": text, "seconds": time.monotonic() - start}
with concurrent.futures.ThreadPoolExecutor() as pool:
    print(json.dumps(list(pool.map(ask, plan["instances"]))))
"""


class DemoError(Exception):
    """The demo can't go on; the message says why."""


class Clock:
    """Seconds per step, in the order they were taken."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure a step, and say that it began."""
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        try:
            yield
        finally:
            self.steps[name] = time.monotonic() - start


def fit(want: int, available_gb: float) -> int:
    """Return how many servers of the wanted number fit into the memory."""
    return max(0, min(want, int((available_gb - SPARE_GB) / SERVER_GB)))


def available_gb(meminfo: str) -> float:
    """Return what /proc/meminfo says is available."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024**2
    raise DemoError("/proc/meminfo names no MemAvailable")


def servers(want: int, running: int, meminfo: str) -> int:
    """Return the number of servers to deploy; memory that ours hold already counts as available."""
    free = available_gb(meminfo) + running * SERVER_GB
    count = fit(want, free)
    if count == 0:
        raise DemoError(f"{free:.1f} GB of memory are available; one server needs {SERVER_GB + SPARE_GB:.1f} GB")
    if count < want:
        print(f"{free:.1f} GB of memory are available: {count} servers instead of {want} ({SERVER_GB} GB each)")
    return count


def table(steps: dict[str, float]) -> str:
    """Return where the time went."""
    width = max(map(len, steps))
    rows = [f"  {name:<{width}}  {seconds:6.1f} s" for name, seconds in steps.items()]
    return "\n".join([*rows, f"  {'all':<{width}}  {sum(steps.values()):6.1f} s"])


def run(*argv: str, **env: str) -> None:
    """Run a command in the project; raises DemoError when it fails."""
    if subprocess.run(argv, cwd=TOP, env={**os.environ, **env}, check=False).returncode:
        raise DemoError(f"failed: {' '.join(argv)}")


def testhost(*args: str, **env: str) -> str:
    """Run tests/testhost/testhost for the demo's own bridge and state."""
    argv = [str(TOP / "tests/testhost/testhost"), *args]
    done = subprocess.run(argv, env={**os.environ, **TESTHOST, **env}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise DemoError(f"testhost {' '.join(args)} failed")
    return done.stdout.strip()


def ansible(*args: str, **env: str) -> None:
    """Run ansible-playbook of the project's own environment."""
    run(str(Path(sys.executable).parent / "ansible-playbook"), *args, ANSIBLE_CONFIG=str(TOP / "ansible.cfg"), **env)


def chat() -> list[dict[str, Any]]:
    """Ask every server of the host one question."""
    argv = [
        "ssh", "-i", f"{TESTHOST['TESTHOST_STATE']}/id_ed25519", "-o", "StrictHostKeyChecking=no",
        "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", f"root@{ADDRESS}",
        f"python3 - '{QUESTION}'",
    ]  # fmt: skip
    done = subprocess.run(argv, input=ASK, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoError(f"can't ask the servers: {done.stderr.strip()}")
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def up() -> int:
    """Bring everything up, or find it up."""
    clock = Clock()
    clock.steps["bootstrap"] = float(os.environ.get("BOOTSTRAP_SECONDS", "0"))
    with clock.step("wheels"):
        run("scripts/wheelhouse")
    with clock.step("model"):
        run("scripts/tiny-model", str(MODEL))
    running = json.loads(STATE.read_text(encoding="utf-8"))["gpus"] if STATE.exists() and is_up() else 0
    want = int(os.environ.get("DEMO_GPUS", "8"))
    count = servers(want, running, Path("/proc/meminfo").read_text(encoding="utf-8"))
    with clock.step("image"):
        testhost("image")
    with clock.step("boot"):
        binds = {TOP / ".cache/wheels": "/srv/wheels", MODEL: "/srv/models/tiny"}
        binds[Path(sys.executable).parent / "uv"] = "/usr/local/bin/uv"
        testhost("up", NAME, ADDRESS, TESTHOST_NSPAWN_ARGS=" ".join(f"--bind-ro={a}:{b}" for a, b in binds.items()))
    STATE.write_text(json.dumps({"gpus": max(count, running)}) + "\n", encoding="utf-8")
    with clock.step("deploy"), tempfile.NamedTemporaryFile(suffix=".json") as stages:
        ansible(
            "playbooks/deploy.yml", "-i", "inventories/demo", "-e", f'{{"sglang_server_gpus": {list(range(count))}}}',
            GPUFLEET_STAGES=stages.name, ANSIBLE_CALLBACK_PLUGINS=str(TOP / "scripts/tools/callbacks"),
            ANSIBLE_CALLBACKS_ENABLED="stages",
        )  # fmt: skip
        parts = json.loads(Path(stages.name).read_text(encoding="utf-8"))
    STATE.write_text(json.dumps({"gpus": count}) + "\n", encoding="utf-8")
    whole = clock.steps.pop("deploy")
    clock.steps |= {f"deploy: {name}": seconds for name, seconds in parts.items() if seconds >= 0.5}
    clock.steps["deploy: the rest"] = max(0.0, whole - sum(s for s in parts.values() if s >= 0.5))
    with clock.step("chat"):
        answers = chat()
        for a in answers:
            print(f"  GPU {a['gpu']} (port {a['port']}, {a['seconds']:.1f} s): {a['text'].strip()}")
    good = sum(a["ok"] for a in answers)
    print(f"\n{good}/{count} servers answered {QUESTION!r}. Where the time went:\n{table(clock.steps)}")
    print("\nLook around: make status; the host's shell: scripts/demo shell; away with it: make demo-down")
    return 0 if good == count else 1


def is_up() -> bool:
    """Say whether the host runs."""
    return any(line.split()[:2] == [NAME, "running"] for line in testhost("list").splitlines())


def down() -> int:
    """Remove the host and all that was in it; the caches stay."""
    print(f"host {NAME}: {testhost('down', NAME)}")
    STATE.unlink(missing_ok=True)
    return 0


def shell() -> int:
    """Open a shell in the host."""
    key = f"{TESTHOST['TESTHOST_STATE']}/id_ed25519"
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    return subprocess.run(["ssh", "-t", "-i", key, *options, f"root@{ADDRESS}"], check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="scripts/demo")
    actions = {"up": up, "down": down, "shell": shell}
    parser.add_argument("action", choices=actions)
    try:
        return actions[parser.parse_args(argv).action]()
    except DemoError as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
