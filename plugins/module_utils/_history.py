# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What ran on a host, and when, by whom and why; and which releases may go."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _kept
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileSpec, read_text, write_files
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import query
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Plan, read_applied
from ansible_collections.gpufleet.sglang.plugins.module_utils._release import RECORD
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import cgroup_pids, show

FILE = "history.jsonl"
LIMIT = 200  # entries that are kept


def read(config_dir: str) -> list[dict[str, Any]]:
    """Return the entries, the oldest first; a line that is none is left out."""
    entries = []
    for line in (read_text(str(Path(config_dir) / FILE)) or "").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def append(config_dir: str, entry: Mapping[str, Any]) -> None:
    """Add an entry; the oldest go."""
    entries = [*read(config_dir), dict(entry)][-LIMIT:]
    text = "".join(json.dumps(item, sort_keys=True) + "\n" for item in entries)
    write_files([FileSpec(str(Path(config_dir) / FILE), text, 0o644)])


def configurations(config_dir: str) -> dict[str, str]:
    """Return a short digest of every installed configuration, by GPU."""
    found = {}
    for gpu in read_applied(config_dir):
        for line in (read_text(str(Path(config_dir) / f"{gpu}.env")) or "").splitlines():
            if line.startswith(_kept.DIGEST):
                found[str(gpu)] = line[len(_kept.DIGEST) :].strip('"')[:12]
    return found


def memory_mib(runner: Runner, plan: Plan) -> dict[int, int]:
    """Measure the memory of every server, by GPU: of its GPU on device cuda, else of its unit."""
    if plan.device == "cuda":
        gpus, _findings = query(runner)
        used = {gpu.uuid or gpu.index: gpu.memory_used_mib for gpu in gpus if gpu.memory_used_mib is not None}
        found = {item.gpu: used.get(item.uuid or item.gpu) for item in plan.instances}
        return {gpu: mib for gpu, mib in found.items() if mib is not None}
    states = show(runner, [item.unit for item in plan.instances])
    return {item.gpu: _resident(cgroup_pids(states[item.unit].control_group)) for item in plan.instances}


def _resident(pids: Sequence[int], proc: str = "/proc") -> int:
    """Return the resident memory of processes in MiB; what several of them share counts for each."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"{proc}/{pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def figures(servers: Sequence[Mapping[str, Any]], memory: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return what is kept of every server."""
    return [
        {
            "gpu": server["gpu"],
            "state": server.get("state"),
            "kv_tokens": server.get("kv_tokens"),
            "max_running_requests": server.get("max_running_requests"),
            "memory_mib": memory.get(server["gpu"]),
        }
        for server in servers
    ]


def beside(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Set the newest entry's figures beside those of the release before it, one line per GPU."""
    if not entries:
        return []
    new = entries[-1]
    old = next((entry for entry in reversed(entries[:-1]) if entry.get("release") != new.get("release")), None)
    head = f"{new.get('what')} of release {new.get('release')} by {new.get('who')}"
    lines = [head + (f": {new['why']}" if new.get("why") else "")]
    before = {server["gpu"]: server for server in (old or {}).get("servers", [])}
    for server in new.get("servers", []):
        line = f"GPU {server['gpu']}: {_figure(server)}"
        if server["gpu"] in before:
            line += f"; release {(old or {}).get('release')} had {_figure(before[server['gpu']])}"
        lines.append(line)
    return lines


def _figure(server: Mapping[str, Any]) -> str:
    def show(value: Any) -> str:
        return "-" if value is None else str(value)

    return f"{show(server.get('memory_mib'))} MiB in use, {show(server.get('kv_tokens'))} KV tokens"


def made_here(releases_dir: str) -> list[str]:
    """Return the finished releases that this collection made."""
    return sorted(path.parent.name for path in Path(releases_dir).glob(f"*/{RECORD}"))


def in_use(releases_dir: str, config_dir: str, proc: str = "/proc") -> set[str]:
    """Return the releases that an installed unit or any running process uses."""
    base = releases_dir.rstrip("/") + "/"
    words = [word for item in read_applied(config_dir).values() for word in item.argv]
    for path in Path(proc).glob("[0-9]*/cmdline"):
        try:
            words += path.read_bytes().decode("utf-8", errors="replace").split("\0")
        except OSError:
            continue
    return {word[len(base) :].split("/", 1)[0] for word in words if word.startswith(base)}


def to_prune(made: Sequence[str], last_used: Sequence[str], needed: set[str], keep: int) -> list[str]:
    """Return the releases to remove: beyond the keep that were used last, and not needed.

    last_used: newest first; a release that never answered counts as older than all that did.
    """
    if keep <= 0:
        return []
    order = [name for name in last_used if name in made] + [name for name in made if name not in last_used]
    stays = needed | set(order[:keep])
    return [name for name in order if name not in stays]


def prune(releases_dir: str, config_dir: str, name: str) -> None:
    """Remove a release: venv, log, lock, option list and copies."""
    base = Path(releases_dir)
    shutil.rmtree(base / name)
    for path in (base / f"{name}.log", base / f".{name}.lock", Path(config_dir) / f"options-{name}.json"):
        path.unlink(missing_ok=True)
    _kept.forget(config_dir, name)
