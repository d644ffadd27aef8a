"""A server that the kernel kills for memory, on a host whose control groups enforce a limit."""

from __future__ import annotations

import re
import subprocess
import time

from day_two import PORT, changed, load

TWO = range(2)


def test_a_server_killed_for_memory_under_load_comes_back_alone(fleet):
    """A limit in a drop-in, and a server that grows with each request: the kernel kills it, without a drain."""
    folder, fault = "/etc/systemd/system/sglang@1.service.d", f"/var/lib/sglang/standin-fault-{PORT + 1}"
    limit = "[Service]\\nMemoryMax=200M\\nMemoryLimit=200M\\nMemorySwapMax=0\\n"
    fleet.sh(f"mkdir {folder}; printf '{limit}' > {folder}/memory.conf; echo leak:8 > {fault}")
    fleet.play("deploy")
    fleet.sh(f"rm {fault}")  # after its next start it does not grow
    pids, uid = fleet.pids(TWO), fleet.sh("id -u sglang").strip()
    begun = time.monotonic()
    with load(fleet, TWO) as told:
        fleet.wait(lambda: int(fleet.units([1])[1]["NRestarts"]) >= 1, 60, "a restart by systemd")
        fleet.wait(lambda: fleet.answers(PORT + 1), 60, "it answers again")
    # test hosts share this machine's kernel
    kernel = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout
    killed = re.findall(
        rf"^\[ *([\d.]+)\] Memory cgroup out of memory: Killed process .*UID:{uid}", kernel, re.MULTILINE
    )
    assert killed and float(killed[-1]) > begun, kernel[-2000:]
    assert changed(fleet, pids) == [1]
    assert told["failed"] == 0, told
    assert told["requests"] > 100
    assert fleet.play("deploy").changed == 0
    fleet.sh(f"rm -r {folder}")
    fleet.play("deploy")
    assert changed(fleet, pids) == [1]
    assert fleet.play("deploy").changed == 0
