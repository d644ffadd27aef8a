# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The lines by which an LXC container on Proxmox gets its GPUs, and a configuration completed with them.

Pure: text in, text out. Two ways to spell a passed-in device:

- lxc: lxc.mount.entry brings the node in and lxc.cgroup2.devices.allow lets it be opened. Every Proxmox knows it, and
  with "optional" the container starts although a node is missing. The rule holds a number that may change at a boot.
- dev: "dev0: /dev/nvidia0,mode=0666", Proxmox 8.1 and newer, looks the number up at each start; the container does not
  start while the node is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CONTROL = "nvidiactl"
UVM = "nvidia-uvm"
UVM_TOOLS = "nvidia-uvm-tools"
GPU_MAJOR = 195  # NVIDIA's registered number; those of nvidia-uvm and nvidia-caps are given at boot
MAX_DEV = 255

_SECTION = re.compile(r"\[[^\]]+\]\s*$")
_RAW = re.compile(r"(lxc\.[a-z0-9_.\-]+)\s*[:=]\s*(.*?)\s*$")
_DEV = re.compile(r"dev(\d+):\s*(.*?)\s*$")
_ALLOW_KEYS = ("lxc.cgroup.devices.allow", "lxc.cgroup2.devices.allow")


@dataclass(frozen=True)
class Completed:
    """A configuration as it should be, which lines that took, and what in it is worth a word."""

    text: str
    added: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    locked: str = ""  # Proxmox is working on the container: backup, migrate, ...


def parse_majors(text: str) -> dict[str, int]:
    """Read the character devices of /proc/devices; a name that has several numbers keeps the first."""
    found: dict[str, int] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        cells = line.split()
        if len(cells) == 2 and cells[0].isdigit():
            found.setdefault(cells[1], int(cells[0]))
    return found


def major_of(path: str, majors: Mapping[str, int]) -> int | None:
    """Return the number the kernel gives the driver behind a node now; None when that driver is not loaded."""
    name = path.rsplit("/", 1)[-1]
    if name.startswith(UVM):
        return majors.get(UVM)
    if "nvidia-cap" in name:
        return majors.get("nvidia-caps")
    # The name of 195 has changed: nvidia-frontend once, then nvidia, nvidiactl and more for the same number.
    names = (name, "nvidia", "nvidia-frontend", CONTROL)
    return next((majors[key] for key in names if key in majors), None)


def allow_line(major: int, v1: bool = False) -> str:
    """Return the rule that lets the container open every node of one driver."""
    return f"{_ALLOW_KEYS[0 if v1 else 1]}: c {major}:* rwm"


def mount_line(path: str) -> str:
    """Return the line that brings a node in; without one on the host the container starts all the same."""
    return f"lxc.mount.entry: {path} {path.lstrip('/')} none bind,optional,create=file"


def dev_line(number: int | str, path: str) -> str:
    """Return the line of Proxmox 8.1 and newer, which is both in one."""
    return f"dev{number}: {path},mode=0666"


def complete(
    text: str, nodes: Sequence[str], majors: Mapping[str, int], style: str = "lxc", v1: bool = False
) -> Completed:
    """Add what is missing to a container's own section; snapshots, which follow it, and every other line stay.

    Lines carry no mark: Proxmox takes comments for the container's notes and moves them. What is there in any spelling
    counts. Rules for numbers that no driver has any more are named, never removed: they may be somebody else's.
    """
    lines = text.splitlines(keepends=True)
    end = next((at for at, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    own = [line.rstrip("\r\n") for line in lines[:end]]
    rules, targets, devices = _present(own, _ALLOW_KEYS[0 if v1 else 1])
    missing: list[str] = []
    for major in sorted({major for node in nodes if (major := major_of(node, majors)) is not None}):
        needed = any(major_of(node, majors) == major and node not in devices.values() for node in nodes)
        if style == "lxc" and needed and not any(_covers(rule, major) for rule in rules):
            missing.append(allow_line(major, v1))
    numbers = iter([number for number in range(MAX_DEV + 1) if number not in devices])
    for node in nodes:
        if node in devices.values():
            continue
        if style == "dev":
            if node not in targets or not _opens(rules, node, majors):
                missing.append(dev_line(next(numbers), node))
        elif not {node, "/dev"} & targets:
            missing.append(mount_line(node))
    locked = next((line.partition(":")[2].strip() for line in own if line.startswith("lock:")), "")
    return Completed(_inserted(lines, end, missing), missing, _notes(rules, majors), locked)


def _present(own: Sequence[str], allow: str) -> tuple[list[str], set[str], dict[int, str]]:
    """Return the device rules, the places in the container that something is mounted on, and the devN lines.

    LXC heeds the rules of the host's own cgroup version only.
    """
    rules: list[str] = []
    targets: set[str] = set()
    devices: dict[int, str] = {}
    for line in own:
        raw, dev = _RAW.match(line), _DEV.match(line)
        if raw and raw.group(1) == allow:
            rules.append(raw.group(2))
        elif raw and raw.group(1) == "lxc.mount.entry":
            cells = raw.group(2).split()
            if len(cells) > 1:
                targets.add("/" + cells[1].strip("/"))
        elif dev:
            first = dev.group(2).split(",")[0]
            devices[int(dev.group(1))] = first[len("path=") :] if first.startswith("path=") else first
    return rules, targets, devices


def _opens(rules: Sequence[str], node: str, majors: Mapping[str, int]) -> bool:
    major = major_of(node, majors)
    return major is not None and any(_covers(rule, major) for rule in rules)


def _covers(rule: str, major: int) -> bool:
    """Say whether a rule lets every node of a number be read and written."""
    cells = rule.split()
    if cells[:1] == ["a"]:
        return True
    if len(cells) != 3 or cells[0] != "c" or not {"r", "w"} <= set(cells[2]):
        return False
    return cells[1] in ("*:*", f"{major}:*")


def _notes(rules: Sequence[str], majors: Mapping[str, int]) -> list[str]:
    notes = []
    for rule in rules:
        match = re.match(r"c (\d+):", rule)
        if match and int(match.group(1)) not in majors.values():
            notes.append(
                f"the rule '{rule}' is for a number that no driver of this host has now: if it was a GPU's before the "
                "last boot, it can go"
            )
    return notes


def _inserted(lines: Sequence[str], end: int, missing: Sequence[str]) -> str:
    """Put the lines behind the container's own last one, before the empty line that ends its section."""
    if not missing:
        return "".join(lines)
    at = end
    while at and not lines[at - 1].strip():
        at -= 1
    head = "".join(lines[:at])
    if head and not head.endswith("\n"):
        head += "\n"
    return head + "".join(f"{line}\n" for line in missing) + "".join(lines[at:])
