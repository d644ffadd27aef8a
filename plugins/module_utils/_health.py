# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What is true of a server: unit, log, port and answer joined into one verdict. No side effects here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._phases import LogDigest
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe import ProbeResult
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import UnitState

STATES = ("absent", "stopped", "starting", "ready", "unhealthy", "failed", "foreign", "stalled")
FAILED = ("unhealthy", "failed", "foreign", "stalled")
EXIT_NAMES = {1: "exited", 2: "killed", 3: "dumped"}
FOREIGN_AFTER = 3.0  # s that another process must keep our port
UNHEALTHY_AFTER = 30.0  # s of bad answers from a server that said it is ready ...
UNHEALTHY_PROBES = 3  # ... and at least so many of them
WRONG_PROBES = 2  # wrong answers in a row that decide
BUSY = 0.1  # of one core: less is no progress


@dataclass(frozen=True)
class Limits:
    """How long a wait may take."""

    progress: float = 600.0
    total: float = 5400.0


@dataclass(frozen=True)
class Look:
    """One sample of one unit and its port."""

    now: float
    unit: UnitState
    digest: LogDigest
    port: str = "none"  # none | ours | foreign | unknown: who listens on our port
    holder: str = ""  # who, when it is foreign
    compiling: bool = False  # a compiler runs in the unit's control group
    cpu_seconds: float = 0.0  # used by the unit so far
    oom_kills: int | None = None  # of the unit's control group


