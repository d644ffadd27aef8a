# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible_collections.gpufleet.sglang.plugins.action import sglang_health

VARS = {"inventory_hostname": "ct200"}


def server(state="starting", **more):
    return {
        "host": "wrong", "gpu": 3, "unit": "sglang@3.service", "port": 30003, "state": state, "phase": state,
        "phases": {}, "reason": "", "seconds": 1.0, "seconds_to_ready": 26.0, "first_token_seconds": None,
        "exit_code": "", "exit_status": None, "result": "success", "restarts": 0, "error_lines": [],
        "invocation_id": "i1", **more,
    }  # fmt: skip


def part(*servers, done=False, number=0):
    return {"changed": False, "servers": list(servers), "done": done, "watch_state": {"slice": number}}


@pytest.fixture
def run(monkeypatch):
    """Run the action against a script of module results; gives result, calls and printed lines."""
    calls, lines = [], []
    monkeypatch.setattr(sglang_health.display, "display", lines.append)
    monkeypatch.setattr(sglang_health.time, "sleep", lambda seconds: None)

    def start(script, check_mode=False, **args):
        task = SimpleNamespace(args=args, check_mode=check_mode, async_val=0, action="x", diff=False)
        connection = SimpleNamespace(reset=lambda: None, _shell=SimpleNamespace(tmpdir=None))
        action = sglang_health.ActionModule(task, connection, SimpleNamespace(), None, None, None)
        answers = iter(script)

        def execute(module_name, module_args, task_vars):
            calls.append(module_args)
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(action, "_execute_module", execute)
        return action.run(task_vars=VARS), calls, lines

    return start


def test_one_look(run):
    result, calls, lines = run([{"servers": [server("failed")]}], watch_state={"x": 1})
    assert (len(calls), calls[0], lines) == (1, {}, [])
    assert result["servers"][0]["host"] == "ct200"
    assert not result.get("failed")


def test_check_mode_looks_once(run):
    result, calls, _lines = run([{"servers": [server("failed")]}], check_mode=True, wait=True)
    assert (len(calls), "slice_seconds" in calls[0], result.get("failed")) == (1, False, None)


def test_slices_until_done(run):
    script = [
        part(server(phases={"weights": 12.0})),
        part(server(phases={"weights": 12.0}), number=1),
        part(server("ready"), done=True, number=2),
    ]
    result, calls, lines = run(script, wait="yes", timeout=7)
    assert [call["watch_state"] for call in calls] == [{}, {"slice": 0}, {"slice": 1}]
    assert {call["slice_seconds"] for call in calls} == {5.0}
    assert lines == [
        "ct200 GPU 3 sglang@3: weights (12 s), starting (1 s)",
        "ct200 GPU 3 sglang@3: ready after 26 s, port 30003",
    ]
    assert not {"watch_state", "done"} & set(result)
    assert not result.get("failed")


def test_failure_names_host_gpu_cause(run):
    bad = server("failed", reason="error: bad", error_lines=["error: bad"], exit_code="exited", exit_status=2)
    result, _calls, lines = run([part(bad, done=True)], wait=True)
    assert result["failed"]
    assert result["msg"].splitlines()[1:3] == [
        "ct200 GPU 3 sglang@3: failed in phase failed (exited 2)",
        "    error: bad",
    ]
    assert lines == ["ct200 GPU 3 sglang@3: failed: exited 2: error: bad"]


def test_lost_connections(run):
    lost = AnsibleConnectionFailure("gone")
    result, calls, lines = run([lost, lost, part(server("ready"), done=True)], wait=True)
    assert (len(calls), len(lines), result.get("failed")) == (3, 3, None)
    with pytest.raises(AnsibleConnectionFailure):
        run([part(server()), lost, lost, lost], wait=True)


@pytest.mark.parametrize("answer", [{"failed": True, "msg": "no systemd"}, {"msg": "MODULE FAILURE", "failed": True}])
def test_module_failure_is_passed_on(run, answer):
    result, _calls, _lines = run([answer], wait=True)
    assert (result["failed"], result["msg"], result["servers"]) == (True, answer["msg"], [])


TRANSIENT = {"code": "jit_contention", "says": "x", "evidence": ["e"], "remedy": "r", "also_seen": [], "retry": "auto"}


def test_a_transient_failure_is_tried_once_more_and_nothing_else(run):
    bad = server("failed", diagnosis=TRANSIENT)
    other = {
        **server("failed", diagnosis={**TRANSIENT, "code": "gpu_oom", "retry": "no"}),
        "gpu": 4,
        "unit": "sglang@4.service",
    }
    script = [part(bad, other, done=True), {"rc": 0}, {"rc": 0}, {"stdout": "i2"}, part(server("ready"), done=True)]
    result, calls, lines = run(script, wait=True, retry_transient=True)
    assert [call["argv"][1] for call in calls if "argv" in call] == ["reset-failed", "restart", "show"]
    assert (calls[4]["units"], calls[4]["invocations"]) == (["sglang@3.service"], {"sglang@3.service": "i2"})
    assert [item["state"] for item in result["servers"]] == ["ready", "failed"]
    assert result["servers"][0]["retried"] == "jit_contention"
    assert (result["changed"], result["failed"]) == (True, True)
    assert any("started once more (jit_contention)" in line for line in lines)


def test_a_transient_failure_that_stays_is_not_tried_again(run):
    bad = server("failed", diagnosis=TRANSIENT)
    script = [part(bad, done=True), {"rc": 0}, {"rc": 0}, {"stdout": "i2"}, part(bad, done=True)]
    result, calls, _lines = run(script, wait=True, retry_transient=True)
    assert len([call for call in calls if "argv" in call]) == 3
    assert result["failed"]
