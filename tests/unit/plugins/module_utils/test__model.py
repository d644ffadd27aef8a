"""Model folders: whole ones, and the ways in which they are not."""

from __future__ import annotations

import json
import os

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def make(folder, **files):
    folder.mkdir()
    whole = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"}
    for name, text in {**whole, **{key.replace("__", "."): value for key, value in files.items()}}.items():
        if text is not None:
            (folder / name).write_text(text)
    return str(folder)


def codes(path, formats=("",), offline=False):
    return [item.code for item in _model.problems(_model.inspect(path), set(formats), offline)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/models/x", "folder"),
        ("Qwen/Qwen3.6-27B", "hub"),
        ("gpt2", "hub"),
        ("s3://bucket/x", "url"),
        ("models/a/b", "relative"),
        ("./x", "relative"),
        ("../x", "relative"),
        ("~/x", "relative"),
        ("", "relative"),
        ("a b", "relative"),
    ],
)
def test_kind(name, kind):
    assert _model.kind_of(name) == kind


@pytest.mark.parametrize(
    ("files", "formats", "expected"),
    [
        ({}, [""], []),
        ({"config__json": None}, [""], ["model_config"]),
        ({"config__json": "{"}, [""], ["model_config"]),
        ({"config__json": "[]"}, [""], ["model_config"]),
        ({"config__json": None, "params__json": "{}"}, ["mistral"], []),
        ({"config__json": None, "params__json": "{}"}, [""], ["model_config"]),
        ({"tokenizer__json": None}, [""], ["model_tokenizer"]),
        ({"model__safetensors": None}, [""], ["model_weights"]),
        ({"model__safetensors": None}, ["dummy"], []),
        ({"model__safetensors": None}, ["dummy", ""], ["model_weights"]),
        ({"model__safetensors": None, "pytorch_model__bin": "w"}, [""], []),
        ({"model__safetensors": None, "x__gguf": "w"}, ["gguf"], []),
        ({"model__safetensors": None, "training_args__bin": "w"}, [""], ["model_weights"]),
        ({"model__safetensors": POINTER}, [""], ["model_pointers"]),
        ({"config__json": None, "tokenizer__json": None, "model__safetensors": None}, [""],
         ["model_config", "model_tokenizer", "model_weights"]),
    ],
)  # fmt: skip
def test_folders(tmp_path, files, formats, expected):
    assert codes(make(tmp_path / "m", **files), formats) == expected


def test_shards_the_index_names_must_be_there(tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model.safetensors"}}
    path = make(tmp_path / "m", **{"model.safetensors.index.json": json.dumps(index)})
    (finding,) = _model.problems(_model.inspect(path), {""}, False)
    assert finding.code == "model_shards"
    assert "model-1.safetensors, model-2.safetensors" in finding.message


def test_an_index_that_does_not_parse(tmp_path):
    assert codes(make(tmp_path / "m", **{"model.safetensors.index.json": "{}"})) == ["model_shards"]


def test_a_dangling_link_is_no_weight(tmp_path):
    path = make(tmp_path / "m")
    os.symlink(tmp_path / "gone", f"{path}/model-2.safetensors")
    assert codes(path) == ["model_unreadable"]


def test_paths_that_are_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "x.gguf").write_text("")
    assert codes(str(tmp_path / "gone")) == ["model_missing"]
    assert codes(str(tmp_path / "file")) == ["model_missing"]
    assert codes(str(tmp_path / "x.gguf")) == []


def test_hub_ids(tmp_path):
    assert codes("Qwen/Qwen3") == []
    assert codes("Qwen/Qwen3", offline=True) == ["model_offline"]
    assert codes("./Qwen3") == ["model_relative"]