@dataclass
class Memory:
    """What is remembered of a unit from look to look and from slice to slice."""

    invocation: str = ""  # the one that is judged
    restarts: int = 0
    expected: bool = False  # invocation was named by the caller, or seen running by us
    begun: float = -1.0
    progress_at: float = 0.0
    cpu_at: float = 0.0
    cpu_seconds: float = 0.0
    lines: int = 0
    phase: str = "none"
    compiling: bool = False
    foreign_since: float | None = None
    unhealthy_since: float | None = None
    bad_probes: int = 0
    saw_starting: bool = False
    ready_at: float | None = None  # when the first good answer came
    probe: dict[str, Any] = field(default_factory=dict)
    terminal: bool = False
    state: str = ""
    oom_kills: int | None = None  # in the judged invocation's control group
    diagnosis: dict[str, Any] = field(default_factory=dict)  # kept so that no slice makes it again

    @property
    def answer(self) -> ProbeResult | None:
        """The newest answer of this invocation."""
        return ProbeResult(**self.probe) if self.probe else None

    def take(self, result: ProbeResult, now: float) -> None:
        """Remember an answer."""
        self.probe = result.to_dict()
        if result.ok:
            self.ready_at = self.ready_at or now
            self.bad_probes = 0
        elif not result.starting:
            self.bad_probes += 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the next slice."""
        return asdict(self)


def memory_from_dict(data: Mapping[str, Any]) -> Memory:
    """Build a memory from what to_dict() gave; unknown keys are dropped."""
    known = {item.name for item in fields(Memory)}
    return Memory(**{key: value for key, value in data.items() if key in known})


@dataclass(frozen=True)
class Verdict:
    """What a look means. terminal: waiting longer changes nothing."""

    state: str
    reason: str = ""
    terminal: bool = False


def choose_invocation(memory: Memory, unit: UnitState, expected: str = "") -> None:
    """Decide which invocation is judged: the expected one, else the first that is seen running."""
    if memory.begun < 0 and expected:
        memory.invocation, memory.restarts, memory.expected = expected, unit.restarts, True
    elif not memory.expected and (memory.begun < 0 or unit.running):
        memory.invocation, memory.restarts = unit.invocation_id, unit.restarts
        memory.expected = unit.running and bool(unit.invocation_id)


def note_progress(memory: Memory, look: Look) -> None:
    """Move the deadline when the server got on: a phase, lines, CPU time, compilers."""
    if look.oom_kills is not None and look.unit.invocation_id == memory.invocation:
        memory.oom_kills = max(memory.oom_kills or 0, look.oom_kills)
    if memory.begun < 0:
        memory.begun = memory.progress_at = memory.cpu_at = look.now
        memory.cpu_seconds, memory.lines = look.cpu_seconds, look.digest.lines
    moved = look.digest.phase != memory.phase or look.digest.lines > memory.lines or look.compiling
    elapsed = look.now - memory.cpu_at
    if elapsed >= 1.0:
        # a scheduler that waits for work may spin on a whole core, so once the port is open this says nothing
        busy = (look.cpu_seconds - memory.cpu_seconds) / elapsed >= BUSY
        moved = moved or (busy and look.port != "ours")
        memory.cpu_at, memory.cpu_seconds = look.now, look.cpu_seconds
    if moved and memory.unhealthy_since is None:
        memory.progress_at = look.now
    memory.phase, memory.lines, memory.compiling = look.digest.phase, look.digest.lines, look.compiling
    memory.foreign_since = (
        None if look.port != "foreign" else look.now if memory.foreign_since is None else memory.foreign_since
    )


def judge(memory: Memory, look: Look, limits: Limits | None = None) -> Verdict:
    """Say what a look means; limits None: a single look, nothing is waited for."""
    unit = look.unit
    if look.digest.bind_error and unit.exists:
        return Verdict("failed", _with_holder(look.digest.bind_error, look), True)
    ended = _ended(memory, look)
    if ended:
        return ended
    if look.port == "foreign":
        since = memory.foreign_since if memory.foreign_since is not None else look.now
        return Verdict("foreign", f"the port is held by {look.holder}", look.now - since >= FOREIGN_AFTER)
    verdict = _running(memory, look)
    if verdict.state == "unhealthy":
        memory.unhealthy_since = look.now if memory.unhealthy_since is None else memory.unhealthy_since
    else:
        memory.unhealthy_since = None
    memory.saw_starting = memory.saw_starting or verdict.state == "starting"
    return verdict if limits is None or verdict.terminal else _in_time(memory, look, verdict, limits)


def _ended(memory: Memory, look: Look) -> Verdict | None:
    """Return the verdict on a unit that does not run (as we knew it), None when it runs."""
    unit = look.unit
    if memory.expected and unit.running:
        if unit.invocation_id != memory.invocation:
            return Verdict("failed", died(memory, look, f"died and was started again{_restarts(unit)}"), True)
        if unit.restarts > memory.restarts:
            return Verdict("failed", died(memory, look, f"died and systemd started it again{_restarts(unit)}"), True)
    if unit.running:
        return None
    if unit.active_state == "failed" or unit.sub_state == "auto-restart":
        return Verdict("failed", died(memory, look), True)
    if unit.active_state == "deactivating":
        if not unit.main_pid and unit.exited >= unit.started and (unit.exit_code, unit.exit_status) != (1, 0):
            return Verdict("failed", died(memory, look), True)
        return Verdict("stopped", "is being stopped")
    if memory.expected:
        return Verdict("failed", died(memory, look, "stopped" if unit.exists else "its unit is gone"), True)
    if not unit.exists:
        return Verdict("absent", _with_holder("no such unit", look), True)
    return Verdict("stopped", _with_holder("", look), True)


STARTING = Verdict("starting")


def _running(memory: Memory, look: Look) -> Verdict:
    answer = memory.answer
    if look.port == "unknown":
        return Verdict("unhealthy", "cannot see which process listens on the port: run this as root (become)")
    if look.port == "ours" and answer is not None and answer.ok:
        return Verdict("ready", terminal=True)
    claims = look.digest.phase == "ready"
    if look.port == "none":
        return (
            Verdict("unhealthy", "says it is ready but nothing listens on its port") if claims else Verdict("starting")
        )
    if answer is None or (answer.starting and not claims):
        return STARTING
    return Verdict("unhealthy", answer.reason, terminal=answer.wrong is not None and memory.bad_probes >= WRONG_PROBES)


def _in_time(memory: Memory, look: Look, verdict: Verdict, limits: Limits) -> Verdict:
    now = look.now
    if verdict.state == "unhealthy" and memory.unhealthy_since is not None:
        bad = now - memory.unhealthy_since
        if (bad >= UNHEALTHY_AFTER and memory.bad_probes >= UNHEALTHY_PROBES) or bad >= limits.progress:
            return Verdict("unhealthy", f"{verdict.reason} (for {bad:.0f} s)", True)
    elif now - memory.progress_at >= limits.progress:
        what = f"no progress for {now - memory.progress_at:.0f} s in phase {look.digest.phase}"
        return Verdict("stalled", f"{what}: {verdict.reason}" if verdict.reason else what, True)
    if now - memory.begun >= limits.total:
        what = f"not ready after {now - memory.begun:.0f} s, in phase {look.digest.phase}"
        state = "unhealthy" if verdict.state == "unhealthy" else "stalled"
        return Verdict(state, f"{what}: {verdict.reason}" if verdict.reason else what, True)
    return verdict


def exit_of(look: Look, invocation: str) -> tuple[str, int | None]:
    """Return how the judged invocation's main process ended: ("exited", 2), ("killed", 9), or ("", None)."""
    if look.digest.exit:  # systemd's own line in the journal of that very invocation
        name, _sep, status = look.digest.exit.partition(" ")
        return name, int(status)
    unit = look.unit
    if unit.exit_code in EXIT_NAMES and (not invocation or unit.invocation_id == invocation):
        return EXIT_NAMES[unit.exit_code], unit.exit_status
    return "", None


