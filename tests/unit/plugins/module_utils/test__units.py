"""Units: what starts, what restarts, what is put back."""

from __future__ import annotations

import os

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _units
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileSpec
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import UnitState
from ansible_collections.gpufleet.sglang.plugins.module_utils._units import (
    Fleet,
    Server,
    UnitsError,
    decide,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._units_result import outcome_result, wait_settled

U = "sglang@0.service"


def state(**kwargs):
    base = {"load_state": "loaded", "active_state": "active", "sub_state": "running", "unit_file_state": "enabled"}
    return UnitState(U, **{**base, **kwargs})


@pytest.mark.parametrize(
    ("unit", "wanted", "running", "unhealthy", "action"),
    [
        (UnitState(U), "d1", None, "", "start"),
        (state(active_state="inactive", sub_state="dead"), "d1", None, "", "start"),
        (state(active_state="failed", sub_state="failed", result="exit-code"), "d1", None, "", "start"),
        (state(active_state="activating", sub_state="auto-restart"), "d1", None, "", "start"),
        (state(), "d1", "d1", "", "none"),
        (state(), "d2", "d1", "", "restart"),
        (state(), "d1", None, "", "restart"),  # started by hand, or by something before us
        (state(), "", "d1", "", "none"),  # the start playbook wants no particular configuration
        (state(), "d1", "d1", "answers nothing", "restart"),
        (state(active_state="activating", sub_state="start"), "d1", "d1", "", "none"),
    ],
)
def test_decide(unit, wanted, running, unhealthy, action):
    assert decide(unit, wanted, running, unhealthy).action == action


SHOW = """Id={unit}
ExecMainStartTimestampMonotonic=5000000
DropInPaths={drop_in}
LoadState={load}
ActiveState={active}
SubState={sub}
UnitFileState={enabled}
InvocationID={invocation}
MainPID={pid}
Job={job}
"""


class World:
    """A systemd that remembers what it was told."""

    def __init__(self, runner, tmp_path, monkeypatch):
        self.runner = runner
        self.units = {}
        self.etc = tmp_path / "etc"
        self.system = tmp_path / "system"
        own = Fleet._own_files
        # unit files below tmp_path, everything else as it is
        monkeypatch.setattr(
            Fleet,
            "_own_files",
            lambda fleet, server: [p.replace("/etc/systemd/system", str(self.system)) for p in own(fleet, server)],
        )
        runner.on_call("systemctl", "show", answer=self.show).on("systemd-analyze").on("systemctl")
        self.fleet = Fleet(runner, str(self.etc), digest_of=lambda pid: (self.units and f"running-{pid}") or None)

    def set(self, unit, **values):
        base = {
            "load": "loaded",
            "active": "active",
            "sub": "running",
            "enabled": "enabled",
            "invocation": "i1",
            "pid": 1,
            "job": "",
            "drop_in": "",
        }
        self.units[unit] = {**base, **values}

    def show(self, argv):
        names = argv[argv.index("--") + 1 :]
        absent = {
            "load": "not-found",
            "active": "inactive",
            "sub": "dead",
            "enabled": "",
            "invocation": "",
            "pid": 0,
            "job": "",
            "drop_in": "",
        }
        return Result(0, "\n".join(SHOW.format(unit=name, **self.units.get(name, absent)) for name in names))

    def server(self, gpu, text="v1", digest="d1"):
        unit = f"sglang@{gpu}.service"
        files = (
            FileSpec(str(self.etc / f"{gpu}.env"), f"{text} env\n", 0o600),
            FileSpec(str(self.etc / f"{gpu}.json"), f"{text} json\n", 0o600),
            FileSpec(str(self.system / unit), f"{text} unit\n"),
        )
        return Server(unit, gpu, files, digest)


@pytest.fixture
def world(runner, tmp_path, monkeypatch):
    return World(runner, tmp_path, monkeypatch)


def test_first_start_installs_enables_and_starts_all_at_once(world):
    out = world.fleet.start([world.server(0), world.server(1)], [], {})
    assert out.changed
    assert [d.action for d in out.decisions] == ["start", "start"]
    assert (world.system / "sglang@0.service").read_text() == "v1 unit\n"
    (restart,) = world.runner.commands("restart")
    assert restart[-2:] == ["sglang@0.service", "sglang@1.service"]
    assert "--no-block" in restart
    assert world.runner.commands("daemon-reload")
    assert world.runner.commands("enable")


def test_second_start_does_nothing(world):
    server = world.server(0, digest="running-1")
    world.fleet.start([server], [], {})
    world.set(U)
    world.runner.calls.clear()
    out = world.fleet.start([server], [], {})
    assert not out.changed
    assert [call[1] for call in world.runner.calls] == ["show"]


def test_check_mode_predicts_and_touches_nothing(world):
    world.fleet.check_mode = True
    out = world.fleet.start([world.server(0)], [], {})
    assert out.changed
    assert len(out.changes) == 3
    assert not world.etc.exists()
    assert [call[1] for call in world.runner.calls] == ["show"]


def test_a_run_cut_off_after_writing_is_finished_by_the_next(world):
    world.set(U)
    server = world.server(0, digest="new")
    world.etc.mkdir()
    world.system.mkdir()
    for spec in server.files:
        _units.write_files([spec])
    out = world.fleet.start([server], [], {})
    assert not out.changes
    assert [d.action for d in out.decisions] == ["restart"]


def test_restore_puts_the_kept_files_back(world):
    world.set(U)
    good = world.server(0, "good")
    _units.write_files(list(good.files))
    assert world.fleet.keep([good]).known_good == [U]
    assert world.fleet.keep([good]).known_good == []
    bad = world.server(0, "bad")
    _units.write_files([*bad.files, FileSpec(str(world.etc / "0.secrets"), "new secret\n", 0o600, secret=True)])
    out = world.fleet.restore([bad])
    assert out.restored == [U]
    assert (world.system / U).read_text() == "good unit\n"
    assert (world.etc / "0.env").read_text() == "good env\n"
    assert not (world.etc / "0.secrets").exists()
    order = [
        call[1] if call[1] != "--no-ask-password" else call[2] for call in world.runner.calls if call[0] == "systemctl"
    ]
    assert order[-7:] == ["stop", "kill", "stop", "daemon-reload", "reset-failed", "restart", "start"]


def test_restore_without_anything_good_stops_and_disables(world):
    world.set(U)
    bad = world.server(0, "bad")
    _units.write_files(list(bad.files))
    out = world.fleet.restore([bad])
    assert (out.restored, out.disabled) == ([], [U])
    assert world.runner.commands("disable", U)
    assert not world.runner.commands("restart")


def test_remove_takes_everything_away(world):
    world.set(U)
    world.set("sglang.target")
    server = world.server(0)
    _units.write_files(list(server.files))
    world.fleet.keep([server])
    out = world.fleet.remove([server], whole=True)
    assert out.changed
    assert not list(world.system.iterdir())
    assert not [path for path in world.etc.rglob("*") if path.is_file()]
    assert world.runner.commands("disable", "sglang.target")


def test_systemd_that_refuses_a_unit_file_changes_nothing(world):
    world.runner.rules.insert(
        0, (("systemd-analyze",), lambda argv: Result(1, "", "sglang@0.service: Command /x is not executable"))
    )
    with pytest.raises(UnitsError, match="not executable"):
        world.fleet.start([world.server(0)], [], {})
    assert not world.system.exists()


def test_settled(world):
    world.set(U, invocation="old", job="17")
    assert world.fleet.settled({U: "old"}, {U: "restart"}) == {}
    world.set(U, invocation="old")
    assert world.fleet.settled({U: "old"}, {U: "restart"}) == {}
    world.set(U, invocation="new")
    assert list(world.fleet.settled({U: "old"}, {U: "restart"})) == [U]
    world.set(U, active="deactivating", sub="stop-sigterm")
    assert world.fleet.settled({U: "old"}, {U: "stop"}) == {}
    world.set(U, active="inactive", sub="dead")
    assert list(world.fleet.settled({U: "old"}, {U: "stop"})) == [U]


def test_wait_settled_gives_up_its_slice(world):
    world.set(U, invocation="old", job="17")
    ticks = iter(range(100))
    told = wait_settled(world.fleet, [], {U: "old"}, {U: "restart"}, 3, lambda: next(ticks), lambda s: None)
    assert told == {"settled": False, "pending": [U], "invocations": {}, "signs": {}}


def test_what_is_being_stopped_tells_of_its_progress(world):
    world.set(U, active="deactivating", sub="stop-sigterm", invocation="old", job="17")
    # nothing listens on its port: no sign of life
    server = Instance(0, U, "127.0.0.1", 1, [], {}, "", "")
    ticks = iter(range(100))
    told = wait_settled(world.fleet, [server], {U: "old"}, {U: "restart"}, 3, lambda: next(ticks), lambda s: None)
    assert told["signs"] == {U: ""}
    world.fleet.give_up([U])
    assert world.runner.commands("kill", "--signal=SIGKILL", U)


def test_a_secret_does_not_outlive_its_variable(world):
    server = world.server(0, digest="running-1")
    secret = FileSpec(str(world.etc / "0.secrets"), "TOKEN=x\n", 0o600, secret=True)
    _units.write_files([*server.files, secret])
    world.set(U)
    world.fleet.keep([server])
    out = world.fleet.start([server], [], {})
    assert out.removed == [secret.path]
    assert "TOKEN" not in str(outcome_result(out, [server]))
    world.fleet.keep([server])
    assert not list(world.etc.rglob("*.secrets"))
    assert not world.fleet.start([server], [], {}).changed


def test_a_masked_unit_is_left_alone(world):
    world.set(U, load="masked", active="inactive", sub="dead")
    with pytest.raises(UnitsError, match=r"systemctl unmask sglang@0\.service"):
        world.fleet.start([world.server(0)], [], {})
    assert not world.system.exists()


@pytest.mark.parametrize(("written", "action"), [(1004.0, "none"), (1006.0, "restart")])
def test_a_drop_in_newer_than_the_process_restarts_it(world, tmp_path, written, action):
    drop_in = tmp_path / "override.conf"
    drop_in.write_text("[Service]\n")
    os.utime(drop_in, (written, written))
    world.set(U, drop_in=str(drop_in))
    world.fleet.clock_offset = 1000.0  # the process started 5 s after boot
    server = world.server(0, digest="running-1")
    _units.write_files(list(server.files))
    (decision,) = world.fleet.start([server], [], {}).decisions
    assert decision.action == action
    assert (str(drop_in) in decision.reason) is (action == "restart")
