"""Time and memory of the controller as the fleet grows: benchmarks/fleet_size.py [--sizes 1,2,4,8] [--slots 8]

Boots that many light hosts (tests/testhost, the stand-in engine), for each size afresh, and deploys, deploys again,
and asks for the status. Hosts and controller share this machine's cores, so times hold the hosts' own work too: the
column of the controller's CPU seconds does not. Needs root and scripts/wheelhouse --standin (make test has run it).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "deploy"))

from fleet import ROOT, Fleet

TESTHOST = ROOT / "tests" / "testhost" / "testhost"


@dataclass
class Cost:
    """What a playbook took of the controller."""

    seconds: float
    cpu: float  # s
    memory: float  # MB at most, shared pages counted once
    changed: int


def name(number: int) -> str:
    """Return a host's name."""
    return f"fleet{number}"


def boot(count: int, first: str) -> None:
    """Boot fresh hosts; first is the address of the first one."""
    net, last = first.rsplit(".", 1)
    binds = {".cache/wheels-standin": "/srv/wheels", ".cache/models/tiny": "/srv/models/tiny"}
    words = [f"--bind-ro={(ROOT / source).resolve()}:{target}" for source, target in binds.items()]
    words.append(f"--bind-ro={Path(sys.executable).parent / 'uv'}:/usr/local/bin/uv")
    for number in range(count):
        subprocess.run(
            [TESTHOST, "up", name(number), f"{net}.{int(last) + number}"],
            env={**os.environ, "TESTHOST_NSPAWN_ARGS": " ".join(words)},
            check=True,
            stdout=subprocess.DEVNULL,
        )


def down(count: int) -> None:
    """Take the hosts away."""
    for number in range(count):
        subprocess.run([TESTHOST, "down", name(number)], check=True, stdout=subprocess.DEVNULL)


def inventory(count: int, slots: int, first: str) -> str:
    """Return the inventory as JSON, which is YAML."""
    net, last = first.rsplit(".", 1)
    state = os.environ.get("TESTHOST_STATE", "/var/lib/testhost")
    variables = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": f"{state}/id_ed25519",
        "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
        "ansible_python_interpreter": "/usr/bin/python3",
        "sglang_server_device": "cpu",
        "sglang_server_gpus": [str(slot) for slot in range(slots)],
        "sglang_server_model": "/srv/models/tiny",
        "sglang_server_version": "0.5.23+standin",
        "sglang_server_release": "standin",
        "sglang_server_lock_file": str(ROOT / "tests/standin-engine/requirements.lock"),
        "sglang_server_wheel_dir": "/srv/wheels",
        "sglang_server_serial": "100%",
    }
    hosts = {name(number): {"ansible_host": f"{net}.{int(last) + number}"} for number in range(count)}
    return json.dumps({"sglang_servers": {"hosts": hosts, "vars": variables}})


def tree_memory(root: int) -> float:
    """Return the MB that a process and all below it use, shared pages divided among those that share them."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        todo += parents.get(pid, [])
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def measure(fleet: Fleet, playbook: str, **extra: object) -> Cost:
    """Run a playbook, and watch the controller's processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = fleet.launch(playbook, extra=extra)
    peak = [0.0]

    def watch() -> None:
        while run.process.poll() is None:
            peak[0] = max(peak[0], tree_memory(run.process.pid))
            time.sleep(0.25)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if run.process.wait(900):
        raise SystemExit(run.output)
    seconds = time.time() - run.started
    watcher.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, cpu, peak[0], run.changed)


def ready(fleet: Fleet, folder: str) -> tuple[int, Cost]:
    """Return how many servers are ready, by the status playbook, and what it took."""
    path = Path(folder) / "status.json"
    cost = measure(fleet, "status", sglang_server_status_json=str(path))
    return sum(row["state"] == "ready" for row in json.loads(path.read_text())), cost


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2,4,8")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--address", default="10.211.0.200", help="of the first host; the others follow")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    os.environ["ANSIBLE_HOST_KEY_CHECKING"] = "false"
    table: dict[int, list[Cost]] = {}
    complete = True
    print("hosts  servers   first deploy   again: s  changed  controller CPU s   MB   status s")
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            try:
                boot(size, args.address)
                path = Path(folder) / f"{size}.yml"
                path.write_text(inventory(size, args.slots, args.address))
                fleet = Fleet(str(path), name(0))
                first, again = measure(fleet, "deploy"), measure(fleet, "deploy")
                count, status = ready(fleet, folder)
                if size == sizes[-1]:
                    by_batch = measure(fleet, "deploy", sglang_server_serial=[1, "100%"])
            finally:
                down(size)
            table[size] = [first, again, status]
            complete = complete and count == size * args.slots and again.changed == 0
            print(
                f"{size:5}  {count:3}/{size * args.slots:<3}  {first.seconds:13.1f}  {again.seconds:9.1f}"
                f"  {again.changed:7}  {again.cpu:16.1f}  {again.memory:4.0f}  {status.seconds:8.1f}",
                flush=True,
            )
    small, large = table[sizes[0]], table[sizes[-1]]
    print(f"\nratios, {sizes[-1]} hosts to {sizes[0]}:")
    for what, at in (("first deploy", 0), ("deploy again", 1), ("status", 2)):
        one, many = small[at], large[at]
        print(
            f"  {what:13} time {many.seconds / one.seconds:5.2f}   controller's CPU {many.cpu / one.cpu:5.2f}"
            f"   its memory {many.memory / one.memory:5.2f}"
        )
    ratio = by_batch.seconds / large[1].seconds
    print(f"  canary host first, then the others, to all in parallel (deploy again): time {ratio:.2f}")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
