# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The units of a fleet: install their files, start what must start, put back what last worked."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from ansible_collections.gpufleet.sglang.plugins.module_utils import _drain, _kept, _record
from ansible_collections.gpufleet.sglang.plugins.module_utils._environment import DIGEST_VARIABLE
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import (
    FileChange,
    FileSpec,
    file_changes,
    read_text,
    remove_files,
    write_files,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import UnitState, show

KNOWN_GOOD = "known-good"


class UnitsError(Exception):
    """systemd refused something; the message names the unit, systemd's words and the remedy."""


@dataclass(frozen=True)
class Server:
    """One unit with the files that belong to it."""

    unit: str
    gpu: int
    files: tuple[FileSpec, ...] = ()
    digest: str = ""  # of the wanted configuration
    instance: Instance | None = None


@dataclass(frozen=True)
class Decision:
    """What happens to one unit: action is none, start or restart; reason is for people."""

    unit: str
    action: str
    reason: str = ""


@dataclass
class Outcome:
    """What a call did, or would do in check mode."""

    changes: list[FileChange] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    enabled: list[str] = field(default_factory=list)
    known_good: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    disabled: list[str] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)  # InvocationID by unit, before a start

    @property
    def changed(self) -> bool:
        """True when anything is different afterwards."""
        acts = any(decision.action != "none" for decision in self.decisions)
        return bool(
            self.changes or self.removed or self.enabled or self.known_good or self.restored or self.disabled or acts
        )


def running_digest(pid: int, proc: str = "/proc") -> str | None:
    """Return the configuration digest a process was started with; None when it can't be read."""
    if pid <= 0:
        return None
    try:
        data = Path(f"{proc}/{pid}/environ").read_bytes()
    except OSError:
        return None
    for item in data.split(b"\0"):
        name, _sep, value = item.partition(b"=")
        if name == DIGEST_VARIABLE.encode():
            return value.decode("ascii", errors="replace")
    return None


def decide(state: UnitState, wanted: str, running: str | None, unhealthy: str = "") -> Decision:
    """Say what must happen to one unit so that it runs the wanted configuration.

    wanted is the digest of the wanted configuration ("" = whatever is installed), running that of
    the process; unhealthy says why a running server is not trusted ("" = it is).
    """
    if not state.running:
        reason = "not running" if state.exists else "new"
        if state.active_state == "failed":
            reason = f"failed ({state.result})"
        elif state.sub_state == "auto-restart":
            reason = "crashed, waiting for systemd to start it again"
        return Decision(state.unit, "start", reason)
    if wanted and running != wanted:
        return Decision(state.unit, "restart", "runs another configuration than the one wanted")
    if unhealthy:
        return Decision(state.unit, "restart", unhealthy)
    return Decision(state.unit, "none")


