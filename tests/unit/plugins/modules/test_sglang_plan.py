"""The module sglang_plan, from arguments to result."""

from __future__ import annotations

import json
import os

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.gpufleet.sglang.plugins.modules import sglang_plan


@pytest.fixture
def run(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    base = {
        "name": "h1",
        "path": str(tmp_path / "etc/plan.json"),
        "device": "cpu",
        "gpus": [0, 1],
        "model": str(model),
        "release": "r1",
        "venv": "/opt/r1",
        "config_dir": str(tmp_path / "etc"),
        "unit_dir": str(tmp_path / "units"),
        "facts": {"gpus": [], "listeners": []},
    }

    def call(**changes):
        with patch_module_args({**base, **changes}), pytest.raises(SystemExit):
            sglang_plan.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_check_run_check_run(run, tmp_path):
    path = tmp_path / "etc/plan.json"
    first = run(_ansible_check_mode=True, _ansible_diff=True)
    assert first["changed"] is True
    assert not path.exists()
    (diff,) = first["diff"]
    assert diff["before"] == ""
    assert json.loads(diff["after"]) == first["plan"]
    assert run()["changed"] is True
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == first["plan"]
    assert run(_ansible_check_mode=True)["changed"] is False
    assert run()["changed"] is False
    path.chmod(0o644)
    assert run()["changed"] is True
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_gpu_that_is_taken_away_is_named_until_its_unit_is_gone(run, tmp_path):
    etc = tmp_path / "etc"
    first = run(gpus=[0, 1, 2])
    assert first["removed_units"] == []
    for instance in first["plan"]["instances"]:  # as the rollout leaves them
        (etc / f"{instance['gpu']}.json").write_text(json.dumps(instance))
    assert run(gpus=[0])["removed_units"] == ["sglang@1.service", "sglang@2.service"]
    assert run(gpus=[0])["removed_units"] == ["sglang@1.service", "sglang@2.service"]
    (etc / "1.json").unlink()
    assert run(gpus=[0])["removed_units"] == ["sglang@2.service"]


def test_all_problems_at_once_and_nothing_written(run, tmp_path):
    result = run(gpus=[0, 0], model="./x", environment={"HF_TOKEN": "x"})
    assert result["failed"] is True
    assert result["msg"].startswith("h1: no plan, 3 problems:\n1. ")
    assert "\n3. " in result["msg"]
    assert sorted(item["code"] for item in result["problems"]) == ["env_secret", "gpu_twice", "model_relative"]
    assert not (tmp_path / "etc").exists()


def test_flags_are_not_checked_without_an_option_list(run):
    absent = {"options_file": "/nonexistent/options.json", "extra_args": {"no-such-flag": 1}}
    refused = run(**absent)
    assert [item["code"] for item in refused["problems"]] == ["release_missing"]
    assert "--tags engine" in refused["msg"]
    result = run(**absent, _ansible_check_mode=True)
    assert result["flags_checked"] is False
    assert [item["code"] for item in result["findings"]] == ["flags_unchecked"]


def test_an_option_list_that_is_none(run, tmp_path):
    (tmp_path / "o.json").write_text("[]")
    result = run(options_file=str(tmp_path / "o.json"))
    assert result["failed"] is True
    assert "o.json" in result["msg"]


def test_toolkit_file(run, tmp_path):
    (tmp_path / "toolkit.json").write_text('{"cuda_home": "/cuda"}')
    uuid = "GPU-00000000-1111-2222-3333-444444444444"
    facts = {"gpus": [{"index": 0, "uuid": uuid, "name": "X"}], "listeners": []}
    result = run(device="cuda", gpus=[], facts=facts, toolkit_file=str(tmp_path / "toolkit.json"))
    environment = result["plan"]["instances"][0]["environment"]
    assert (environment["CUDA_HOME"], environment["CUDA_VISIBLE_DEVICES"]) == ("/cuda", uuid)
    assert result["lines"] == [f"GPU 0 (X, {uuid}): sglang@0.service on 127.0.0.1:30000, canary"]


def test_facts_that_are_none(run):
    result = run(facts={"gpus": [{"nonsense": 1}]})
    assert result["failed"] is True


def test_a_remedy_is_applied_while_the_value_that_failed_is_asked_for_and_then_forgotten(run, tmp_path):
    record = tmp_path / "etc/remedies.json"
    record.parent.mkdir()
    item = {"gpu": 1, "code": "gpu_oom", "setting": "mem_fraction_static", "before": 0.85, "after": 0.8}
    record.write_text(json.dumps({"schema": 1, "remedies": {"1": item}}))
    asked = {"settings": {"mem_fraction_static": 0.85}, "remedies": {"gpu_oom": 0.7}}
    told = run(**asked)
    assert told["remedies"] == ["GPU 1: mem_fraction_static is 0.8 instead of 0.85 (remedy for gpu_oom)"]
    assert "0.8" in told["plan"]["instances"][1]["argv"]
    assert run(**asked)["changed"] is False
    check = run(**{**asked, "settings": {"mem_fraction_static": 0.7}, "_ansible_check_mode": True})
    assert (check["changed"], check["remedies"]) == (True, [])
    assert json.loads(record.read_text())["remedies"]
    run(**{**asked, "settings": {"mem_fraction_static": 0.7}})
    assert json.loads(record.read_text())["remedies"] == {}
