"""What nobody may find on a host, looked for from outside: ports, secrets, files that all may write, cores."""

from __future__ import annotations

import re

PLACES = "/opt/sglang /etc/sglang /etc/systemd/system /var/lib/sglang /var/cache/sglang"
SCORE = 1.8  # of systemd-analyze security; less is better


def unit_pids(fleet, gpus) -> set[int]:
    """Every process of the units."""
    listed = fleet.sh("systemd-cgls --no-pager -l --full -u " + " -u ".join(f"sglang@{gpu}.service" for gpu in gpus))
    return {int(pid) for pid in re.findall(r"[├└]─\s*(\d+) ", listed)}


def listening(fleet, gpus) -> dict[str, set[str]]:
    """Addresses that the units' processes listen on, by port."""
    pids = unit_pids(fleet, gpus)
    found: dict[str, set[str]] = {}
    for line in fleet.sh("ss -Hltnp").splitlines():
        if pids & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}:
            address, _colon, port = line.split()[3].rpartition(":")
            found.setdefault(port, set()).add(address)
    return found


def nothing_listens_beyond_loopback(fleet, gpus, base_port=30000) -> None:
    found = listening(fleet, gpus)
    print(f"listening: {found}")
    assert {str(base_port + gpu) for gpu in gpus} <= set(found)
    assert set().union(*found.values()) <= {"127.0.0.1", "[::1]"}


def units_score(fleet, gpus) -> None:
    for gpu in gpus:
        text = fleet.sh(f"systemd-analyze security --no-pager sglang@{gpu}.service")
        score = float(re.search(r"Overall exposure level for \S+: ([\d.]+)", text).group(1))
        print(f"sglang@{gpu}: {score}")
        assert score <= SCORE


def files_are_private(fleet) -> None:
    assert fleet.sh(f"find {PLACES} -xdev -perm -0002 ! -type l") == ""
    ours = fleet.sh("stat -c '%a %U %n' /etc/sglang/*.env /etc/sglang/*.secrets /etc/sglang/plan.json", rc=None)
    assert {line.rsplit(" ", 1)[0] for line in ours.splitlines()} == {"600 root"}
    # what a server writes, a crash dump too, only its own user may read
    assert fleet.sh("find /var/lib/sglang /var/cache/sglang -xdev -user sglang -perm /0007 ! -type l") == ""


def no_process_dumps_core(fleet, gpus) -> None:
    for pid in unit_pids(fleet, gpus):
        limits, status = fleet.sh(f"cat /proc/{pid}/limits"), fleet.sh(f"cat /proc/{pid}/status")
        assert re.search(r"Max core file size\s+0\s+0\s", limits), limits
        assert re.search(r"^Umask:\s*0077$", status, re.MULTILINE)


def secret_is_nowhere(fleet, secret: str, output: str, gpus) -> None:
    """Not in the playbook's output, ps, the journal, facts; on disk in files of mode 0600 only."""
    assert secret not in output
    assert secret not in fleet.sh("ps axww -o args")
    assert secret not in fleet.sh("journalctl --no-pager -o cat -b", timeout=120)
    assert secret not in fleet.facts()
    for gpu in gpus:
        assert secret not in fleet.sh(f"systemctl show sglang@{gpu}.service")
    holding = fleet.sh(f"grep -rlF '{secret}' {PLACES} /run/systemd /var/log /tmp /root --exclude-dir=.cache", rc=None)
    assert holding.split()
    for path in holding.split():
        assert path.endswith(".secrets"), path
        assert fleet.sh(f"stat -c '%a %U' {path}").strip() == "600 root"
