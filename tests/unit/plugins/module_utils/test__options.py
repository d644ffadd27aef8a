"""The engine's option list: look-ups, checks, and reading it from a real parser."""

from __future__ import annotations

import sys

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _options_read as reading
from ansible_collections.gpufleet.sglang.plugins.module_utils._options import (
    EngineOptions,
    Option,
    OptionsFileError,
    find_option,
    suggest,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result, SubprocessRunner
from ansible_collections.gpufleet.sglang.tests.unit.plugins.module_utils import wheelhouse

OPTIONS = (
    Option(("-h", "--help"), nargs=0, action="_HelpAction"),
    Option(("--model-path", "--model"), type="str"),
    Option(("--port",), type="int", default="30000"),
    Option(("--mem-fraction-static",), type="float"),
    Option(("--attention-backend",), choices=("triton", "flashinfer", "fa3")),
    Option(("--load-format",), choices=tuple(f"f{n}" for n in range(20))),
    Option(("--enable-metrics",), nargs=0, action="_StoreTrueAction"),
    Option(("--lora-strict-loading", "--no-lora-strict-loading"), nargs=0, action="BooleanOptionalAction"),
    Option(("--cuda-graph-max-bs-decode",), type="int"),
    Option(("--cuda-graph-max-bs-prefill",), type="int"),
    Option(("--mamba-radix-cache-strategy",), choices=("auto", "no_buffer")),
    Option(("--cuda-graph-bs",), nargs="+", type="int"),
    Option(("--model-checksum",), nargs="?"),
    Option(("--pair",), nargs=2),
    Option(("--old",), nargs=0, action="DeprecatedAction", message="use --new", refused=True),
)
ENGINE = EngineOptions("0.5.23", "/v", "f", OPTIONS)


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("port", 30001, None),
        ("--port", "30001", None),
        ("mem_fraction_static", 0.85, None),
        ("attention_backend", "flashinfer", None),
        ("enable_metrics", True, None),
        ("enable_metrics", False, None),
        ("no-lora-strict-loading", True, None),
        ("cuda_graph_bs", [1, 2, 4], None),
        ("model-checksum", True, None),
        ("model-checksum", "x", None),
        ("pair", [1, 2], None),
        ("port", None, None),
        ("port", "x", '--port: "x" is not an integer'),
        ("port", True, "--port needs a value"),
        ("port", [1, 2], "--port takes one value, got 2: [1, 2]"),
        ("mem-fraction-static", "high", '--mem-fraction-static: "high" is not a number'),
        ("attention-backend", "flashinfr", "is not one of triton, flashinfer, fa3; did you mean flashinfer?"),
        ("load-format", "f99", "is not one of the 20 values it knows; did you mean f9?"),
        ("enable-metrics", "yes", '--enable-metrics is a bare flag and takes no value, got "yes"'),
        ("cuda-graph-bs", [], "--cuda-graph-bs needs at least one value"),
        ("pair", [1], "--pair takes 2 values, got 1: [1]"),
        ("help", True, "prints a text and ends the server"),
        ("old", True, "--old was retired in SGLang 0.5.23: use --new"),
        ("cuda-graph-max-bs", 8, "is ambiguous in SGLang 0.5.23: it could be --cuda-graph-max-bs-decode, --cuda-"),
        ("mem-fraction", 0.5, "is short for --mem-fraction-static in SGLang 0.5.23: write it in full"),
        (
            "mamba-scheduler-strategy",
            "auto",
            "no option --mamba-scheduler-strategy; did you mean --mamba-radix-cache-strategy?",
        ),
        ("zzz", 1, "SGLang 0.5.23 has no option --zzz"),
    ],
)
def test_check(flag, value, problem):
    found = ENGINE.check(flag, value)
    assert found is None if problem is None else problem in str(found)


