# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Looking at many servers at once, again and again, until each is ready or cannot become so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ansible_collections.gpufleet.sglang.plugins.module_utils._facts import oom_kills
from ansible_collections.gpufleet.sglang.plugins.module_utils._health import (
    FAILED,
    Limits,
    Look,
    Verdict,
    choose_invocation,
    describe,
    judge,
    memory_from_dict,
    note_progress,
    short,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._journal import Follower, LineSource
from ansible_collections.gpufleet.sglang.plugins.module_utils._listeners import (
    Listener,
    answering,
    command_of,
    listeners,
    owners,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe import Probe, ProbeOptions, ProbeResult
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._siblings import stand_out
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import (
    COMPILERS,
    UnitState,
    cgroup_pids,
    names_of,
    show,
    unit_of_pid,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._why import Case

INTERVAL = 0.7  # s between looks
SETTLE = 5  # tenths of a second for a ready line to arrive ...
FRESH = 3600.0  # ... of a server that started so many seconds ago, or less
GRACE = 1.0  # s that bad news waits for answers that are on their way
PROBE_EVERY = 1.0  # s between two questions to a server that is not ready

Explain = Callable[[Sequence[Case]], dict[str, dict[str, Any]]]
Place = Callable[[Sequence[Instance]], dict[str, tuple[bool, str]]]  # by unit: on its GPU?, on which others


class World(Protocol):
    """The host, as the watch sees it; tests put another one in its place."""

    follower: Follower

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
    def units(self, names: Sequence[str]) -> dict[str, UnitState]: ...
    def sockets(self, ports: Sequence[int]) -> list[Listener]: ...
    def pids(self, unit: UnitState) -> list[int]: ...
    def holds(self, pids: Sequence[int], inode: int) -> bool: ...
    def holder(self, inode: int) -> tuple[int, str, str] | None: ...
    def names(self, pids: Sequence[int]) -> set[str]: ...
    def cpu(self, pids: Sequence[int]) -> float: ...
    def oom_kills(self, unit: UnitState) -> int | None: ...
    def ask(self, key: str, host: str, port: int) -> None: ...
    def asking(self, key: str) -> bool: ...
    def answer(self, key: str) -> ProbeResult | None: ...


class Host:
    """The real one."""

    def __init__(self, runner: Runner, follower: Follower, options: ProbeOptions, proc: str = "/proc") -> None:
        self.runner, self.follower, self.options, self.proc = runner, follower, options, proc
        self._asked: dict[str, threading.Thread] = {}
        self._answers: dict[str, ProbeResult] = {}

    def now(self) -> float:
        """Return CLOCK_MONOTONIC, the clock of systemd's and the journal's timestamps."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def units(self, names: Sequence[str]) -> dict[str, UnitState]:
        """Ask systemd."""
        return show(self.runner, names)

    def sockets(self, ports: Sequence[int]) -> list[Listener]:
        """Return who listens, without the processes."""
        return listeners(self.proc, ports, pids=())

    def pids(self, unit: UnitState) -> list[int]:
        """Return the unit's processes."""
        found = cgroup_pids(unit.control_group)
        return found or ([unit.main_pid] if unit.main_pid else [])

    def holds(self, pids: Sequence[int], inode: int) -> bool:
        """Say whether one of these processes has the socket open."""
        return bool(owners([inode], pids, self.proc)[inode])

    def holder(self, inode: int) -> tuple[int, str, str] | None:
        """Return pid, command and unit of a process that has the socket open; None when it can't be seen."""
        found = owners([inode], None, self.proc)[inode]
        if not found:
            return None
        return found[0], command_of(found[0], self.proc), unit_of_pid(found[0], self.proc) or ""

    def names(self, pids: Sequence[int]) -> set[str]:
        """Return the names of these processes."""
        return names_of(pids, self.proc)

    def cpu(self, pids: Sequence[int]) -> float:
        """Return the CPU seconds these processes have used (where systemd does no accounting)."""
        ticks = 0
        for pid in pids:
            try:
                stat = Path(f"{self.proc}/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(stat[11]) + int(stat[12])
            except (OSError, IndexError, ValueError):
                continue
        return ticks / os.sysconf("SC_CLK_TCK")

    def oom_kills(self, unit: UnitState) -> int | None:
        """Return how many of the unit's processes were killed for memory."""
        return oom_kills(unit.control_group)

    def ask(self, key: str, host: str, port: int) -> None:
        """Start asking in a thread, which ends with the process."""

        def run() -> None:
            self._answers[key] = Probe(host, port, self.options).run()

        thread = threading.Thread(target=run, name=f"probe-{key}", daemon=True)
        self._asked[key] = thread
        thread.start()

    def asking(self, key: str) -> bool:
        """Say whether the answer is still to come."""
        thread = self._asked.get(key)
        return thread is not None and thread.is_alive()

    def answer(self, key: str) -> ProbeResult | None:
        """Return an answer once."""
        return self._answers.pop(key, None)


@dataclass
class Outcome:
    """What a slice (or a whole wait) found; state carries it to the next slice."""

    servers: list[dict[str, Any]]
    done: bool
    state: dict[str, Any] = field(default_factory=dict)


class Watch:
    """Many servers, one loop."""

    def __init__(
        self,
        world: World,
        instances: Sequence[Instance],
        host: str,
        invocations: Mapping[str, str] | None = None,
        state: Mapping[str, Any] | None = None,
        explain: Explain | None = None,
        place: Place | None = None,
    ) -> None:
        self.explain, self.place = explain, place
        self.world, self.instances, self.host = world, list(instances), host
        self.invocations = {short(unit): value for unit, value in (invocations or {}).items()}
        carried = (state or {}).get("units", {})
        self.memories = {item.unit: memory_from_dict(carried.get(item.unit, {})) for item in instances}
        self.single = False  # one look: nothing gets more decided
        self.asked_at: dict[str, float] = {}
        self.asked_for: dict[str, str] = {}

    def state(self) -> dict[str, Any]:
        """Return all that the next slice needs."""
        return {
            "journal": self.world.follower.state(),
            "units": {unit: memory.to_dict() for unit, memory in self.memories.items()},
        }

    def look(self) -> dict[str, Look]:
        """Take one sample of every unit."""
        world = self.world
        units = world.units([item.unit for item in self.instances])
        for item in self.instances:
            memory = self.memories[item.unit]
            choose_invocation(memory, units[item.unit], self.invocations.get(short(item.unit), ""))
            world.follower.follow(item.unit, memory.invocation)
        world.follower.poll()
        sockets = world.sockets([item.port for item in self.instances])
        return {item.unit: self._sample(item, units[item.unit], sockets) for item in self.instances}

    def _sample(self, item: Instance, unit: UnitState, sockets: Sequence[Listener]) -> Look:
        world = self.world
        pids = world.pids(unit) if unit.running or unit.main_pid else []
        listener = answering(sockets, item.probe_host, item.port)
        port, holder = "none", ""
        if listener is not None:
            if pids and world.holds(pids, listener.inode):
                port = "ours"
            else:
                found = world.holder(listener.inode)
                if found is None:
                    port = "unknown"
                elif found[2] == item.unit:
                    port = "ours"
                else:
                    port = "foreign"
                    holder = f"pid {found[0]}" + (f" ({found[1]})" if found[1] else "")
                    holder += f" of unit {found[2]}" if found[2] else ""
        memory = self.memories[item.unit]
        look = Look(
            now=world.now(),
            unit=unit,
            digest=world.follower.digest(item.unit),
            port=port,
            holder=holder,
            compiling=bool(COMPILERS & world.names(pids)),
            cpu_seconds=unit.cpu_seconds or world.cpu(pids),
            oom_kills=world.oom_kills(unit),
        )
        note_progress(memory, look)
        return look

    def collect(self, looks: Mapping[str, Look], ask: bool = True) -> bool:
        """Take the answers that came and ask the servers whose turn it is; True while answers are to come."""
        world, pending = self.world, False
        for item in self.instances:
            memory, look = self.memories[item.unit], looks[item.unit]
            answer = world.answer(item.unit)
            if answer is not None and self.asked_for.get(item.unit) == look.unit.invocation_id:
                memory.take(answer, world.now())
                self.asked_at[item.unit] = world.now()
            if world.asking(item.unit):
                pending = True
                continue
            known = memory.answer
            due = world.now() - self.asked_at.get(item.unit, float("-inf")) >= PROBE_EVERY
            if ask and look.port == "ours" and look.unit.running and due and not (known and known.ok):
                self.asked_for[item.unit] = look.unit.invocation_id
                self.asked_at[item.unit] = world.now()
                world.ask(item.unit, item.probe_host, item.port)
                pending = True
        return pending

    def verdicts(self, looks: Mapping[str, Look], limits: Limits | None) -> dict[str, Verdict]:
        """Judge every unit."""
        found = {unit: judge(self.memories[unit], look, limits) for unit, look in looks.items()}
        for unit, verdict in found.items():
            self.memories[unit].state, self.memories[unit].terminal = verdict.state, verdict.terminal
        return found

    def servers(self, looks: Mapping[str, Look], verdicts: Mapping[str, Verdict]) -> list[dict[str, Any]]:
        """Describe every server."""
        for _try in range(SETTLE):  # a server may answer a moment before its ready line is in the journal
            if all(verdicts[unit].state != "ready" or _told(look) for unit, look in looks.items()):
                break
            self.world.sleep(0.1)
            self.world.follower.poll()
        whys = self._whys(looks, verdicts)
        servers = [
            {
                **describe(item, self.memories[item.unit], looks[item.unit], verdicts[item.unit], self.host),
                "diagnosis": whys.get(item.unit),
            }
            for item in self.instances
        ]
        ready = {server["unit"] for server in servers if server["state"] == "ready"}
        asked = [item for item in self.instances if item.unit in ready and item.uuid]
        nan = {unit: look.digest.nan for unit, look in looks.items() if look.digest.nan}
        return stand_out(servers, self.place(asked) if self.place and asked else {}, nan)

    def _whys(self, looks: Mapping[str, Look], verdicts: Mapping[str, Verdict]) -> dict[str, dict[str, Any]]:
        """Explain the servers that are decided and not well."""
        bad = [
            item
            for item in self.instances
            if verdicts[item.unit].state in FAILED and self._decided(verdicts[item.unit])
        ]
        if not bad or self.explain is None:
            return {}
        return self.explain(
            [Case(item, self.memories[item.unit], looks[item.unit], verdicts[item.unit]) for item in bad]
        )

    def _decided(self, verdict: Verdict) -> bool:
        return verdict.terminal or self.single

    def once(self, timeout: float) -> Outcome:
        """Look once; a server that listens is asked, and all are given timeout seconds together."""
        self.single = True
        looks = self.look()
        deadline = self.world.now() + timeout
        pending = self.collect(looks)
        while pending and self.world.now() < deadline:
            self.world.sleep(0.05)
            pending = self.collect(looks, ask=False)
        for item in self.instances:
            if self.world.asking(item.unit):
                self.memories[item.unit].take(ProbeResult(reason=f"no answer within {timeout:g} s"), self.world.now())
        verdicts = self.verdicts(looks, None)
        for unit, look in looks.items():
            if verdicts[unit].state == "starting" and look.unit.restarts:
                verdicts[unit] = replace(verdicts[unit], reason=self._loops(unit, look))
        return Outcome(self.servers(looks, verdicts), True, self.state())

    def _loops(self, unit: str, look: Look) -> str:
        """Say why systemd had to start a unit again that looks as if it were merely starting."""
        last = self.world.follower.before(unit)
        why = [*last.error_lines()[:1], *([last.exit] if last.exit else [])]
        times = "once" if look.unit.restarts == 1 else f"{look.unit.restarts} times"
        return f"systemd has restarted it {times}" + (f", last after: {why[0]}" if why else "")

    def wait(self, limits: Limits, seconds: float | None = None, patience: float = 60.0) -> Outcome:
        """Look until all is decided, or for about so many seconds (None: as long as it takes).

        A slice returns as soon as another server is lost, and stays up to patience longer for an
        answer that is on its way: asked anew in every slice, a slow server would never get to answer.
        """
        end = None if seconds is None else self.world.now() + seconds
        heard: float | None = None
        lost = {unit for unit, memory in self.memories.items() if memory.terminal and memory.state != "ready"}
        while True:
            looks = self.look()
            pending = self.collect(looks)
            verdicts = self.verdicts(looks, limits)
            done = all(verdict.terminal for verdict in verdicts.values())
            news = {unit for unit, item in verdicts.items() if item.terminal and item.state in FAILED} - lost
            now = self.world.now()
            heard = now if news and heard is None else heard
            late = heard is not None and now - heard >= GRACE
            over = end is not None and (late or now >= end + patience or (not pending and (bool(news) or now >= end)))
            if done or over:
                return Outcome(self.servers(looks, verdicts), done, self.state())
            self._pause(looks)

    def _pause(self, looks: Mapping[str, Look]) -> None:
        """Sleep until the next look, or until an answer arrives."""
        until = self.world.now() + INTERVAL
        waiting = [unit for unit in looks if self.world.asking(unit)]
        while self.world.now() < until:
            self.world.sleep(0.05 if waiting else INTERVAL)
            if waiting and not all(self.world.asking(unit) for unit in waiting):
                return


def make_host(
    runner: Runner, source: LineSource, options: ProbeOptions, state: Mapping[str, Any] | None = None
) -> Host:
    """Build the real world, following the journal from where the last slice stopped."""
    return Host(runner, Follower(source, (state or {}).get("journal")), options)


def _told(look: Look) -> bool:
    """Say whether the ready line was read, or is not to be expected any more."""
    return look.digest.phase in ("none", "ready") or look.now - look.unit.started > FRESH
