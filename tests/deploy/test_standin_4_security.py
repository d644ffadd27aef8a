"""What a deploy leaves open, asked from outside (the fleet is up)."""

from __future__ import annotations

import outside

GPUS = range(8)
SECRET = "hf_ThisIsTheSecretOfTheTest"


def test_units_score(fleet):
    outside.units_score(fleet, GPUS)


def test_servers_listen_on_loopback_only(fleet):
    outside.nothing_listens_beyond_loopback(fleet, GPUS)


def test_a_secret_is_seen_by_nobody(fleet):
    run = fleet.play(
        "deploy", "-vvv", "--diff", extra={"sglang_server_secret_environment": {"HF_TOKEN": SECRET}}, timeout=900
    )
    outside.secret_is_nowhere(fleet, SECRET, run.output, GPUS)


def test_files_are_private(fleet):
    outside.files_are_private(fleet)


def test_a_crash_leaves_no_core(fleet):
    outside.no_process_dumps_core(fleet, GPUS)
    pid = fleet.pids(GPUS)[3]
    fleet.sh("systemctl kill --signal=ABRT --kill-who=main sglang@3")
    fleet.wait(lambda: fleet.pids(GPUS)[3] not in (0, pid) and fleet.answers(30003), 60, "it answers again")
    cores = fleet.sh("find / -xdev -path /proc -prune -o -type f \\( -name core -o -name 'core.*' \\) -size +0 -print")
    assert [path for path in cores.split() if not path.endswith((".py", ".pyc", ".so", ".pyi"))] == []
