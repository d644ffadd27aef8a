"""What every release in the table calls every stable setting."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._flags import SETTINGS, settings_flags
from ansible_collections.gpufleet.sglang.plugins.module_utils._spelling import (
    MODULE_ENTRY,
    SERVE_ENTRY,
    covered,
    deprecated,
    history,
    knows,
    number,
    spelling,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._spellings import FLAGS, VERSIONS

# The settings whose flag changed: setting -> (spelled so before 0.5.14, and so from 0.5.14 on)
RENAMED = {
    "mamba_strategy": ("mamba-scheduler-strategy", "mamba-radix-cache-strategy"),
    "decode_graph_max_batch": ("cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
    "decode_graphs": ("disable-cuda-graph", "disable-decode-cuda-graph"),
    "prefill_graphs": ("disable-piecewise-cuda-graph", "disable-prefill-cuda-graph"),
}
VALUES = {"str": "x", "fraction": 0.5, "count": 8, "tokens": 8, "seconds": 8, "seed": 8}


def test_the_table_holds_every_release_from_the_oldest_to_the_newest():
    assert (VERSIONS[0], VERSIONS[-1]) == ("0.5.10", "0.5.23")
    assert sorted(VERSIONS, key=number) == list(VERSIONS)
    assert {number(version)[2] for version in VERSIONS} == set(range(10, 24))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_on_every_release(version, setting):
    old, new = RENAMED.get(setting, (SETTINGS[setting].flags[0],) * 2)
    expected = old if number(version) < (0, 5, 14) else new
    assert spelling(SETTINGS[setting].flags, version) == expected
    assert not deprecated(expected, version)
    value = SETTINGS[setting].when if SETTINGS[setting].kind == "bool" else VALUES[SETTINGS[setting].kind]
    flags, findings = settings_flags({setting: value}, None, "sglang_server_", version=version)
    assert ([flag.name for flag in flags], findings) == ([expected], [])


@pytest.mark.parametrize("version", VERSIONS)
def test_both_ways_to_start_are_on_every_release(version):
    assert knows(MODULE_ENTRY, version) and knows(SERVE_ENTRY, version)


@pytest.mark.parametrize(
    ("flag", "version", "known", "instead"),
    [
        ("mamba-scheduler-strategy", "0.5.13", True, ""),
        ("mamba-scheduler-strategy", "0.5.14", True, "--mamba-radix-cache-strategy"),
        ("mamba-scheduler-strategy", "0.5.19", True, "--mamba-radix-cache-strategy"),
        ("mamba-scheduler-strategy", "0.5.20", False, ""),
        ("mamba-radix-cache-strategy", "0.5.13", False, ""),
        ("cuda-graph-max-bs", "0.5.12", True, ""),  # 0.5.12 lies before the post-release that the table was read from
        ("disable-cuda-graph", "0.5.23.post1", True, "--cuda-graph-backend-{decode,prefill}=disabled"),
        ("disable-cuda-graph", "0.5.13+cu128", True, ""),
        ("disable-cuda-graph", "0.5.9", None, ""),
        ("disable-cuda-graph", "0.6.0", None, ""),
        ("disable-cuda-graph", "main", None, ""),
        ("no-such-flag", "0.5.23", None, ""),
    ],
)
def test_when_a_flag_came_and_went(flag, version, known, instead):
    assert (knows(flag, version), deprecated(flag, version)) == (known, instead)


def test_history_names_what_came_and_what_went():
    assert history("mamba-scheduler-strategy", "0.5.23") == (
        "it went after 0.5.19, which names instead: --mamba-radix-cache-strategy"
    )
    assert history("mamba-radix-cache-strategy", "0.5.12") == "it came with 0.5.14"
    assert history("torchao-config", "0.5.23") == "it went after 0.5.17"
    assert history("dtype", "0.5.23") == history("no-such-flag", "0.5.23") == history("dtype", "9.9.9") == ""


def test_rows_are_in_order():
    for flag, (first, last, since, _instead) in FLAGS.items():
        assert first in VERSIONS and last in VERSIONS and number(first) <= number(last), flag
        assert not since or number(first) <= number(since) <= number(last), flag
    assert not covered("")