def test_find_is_exact_and_suggest_is_not():
    assert find_option(OPTIONS, "model") is OPTIONS[1]
    assert find_option(OPTIONS, "--mode") is None
    assert suggest(OPTIONS, "atention-backend") == ["--attention-backend"]
    assert OPTIONS[7].negation == "--no-lora-strict-loading"
    assert OPTIONS[6].negation is None


def test_file_round_trip(tmp_path):
    path = tmp_path / "options.json"
    path.write_text(ENGINE.to_json())
    assert EngineOptions.load(str(path)) == ENGINE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 2}'])
def test_a_broken_file_names_itself_and_the_remedy(tmp_path, text):
    path = tmp_path / "options.json"
    path.write_text(text)
    with pytest.raises(OptionsFileError, match=r"options\.json: .*--tags engine"):
        EngineOptions.load(str(path))


def read(tmp_path, monkeypatch, files):
    root = tmp_path / "site"
    for name, text in files.items():
        path = root / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(root))
    return reading.read_options(SubprocessRunner(), sys.executable, version="0.5.23", venv="/v", fingerprint="f")


BASE = {"__init__.py": "print('chatter')\n", "srt/__init__.py": ""}


@pytest.mark.parametrize(
    ("files", "entry"),
    [
        ({"srt/server_args.py": wheelhouse.PARSER}, "sglang.srt.server_args:ServerArgs.add_cli_args"),
        (
            {"srt/server_args.py": wheelhouse.PARSER.replace("ServerArgs", "Moved")},
            "sglang.srt.server_args:prepare_server_args",
        ),
        (
            {
                "srt/elsewhere.py": wheelhouse.PARSER,
                "launch_server.py": "from sglang.srt.elsewhere import prepare_server_args",
            },
            "sglang.launch_server:prepare_server_args",
        ),
    ],
)
def test_read_wherever_the_parser_is(tmp_path, monkeypatch, files, entry):
    options = read(tmp_path, monkeypatch, {**BASE, **files})
    assert options.entry == entry
    assert options.launch_server is ("launch_server.py" in files)
    assert options.check("port", 1) is None
    assert options.find("attention-backend") == Option(("--attention-backend",), choices=("triton", "flashinfer"))


@pytest.mark.parametrize(
    ("files", "texts"),
    [
        ({}, ["No module named 'sglang.srt.server_args'", "a package is missing"]),
        (
            {"srt/server_args.py": "x = 1\n", "launch_server.py": ""},
            ["ServerArgs", "keeps its parser in a place not known"],
        ),
        ({"srt/server_args.py": "import vllm\n"}, ["No module named 'vllm'", "device cpu"]),
        ({"srt/server_args.py": "raise OSError('libcuda.so.1: cannot open')\n"}, ["libcuda.so.1", "NVIDIA driver"]),
        ({"srt/server_args.py": "import os; os.kill(os.getpid(), 9)\n"}, ["rc 137", "signal 9"]),
    ],
)
def test_an_unreadable_parser_says_why(tmp_path, monkeypatch, files, texts):
    with pytest.raises(reading.OptionsReadError) as caught:
        read(tmp_path, monkeypatch, {**BASE, **files})
    for text in texts:
        assert text in str(caught.value)


def test_a_slow_import_is_ended():
    class Slow:
        def run(self, argv, *, timeout=30.0, env=None, cwd=None):
            assert timeout == 180
            assert env["SGLANG_USE_CPU_ENGINE"] == "1"
            return Result(124, "", "x")

    with pytest.raises(reading.OptionsReadError, match="more than 180 s"):
        reading.read_options(Slow(), "p", version="1", venv="/v", fingerprint="f", device="cpu")


def test_the_cache_counts_for_this_engine_only(tmp_path):
    path = tmp_path / "o.json"
    assert reading.cached(str(path), "0.5.23", "/v", "f") is None
    path.write_text(ENGINE.to_json())
    assert reading.cached(str(path), "0.5.23", "/v", "f") == ENGINE
    for other in (("0.5.24", "/v", "f"), ("0.5.23", "/w", "f"), ("0.5.23", "/v", "g")):
        assert reading.cached(str(path), *other) is None
