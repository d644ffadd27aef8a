# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Into an LXC container through its Proxmox host: ssh, with `pct exec` before each command."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pct
short_description: Run tasks in an LXC container through C(pct exec) on its Proxmox host
version_added: 0.1.0
author: The gpufleet.sglang contributors (@gpufleet)
description:
  - Reaches the Proxmox host with P(ansible.builtin.ssh#connection) and runs everything in the container with
    C(pct exec), so the container needs no ssh server, no key and no address.
  - Whatever a command holds, all of it runs in the container, none of it on the Proxmox host.
  - Takes the same inventory variables as P(community.proxmox.proxmox_pct_remote#connection), and needs neither
    Paramiko nor another collection.
  - Modules are pipelined, so a task is one C(pct exec), and the ssh connection is kept between tasks.
  - A container that does not run, a wrong ID, a missing C(pct), a refused C(sudo) and a lost connection make the host
    unreachable, with a message that says which of them it was.
notes:
  - Every variable and setting of P(ansible.builtin.ssh#connection) holds for the way to the Proxmox host.
    C(ServerAliveInterval) in C(ansible_ssh_common_args) or C(ssh_args) is what ends a connection that went silent.
  - A user other than C(root) needs C(NAME ALL=(root) NOPASSWD:/usr/sbin/pct) in the Proxmox host's sudoers.
  - A command that ends with 255 in the container counts as a lost connection, as it does with ssh itself.
options:
  remote_addr:
    description: The Proxmox host.
    type: str
    vars:
      - name: inventory_hostname
      - name: ansible_host
      - name: ansible_ssh_host
  remote_user:
    description: Who logs in there. Others than C(root) run C(pct) through O(proxmox_become_method).
    type: str
    default: root
    vars:
      - name: ansible_user
      - name: ansible_ssh_user
    env:
      - name: ANSIBLE_REMOTE_USER
    ini:
      - section: defaults
        key: remote_user
    keyword:
      - name: remote_user
    cli:
      - name: user
        option: --user
  vmid:
    description: The container's ID.
    type: int
    required: true
    vars:
      - name: proxmox_vmid
  proxmox_become_method:
    description: The command that makes O(remote_user) root on the Proxmox host, without asking for a password.
    type: str
    default: sudo
    vars:
      - name: proxmox_become_method
  pipelining:
    description: Send modules through C(pct exec) instead of writing them to files first, which takes five of them.
    type: bool
    default: true
    vars:
      - name: ansible_pipelining
      - name: ansible_ssh_pipelining
    env:
      - name: ANSIBLE_PIPELINING
"""

import os
import re
import shlex
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.plugins.connection import ConnectionBase
from ansible.plugins.loader import connection_loader

PCT = "/usr/sbin/pct"
MEGABYTE = 1 << 20
PIECE = 16  # MB read by one pct
# What pct, sudo and the Proxmox host's shell say, and what it means. Texts: PVE/CLI/pct.pm.
MEANINGS = (
    (r"lxc/\d+\.conf' does not exist", "has no container {vmid}: see `pct list` there, and proxmox_vmid"),
    (r"container '\d+' not running", "container {vmid} does not run: `pct start {vmid}` there"),
    (r"pct: (?:command )?not found|pct: No such file", "has no {pct}: ansible_host must be the Proxmox host"),
    (r"^(?:sudo|doas): ", "{user} may not run {pct} as root there without a password"),
)


def meaning(said: str, vmid: int, user: str) -> str:
    """Return what a failed pct means, or nothing when it is none of what pct, sudo or the host say themselves."""
    for pattern, text in MEANINGS:
        if re.search(pattern, said, re.MULTILINE) and not (user == "root" and "{user}" in text):
            return text.format(pct=PCT, vmid=vmid, user=user)
    return ""


class Connection(ConnectionBase):
    """ssh to the Proxmox host, pct from there."""

    transport = "gpufleet.sglang.pct"
    has_pipelining = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By this name the task executor fills in every option of the inner plugin, as it does for network_cli.
        self.ssh_type_conn = connection_loader.get("ansible.builtin.ssh", *args, **kwargs)

    def set_become_plugin(self, plugin: Any) -> None:
        """Become works in the container; ssh watches for its prompt."""
        super().set_become_plugin(plugin)
        self.ssh_type_conn.set_become_plugin(plugin)

    def _connect(self) -> Connection:
        return self

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Run a command in the container."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        vmid, user = self.get_option("vmid"), self.get_option("remote_user")
        root = "" if user == "root" else f"{self.get_option('proxmox_become_method')} -n "
        where = f"Proxmox host {self.get_option('remote_addr')}"
        # In one word: of a raw task's `a; b > c` the Proxmox host's shell would run b there, and write c there.
        word = shlex.quote(cmd)
        try:
            code, out, err = self.ssh_type_conn.exec_command(
                f"{root}{PCT} exec {vmid} -- /bin/sh -c {word}", in_data=in_data, sudoable=sudoable
            )
        except AnsibleConnectionFailure as exc:  # pct itself ends with 255 too
            means = meaning(str(exc), vmid, user)
            raise AnsibleConnectionFailure(f"{where}: {means or exc}") from exc
        # A tty puts what pct says on standard output; a command that worked may say anything
        if code in (1, 127) and (means := meaning((err or out[:4096]).decode(errors="replace"), vmid, user)):
            raise AnsibleConnectionFailure(f"{where}: {means}")
        return code, out, err

    def _sh(self, line: str, doing: str, in_data: bytes | None = None) -> bytes:
        code, out, err = self.exec_command(line, in_data=in_data, sudoable=False)
        if code:
            said = err.decode(errors="replace").strip() or f"pct exec ended with {code}"
            raise AnsibleError(f"container {self.get_option('vmid')}: {doing}: {said}")
        return out

    def put_file(self, in_path: str, out_path: str) -> None:
        """Write a file in the container."""
        super().put_file(in_path, out_path)
        if not os.path.exists(in_path):
            raise AnsibleFileNotFound(f"there is no {in_path} to copy")
        with open(in_path, "rb") as file:
            data = file.read()
        # without data ssh would not end the command's standard input
        line = f"cat > {shlex.quote(out_path)}" if data else f": > {shlex.quote(out_path)}"
        self._sh(line, f"writing {out_path}", data or None)

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Read a file in the container, piece by piece: the ssh plugin takes time by the square of what it reads."""
        super().fetch_file(in_path, out_path)
        count = 0
        with open(out_path, "wb") as file:
            while True:
                line = f"dd if={shlex.quote(in_path)} bs={MEGABYTE} skip={count * PIECE} count={PIECE}"
                data = self._sh(line, f"reading {in_path}")
                file.write(data)
                count += 1
                if len(data) < PIECE * MEGABYTE:
                    return

    def reset(self) -> None:
        """Drop the ssh connection; the next command opens another."""
        self.ssh_type_conn.reset()

    def close(self) -> None:
        """Leave the ssh connection to the next task."""
        self.ssh_type_conn.close()
        self._connected = False
