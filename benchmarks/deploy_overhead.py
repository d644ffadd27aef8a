"""What the deploy adds to the engine's own start, and what a second deploy costs. Prints ratios from one run.

  benchmarks/deploy_overhead.py [--inventory inventories/demo] [--host HOST]

The host's servers are stopped and removed first (the release stays), then deployed, then deployed
again. The engine's own time is that of GPU 0 plus that of the slowest of the others, since those
start together after it: from the start of the main process to "ready to roll", read from the journal.
Needs a host that was deployed before: make demo.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "deploy"))

from fleet import Fleet


def status(fleet: Fleet, extra: dict) -> list[dict]:
    """Return the status playbook's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "status.json"
        fleet.play("status", extra={**extra, "sglang_server_status_json": str(path)})
        return json.loads(path.read_text())


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inventory", default="inventories/demo")
    parser.add_argument("--host", default="demo")
    parser.add_argument("--extra", type=json.loads, default={}, help="extra variables, as JSON")
    args = parser.parse_args()
    fleet = Fleet(args.inventory, args.host)

    gpus = [row["gpu"] for row in status(fleet, args.extra) if row["gpu"] is not None]
    fleet.play("stop", extra=args.extra)
    fleet.sh("rm -rf /etc/systemd/system/sglang* /etc/sglang/*.json.bak /etc/sglang/[0-9]* /etc/sglang/known-good")
    fleet.sh("systemctl daemon-reload")

    first = fleet.play("deploy", extra=args.extra, timeout=1800)
    rows = {row["gpu"]: row for row in status(fleet, args.extra)}
    pids = fleet.pids(gpus)
    second = fleet.play("deploy", extra=args.extra)
    canary, *rest = (rows[gpu]["seconds_to_ready"] for gpu in sorted(rows))
    own = canary + max(rest, default=0.0)
    same = fleet.pids(gpus) == pids

    print(f"servers                        {len(rows)}")
    print(f"engine: canary ready           {canary:7.1f} s")
    print(f"engine: slowest of the others  {max(rest, default=0.0):7.1f} s")
    print(f"first deploy                   {first.seconds:7.1f} s")
    print(f"second deploy                  {second.seconds:7.1f} s, changed={second.changed}, same processes: {same}")
    print(f"ratio: first deploy / engine's own time = {first.seconds / own:.2f}")
    return 0 if all(row["state"] == "ready" for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
