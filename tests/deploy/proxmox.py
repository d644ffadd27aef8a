"""A test host that plays a Proxmox host: its pct leads into another test host."""

from __future__ import annotations

import json
import os
import subprocess

from fleet import ROOT, Fleet

WAYS = OURS, THEIRS, SSH = ("pct", "proxmox_pct_remote", "ssh")
COLLECTIONS = ROOT / ".cache" / "collections"  # scripts/proxmox-collection
# What ansible-playbook needs to find community.proxmox as well
ENVIRONMENT = {"ANSIBLE_COLLECTIONS_PATH": f".collections:{COLLECTIONS}", "ANSIBLE_HOST_KEY_CHECKING": "false"}


def reference(inventory: str, container: str) -> Fleet:
    """The container as a host of its own; playbooks get inventories/ct200 below the test's inventory."""
    ct = Fleet(inventory, container)
    ct.inventory_args = ["-i", "inventories/ct200", *ct.inventory_args]
    return ct


def proxmox_host(inventory: str, name: str, ct: Fleet) -> Fleet:
    """Install pct, and fred, who may run only that."""
    host = Fleet(inventory, name)
    key = ct.variables["ansible_ssh_private_key_file"]
    for source, target, mode in (
        (ROOT / "tests/proxmox/pct", "/usr/sbin/pct", 755),
        (key, "/root/.ssh/container", 600),
    ):
        with open(source, "rb") as file:
            copied = f"cat > {target} && chmod {mode} {target}"
            subprocess.run([*host.ssh_args, copied], stdin=file, check=True, timeout=30)
    host.sh(f"mkdir -p /etc/pve/lxc; echo address: {ct.address} > /etc/pve/lxc/200.conf")
    host.sh("id fred 2>/dev/null || useradd -m -s /bin/sh fred; cp -r /root/.ssh ~fred/; chown -R fred: ~fred/.ssh")
    host.sh("echo 'fred ALL = (root) NOPASSWD: /usr/sbin/pct' > /etc/sudoers.d/pct")
    return host


def adhoc(ct: Fleet, by: str, *args: str, **extra: object) -> subprocess.CompletedProcess[str]:
    """Run ansible against the container by one of its ways in."""
    argv = [ct.bin("ansible"), *ct.inventory_args, "ct200", *args]
    argv += ["-e", json.dumps({"ct200_by": by, **extra})]
    env = {**os.environ, **ENVIRONMENT, "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(
        argv, cwd=ROOT, env=env, capture_output=True, text=True, errors="replace", timeout=180, check=False
    )
