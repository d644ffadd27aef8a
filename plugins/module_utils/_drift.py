# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Whether a running server is the one that the plan asks for: item by item, old value and new, secrets hidden."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils import _record
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import read_text
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import (
    Instance,
    Plan,
    PlanFileError,
    read_applied,
    read_plan,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._record import Difference
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import UnitState, show

HIDDEN = "(hidden)"
SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
NO_SECRET = re.compile(r"token(s|izer)|max.*token|token.*max", re.IGNORECASE)
# What systemd itself gives every service, beside the digest that ties a process to its files.
SYSTEMDS = re.compile(
    r"^(HOME|USER|LOGNAME|SHELL|LANG|PATH|PWD|SHLVL|_|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID|NOTIFY_SOCKET|"
    r"MEMORY_PRESSURE_\w+|CREDENTIALS_DIRECTORY|(RUNTIME|STATE|CACHE|LOGS|CONFIGURATION)_DIRECTORY|MAINPID|GPUFLEET_CONFIG)$"
)


def shown(name: str, value: str | None) -> str:
    """Return a value as it may be shown: one of something that sounds secret is hidden."""
    if value is None:
        return "not set"
    return HIDDEN if SECRET.search(name) and not NO_SECRET.search(name) else value


def flags_of(argv: Sequence[str]) -> dict[str, str]:
    """Return a command's flags with their values; words before the first flag have the name ""."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        else:
            found.setdefault(name, []).append(word)
    return {flag: " ".join(words) or "set" for flag, words in found.items()}


def flag_differences(running: Sequence[str], wanted: Sequence[str]) -> list[Difference]:
    """Compare two commands by their flags."""
    old, new = flags_of(running), flags_of(wanted)
    return [
        Difference("flag", name or "command", shown(name, old.get(name)), shown(name, new.get(name)))
        for name in [*old, *(name for name in new if name not in old)]
        if old.get(name) != new.get(name)
    ]


def environment_differences(
    running: Mapping[str, str], wanted: Mapping[str, str], secrets: Mapping[str, str]
) -> list[Difference]:
    """Compare a process's environment with the planned one; secrets: the secrets file as it lies there."""
    found = []
    for name in sorted({*running, *wanted, *secrets}):
        old, new = running.get(name), secrets.get(name, wanted.get(name))
        if old == new or (name not in wanted and name not in secrets and SYSTEMDS.match(name)):
            continue
        hide = name in secrets or (
            name not in wanted and old is not None
        )  # nobody knows what it is: it may be a secret
        values = [("not set" if value is None else HIDDEN) if hide else shown(name, value) for value in (old, new)]
        found.append(Difference("environment", name, *values))
    return found


def file_differences(item: str, path: str, good: str | None, now: str | None) -> list[Difference]:
    """Compare an installed file with the copy of what last answered, by its lines; comments don't count."""
    if good is None or good == now:
        return []
    if now is None:
        return [Difference(item, path, "installed", "missing")]
    old, new = _lines(good), _lines(now)
    if old == new:
        return []
    less = [line for line in old if line not in new]
    more = [line for line in new if line not in old]
    return [
        Difference(
            item,
            path,
            " | ".join(map(_masked, more)) or "(no such line)",
            " | ".join(map(_masked, less)) or "(no such line)",
        )
    ]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", ";"))]


def _masked(line: str) -> str:
    """Hide the values of Environment= lines; everything else in a unit file is open to everybody."""
    name, equals, _value = line.partition("=")
    return f"{name}={HIDDEN}" if equals and name.strip() == "Environment" else line


def process(pid: int, proc: str = "/proc") -> tuple[list[str], dict[str, str]] | None:
    """Return command and environment of a running process; None when they can't be read."""
    try:
        argv = Path(f"{proc}/{pid}/cmdline").read_bytes().decode("utf-8", errors="replace").split("\0")[:-1]
        pairs = Path(f"{proc}/{pid}/environ").read_bytes().decode("utf-8", errors="replace").split("\0")
    except OSError:
        return None
    return argv, dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def secrets_of(text: str | None) -> dict[str, str]:
    """Read a secrets file as systemd does."""
    found = {}
    for line in (text or "").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            plain = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
            found[name] = re.sub(r'\\(["\\`$])', r"\1", plain)
    return found


def differences(
    plan: Plan, wanted: Instance | None, unit: UnitState, config_dir: str, offset: float, proc: str = "/proc"
) -> list[Difference] | None:
    """Say what a running server has otherwise than planned; None when nothing runs that could be compared.

    offset: what to add to systemd's monotonic seconds to get a file's time.
    """
    told = process(unit.main_pid, proc) if unit.running and unit.main_pid else None
    if told is None:
        return None
    if wanted is None:
        return [Difference("plan", unit.unit, "runs", "not in the plan")]
    argv, environment = told
    found = []
    venv = plan.release.venv
    # A venv's script runs as "python script ...": what comes before the planned first word is the interpreter.
    command = argv[argv.index(wanted.argv[0]) :] if wanted.argv and wanted.argv[0] in argv else argv
    if not any(word.startswith(venv + "/") for word in argv):
        runs = next((os.path.dirname(os.path.dirname(word)) for word in argv if "/bin/" in word), "unknown")
        found.append(Difference("release", "", os.path.basename(runs), plan.release.name))
        command = _drop_first(command)
        found += [item for item in flag_differences(command, wanted.argv[1:]) if item.name != "command"]
    else:
        found += flag_differences(command, wanted.argv)
    base = Path(config_dir)
    secrets = secrets_of(read_text(str(base / f"{wanted.gpu}.secrets")))
    found += environment_differences(environment, wanted.environment, secrets)
    good = base / "known-good" / str(wanted.gpu) / os.path.basename(wanted.unit_file)
    found += file_differences("unit file", wanted.unit_file, read_text(str(good)), read_text(wanted.unit_file))
    model = _record.model_state(wanted.argv, wanted.environment)
    record = _record.read_record(config_dir, wanted.gpu)
    return found + _record.since_start(record, unit, _record.drop_ins(unit), model, offset)


def _drop_first(argv: Sequence[str]) -> list[str]:
    for at, word in enumerate(argv):
        if word.startswith("--"):
            return list(argv[at:])
    return list(argv)


def look_for_drift(runner: Runner, plan_file: str) -> dict[str, list[str] | None]:
    """Compare every server of the plan, and every one that an earlier plan left; returns lines by unit."""
    try:
        plan = read_plan(plan_file)
    except PlanFileError:
        return {}
    config_dir = str(Path(plan_file).parent)
    planned = {item.unit: item for item in plan.instances}
    names = list({**planned, **{item.unit: item for item in read_applied(config_dir).values()}})
    offset = time.time() - time.monotonic()
    found: dict[str, list[str] | None] = {}
    for name, unit in show(runner, names).items():
        told = differences(plan, planned.get(name), unit, config_dir, offset)
        found[name] = None if told is None else [item.text() for item in told]
    return found
