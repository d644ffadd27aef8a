"""What a server was started with, and the copies by release that a rollback puts back."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _history, _kept, _record
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance, Plan, Release
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import UnitState


def unit(**changes):
    return dataclasses.replace(UnitState("sglang@3.service"), invocation_id="i1", started=100.0, **changes)


# -- _record ------------------------------------------------------------------------------------


def test_a_record_is_private_and_reads_back(tmp_path):
    record = _record.Record("i1", {"/a.conf": "1234"}, "m")
    _record.write_record(str(tmp_path), 3, record)
    assert _record.read_record(str(tmp_path), 3) == record
    assert oct((tmp_path / "3.started").stat().st_mode)[-3:] == "600"
    (tmp_path / "3.started").write_text('{"invocation": "i1", "more": 1}')
    assert _record.read_record(str(tmp_path), 3) is None
    assert _record.read_record(str(tmp_path), 4) is None


def test_drop_ins_of_the_unit_and_of_its_template_count_before_systemd_is_told(tmp_path):
    for folder, text in (("sglang@3.service.d", "a"), ("sglang@.service.d", "b"), ("sglang@4.service.d", "c")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.conf").write_text(text)
    (tmp_path / "sglang@3.service.d/x.txt").write_text("no drop-in")
    found = _record.drop_ins(unit(drop_ins=[str(tmp_path / "gone.conf")]), [str(tmp_path)])
    assert [path[len(str(tmp_path)) :] for path in found] == ["/sglang@.service.d/x.conf", "/sglang@3.service.d/x.conf"]


@pytest.mark.parametrize(
    ("recorded", "now", "model", "lines"),
    [
        ({"a": "11", "b": "22"}, {"a": "11", "b": "22"}, "m", []),
        ({"a": "11"}, {"a": "33"}, "m", ["drop-in a: text 11 -> text 33"]),
        ({"a": "11"}, {}, "m", ["drop-in a: text 11 -> not there"]),
        ({}, {"a": "11"}, "m", ["drop-in a: not there -> text 11"]),
        ({}, {}, "other", ["model: m -> other"]),
        ({}, {}, "", []),  # it can't be seen now: nothing is said
    ],
)
def test_what_changed_under_the_recorded_process(recorded, now, model, lines):
    record = _record.Record("i1", recorded, "m")
    assert [item.text() for item in _record.since_start(record, unit(), now, model, 0.0)] == lines


def test_without_a_record_of_this_process_a_drop_ins_time_decides(tmp_path):
    old, new = tmp_path / "old.conf", tmp_path / "new.conf"
    for path, when in ((old, 1050), (new, 1150)):
        path.write_text("x")
        os.utime(path, (when, when))
    now = {str(old): "1", str(new): "2"}
    found = _record.since_start(_record.Record("i0", {"/was.conf": "3"}), unit(), now, "m", 1000.0)
    assert [item.text() for item in found] == [
        f"drop-in {new}: not there, or another text -> newer than its process",
        "drop-in /was.conf: perhaps in effect -> removed",
    ]


def test_a_model_folder_that_changes_is_seen(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    argv = ["/v/bin/python", "--model-path", str(tmp_path)]
    before = _record.model_state(argv, {})
    assert before
    assert _record.model_state(argv, {}) == before
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert _record.model_state(argv, {}) != before
    assert _record.model_state(["--model-path", "/nowhere/at/all"], {}) == ""


# -- _kept --------------------------------------------------------------------------------------


def instance(release, gpu=3):
    argv = [f"/opt/{release}/bin/python", "-m", "sglang.launch_server"]
    return Instance(
        gpu, f"sglang@{gpu}.service", "127.0.0.1", 30000 + gpu, argv, {}, f"/e/{gpu}.env", f"/u/sglang@{gpu}.service"
    )


def roll_out(folder, release, gpus=(3,)):
    """Write a release's plan and keep its servers, as the state known_good does."""
    items = [instance(release, gpu) for gpu in gpus]
    plan = Plan("h", "cpu", "/m", Release(release, f"/opt/{release}", f"/opt/{release}/bin/python", "1"), items)
    (folder / "plan.json").write_text(plan.to_json())
    return [keep(folder, item) for item in items]


