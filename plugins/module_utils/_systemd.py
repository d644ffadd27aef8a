# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Reading units: one systemctl call for many units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner

PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "Result",
    "InvocationID",
    "NRestarts",
    "MainPID",
    "ExecMainCode",
    "ExecMainStatus",
    "ExecMainStartTimestampMonotonic",
    "ExecMainExitTimestampMonotonic",
    "CPUUsageNSec",
    "ControlGroup",
    "NeedDaemonReload",
    "FragmentPath",
    "Job",
    "DropInPaths",
)
COMPILERS = frozenset(("nvcc", "cicc", "ptxas", "ninja", "cc1plus", "cudafe++", "fatbinary"))


class SystemdError(Exception):
    """systemctl could not be asked; the message says what it answered."""


@dataclass(frozen=True)
class UnitState:
    """One unit as systemd sees it (systemctl show); times are CLOCK_MONOTONIC seconds, 0 when unset."""

    unit: str
    load_state: str = "not-found"
    active_state: str = "inactive"
    sub_state: str = "dead"
    unit_file_state: str = ""
    result: str = "success"
    invocation_id: str = ""
    restarts: int = 0
    main_pid: int = 0
    exit_code: int = 0  # ExecMainCode: CLD_EXITED 1, CLD_KILLED 2, CLD_DUMPED 3
    exit_status: int = 0  # exit status, or the signal's number
    started: float = 0.0
    exited: float = 0.0
    cpu_seconds: float = 0.0
    control_group: str = ""
    need_daemon_reload: bool = False
    fragment_path: str = ""
    job: bool = False  # a start or stop job is queued or runs
    drop_ins: tuple[str, ...] = ()

    @property
    def exists(self) -> bool:
        """True when systemd has a unit file for it."""
        return self.load_state not in ("not-found", "")

    @property
    def running(self) -> bool:
        """True while a main process should be there (starting included, stopping not)."""
        return self.active_state in ("active", "activating", "reloading") and self.sub_state != "auto-restart"


def parse_show(text: str) -> dict[str, UnitState]:
    """Turn the output of `systemctl show A B ... -p ...` into states by unit name."""
    states = {}
    for block in text.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if not values.get("Id"):
            continue
        states[values["Id"]] = UnitState(
            unit=values["Id"],
            load_state=values.get("LoadState", ""),
            active_state=values.get("ActiveState", ""),
            sub_state=values.get("SubState", ""),
            unit_file_state=values.get("UnitFileState", ""),
            result=values.get("Result", ""),
            invocation_id=values.get("InvocationID", ""),
            restarts=_int(values.get("NRestarts")),
            main_pid=_int(values.get("MainPID")),
            exit_code=_int(values.get("ExecMainCode")),
            exit_status=_int(values.get("ExecMainStatus")),
            started=_int(values.get("ExecMainStartTimestampMonotonic")) / 1e6,
            exited=_int(values.get("ExecMainExitTimestampMonotonic")) / 1e6,
            cpu_seconds=_int(values.get("CPUUsageNSec")) / 1e9,
            control_group=values.get("ControlGroup", ""),
            need_daemon_reload=values.get("NeedDaemonReload") == "yes",
            fragment_path=values.get("FragmentPath", ""),
            job=values.get("Job", "") not in ("", "0"),
            drop_ins=tuple(values.get("DropInPaths", "").split()),
        )
    return states


def show(runner: Runner, units: Sequence[str]) -> dict[str, UnitState]:
    """Ask systemd for the state of units; a unit it does not know has load_state not-found.

    Raises SystemdError when systemctl itself fails (no systemd as PID 1, no bus).
    """
    if not units:
        return {}
    done = runner.run(["systemctl", "show", "--no-pager", "-p", ",".join(PROPERTIES), "--", *units])
    if done.rc != 0:
        raise SystemdError(f"systemctl show failed (rc {done.rc}): {(done.stderr or done.stdout).strip()}")
    states = parse_show(done.stdout)
    return {unit: states.get(unit, UnitState(unit=unit)) for unit in units}


def cgroup_pids(control_group: str, root: str = "/sys/fs/cgroup") -> list[int]:
    """Return the pids in a unit's control group and its children; [] when it is gone.

    Looks in cgroup2 and, where a machine is in hybrid or legacy mode, in systemd's v1 hierarchy.
    """
    pids: list[int] = []
    if not control_group:
        return pids
    for base in (root, f"{root}/unified", f"{root}/systemd"):
        folder = Path(base + control_group)
        if not folder.is_dir():
            continue
        for file in sorted(folder.rglob("cgroup.procs")):
            try:
                pids.extend(int(line) for line in file.read_text().split())
            except OSError:  # the group went away between listing and reading
                continue
        if pids:
            break
    return pids


def names_of(pids: Sequence[int], proc: str = "/proc") -> set[str]:
    """Return the names of processes, those that are gone left out."""
    found = set()
    for pid in pids:
        try:
            found.add(Path(f"{proc}/{pid}/comm").read_text().strip())
        except OSError:
            continue
    return found


def unit_of_pid(pid: int, proc: str = "/proc") -> str | None:
    """Return the systemd unit (service or scope) a process belongs to, or None when there is none to see."""
    try:
        text = Path(f"{proc}/{pid}/cgroup").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        for part in reversed(line.rsplit(":", 1)[-1].split("/")):
            if part.endswith((".service", ".scope")):
                return part
    return None


def _int(text: str | None) -> int:
    # "[not set]" and 18446744073709551615 both mean: no figure
    if not text or not text.lstrip("-").isdigit():
        return 0
    value = int(text)
    return 0 if value >= 2**64 - 1 else value
