# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Who asks for the lock, and when a holder of the same controller is looked for."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ansible_collections.gpufleet.sglang.plugins.action import sglang_lock, sglang_units
from ansible_collections.gpufleet.sglang.plugins.plugin_utils import _run

ME = {"run": "c/10/1", "pid": 10, "who": "ann", "where": "here", "controller": "c"}


def held_by(run, controller):
    return {"failed": True, "msg": "held", "holder": {"run": run, "controller": controller}}


TAKEN = {"changed": False, "held": True, "taken_over": ""}


def action(plugin, script, calls, **args):
    task = SimpleNamespace(args=args, check_mode=False, async_val=0, action="x", diff=False)
    made = plugin.ActionModule(
        task, SimpleNamespace(_shell=SimpleNamespace(tmpdir=None)), SimpleNamespace(), None, None, None
    )
    answers = iter(script)

    def execute(module_name, module_args, task_vars):
        calls.append(dict(module_args))
        return next(answers)

    made._execute_module = execute
    return made.run(None, {"inventory_hostname": "ct200"})


@pytest.mark.parametrize(
    ("script", "alive", "asked", "failed"),
    [
        ([TAKEN], {}, [None], False),
        ([held_by("c/11/2", "c")], {"c/11/2": True}, [None], True),  # alive: it waits its turn
        ([held_by("c/11/2", "c"), TAKEN], {"c/11/2": False}, [None, {"c/11/2": False}], False),
        ([held_by("d/11/2", "d")], {}, [None], True),  # of another controller nothing is known
    ],
)
def test_a_dead_holder_of_this_controller_is_told_to_the_module(monkeypatch, script, alive, asked, failed):
    calls, lines = [], []
    monkeypatch.setattr(sglang_lock.display, "display", lines.append)
    monkeypatch.setattr(sglang_lock, "this_run", lambda: ME)
    monkeypatch.setattr(sglang_lock, "is_alive", alive.__getitem__)
    result = action(sglang_lock, script, calls, what="deploy")
    assert [call.get("alive") for call in calls] == asked
    assert all(call["run"] == "c/10/1" and call["what"] == "deploy" for call in calls)
    assert bool(result.get("failed")) is failed


def test_a_take_over_is_said(monkeypatch):
    lines = []
    monkeypatch.setattr(sglang_lock.display, "display", lines.append)
    action(sglang_lock, [{**TAKEN, "taken_over": "eve on far"}], [])
    assert lines == ["ct200: the lock of a run that is gone was taken over: eve on far"]


def test_a_run_is_alive_while_its_very_process_is():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run = f"{_run.controller_id()}/{child.pid}/{_run.started(child.pid)}"
    assert _run.is_alive(run)
    assert not _run.is_alive(f"{_run.controller_id()}/{child.pid}/1")  # the number was given again
    child.communicate()
    assert not _run.is_alive(run)
    assert not _run.is_alive("")
    assert _run.this_run()["pid"] == os.getppid()


THREE, FOUR = "sglang@3.service", "sglang@4.service"


def test_a_server_that_stands_still_is_not_waited_for(monkeypatch):
    lines = []
    monkeypatch.setattr(sglang_units.display, "display", lines.append)
    clock = iter([0.0, 0.0, 5.0, 5.0, 35.0, 35.0, 67.0])
    monkeypatch.setattr(sglang_units.time, "monotonic", lambda: next(clock))
    script = [
        {"drained": False, "requests": {THREE: 1, FOUR: 1}, "signs": {THREE: "a", FOUR: "b"}},
        {"drained": False, "requests": {THREE: 1, FOUR: 1}, "signs": {THREE: "a", FOUR: "c"}},
        {"drained": False, "requests": {THREE: 1, FOUR: 0}, "signs": {THREE: "a"}},
    ]
    action(sglang_units, script, [], state="drained", stall_timeout=60)
    assert lines[-1] == (
        f"ct200: out of service after 67 s: {THREE}, {FOUR}; still at work, their own stop waits for them: {THREE} 1"
    )


def test_a_server_that_stands_still_while_it_stops_is_killed(monkeypatch):
    calls, lines = [], []
    monkeypatch.setattr(sglang_units.display, "display", lines.append)
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(sglang_units.time, "monotonic", lambda: next(clock))
    stopping = {"settled": False, "invocations": {}, "pending": [THREE, FOUR]}
    script = [
        {
            "units": [{"unit": unit, "gpu": unit[7], "action": "stop", "reason": "x"} for unit in (THREE, FOUR)],
            "before": {},
        },
        {**stopping, "signs": {THREE: "", FOUR: "5 tokens"}},
        {**stopping, "signs": {THREE: "", FOUR: "6 tokens"}},
        {**stopping, "signs": {THREE: "", FOUR: None}},  # it compiles
        {**stopping, "signs": {THREE: "", FOUR: "6 tokens"}},
        {"settled": True, "invocations": {}, "pending": [], "signs": {}},
    ]
    action(sglang_units, script, calls, state="stopped", stall_timeout=60)
    assert [call["stalled"] for call in calls[1:]] == [[], [], [], [], [THREE]]
    assert f"ct200 {THREE}: no sign of progress for 60 s while it stops: killed" in lines


def test_a_drain_is_waited_for_in_slices(monkeypatch):
    calls, lines = [], []
    monkeypatch.setattr(sglang_units.display, "display", lines.append)
    clock = iter([0.0, 0.0, 5.0, 5.0, 9.0])
    monkeypatch.setattr(sglang_units.time, "monotonic", lambda: next(clock))
    script = [
        {"drained": False, "requests": {"sglang@3.service": 2, "sglang@4.service": 0}, "signs": {}},
        {"drained": True, "requests": {"sglang@3.service": 0, "sglang@4.service": None}, "signs": {}},
    ]
    result = action(sglang_units, script, calls, state="drained", units=["sglang@3.service", "sglang@4.service"])
    assert result["drained"] is True
    assert [call["begun"] for call in calls] == [0.0, 5.0]
    assert lines == [
        "ct200: waiting for requests: sglang@3.service 2 (5 s)",
        "ct200: out of service after 9 s: sglang@3.service, sglang@4.service",
    ]
