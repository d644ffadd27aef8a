"""Eight GPUs of which one goes, and a driver that stops answering: whatever can be managed is.

The driver is played (nvidia-smi, device nodes, /proc/driver), the engine is the stand-in; the rest is real.
"""

from __future__ import annotations

import json

import pytest
from day_two import GPUS, PORT, changed

UUIDS = [f"GPU-{gpu:08x}-1111-2222-3333-444444444444" for gpu in GPUS]
NODES = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", *(f"nvidia{gpu}" for gpu in GPUS)]
# What it says when one GPU has fallen off the bus: nothing of the others, unless they are asked for alone.
SMI = r"""#!/usr/bin/python3
import sys, time
from pathlib import Path

fault = Path("/run/smi-fault").read_text().split() if Path("/run/smi-fault").exists() else []
if "hangs" in fault:
    time.sleep(600)
if "library" in fault:
    print("nvidia-smi: error while loading shared libraries: libnvidia-ml.so.1: cannot open", file=sys.stderr)
    sys.exit(127)
if "fails" in fault:
    print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    sys.exit(9)
asked = next((word[5:].lower().split(",") for word in sys.argv if word.startswith("--id=")), [])
gone = [int(word) for word in fault if word.isdigit()]
rows = []
for gpu in range(8):
    uuid, bus = f"GPU-{gpu:08x}-1111-2222-3333-444444444444", f"0000:{gpu + 1:02x}:00.0"
    if asked and uuid.lower() not in asked and bus not in asked:
        continue
    if gpu in gone:
        print(f"Unable to determine the device handle for GPU{bus.upper()}: Unknown Error")
        sys.exit(15)
    row = {"index": gpu, "uuid": uuid, "name": "Played GPU", "memory.total": 97887, "memory.free": 97883,
           "memory.used": 4, "compute_cap": "12.0", "driver_version": "580.95.05", "pci.bus_id": f"0000{bus}"}
    query = next((word[12:] for word in sys.argv if word.startswith("--query-gpu=")), "")
    rows += [", ".join(str(row.get(name, "[N/A]")) for name in query.split(","))] if query else []
print("\n".join(rows))
"""
CUDA = {
    "sglang_server_device": "cuda",
    "sglang_server_gpus": [],
    "sglang_server_jit": False,
    "sglang_server_max_unavailable": 7,
}


def deploy(fleet, rc=0, **more):
    return fleet.play("deploy", "--skip-tags", "toolkit,cccl", extra={**CUDA, **more}, rc=rc)


@pytest.fixture(scope="module", autouse=True)
def deployed(fleet):
    """A machine with eight GPUs, each with its server."""
    fleet.sh(f"cat > /usr/local/bin/nvidia-smi <<'X'\n{SMI}\nX\nchmod +x /usr/local/bin/nvidia-smi")
    fleet.sh("".join(f"ln -sf /dev/null /dev/{name};" for name in NODES))
    fleet.sh("mount -t tmpfs none /proc/driver")
    for gpu, uuid in enumerate(UUIDS):
        folder = f"/proc/driver/nvidia/gpus/0000:{gpu + 1:02x}:00.0"
        fleet.sh(f"mkdir -p {folder}; printf 'GPU UUID: {uuid}\\nDevice Minor: {gpu}\\n' > {folder}/information")
    deploy(fleet)
    assert deploy(fleet).changed == 0


@pytest.fixture(params=["its device node is missing", "it fell off the bus"])
def gone(fleet, request):
    """GPU 5 goes and comes back; returns what is said of it."""
    if "node" in request.param:
        fleet.sh("rm /dev/nvidia5")
        yield "/dev/nvidia5 does not exist"
        fleet.sh("ln -s /dev/null /dev/nvidia5")
    else:
        fleet.sh("echo 5 > /run/smi-fault")
        yield "nvidia-smi failed with rc 15: Unable to determine the device handle for GPU0000:06:00.0"
        fleet.sh("rm /run/smi-fault")


def test_one_gpu_is_gone_and_seven_are_managed(fleet, gone):
    pids = fleet.pids(GPUS)
    wanted = {"sglang_server_watchdog_timeout": 120 + len(gone)}
    run = deploy(fleet, rc=2, **wanted)
    assert f"GPU 5 ({UUIDS[5]}) had a server and is gone: {gone}" in run.output.replace("\n", " ")
    assert changed(fleet, pids) == [gpu for gpu in GPUS if gpu != 5]
    assert all(fleet.answers(PORT + gpu) for gpu in GPUS if gpu != 5)
    again = deploy(fleet, rc=2, **wanted)
    assert again.changed == 0


def test_it_is_back(fleet):
    pids = fleet.pids(GPUS)
    wanted = {"sglang_server_watchdog_timeout": 119}
    deploy(fleet, **wanted)
    assert changed(fleet, pids) == list(GPUS)
    assert deploy(fleet, **wanted).changed == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("fails", "nvidia-smi failed with rc 9: NVIDIA-SMI has failed because it couldn't communicate with the"),
        ("library", "nvidia-smi does not find the driver's library"),
        ("hangs", "nvidia-smi did not answer within 30 s"),
    ],
)
def test_a_driver_that_does_not_answer_stops_the_deploy_and_no_server(fleet, tmp_path, fault, said):
    pids = fleet.pids(GPUS)
    fleet.sh(f"echo {fault} > /run/smi-fault")
    try:
        run = deploy(fleet, rc=2, sglang_server_watchdog_timeout=130)
        text = run.output.replace("\n", " ")
        assert said in text
        assert "No server was stopped or restarted" in text
        assert changed(fleet, pids) == []
        path = tmp_path / "status.json"
        fleet.play("status", extra={**CUDA, "sglang_server_status_json": str(path)})
        assert [row["state"] for row in json.loads(path.read_text())] == ["ready"] * len(GPUS)
    finally:
        fleet.sh("rm /run/smi-fault")
    assert changed(fleet, pids) == []
