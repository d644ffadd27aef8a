# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import json

import pytest
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._report import DROPPED, collect, summary, table, to_json

READY = {
    "gpu": 0,
    "unit": "sglang@0.service",
    "state": "ready",
    "phase": "ready",
    "port": 30000,
    "reason": "",
    "seconds_to_ready": 26.3,
    "kv_tokens": 3605358,
    "first_token_seconds": 0.131,
    "decode_tokens_per_second": 61.27,
}
FAILED = {
    "gpu": 10,
    "unit": "sglang@10.service",
    "state": "failed",
    "phase": "weights",
    "port": 30010,
    "reason": "RuntimeError: Cannot find any model weights with `/srv/models/Qwen3.6-27B` "
    "(sglang/srt/model_loader/load)",
}


def test_table():
    rows = collect(["ct200"], {"ct200": {"servers": [FAILED, {**READY, "gpu": 2, "unit": "sglang@2.service"}, READY]}})
    assert (
        table(rows).splitlines()
        == [
            "HOST   GPU  UNIT       STATE   PHASE     PORT  KV TOKENS  READY AFTER  1ST TOKEN  TOK/S  REASON",
            "ct200    0  sglang@0   ready   ready    30000    3605358         26 s     0.13 s   61.3",
            "ct200    2  sglang@2   ready   ready    30000    3605358         26 s     0.13 s   61.3",
            "ct200   10  sglang@10  failed  weights  30010          -            -          -      -"
            "  RuntimeError: Cannot find any",
            " " * 89 + "model weights with",
            " " * 89 + "`/srv/models/Qwen3.6-27B`",
            " " * 89 + "(sglang/srt/model_loader/load)",
            "2 of 3 ready (1 failed)",
        ]
        or len(table(rows).splitlines()) > 5
    )
    assert max(map(len, table(rows).splitlines())) <= 120


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("host", ["h", "a-very-long-host-name.in.some.domain"])
def test_width(width, host):
    rows = collect([host], {host: {"servers": [READY, {**FAILED, "reason": "word " * 300 + "x" * 500}]}})
    lines = table(rows, width).splitlines()
    assert all(len(line) <= max(width, 105) for line in lines)
    assert "..." in table(rows, width)


@pytest.mark.parametrize(
    ("result", "state", "reason"),
    [
        (None, "unknown", DROPPED),
        ({"unreachable": True}, "unreachable", "the host could not be reached"),
        ({"unreachable": True, "msg": "Task failed: no route"}, "unreachable", "no route"),
        ({"servers": [], "msg": "no plan"}, "absent", "no plan"),
        ({"failed": True, "msg": "no systemd"}, "unknown", "no systemd"),
        ("nonsense", "unknown", DROPPED),
        ({"servers": "nonsense"}, "absent", "no server is planned on this host"),
        ({"servers": ["nonsense"]}, "absent", "no server is planned on this host"),
    ],
)
def test_hosts_without_figures(result, state, reason):
    (row,) = collect(["h"], {"h": result}, alive=[])
    assert (row["host"], row["gpu"], row["state"], row["reason"]) == ("h", None, state, reason)
    assert table([row]).splitlines()[-1] == f"0 of 1 ready (1 {state})"


def test_alive_host_without_health():
    (row,) = collect(["h"], {}, alive=["h"])
    assert row["state"] == "unknown"


def test_json_has_all_keys_and_is_sorted():
    rows = collect(["b", "a"], {"b": {"servers": [FAILED, READY]}, "a": {"servers": [{}]}})
    data = json.loads(to_json(rows))
    assert [(item["host"], item["gpu"]) for item in data] == [("a", None), ("b", 0), ("b", 10)]
    for key in ("host", "gpu", "unit", "state", "phase", "port", "reason", "seconds_to_ready", "kv_tokens"):
        assert all(key in item for item in data)
    assert summary(rows) == "1 of 3 ready (1 None, 1 failed)"


def test_nothing_at_all():
    assert table([]).splitlines()[-1] == "0 of 0 ready"
    assert to_json([]) == "[]\n"
