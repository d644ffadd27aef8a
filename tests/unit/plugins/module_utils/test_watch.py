# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._health import Limits
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance, Plan, PlanFileError, Release
from ansible_collections.gpufleet.sglang.plugins.module_utils._journal import Follower
from ansible_collections.gpufleet.sglang.plugins.module_utils._listeners import Listener
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe import ProbeOptions, ProbeResult
from ansible_collections.gpufleet.sglang.plugins.module_utils._select import select
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import UnitState
from ansible_collections.gpufleet.sglang.plugins.module_utils._watch import Host, Watch
from ansible_collections.gpufleet.sglang.tests.unit.replay import REPLAYS, Journal, lines_of

GOOD = ProbeResult(ok=True, model="m", completion_tokens=4)
WARMING = ProbeResult(starting=True, reason="GET /ready answered 503")
LIMITS = Limits(60, 600)


def instance(gpu):
    return Instance(gpu, f"u{gpu}.service", "127.0.0.1", 30000 + gpu, [], {}, "", "")


class World:
    """A host in memory; events: (time, callable) that happen when the clock gets there."""

    def __init__(self, count):
        self.clock = 1000.0
        self.journal = Journal()
        self.journal.add("boot", unit="init", invocation="x", at=999)
        self.follower = Follower(self.journal)
        self.states = {}
        self.open = {}
        self.answers = {}
        self.pending = {}
        self.asked = []
        self.events = []
        self.looks = 0
        for gpu in range(count):
            self.start(gpu)

    def start(self, gpu, invocation=None, restarts=0):
        unit = f"u{gpu}.service"
        self.states[unit] = UnitState(
            unit, "loaded", "active", "running", invocation_id=invocation or f"i{gpu}", main_pid=100 + gpu,
            started=self.clock, restarts=restarts,
        )  # fmt: skip

    def change(self, gpu, **changes):
        unit = f"u{gpu}.service"
        self.states[unit] = replace(self.states[unit], **changes)

    def log(self, gpu, text):
        unit = f"u{gpu}.service"
        self.journal.add(text, unit=unit, invocation=self.states[unit].invocation_id, at=self.clock)

    def later(self, seconds, what, *args, **more):
        self.events.append((1000.0 + seconds, what, args, more))

    def listen(self, gpu, pid=None):
        self.open[30000 + gpu] = pid or 100 + gpu

    def serve(self, gpu, after=0.5, answer=GOOD):
        self.listen(gpu)
        self.answers[f"u{gpu}.service"] = (after, answer)

    def now(self):
        return self.clock

    def sleep(self, seconds):
        self.clock += seconds
        due = [event for event in self.events if event[0] <= self.clock]
        self.events = [event for event in self.events if event[0] > self.clock]
        for _time, what, args, more in sorted(due, key=lambda event: event[0]):
            what(*args, **more)

    def units(self, names):
        self.looks += 1
        return {name: self.states.get(name, UnitState(name)) for name in names}

    def sockets(self, ports):
        return [Listener("127.0.0.1", port, pid) for port, pid in self.open.items() if port in ports]

    def pids(self, unit):
        return [unit.main_pid] if unit.main_pid else []

    def holds(self, pids, inode):
        return inode in pids

    def holder(self, inode):
        return inode, "nginx: master", "nginx.service"

    def names(self, pids):
        return {"python"}

    def cpu(self, pids):
        return 0.0

    def oom_kills(self, unit):
        return 0

    def ask(self, key, host, port):
        after, answer = self.answers.get(key, (0.0, WARMING))
        self.asked.append(key)
        self.pending[key] = (self.clock + after, answer)

    def asking(self, key):
        return key in self.pending and self.pending[key][0] > self.clock

    def answer(self, key):
        if key in self.pending and self.pending[key][0] <= self.clock:
            return self.pending.pop(key)[1]
        return None


def watch(world, count, state=None, **more):
    return Watch(world, [instance(gpu) for gpu in range(count)], "h", state=state, **more)


def slices(world, count, limits=LIMITS, **more):
    """Wait as the action plugin does: a new process for every slice, only JSON in between."""
    state, outcomes = {}, []
    while True:
        world.follower = Follower(world.journal, state.get("journal"))
        outcome = watch(world, count, state, **more).wait(limits, 5.0)
        outcomes.append((world.clock - 1000.0, outcome))
        state = json.loads(json.dumps(outcome.state))
        if outcome.done:
            return outcomes


def states(outcome):
    return [server["state"] for server in outcome.servers]


