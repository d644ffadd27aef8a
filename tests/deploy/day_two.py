"""What the day-two tests ask of a host."""

from __future__ import annotations

import json

GPUS = range(8)
PORT = 30000
LOCK = "/run/gpufleet-sglang.lock"


def changed(fleet, pids):
    """Return the GPUs whose server has another process than in pids."""
    after = fleet.pids(GPUS)
    return [gpu for gpu in GPUS if after[gpu] != pids[gpu]]


def runs_from(fleet, release, gpu):
    """Say whether a server's process runs from a release."""
    return f"/opt/sglang/releases/{release}/" in fleet.sh(f"cat /proc/{fleet.pids([gpu])[gpu]}/cmdline | tr '\\0' ' '")


def status(fleet, tmp_path):
    """Return the drift that status tells, by GPU."""
    path = tmp_path / "status.json"
    fleet.play("status", extra={"sglang_server_status_json": str(path)})
    return {row["gpu"]: row["drift"] for row in json.loads(path.read_text())}