def keep(folder, item):
    text = json.dumps(dataclasses.asdict(item))
    files = [
        (f"/e/{item.gpu}.json", text),
        (f"/e/{item.gpu}.env", f"A=1\n{_kept.DIGEST}abc\n"),
        (item.unit_file, "[Service]"),
    ]
    return _kept.keep(str(folder), item.gpu, files)


def test_the_release_before_is_the_one_used_last(tmp_path):
    for number, name in enumerate(("one", "two", "three")):
        assert roll_out(tmp_path, name) == [True]
        os.utime(tmp_path / f"releases/{name}/plan.json", (number, number))
    assert _kept.kept_releases(str(tmp_path)) == ["three", "two", "one"]
    assert _kept.previous(str(tmp_path)) == "two"
    assert _kept.previous(str(tmp_path), "one") == "one"
    with pytest.raises(_kept.KeptError, match="no server has answered under release nine here; there are: three, two"):
        _kept.previous(str(tmp_path), "nine")
    roll_out(tmp_path, "one")
    assert _kept.previous(str(tmp_path)) == "three"
    assert roll_out(tmp_path, "one") == [False]  # nothing new
    _kept.forget(str(tmp_path), "three")
    assert _kept.kept_releases(str(tmp_path)) == ["one", "two"]


def test_there_may_be_none(tmp_path):
    with pytest.raises(_kept.KeptError):
        _kept.previous(str(tmp_path))
    roll_out(tmp_path, "one")
    with pytest.raises(_kept.KeptError, match="release one is the only one"):
        _kept.previous(str(tmp_path))


def test_a_restored_server_is_not_kept_for_a_release_it_does_not_run(tmp_path):
    roll_out(tmp_path, "two", gpus=(3,))
    assert keep(tmp_path, instance("one", 4)) is False
    plan = _kept.kept_plan(str(tmp_path), "two")
    assert [item.gpu for item in plan.instances] == [3]


def test_a_kept_servers_files_come_back_with_their_modes(tmp_path):
    roll_out(tmp_path, "one")
    specs, digest = _kept.kept_files(str(tmp_path), "one", instance("one"))
    assert digest == "abc"
    assert {(spec.path, spec.mode) for spec in specs} == {
        ("/e/3.env", 0o600),
        (f"{tmp_path}/3.json", 0o600),
        ("/u/sglang@3.service", 0o644),
    }
    assert oct((tmp_path / "releases/one/3/3.env").stat().st_mode)[-3:] == "600"
    assert oct((tmp_path / "releases").stat().st_mode)[-3:] == "700"


# -- _history -----------------------------------------------------------------------------------


def test_the_history_keeps_the_newest_and_passes_over_what_is_no_entry(tmp_path, monkeypatch):
    monkeypatch.setattr(_history, "LIMIT", 3)
    (tmp_path / _history.FILE).write_text("not json\n")
    for number in range(5):
        _history.append(str(tmp_path), {"n": number})
    assert [entry["n"] for entry in _history.read(str(tmp_path))] == [2, 3, 4]


def test_the_figures_stand_beside_those_of_the_release_before():
    def entry(release, kv_tokens):
        servers = _history.figures([{"gpu": 0, "kv_tokens": kv_tokens}], {0: 500})
        return {"what": "deploy", "release": release, "who": "ann", "why": "", "servers": servers}

    assert _history.beside([entry("a", 10), entry("b", 20), entry("b", 30)]) == [
        "deploy of release b by ann",
        "GPU 0: 500 MiB in use, 30 KV tokens; release a had 500 MiB in use, 10 KV tokens",
    ]
    assert _history.beside([]) == []
