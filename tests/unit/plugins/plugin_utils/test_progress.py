# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

from ansible_collections.gpufleet.sglang.plugins.plugin_utils._progress import Progress


def server(gpu=3, state="starting", phase="process", **more):
    return {
        "host": "ct200",
        "gpu": gpu,
        "unit": f"sglang@{gpu}.service",
        "port": 30000 + gpu,
        "state": state,
        "phase": phase,
        "phases": {},
        "reason": "",
        "seconds": 12.4,
        "seconds_to_ready": None,
        "first_token_seconds": None,
        "exit_code": "",
        "exit_status": None,
        **more,
    }


def test_a_server_on_its_way():
    progress = Progress(0)
    steps = [
        (server(phase="none", seconds=None), ["ct200 GPU 3 sglang@3: none"]),
        (server(phases={"process": 1.0}), ["ct200 GPU 3 sglang@3: process (1 s)"]),
        (server(phases={"process": 1.0}), []),
        (
            server(phase="kv_pool", phases={"process": 1.0, "weights": 11.6, "kv_pool": 14.2}),
            ["ct200 GPU 3 sglang@3: weights (12 s), kv_pool (14 s)"],
        ),
        (
            server(
                state="ready",
                phase="ready",
                phases={"process": 1.0, "warmup": 24.0, "ready": 26.2},
                seconds_to_ready=26.2,
                first_token_seconds=0.131,
            ),
            [
                "ct200 GPU 3 sglang@3: warmup (24 s)",
                "ct200 GPU 3 sglang@3: ready after 26 s, port 30003, 1st token 0.13 s",
            ],
        ),
        (server(state="ready", phase="ready", seconds_to_ready=26.2), []),
        (
            server(state="failed", reason="killed 9 while serving", exit_code="killed", exit_status=9),
            ["ct200 GPU 3 sglang@3: failed: killed 9 while serving"],
        ),
    ]
    for now, (step, lines) in enumerate(steps):
        assert progress.update([step], now) == lines


def test_failures():
    progress = Progress(0)
    assert progress.update(
        [
            server(0, state="failed", reason="error: bad flag", exit_code="exited", exit_status=2),
            server(1, state="foreign", reason="the port is held by pid 7"),
            server(2, state="stalled", reason="x" * 1000),
            server(4, state="ready", seconds_to_ready=None),
        ],
        1,
    ) == [
        "ct200 GPU 0 sglang@0: failed: exited 2: error: bad flag",
        "ct200 GPU 1 sglang@1: foreign: the port is held by pid 7",
        "ct200 GPU 2 sglang@2: stalled: " + "x" * 266 + "...",
        "ct200 GPU 4 sglang@4: ready, port 30004",
    ]


def test_heartbeat_after_silence_only():
    progress = Progress(0)
    both = [server(0, phases={"process": 0.0}), server(1, state="ready", phase="ready")]
    assert len(progress.update(both, 5)) == 2
    assert progress.update(both, 34) == []
    assert progress.update(both, 35) == ["ct200: waiting for 1 of 2: GPU 0 process (12 s)"]
    assert progress.update(both, 40) == []
    assert progress.update(both[1:], 90) == []