def died(memory: Memory, look: Look, how: str = "") -> str:
    """Return one line on why a unit ended: its most telling log line, else what systemd knows."""
    lines = look.digest.error_lines()
    name, status = exit_of(look, memory.invocation)
    if name == "killed" and look.digest.phase == "ready" and not look.digest.wrapped:
        return f"killed {status} while serving"  # from outside: older errors in its log are not why
    if lines:
        return lines[0]
    known = [part for part in (how, f"{name} {status}" if name else "") if part]
    result = look.digest.result or look.unit.result
    if result not in ("", "success", "exit-code", "signal"):
        known.append(f"result {result}")
    return f"{', '.join(known) or 'ended'}, without an error line in its log"


def describe(instance: Instance, memory: Memory, look: Look, verdict: Verdict, host: str) -> dict[str, Any]:
    """Return the figures of one server as the module returns them."""
    unit, digest, answer = look.unit, look.digest, memory.answer or ProbeResult()
    same = unit.invocation_id == memory.invocation
    phase = digest.phase
    rests = verdict.state in ("stopped", "absent")  # figures of a server that is gone would read as its own
    if rests:
        phase = "none"
    elif verdict.state == "ready":
        phase = "ready"
    elif phase == "none" and unit.running:
        phase = "process"
    exit_code, exit_status = exit_of(look, memory.invocation)
    if verdict.state in ("ready", "starting", "absent"):
        exit_code, exit_status = "", None
    if not unit.started or not same or rests:
        seconds = None
    else:
        seconds = max(0.0, (look.now if unit.running else unit.exited) - unit.started)
    ready = verdict.state == "ready"
    address = f"[{instance.probe_host}]" if ":" in instance.probe_host else instance.probe_host
    return {
        "gpu": instance.gpu,
        "uuid": instance.uuid,
        "canary": instance.canary,
        "unit": instance.unit,
        "host": host,
        "port": instance.port,
        "url": f"http://{address}:{instance.port}",
        "state": verdict.state,
        "phase": phase,
        "phases": _phases(memory, look),
        "reason": verdict.reason,
        "seconds": None if seconds is None else round(seconds, 1),
        "seconds_to_ready": _seconds_to_ready(memory, look, ready),
        "model": answer.model if ready else None,
        "version": answer.version if ready else None,
        "kv_tokens": None if rests else _known(answer.kv_tokens if ready else None, digest.kv_tokens),
        "max_running_requests": (
            None if rests else _known(answer.max_running_requests if ready else None, digest.max_running_requests)
        ),
        "first_token_seconds": answer.first_token_seconds if ready else None,
        "decode_tokens_per_second": answer.decode_tokens_per_second if ready else None,
        "completion_tokens": answer.completion_tokens if ready else None,
        "text": answer.text if ready else None,
        "result": (digest.result if not same and digest.result else unit.result) if unit.exists else None,
        "exit_code": exit_code,
        "exit_status": exit_status,
        "error_lines": digest.error_lines() if verdict.state in FAILED else [],
        "invocation_id": memory.invocation or None,
        "main_pid": unit.main_pid or None,
        "restarts": unit.restarts,
    }


