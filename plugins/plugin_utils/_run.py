# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which run of ansible-playbook this is, and whether another one of this controller is still alive."""

from __future__ import annotations

import getpass
import os
import platform
from pathlib import Path
from typing import Any


def controller_id(proc: str = "/proc") -> str:
    """Name this controller and its boot; "" where the system does not say."""
    try:
        boot = Path(f"{proc}/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Containers of one machine share the boot, not the processes.
        return f"{boot}/{os.readlink(f'{proc}/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int, proc: str = "/proc") -> str:
    """Return when a process began, in the kernel's ticks; "" when there is none."""
    try:
        words = Path(f"{proc}/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return words[19] if words[0] not in "ZX" else ""


def this_run() -> dict[str, Any]:
    """Describe the run that this worker belongs to: its parent is ansible-playbook."""
    pid = os.getppid()
    who = os.environ.get("SUDO_USER") or ""
    try:
        who = who or getpass.getuser()
    except (KeyError, OSError):
        who = f"uid {os.getuid()}"
    controller = controller_id()
    node = platform.node()
    return {
        "run": f"{controller or node}/{pid}/{started(pid)}",
        "pid": pid,
        "who": who,
        "where": node,
        "controller": controller,
    }


def is_alive(run: str) -> bool:
    """Say whether a run of this controller still has its process."""
    _rest, _sep, name = run.rpartition("/")
    pid = _rest.rpartition("/")[2]
    return pid.isdigit() and bool(name) and started(int(pid)) == name