def test_eight_become_ready():
    world = World(8)
    for gpu in range(8):
        world.later(3 + gpu, world.log, gpu, "Load weight begin")
        world.later(20 + gpu, world.log, gpu, "The server is fired up and ready to roll!")
        world.later(20 + gpu, world.serve, gpu)
    outcomes = slices(world, 8)
    end, last = outcomes[-1]
    assert states(last) == ["ready"] * 8
    assert 27 < end < 31
    assert [server["phases"]["weights"] for server in last.servers][:2] == [
        pytest.approx(3, abs=1),
        pytest.approx(4, abs=1),
    ]
    assert sorted(world.asked) == sorted(f"u{gpu}.service" for gpu in range(8))  # once each, in all slices together
    assert all(after - before < 8 for (before, _a), (after, _b) in zip(outcomes, outcomes[1:]))


def test_a_dead_unit_ends_its_slice_and_the_others_go_on():
    world = World(2)
    world.later(7.0, world.log, 0, "RuntimeError: no weights")
    world.later(7.1, world.change, 0, active_state="failed", sub_state="failed", main_pid=0, exit_code=1, exit_status=1)
    world.later(20, world.serve, 1)
    outcomes = slices(world, 2)
    first = next((time, outcome) for time, outcome in outcomes if "failed" in states(outcome))
    assert first[0] < 9.5  # seen within a second, told with the slice that ends for it
    assert states(outcomes[-1][1]) == ["failed", "ready"]
    assert outcomes[-1][1].servers[0]["reason"] == "RuntimeError: no weights"


@pytest.mark.parametrize(
    "event",
    [
        lambda world: world.change(0, sub_state="auto-restart", active_state="activating", main_pid=0),
        lambda world: world.start(0, "i9", restarts=1),
        lambda world: world.start(0, "i9"),
        lambda world: world.states.pop("u0.service"),
        lambda world: world.log(0, "ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 1)"),
    ],
)
@pytest.mark.parametrize("invocations", [{}, {"u0": "i0"}, {"u0.service": "i0"}])
def test_every_kind_of_end_is_seen_within_a_second(event, invocations):
    world = World(1)
    world.later(10, event, world)
    outcome = watch(world, 1, invocations=invocations).wait(LIMITS)
    assert states(outcome) == ["failed"]
    assert world.clock - 1010 <= 1.0


def test_cause_of_the_invocation_we_started_not_of_the_next():
    world = World(1)
    world.log(0, "RuntimeError: the first")
    world.start(0, "i9", restarts=1)
    world.log(0, "RuntimeError: the second")
    outcome = watch(world, 1, invocations={"u0.service": "i0"}).wait(LIMITS)
    assert outcome.servers[0]["error_lines"] == ["RuntimeError: the first"]


def test_foreign_server_never_counts():
    world = World(1)
    world.listen(0, pid=77)
    outcome = watch(world, 1).wait(LIMITS)
    assert states(outcome) == ["foreign"]
    assert outcome.servers[0]["reason"] == "the port is held by pid 77 (nginx: master) of unit nginx.service"
    assert world.asked == []
    assert world.clock - 1000 < 5


def test_slow_answer_outlives_its_slice():
    world = World(2)
    world.serve(0, after=17.0)
    world.serve(1)
    outcomes = slices(world, 2)
    assert world.asked == ["u0.service", "u1.service"]
    assert states(outcomes[-1][1]) == ["ready", "ready"]
    assert world.clock - 1000 < 19


def test_ready_server_that_dies_while_others_load():
    world = World(2)
    world.serve(0)
    world.later(30, world.change, 0, active_state="failed", sub_state="failed", main_pid=0, exit_code=2, exit_status=9)
    world.later(40, world.serve, 1)
    assert states(slices(world, 2)[-1][1]) == ["failed", "ready"]


def test_stalled():
    world = World(1)
    world.log(0, "Load weight begin")
    outcomes = slices(world, 1)
    assert states(outcomes[-1][1]) == ["stalled"]
    assert 60 <= world.clock - 1000 < 66


def test_warming_up_is_asked_again_not_flooded():
    world = World(1)
    world.listen(0)
    world.later(20, world.serve, 0)
    assert states(slices(world, 1)[-1][1]) == ["ready"]
    assert 10 <= len(world.asked) <= 21


