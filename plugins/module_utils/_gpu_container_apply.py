# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Completing a container's configuration on the Proxmox host: read, judge, keep the old one, write."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._gpu_container_conf import (
    CONTROL,
    UVM,
    UVM_TOOLS,
    complete,
    major_of,
    parse_majors,
)


class ConfError(Exception):
    """The configuration cannot be completed; the message says why and what to do, and nothing was changed."""


@dataclass(frozen=True)
class Spec:
    """What the configuration is to hold."""

    path: str
    gpus: Sequence[int] = ()  # minor numbers; empty for every GPU the host has
    style: str = "lxc"
    backup_dir: str = ""
    devices_file: str = "/proc/devices"
    dev: str = "/dev"
    cgroup: str = "/sys/fs/cgroup"


def ensure(spec: Spec, *, check: bool, now: Callable[[], float] = time.time) -> dict[str, Any]:
    """Complete the configuration; returns the module's result."""
    try:
        text = Path(spec.path).read_text(encoding="utf-8")
        majors = parse_majors(Path(spec.devices_file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfError(f"{spec.path} or {spec.devices_file} cannot be read: {exc}; is this the Proxmox host?") from exc
    nodes = wanted_nodes(spec)
    problems = [*_host_problems(spec, majors), *_node_problems(spec, nodes)]
    if problems:
        raise ConfError("; ".join(problems))
    done = complete(text, nodes, majors, spec.style, v1=not Path(spec.cgroup, "cgroup.controllers").exists())
    if done.added and done.locked:
        raise ConfError(
            f"{spec.path} is locked ({done.locked}): Proxmox is working on the container; run this afterwards"
        )
    backup = ""
    if done.added and not check:
        backup = _keep(spec, text, now())
        _write(spec.path, text, done.text)
    header = {"before_header": spec.path, "after_header": spec.path}
    return {
        "changed": bool(done.added),
        "added": done.added,
        "notes": done.notes,
        "backup": backup,
        "diff": {**header, "before": text, "after": done.text},
    }


def wanted_nodes(spec: Spec) -> list[str]:
    """Return the nodes to pass in: the driver's own, and those of the GPUs."""
    gpus = list(spec.gpus)
    if not gpus:
        names = [path.name for path in Path(spec.dev).glob("nvidia[0-9]*")]
        gpus = sorted(int(name[len("nvidia") :]) for name in names if re.fullmatch(r"nvidia\d+", name))
    return [f"/dev/{name}" for name in (CONTROL, UVM, UVM_TOOLS, *(f"nvidia{number}" for number in gpus))]


def _host_problems(spec: Spec, majors: dict[str, int]) -> list[str]:
    problems = []
    if major_of("nvidia0", majors) is None:
        problems.append(f"the NVIDIA driver is not loaded ({spec.devices_file} does not name it): 'modprobe nvidia'")
    if UVM not in majors:
        problems.append(f"nvidia-uvm is not loaded ({spec.devices_file} does not name it): 'nvidia-modprobe -u -c=0'")
    return problems


def _node_problems(spec: Spec, nodes: Sequence[str]) -> list[str]:
    """With the devN line of a missing node a container does not start; without a GPU there is no sense in it."""
    if len(nodes) == 3:
        return [f"there is no {spec.dev}/nvidia0 or other GPU to pass in: 'nvidia-smi' on this host makes the nodes"]
    if spec.style != "dev":
        return []
    missing = [node for node in nodes if not Path(spec.dev, node.rsplit("/", 1)[-1]).exists()]
    return [f"{', '.join(missing)} not there: 'nvidia-modprobe -u -c=0' makes them"] if missing else []


def _keep(spec: Spec, text: str, now: float) -> str:
    """Keep the old text: not beside the file, where Proxmox keeps nothing but configurations."""
    if not spec.backup_dir:
        return ""
    stamp = time.strftime("%Y-%m-%d@%H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03d}"
    path = Path(spec.backup_dir, f"{Path(spec.path).name}.{stamp}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
    except OSError as exc:
        raise ConfError(f"the old configuration cannot be kept in {path}: {exc.strerror}; nothing was changed") from exc
    return str(path)


def _write(path: str, before: str, after: str) -> None:
    """Write as Proxmox does, whose file system can do no more: a file beside it, renamed; owner and mode stay."""
    beside = f"{path}.tmp.{os.getpid()}"
    try:
        Path(beside).write_text(after, encoding="utf-8")
        old = os.stat(path)
        with contextlib.suppress(OSError):
            os.chown(beside, old.st_uid, old.st_gid)
            os.chmod(beside, stat.S_IMODE(old.st_mode))
        if Path(path).read_text(encoding="utf-8") != before:
            raise ConfError(f"{path} was changed by somebody else just now; nothing was changed: run this again")
        os.replace(beside, path)
    except OSError as exc:
        raise ConfError(f"{path} cannot be written: {exc.strerror}; nothing was changed") from exc
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)
