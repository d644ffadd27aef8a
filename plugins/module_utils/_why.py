# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The diagnosis of servers on this host: their journals and the facts, many at once."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import Diagnosis, diagnose
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_log import Log, Reader
from ansible_collections.gpufleet.sglang.plugins.module_utils._drain import MOVING
from ansible_collections.gpufleet.sglang.plugins.module_utils._facts import Seen, collect
from ansible_collections.gpufleet.sglang.plugins.module_utils._health import Look, Memory, Verdict, exit_of
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._journal import LineSource
from ansible_collections.gpufleet.sglang.plugins.module_utils._listeners import command_of
from ansible_collections.gpufleet.sglang.plugins.module_utils._options import EngineOptions, OptionsFileError
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe import Probe, ProbeOptions
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import cgroup_pids

SECONDS = 8.0  # one journal may take this long to read
PARSED = 3000  # lines but traffic that are parsed from the beginning, and as many from the end
MAX_BYTES = 4000  # of one line
BASE = ("journalctl", "--quiet", "--no-pager", "--all", "-o", "cat")
IDLE_AFTER = 30.0  # s without progress
_UNANSWERED = re.compile(r"no answer within|was not complete within")


@dataclass
class Case:
    """One server to explain."""

    instance: Instance
    memory: Memory
    look: Look
    verdict: Verdict


def read_journal(source: LineSource, unit: str, invocation: str, seconds: float = SECONDS) -> Log:
    """Read one invocation's journal (the unit's lines and systemd's own about it), however long it is."""
    matches = [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}", f"UNIT={unit}", "_PID=1"]
    lines = source.lines([*BASE, "--boot", *matches], seconds=seconds)
    try:
        return read_lines(lines)
    finally:
        close: Callable[[], None] | None = getattr(lines, "close", None)
        if close:
            close()


def read_lines(lines: Iterable[bytes]) -> Log:
    """Parse lines; traffic costs next to nothing, and of a very long log the first and the last lines are parsed."""
    reader = Reader()
    rest: deque[bytes] = deque(maxlen=PARSED)
    count = 0
    for raw in lines:
        head = raw[:64]
        # a server's traffic, most of any long journal, told without a pattern
        if (
            b"Decode batch, #" in head
            or b"Prefill batch, #" in head
            or (raw.endswith(b'" 200 OK') and b"INFO: " in head)
        ):
            continue
        count += 1
        if count <= PARSED:
            reader.feed(raw[:MAX_BYTES].decode("utf-8", "replace"))
        else:
            rest.append(raw[:MAX_BYTES])
    for raw in rest:
        reader.feed(raw.decode("utf-8", "replace"))
    return reader.finish()


class Explainer:
    """Explains servers; results are kept in their memories, so that no slice does it again."""

    def __init__(self, runner: Runner, source: LineSource, config_dir: str = "/etc/sglang") -> None:
        self.runner, self.source, self.config_dir = runner, source, config_dir
        self._options: dict[str, EngineOptions | None] = {}

    def __call__(self, cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
        """Return the diagnoses by unit."""
        found: dict[str, dict[str, Any]] = {}
        todo = []
        for case in cases:
            known = case.memory.diagnosis
            if known and known.get("of") == _key(case):
                found[case.instance.unit] = {key: value for key, value in known.items() if key != "of"}
            else:
                todo.append(case)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not todo:
                        return
                    case = todo.pop()
                said = self.explain(case)
                if said:
                    with lock:
                        found[case.instance.unit] = said.to_dict()
                        case.memory.diagnosis = {**said.to_dict(), "of": _key(case)}

        threads = [threading.Thread(target=work, daemon=True) for _number in range(min(2, len(todo)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def explain(self, case: Case) -> Diagnosis | None:
        """Return why one server is as it is."""
        memory, look, unit = case.memory, case.look, case.instance.unit
        exit_code, exit_status = exit_of(look, memory.invocation)
        same = look.unit.invocation_id == memory.invocation
        waited = look.now - memory.progress_at
        seen = Seen(
            failed=case.verdict.state != "ready",
            phase="ready" if case.verdict.state == "ready" else look.digest.phase,
            result=look.digest.result or (look.unit.result if same else ""),
            exit_code=exit_code,
            exit_status=exit_status,
            restarts=look.unit.restarts,
            started=look.unit.started if same else 0.0,
            now=look.now,
            oom_kills=memory.oom_kills,
            port_holder=look.holder if look.port == "foreign" else "",
            compiling=look.compiling,
            idle=case.verdict.state == "stalled" and waited >= IDLE_AFTER,
            wrong=(memory.probe or {}).get("wrong") or {},
            children_dead=self.children_dead(case),
            standing=standing(case) if case.verdict.state in ("unhealthy", "stalled") and look.port == "ours" else "",
            symptom=case.verdict.reason if case.verdict.state == "unhealthy" else "",
        )
        log = read_journal(self.source, unit, memory.invocation) if memory.invocation else Log()
        return diagnose(log, collect(self.runner, case.instance, seen), self.options(case.instance))

    def children_dead(self, case: Case) -> list[str]:
        """Return the processes that a server which once was ready lacks: their titles begin with sglang::."""
        if case.look.digest.phase != "ready" or not case.look.unit.running:
            return []
        titles = [command_of(pid) for pid in cgroup_pids(case.look.unit.control_group)]
        if not any("sglang" in title for title in titles):
            return []
        return [
            name for name in ("scheduler", "detokenizer") if not any(f"sglang::{name}" in title for title in titles)
        ]

    def options(self, instance: Instance) -> EngineOptions | None:
        """Return the option list of the engine a server runs, None when it is not there."""
        venv = str(Path(instance.argv[0]).parent.parent) if instance.argv else ""
        if venv not in self._options:
            self._options[venv] = _find_options(self.config_dir, venv)
        return self._options[venv]


def standing(case: Case, pause: float = 1.0) -> str:
    """Look twice at what the engine says it does: requests that run while no token comes are a stall.

    So is a server that says nothing of its load, as one with a hung scheduler does, and left a request unanswered.
    """
    probe = Probe(case.instance.probe_host, case.instance.port, ProbeOptions())
    first = _load(probe)
    if not first and _UNANSWERED.search(case.verdict.reason) and not case.look.compiling:
        return case.verdict.reason
    if not first or not first.get("num_running_reqs"):
        return ""
    time.sleep(pause)
    second = _load(probe)
    if second and all(first.get(name) == second.get(name) for name in MOVING):
        return f"{first['num_running_reqs']} requests run and no token came in {pause:g} s"
    return ""


def _load(probe: Probe) -> dict[str, Any]:
    loads = probe.document("/v1/loads").get("loads")
    return loads[0] if isinstance(loads, list) and loads and isinstance(loads[0], dict) else {}


def _find_options(config_dir: str, venv: str) -> EngineOptions | None:
    for path in sorted(Path(config_dir).glob("options-*.json")):
        try:
            options = EngineOptions.load(str(path))
        except OptionsFileError:
            continue
        if options.venv == venv:
            return options
    return None


def _key(case: Case) -> str:
    return f"{case.memory.invocation}/{case.verdict.state}"
