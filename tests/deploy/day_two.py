"""What the day-two tests ask of a host."""

from __future__ import annotations

import json
import subprocess
from contextlib import contextmanager
from pathlib import Path

GPUS = range(8)
PORT = 30000
LOCK = "/run/gpufleet-sglang.lock"


def changed(fleet, pids):
    """Return the GPUs whose server has another process than in pids."""
    after = fleet.pids(list(pids))
    return [gpu for gpu in pids if after[gpu] != pids[gpu]]


def runs_from(fleet, release, gpu):
    """Say whether a server's process runs from a release."""
    return f"/opt/sglang/releases/{release}/" in fleet.sh(f"cat /proc/{fleet.pids([gpu])[gpu]}/cmdline | tr '\\0' ' '")


def status(fleet, tmp_path):
    """Return the drift that status tells, by GPU."""
    path = tmp_path / "status.json"
    fleet.play("status", extra={"sglang_server_status_json": str(path)})
    return {row["gpu"]: row["drift"] for row in json.loads(path.read_text())}


@contextmanager
def load(fleet, gpus=GPUS):
    """A client that asks all servers without a pause; yields a dictionary that has its counts afterwards."""
    program = Path(__file__).with_name("load.py").read_text(encoding="utf-8")
    subprocess.run([*fleet.ssh_args, "cat > /run/load.py"], input=program, text=True, check=True)
    ports = " ".join(str(PORT + gpu) for gpu in gpus)
    argv = [*fleet.ssh_args, f"python3 /run/load.py 0 {ports}"]
    client = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    told: dict = {}
    try:
        yield told
    finally:
        told.update(json.loads(client.communicate(timeout=60)[0]))
        print(told)