class Fleet:
    """Acts on the units of one host.

    runner runs systemctl; config_dir holds known-good copies; check_mode predicts and touches
    nothing; digest_of reads a process's configuration.
    """

    def __init__(
        self,
        runner: Runner,
        config_dir: str,
        target: str = "sglang.target",
        check_mode: bool = False,
        digest_of: Callable[[int], str | None] = running_digest,
        clock_offset: float | None = None,
    ) -> None:
        self.runner = runner
        self.config_dir = config_dir
        self.target = target
        self.check_mode = check_mode
        self.digest_of = digest_of
        # what to add to systemd's monotonic seconds to get a file's time
        self.clock_offset = time.time() - time.monotonic() if clock_offset is None else clock_offset

    # -- what the module's states call ------------------------------------------------------

    def start(self, servers: Sequence[Server], shared: Sequence[FileSpec], unhealthy: Mapping[str, str]) -> Outcome:
        """Install the files, then start or restart exactly the units that need it, all at once."""
        units = [server.unit for server in servers]
        states = show(self.runner, units)
        if not self.check_mode and any(_stale(state) for state in states.values()):
            self._systemctl("daemon-reload")  # a drop-in counts from here on
            states = show(self.runner, units)
        masked = [unit for unit, state in states.items() if state.load_state == "masked"]
        if masked:
            names = " ".join(masked)
            remedy = f"systemctl unmask {names}, or take the GPU out of sglang_server_gpus"
            raise UnitsError(f"masked by hand, so nothing was touched: {names}. Either {remedy}")
        out = Outcome(changes=file_changes([*shared, *(spec for server in servers for spec in server.files)]))
        out.removed = [path for server in servers if server.files for path in self._unwanted(server)]
        for server in servers:
            state = states[server.unit]
            trouble = unhealthy.get(server.unit, "") or self._changed_under_it(server, state, out.changes)
            out.decisions.append(decide(state, server.digest, self.digest_of(state.main_pid), trouble))
        reload = any(_is_unit(change.spec.path) for change in out.changes) or any(map(_stale, states.values()))
        disabled = [server.unit for server in servers if states[server.unit].unit_file_state != "enabled"]
        if shared and show(self.runner, [self.target])[self.target].unit_file_state != "enabled":
            disabled.append(self.target)
        out.enabled = disabled
        out.before = {unit: state.invocation_id for unit, state in states.items()}
        if self.check_mode:
            return out
        self._verify([change.spec for change in out.changes if _is_unit(change.spec.path)])
        write_files([change.spec for change in out.changes])
        remove_files(out.removed)
        if reload:
            self._systemctl("daemon-reload")
        if disabled:
            self._systemctl("enable", *disabled)
        self._launch(out.decisions)
        return out

    def keep(self, servers: Sequence[Server]) -> Outcome:
        """Remember the installed files of these units as known good; nothing is written when they are the same."""
        out = Outcome()
        states = show(self.runner, [server.unit for server in servers])
        for server in servers:
            installed = [(path, text) for path in self._own_files(server) if (text := read_text(path)) is not None]
            if not self.check_mode:
                self._in_service(server, states[server.unit])
                _kept.keep(self.config_dir, server.gpu, installed)
            specs = [
                FileSpec(str(self._kept(server.gpu) / os.path.basename(path)), text, 0o600, secret=True)
                for path, text in installed
            ]
            wanted = {spec.path for spec in specs}
            stale = [str(path) for path in self._kept(server.gpu).glob("*") if str(path) not in wanted]
            changes = file_changes(specs)
            if changes or stale:
                out.known_good.append(server.unit)
                if not self.check_mode:
                    self._kept(server.gpu).mkdir(parents=True, exist_ok=True, mode=0o700)
                    os.chmod(self._kept(server.gpu).parent, 0o700)
                    write_files([change.spec for change in changes])
                    remove_files(stale)
        return out

    def restore(self, servers: Sequence[Server]) -> Outcome:
        """Put back what was last known good and start it; a unit that never was good is stopped and disabled.

        These units have just failed their gate: they serve nobody, so they are killed rather than drained
        (an SGLang that could not bind its port ignores SIGTERM for two minutes).
        """
        out = Outcome()
        states = show(self.runner, [server.unit for server in servers])
        good = [server for server in servers if self._kept_files(server)]
        bad = [server for server in servers if not self._kept_files(server)]
        if self.check_mode:
            out.restored = [server.unit for server in good]
            out.disabled = [server.unit for server in bad if states[server.unit].exists]
            return out
        self._kill([server.unit for server in servers if states[server.unit].exists])
        for server in good:
            kept = self._kept_files(server)
            write_files(list(kept))
            remove_files(path for path in self._own_files(server) if path not in {spec.path for spec in kept})
            out.restored.append(server.unit)
        self._systemctl("daemon-reload")
        for server in bad:
            if states[server.unit].exists:
                self._systemctl("disable", server.unit)
                out.disabled.append(server.unit)
        out.before = {server.unit: states[server.unit].invocation_id for server in good}
        out.decisions = [
            Decision(server.unit, "start", "restored to its last known good configuration") for server in good
        ]
        self._launch(out.decisions)
        return out

    def stop(self, units: Sequence[str]) -> Outcome:
        """Begin to stop units; each drains its requests (settled() tells when they are gone)."""
        states = show(self.runner, units)
        out = Outcome()
        for unit in units:
            state = states[unit]
            if state.exists and (state.active_state not in ("inactive", "failed")):
                out.decisions.append(Decision(unit, "stop", "drains its requests first"))
        out.before = {unit: state.invocation_id for unit, state in states.items()}
        names = [decision.unit for decision in out.decisions]
        if names and not self.check_mode:
            self._systemctl("stop", "--no-block", *names)
        return out

    def remove(self, servers: Sequence[Server], whole: bool = False) -> Outcome:
        """Disable units that have stopped and take away their files, known-good copies included.

        whole says that no server stays: then the target goes too.
        """
        out = Outcome()
        units = [server.unit for server in servers] + ([self.target] if whole else [])
        states = show(self.runner, units)
        out.disabled = [unit for unit in units if states[unit].unit_file_state == "enabled"]
        paths = [path for server in servers for path in self._own_files(server)]
        paths += [_record.record_file(self.config_dir, server.gpu) for server in servers]
        paths += [f"/etc/systemd/system/{self.target}"] if whole else []
        out.removed = [path for path in paths if os.path.lexists(path)]
        out.removed += [str(self._kept(server.gpu)) for server in servers if self._kept(server.gpu).is_dir()]
        if self.check_mode:
            return out
        if out.disabled:
            self._systemctl("disable", *out.disabled)
        if whole and states[self.target].active_state != "inactive":
            self._systemctl("stop", self.target)
        remove_files(paths)
        for server in servers:
            shutil.rmtree(self._kept(server.gpu), ignore_errors=True)
            if server.instance:
                _drain.unmark(server.instance.port)
        if out.removed:
            self._systemctl("daemon-reload")
            # rc 1 when a unit was not loaded at all: nothing to forget then
            self.runner.run(["systemctl", "reset-failed", *units])
        return out

    def give_up(self, units: Sequence[str]) -> None:
        """End at once units that are being stopped and do not get on; the job that stops them goes on."""
        if units:
            self.runner.run(["systemctl", "kill", "--signal=SIGKILL", *units])

    def settled(self, before: Mapping[str, str], actions: Mapping[str, str]) -> dict[str, UnitState]:
        """Return the units whose job is done: a start has another InvocationID, a stop is no longer active."""
        states = show(self.runner, list(before))
        done = {}
        for unit, state in states.items():
            if state.job:
                continue
            if actions.get(unit) == "stop":
                if state.active_state in ("inactive", "failed"):
                    done[unit] = state
            elif state.invocation_id != before[unit] or not state.running:
                done[unit] = state
        return done

    # -- details ----------------------------------------------------------------------------

    def _in_service(self, server: Server, state: UnitState) -> None:
        """Write down what a server that has answered was started with, for the next look at it."""
        known = _record.read_record(self.config_dir, server.gpu)
        if state.invocation_id and (known is None or known.invocation != state.invocation_id):
            item = server.instance
            model = _record.model_state(item.argv, item.environment) if item else ""
            record = _record.Record(state.invocation_id, _record.drop_ins(state), model)
            _record.write_record(self.config_dir, server.gpu, record)

    def _launch(self, decisions: Sequence[Decision]) -> None:
        units = [decision.unit for decision in decisions if decision.action in ("start", "restart")]
        if not units:
            return
        # A unit that ran into its start limit refuses even our start; rc 1 when it is not loaded yet.
        self.runner.run(["systemctl", "reset-failed", *units])
        self._systemctl("restart", "--no-block", *units)
        # Active, so that a stop of the target reaches its units; without its dependencies, so that
        # it does not start servers that are not due yet.
        self._systemctl("start", "--job-mode=ignore-dependencies", self.target)

    def _kill(self, units: Sequence[str]) -> None:
        if not units:
            return
        # Stop first: then the kill is the end of a stop, not a crash that Restart= answers.
        self._systemctl("stop", "--no-block", *units)
        self.give_up(units)
        self._systemctl("stop", *units, timeout=90)

    def _systemctl(self, *args: str, timeout: float = 60.0) -> None:
        done = self.runner.run(["systemctl", "--no-ask-password", *args], timeout=timeout)
        if done.rc != 0:
            raise UnitsError(
                f"systemctl {' '.join(args)} failed (rc {done.rc}): {(done.stderr or done.stdout).strip()}"
            )

    def _verify(self, specs: Sequence[FileSpec]) -> None:
        """Let systemd read the new unit files before they replace the old ones."""
        units = [spec for spec in specs if spec.path.endswith(".service")]
        if not units:
            return
        with tempfile.TemporaryDirectory(prefix="gpufleet-verify-") as folder:
            paths = []
            for spec in units:
                path = os.path.join(folder, os.path.basename(spec.path))
                Path(path).write_text(spec.content, encoding="utf-8")
                paths.append(path)
            done = self.runner.run(["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", *paths])
        if done.rc not in (0, 127):
            lines = [line.replace(folder + "/", "") for line in done.stderr.splitlines() if line.strip()]
            raise UnitsError(
                "systemd does not accept the new unit files, nothing was changed: " + "; ".join(lines[-8:])
            )

    def _unwanted(self, server: Server) -> list[str]:
        """Our files of a server that its configuration no longer has: a secret must not outlive its variable."""
        wanted = {spec.path for spec in server.files}
        return [path for path in self._own_files(server) if path not in wanted and os.path.lexists(path)]

    def _changed_under_it(self, server: Server, state: UnitState, changes: Sequence[FileChange]) -> str:
        """Say what a running server was started with that is otherwise now; "" when nothing is."""
        if not state.running or not state.started:
            return ""
        own = [change.spec.path for change in changes if change.before is not None and change.spec in server.files]
        edited = _record.edited_before(own, state, self.clock_offset)
        if edited:
            return f"{edited[0]} was edited by hand before its start"
        item = server.instance
        model = _record.model_state(item.argv, item.environment) if item else ""
        known = _record.read_record(self.config_dir, server.gpu)
        found = _record.since_start(known, state, _record.drop_ins(state), model, self.clock_offset)
        return found[0].text() if found else ""

    def _kept(self, gpu: int) -> Path:
        return Path(self.config_dir) / KNOWN_GOOD / str(gpu)

    def _own_files(self, server: Server) -> list[str]:
        base = Path(self.config_dir)
        return [
            str(base / f"{server.gpu}.env"),
            str(base / f"{server.gpu}.secrets"),
            str(base / f"{server.gpu}.json"),
            f"/etc/systemd/system/{server.unit}",
        ]

    def _kept_files(self, server: Server) -> list[FileSpec]:
        specs = []
        for path in self._own_files(server):
            text = read_text(str(self._kept(server.gpu) / os.path.basename(path)))
            if text is not None:
                specs.append(FileSpec(path, text, 0o644 if _is_unit(path) else 0o600, secret=path.endswith(".secrets")))
        return specs if any(_is_unit(spec.path) for spec in specs) else []


def _is_unit(path: str) -> bool:
    return path.endswith((".service", ".target"))


def _stale(state: UnitState) -> bool:
    """Say whether systemd has to read files again; of a drop-in's new folder it knows nothing by itself."""
    return state.need_daemon_reload or set(_record.drop_ins(state)) != set(state.drop_ins)