def test_state_is_small():
    world = World(8)
    for gpu in range(8):
        for number in range(100):
            world.log(gpu, f"error: {number} " + "x" * 3000)
    outcome = watch(world, 8).wait(LIMITS, 1.0)
    assert len(json.dumps(outcome.state)) < 50000


def test_ready_line_that_comes_after_the_answer():
    world = World(1)
    world.log(0, "Load weight begin")
    world.later(5, world.serve, 0, after=0.0)
    world.sleep(5)
    world.later(5.75, world.log, 0, "The server is fired up and ready to roll!")
    server = watch(world, 1).wait(LIMITS).servers[0]
    assert (server["state"], server["phases"]["ready"], server["seconds_to_ready"]) == (
        "ready",
        *[pytest.approx(5.8, abs=0.1)] * 2,
    )


def test_once():
    world = World(4)
    world.serve(0)
    world.serve(1, after=100)
    world.change(2, active_state="inactive", sub_state="dead", main_pid=0)
    world.states.pop("u3.service")
    outcome = watch(world, 4).once(20)
    assert states(outcome) == ["ready", "unhealthy", "stopped", "absent"]
    assert outcome.servers[1]["reason"] == "no answer within 20 s"
    assert world.looks == 1
    assert world.clock - 1000 < 21


def test_once_tells_a_crash_loop_from_a_start():
    world = World(1)
    world.log(0, "RuntimeError: of long ago")
    world.start(0, "i8", restarts=1)
    world.log(0, "RuntimeError: no weights")
    world.start(0, "i9", restarts=2)
    world.log(0, "Load weight begin")
    server = watch(world, 1).once(20).servers[0]
    assert (server["state"], server["phase"]) == ("starting", "weights")
    assert server["reason"] == "systemd has restarted it 2 times, last after: RuntimeError: no weights"


@pytest.mark.parametrize("name", [case[0] for case in REPLAYS])
def test_real_logs_through_the_loop(name):
    """A line every 0.1 s; the process ends after the last, as it did."""
    lines = lines_of(name)
    world = World(1)
    for number, line in enumerate(lines):
        world.later(number * 0.1, world.log, 0, line)
        if "Uvicorn running on" in line:
            world.later(number * 0.1, world.listen, 0)
    world.later(
        len(lines) * 0.1,
        world.change,
        0,
        active_state="failed",
        sub_state="failed",
        main_pid=0,
        exit_code=2,
        exit_status=9,
    )
    last = slices(world, 1)[-1][1].servers[0]
    phases, _tokens, errors = next(case for case in REPLAYS if case[0] == name)[1:]
    assert last["state"] == "failed"
    assert list(last["phases"]) == phases.split()
    if errors:
        assert last["reason"].startswith(errors[0])
    if "port-in-use" in name:  # told at the bind error, long before the process ended
        at = next(number for number, line in enumerate(lines) if "Errno 98" in line) * 0.1
        assert world.clock - 1000 - at <= 1.0


def test_select(tmp_path):
    assert select(str(tmp_path / "no.json"), None, None).message.endswith("nothing has been deployed on this host")
    plan = Plan("h", "cpu", "m", Release("r", "/v", "/p", "1"), [instance(0), instance(1)])
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert [item.gpu for item in select(str(path), None, None).instances] == [0, 1]
    chosen = select(str(path), None, ["u1"])
    assert ([item.gpu for item in chosen.instances], chosen.host) == ([1], "h")
    with pytest.raises(PlanFileError, match="not in the plan: u7; it has u0, u1"):
        select(str(path), None, ["u7.service"])
    given = select("", [{"gpu": 2, "unit": "sglang@2", "port": "30002"}], None).instances
    assert (given[0].unit, given[0].port, given[0].host) == ("sglang@2.service", 30002, "127.0.0.1")
    with pytest.raises(PlanFileError, match="lacks unit, port"):
        select("", [{"gpu": 2}], None)
    path.write_text("{}")
    with pytest.raises(PlanFileError, match="schema"):
        select(str(path), None, None)


def test_host_reads_the_real_proc():
    host = Host(None, None, ProbeOptions(timeout=1))
    me = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = host.sockets([port])
        assert host.holds([me], found.inode) and not host.holds([1], found.inode)
        assert host.holder(found.inode)[0] == me
    assert host.cpu([me]) > 0
    assert Path("/proc/self/comm").read_text().strip() in host.names([me])
    host.ask("k", "127.0.0.1", port)
    while host.asking("k"):
        host.sleep(0.01)
    assert host.answer("k").reason == "GET /ready: Connection refused"
    assert host.answer("k") is None