def _known(asked: int | None, logged: int | None) -> int | None:
    return logged if asked is None else asked


def _phases(memory: Memory, look: Look) -> dict[str, float]:
    started = look.unit.started
    if not started or look.unit.invocation_id != memory.invocation:
        return {}
    return {phase: round(max(0.0, at - started), 1) for phase, at in look.digest.phase_times.items()}


def _seconds_to_ready(memory: Memory, look: Look, ready: bool) -> float | None:
    unit = look.unit
    if not ready or not unit.started or unit.invocation_id != memory.invocation:
        return None
    said = look.digest.phase_times.get("ready")
    if said is not None and said >= unit.started:
        return round(said - unit.started, 1)
    if memory.saw_starting and memory.ready_at is not None:  # no such line, but we were there
        return round(memory.ready_at - unit.started, 1)
    return None


def failure_message(servers: Sequence[Mapping[str, Any]]) -> str:
    """Return the text a failed wait ends with: a block for each server that is not ready."""
    bad = [server for server in servers if server["state"] != "ready"]
    blocks = [f"{len(bad)} of {len(servers)} server{'s' * (len(servers) != 1)} not ready."]
    for server in bad:
        name = short(server["unit"])
        head = f"{server['host']} GPU {server['gpu']} {name}: {server['state']} in phase {server['phase']}"
        facts = []
        if server["exit_code"]:
            facts.append(f"{server['exit_code']} {server['exit_status']}")
        if server["result"] not in (None, "", "success"):
            facts.append(f"systemd result {server['result']}")
        if server["restarts"]:
            facts.append(f"restarted {server['restarts']} times")
        lines = [head + (f" ({', '.join(facts)})" if facts else "")]
        reason = server["reason"] or "no reason known"
        lines += [f"    {line}" for line in explained(server)]
        known = (server.get("diagnosis") or {}).get("evidence") or []
        causes = [reason, *[line for line in server["error_lines"] if not reason.startswith(line)]]
        lines += [f"    {cause}" for cause in causes if not any(cause[:60] in line for line in known)]
        look = f"journalctl -u {name}"
        if server["invocation_id"]:
            look += f" _SYSTEMD_INVOCATION_ID={server['invocation_id']}"
        lines.append(f"    look: {look}")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def explained(server: Mapping[str, Any]) -> list[str]:
    """Return the lines of a server's diagnosis: code, what shows it, what to do."""
    found = server.get("diagnosis")
    if not found:
        return []
    lines = [f"cause: {found['code']}: {found['says']}"]
    lines += [f"  {line}" for line in found["evidence"]]
    lines.append(f"remedy: {found['remedy']}")
    if found["also_seen"]:
        lines.append(f"also seen: {', '.join(found['also_seen'])}")
    return lines


def short(unit: str) -> str:
    """Return a unit's name as people type it."""
    return unit[: -len(".service")] if unit.endswith(".service") else unit


def _restarts(unit: UnitState) -> str:
    return f" ({unit.restarts} restarts)" if unit.restarts else ""


def _with_holder(text: str, look: Look) -> str:
    if look.port != "foreign":
        return text
    held = f"the port is held by {look.holder}"
    return f"{text} ({held})" if text else held
