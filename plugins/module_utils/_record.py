# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What a server was started with beyond its own files: drop-ins and the model, written down after its gate."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileSpec, file_changes, write_files
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import UnitState

ROOTS = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/etc/systemd/system",
    "/run/systemd/system",
)


@dataclass(frozen=True)
class Difference:
    """One thing that a running server has otherwise than it should; both values are fit to be shown."""

    item: str  # flag, release, environment, unit file, drop-in, model
    name: str  # --max-running-requests, HF_HOME, a path
    running: str
    wanted: str

    def text(self) -> str:
        """Return it as one line."""
        return f"{self.item} {self.name}: {self.running} -> {self.wanted}".replace(" : ", ": ")


@dataclass(frozen=True)
class Record:
    """What was true when this invocation had passed its gate."""

    invocation: str
    drop_ins: dict[str, str] = field(default_factory=dict)  # digest by path
    model: str = ""


def record_file(config_dir: str, gpu: int) -> str:
    """Return where a server's record lies."""
    return str(Path(config_dir) / f"{gpu}.started")


def read_record(config_dir: str, gpu: int) -> Record | None:
    """Read a server's record; None when there is none that can be read."""
    try:
        return Record(**json.loads(Path(record_file(config_dir, gpu)).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_record(config_dir: str, gpu: int, record: Record) -> None:
    """Write a server's record."""
    spec = FileSpec(record_file(config_dir, gpu), json.dumps(asdict(record), sort_keys=True) + "\n", 0o600)
    write_files([change.spec for change in file_changes([spec])])


def drop_ins(unit: UnitState, roots: Sequence[str] = ROOTS) -> dict[str, str]:
    """Return digest by path of the drop-ins that a unit would be started with now, reloaded or not."""
    template = unit.unit.partition("@")[0] + "@.service.d"
    found = set(unit.drop_ins)
    for root in roots:
        for folder in (f"{unit.unit}.d", template):
            found.update(str(path) for path in Path(root, folder).glob("*.conf"))
    digests = {}
    for path in sorted(found):
        try:
            digests[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
        except OSError:  # removed, and systemd has not been told yet
            continue
    return digests


def model_state(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return which state of its model a server would load now; "" when that can't be seen.

    A folder: its real path and a digest of names, sizes and times. A hub id: the commit its cache points to.
    """
    model = _value(argv, "--model-path") or _value(argv, "--model")
    if model.startswith("/"):
        real = os.path.realpath(model)
        try:
            entries = sorted(
                (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)
                for entry in os.scandir(real)
                if entry.is_file()
            )
        except OSError:
            return ""
        return f"{real} {hashlib.sha256(repr(entries).encode()).hexdigest()[:12]}"
    hub = environment.get("HF_HUB_CACHE") or f"{environment.get('HF_HOME', '')}/hub"
    revision = _value(argv, "--revision") or "main"
    try:
        reference = Path(hub, f"models--{model.replace('/', '--')}", "refs", revision)
        return reference.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def since_start(
    record: Record | None, unit: UnitState, now: Mapping[str, str], model: str, offset: float
) -> list[Difference]:
    """Say what changed under a running server since it was started.

    now: drop_ins(); model: model_state(); offset: what to add to systemd's monotonic seconds to get a file's time.
    Without a record of this very invocation (systemd has restarted it since) a drop-in's time decides.
    """
    found = []
    if record is not None and record.invocation == unit.invocation_id:
        for path in sorted({*record.drop_ins, *now}):
            before, after = record.drop_ins.get(path), now.get(path)
            if before != after:
                found.append(Difference("drop-in", path, _digest(before), _digest(after)))
        if record.model and model and record.model != model:
            found.append(Difference("model", "", record.model, model))
        return found
    started = unit.started + offset
    for path in now if unit.started else ():
        if os.path.getmtime(path) > started:
            found.append(Difference("drop-in", path, "not there, or another text", "newer than its process"))
    gone = record.drop_ins if record is not None else {}
    found += [Difference("drop-in", path, "perhaps in effect", "removed") for path in sorted(gone) if path not in now]
    return found


def edited_before(paths: Iterable[str], unit: UnitState, offset: float) -> list[str]:
    """Return the files that were changed last before a server started, so that it may run with what they say."""
    started = unit.started + offset
    return [path for path in paths if 0.0 < _changed_at(path) <= started]


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_ctime  # unlike the time of modification it can't be set
    except OSError:
        return 0.0


def _digest(digest: str | None) -> str:
    return f"text {digest[:8]}" if digest else "not there"


def _value(argv: Sequence[str], flag: str) -> str:
    for at, word in enumerate(argv):
        if word == flag and at + 1 < len(argv):
            return argv[at + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""
