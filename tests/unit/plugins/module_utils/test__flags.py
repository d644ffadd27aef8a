"""Stable settings and free flags on the engines that users have."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._flags import (
    SETTINGS,
    Flag,
    companions,
    extra_flags,
    settings_flags,
    typed,
)
from engines import engine

VERSIONS = ("0.5.12", "0.5.16", "0.5.23")


def words(flags):
    return [word for flag in flags for word in flag.argv()]


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        (
            "mamba_strategy",
            "no_buffer",
            [
                "--mamba-scheduler-strategy no_buffer",
                "--mamba-radix-cache-strategy no_buffer",
                "--mamba-radix-cache-strategy no_buffer",
            ],
        ),
        (
            "decode_graph_max_batch",
            64,
            ["--cuda-graph-max-bs 64", "--cuda-graph-max-bs-decode 64", "--cuda-graph-max-bs-decode 64"],
        ),
        (
            "decode_graphs",
            False,
            ["--disable-cuda-graph", "--disable-decode-cuda-graph", "--disable-decode-cuda-graph"],
        ),
        (
            "prefill_graphs",
            False,
            ["--disable-piecewise-cuda-graph", "--disable-prefill-cuda-graph", "--disable-prefill-cuda-graph"],
        ),
        ("decode_graphs", True, ["", "", ""]),
        ("metrics", True, ["--enable-metrics"] * 3),
        ("metrics", "true", ["--enable-metrics"] * 3),
        ("metrics", False, ["", "", ""]),
        ("sleep_on_idle", True, ["--sleep-on-idle"] * 3),
        ("mem_fraction_static", "0.85", ["--mem-fraction-static 0.85"] * 3),
        ("chunked_prefill_size", -1, ["--chunked-prefill-size -1"] * 3),
        ("watchdog_timeout", 600.0, ["--watchdog-timeout 600"] * 3),
        ("attention_backend", None, ["", "", ""]),
        ("log_level", "", ["", "", ""]),
    ],
)
def test_setting_becomes_the_engines_own_flag(setting, value, expected):
    for version, line in zip(VERSIONS, expected):
        flags, findings = settings_flags({setting: value}, engine(version), "sglang_server")
        assert (" ".join(words(flags)), findings) == (line, [])


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ([Flag("mamba-radix-cache-strategy", ("no_buffer",))], ["--disable-overlap-schedule"]),
        ([Flag("mamba-scheduler-strategy", ("no_buffer",))], ["--disable-overlap-schedule"]),
        ([Flag("mamba-radix-cache-strategy", ("auto",))], []),
        ([Flag("mamba-radix-cache-strategy", ("extra_buffer",))], []),
        ([Flag("mamba-radix-cache-strategy", ("no_buffer",)), Flag("disable-overlap-schedule")], []),
        ([Flag("mamba-radix-cache-strategy", ("no_buffer",)), Flag("disable-radix-cache")], []),
        ([Flag("enable-metrics")], []),
    ],
)
def test_no_buffer_by_name_comes_without_the_overlap_schedule(flags, added):
    assert words(companions(flags)) == added


def test_every_setting_has_a_flag_in_every_version():
    for version in VERSIONS:
        for setting in SETTINGS.values():
            assert any(engine(version).find(flag) for flag in setting.flags), (version, setting)


def test_without_an_option_list_the_newest_names_are_taken():
    flags, findings = settings_flags({"mamba_strategy": "no_buffer", "decode_graphs": False}, None, "sglang_server")
    assert words(flags) == ["--mamba-radix-cache-strategy", "no_buffer", "--disable-decode-cuda-graph"]
    assert findings == []


def test_a_setting_the_engine_has_no_flag_for_is_a_problem():
    small = engine("0.5.16")
    small = type(small)(small.version, "/v", "", tuple(o for o in small.options if "mamba" not in o.name))
    flags, (finding,) = settings_flags({"mamba_strategy": "no_buffer"}, small, "sglang_server")
    assert flags == []
    assert finding.code == "no_flag"
    assert "--mamba-radix-cache-strategy or --mamba-scheduler-strategy" in finding.message


@pytest.mark.parametrize(
    ("kind", "value", "good"),
    [
        ("fraction", 0.85, 0.85),
        ("fraction", 0, None),
        ("fraction", 1, None),
        ("fraction", 1.5, None),
        ("fraction", "much", None),
        ("fraction", "nan", None),
        ("fraction", True, None),
        ("count", "64", 64),
        ("count", 0, None),
        ("count", -1, None),
        ("count", 1.5, None),
        ("count", [1], None),
        ("tokens", -1, -1),
        ("tokens", -2, None),
        ("seed", 0, 0),
        ("seconds", 0.5, 0.5),
        ("seconds", 0, None),
        ("bool", "yes", True),
        ("bool", "maybe", None),
        ("str", "fa3", "fa3"),
        ("str", "a\nb", None),
        ("str", {"a": 1}, None),
    ],
)
def test_typed(kind, value, good):
    result, wrong = typed(kind, value)
    assert (wrong is None) == (good is not None)
    if wrong is None:
        assert (result, type(result)) == (good, type(good))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"page-size": 16}, ["--page-size", "16"]),
        ({"--page_size": "16"}, ["--page-size", "16"]),
        ({"disable-radix-cache": True}, ["--disable-radix-cache"]),
        ({"disable-radix-cache": False, "page-size": None}, []),
        ({"cuda-graph-bs-decode": [1, 2, 4]}, ["--cuda-graph-bs-decode", "1", "2", "4"]),
        ({"cuda-graph-config": {"decode": {"max_bs": 8}}}, ["--cuda-graph-config", '{"decode":{"max_bs":8}}']),
        ({"tp-size": 1}, ["--tp-size", "1"]),
        ({"revision": "-x"}, ["--revision=-x"]),
        ({"page-size": 1, "crash-dump-folder": "/d"}, ["--crash-dump-folder", "/d", "--page-size", "1"]),
    ],
)
def test_extra_args(extra, expected):
    flags, findings = extra_flags(extra, [], engine("0.5.23"), "sglang_server")
    assert (words(flags), findings) == (expected, [])


@pytest.mark.parametrize(
    ("extra", "code", "text"),
    [
        ({"model": "/m"}, "owned_flag", "sglang_server_model"),
        ({"model-path": "/m"}, "owned_flag", "sglang_server_model"),
        ({"port": 1}, "owned_flag", "sglang_server_base_port"),
        ({"host": "::"}, "owned_flag", "sglang_server_host"),
        ({"base-gpu-id": 1}, "owned_flag", "sglang_server_gpus"),
        ({"config": "f"}, "owned_flag", "sglang_server_extra_args"),
        ({"api-key": "k"}, "owned_flag", "router"),
        ({"admin-api-key": "k"}, "owned_flag", "first log line"),
        ({"tensor-parallel-size": 2}, "owned_flag", "one server per GPU"),
        ({"tp-size": "8"}, "owned_flag", "one server per GPU"),
        ({"nnodes": 2}, "owned_flag", "one server per GPU"),
        ({"ssl-keyfile": "/k"}, "owned_flag", "TLS into the router"),
        ({"help": True}, "owned_flag", "ends the engine"),
        ({"mamba-scheduler-strategy": "no_buffer"}, "unknown_flag", "sglang_server_mamba_strategy"),
        ({"cuda-graph-max-bs": 8}, "unknown_flag", "sglang_server_decode_graph_max_batch"),
        ({"warp-drive-xyz": 8}, "unknown_flag", "not an option of SGLang 0.5.23"),
        ({"page-sze": 8}, "unknown_flag", "--page-size"),
        ({"attention-backend": "flashinfr"}, "bad_value", "flashinfer"),
        ({"max-running-requests": 1}, "flag_twice", "--max-running-requests"),
        ({"page-size": 1, "page_size": 2}, "flag_twice", "--page-size"),
        ({"disable-radix-cache": "x"}, "bad_value", "bare flag"),
        ({"page-size": []}, "bad_value", "empty list"),
        ({"page-size": [[1]]}, "bad_value", "plain values"),
        ({"revision": "a\nb"}, "bad_value", "one line"),
    ],
)
def test_extra_args_refused(extra, code, text):
    taken = [Flag("max-running-requests", ("64",))]
    _flags, (finding,) = extra_flags(extra, taken, engine("0.5.23"), "sglang_server")
    assert finding.code == code
    assert text in finding.text()


def test_owned_flags_are_refused_without_an_option_list_too():
    for name, value in (("model", "/m"), ("tp", 2), ("api-key", "k")):
        _flags, (finding,) = extra_flags({name: value}, [], None, "sglang_server")
        assert finding.code == "owned_flag"


def test_a_deprecated_flag_that_the_engine_still_takes_stays_and_is_named():
    flags, findings = extra_flags({"mamba-scheduler-strategy": "no_buffer"}, [], engine("0.5.16"), "sglang_server_")
    assert words(flags) == ["--mamba-scheduler-strategy", "no_buffer"]
    assert [(item.code, item.severity) for item in findings] == [("flag_deprecated", "warning")]
    assert "--mamba-radix-cache-strategy" in findings[0].message


def test_a_removed_flag_is_refused_with_its_history():
    _flags, findings = extra_flags({"cuda-graph-bs": 8}, [], engine("0.5.23"), "sglang_server_")
    assert findings[0].code == "unknown_flag"
    assert "it went after 0.5.19, which names instead: --cuda-graph-bs-decode" in findings[0].message
    assert "--cuda-graph-bs-decode" in findings[0].remedy
