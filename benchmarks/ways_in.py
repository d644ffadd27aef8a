"""ct200 by ssh, by our pct and by community.proxmox's: seconds and round trips. Prints ratios from one run.

  molecule create -s ct200; scripts/proxmox-collection; benchmarks/ways_in.py; molecule destroy -s ct200

Deploys first (through pct), then times what changes nothing. A round trip is one command run by the connection plugin,
as Ansible logs it: each is one `pct exec` on the Proxmox host. The stand-in for pct (tests/proxmox/pct) starts in
milliseconds; Proxmox's own is a Perl program and takes longer, so the last column says what each 0.1 s of that adds.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "deploy"))

from fleet import Fleet
from proxmox import ENVIRONMENT, OURS, SSH, THEIRS, adhoc, proxmox_host, reference

TRIP = re.compile(r"^<[^>]*> (?:SSH: )?EXEC ", re.MULTILINE)


def deploy(ct: Fleet, by: str) -> tuple[float, int]:
    """Return the seconds of a deploy that changes nothing, and its round trips."""
    run = ct.play("deploy", "-vvv", extra={"ct200_by": by}, env=ENVIRONMENT)
    if run.changed:
        raise SystemExit(f"{by}: the deploy changed {run.changed_tasks()}")
    return run.seconds, len(TRIP.findall(run.output))


def transfer(ct: Fleet, by: str, megabytes: int) -> tuple[float, float]:
    """Return the seconds for a file there and back."""
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder) / "big"
        big.write_bytes(os.urandom(1 << 20) * megabytes)
        seconds = []
        for module, args in (
            ("copy", f"src={big} dest=/tmp/big"),
            ("fetch", f"src=/tmp/big dest={folder}/back flat=true"),
        ):
            begun = time.monotonic()
            done = adhoc(ct, by, "-m", f"ansible.builtin.{module}", "-a", args)
            seconds.append(time.monotonic() - begun)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
        ct.sh("rm /tmp/big")
    return seconds[0], seconds[1]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inventory", default="molecule/shared/inventory:molecule/ct200/inventory.yml")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3, help="of the deploy, by turns; the fastest counts")
    args = parser.parse_args()
    ct = reference(args.inventory, "ct")
    proxmox_host(args.inventory, "pve", ct)
    ct.play("deploy", extra={"ct200_by": OURS}, env=ENVIRONMENT)

    ways = (SSH, OURS, THEIRS)
    found: dict[str, list[tuple[float, int]]] = {by: [] for by in ways}
    for _run in range(args.runs):
        for by in ways:
            found[by].append(deploy(ct, by))
    best = {by: min(runs) for by, runs in found.items()}
    print(
        f"ct200_by            deploy again  to ssh  round trips   {args.megabytes} MB there   back   per 0.1 s of pct"
    )
    for by in ways:
        seconds, trips = best[by]
        there, back = transfer(ct, by, args.megabytes)
        more = "-" if by == SSH else f"+{trips / 10:.1f} s"
        print(
            f"{by:18}  {seconds:10.1f} s  {seconds / best[SSH][0]:6.2f}  {trips:11}  {there:10.1f} s  {back:5.1f} s"
            f"  {more:>16}",
            flush=True,
        )
    print(f"ratio: {THEIRS}'s round trips to {OURS}'s = {best[THEIRS][1] / best[OURS][1]:.1f}")
    print(f"ratio: {THEIRS}'s time to {OURS}'s = {best[THEIRS][0] / best[OURS][0]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
