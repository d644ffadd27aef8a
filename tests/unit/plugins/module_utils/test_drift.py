"""Drift: which item, old and new value, secrets hidden; and which releases may go."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._drain import requests_in, sign_in
from ansible_collections.gpufleet.sglang.plugins.module_utils._drift import (
    environment_differences,
    file_differences,
    flag_differences,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._history import to_prune


@pytest.mark.parametrize(
    ("running", "wanted", "lines"),
    [
        (["/v/python", "-m", "s", "--a", "1"], ["/v/python", "-m", "s", "--a", "1"], []),
        (["--a", "1", "--b"], ["--a", "2"], ["flag --a: 1 -> 2", "flag --b: set -> not set"]),
        (["--a=1"], ["--a", "1", "--c", "3"], ["flag --c: not set -> 3"]),
        (["--api-key", "k1"], ["--api-key", "k2"], ["flag --api-key: (hidden) -> (hidden)"]),
        (["--max-total-tokens", "1"], ["--max-total-tokens", "2"], ["flag --max-total-tokens: 1 -> 2"]),
    ],
)
def test_flags(running, wanted, lines):
    assert [item.text() for item in flag_differences(running, wanted)] == lines


@pytest.mark.parametrize(
    ("running", "wanted", "secrets", "lines"),
    [
        ({"A": "1", "INVOCATION_ID": "x"}, {"A": "1"}, {}, []),
        ({"A": "1"}, {"A": "2"}, {}, ["environment A: 1 -> 2"]),
        ({"B": "s3cret"}, {}, {}, ["environment B: (hidden) -> not set"]),
        ({"T": "old"}, {}, {"T": "new"}, ["environment T: (hidden) -> (hidden)"]),
        ({"T": "same"}, {}, {"T": "same"}, []),
    ],
)
def test_environment(running, wanted, secrets, lines):
    assert [item.text() for item in environment_differences(running, wanted, secrets)] == lines


def test_a_file_is_compared_by_its_lines():
    good = "# one\n[Service]\nRestartSec=1\n"
    assert file_differences("unit file", "u", good, "# two\n[Service]\nRestartSec=1\n") == []
    (found,) = file_differences("unit file", "u", good, "[Service]\nRestartSec=7\nEnvironment=K=s\n")
    assert found.text() == "unit file u: RestartSec=7 | Environment=(hidden) -> RestartSec=1"


@pytest.mark.parametrize(
    ("payload", "count"),
    [({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]}, 3), ({"loads": []}, None), ([], None)],
)
def test_requests_in_flight(payload, count):
    assert requests_in(payload) == count


def test_what_moves_in_an_engine_that_works():
    first = {"num_running_reqs": 1, "num_used_tokens": 10, "timestamp": 1}
    assert sign_in({"loads": [first]}) == sign_in({"loads": [{**first, "timestamp": 2}]})
    assert sign_in({"loads": [first]}) != sign_in({"loads": [{**first, "num_used_tokens": 11}]})
    assert sign_in(None) == sign_in({"loads": []}) == ""


@pytest.mark.parametrize(
    ("needed", "keep", "gone"),
    [({"c"}, 2, ["a", "x"]), ({"c", "a"}, 1, ["b", "x"]), (set(), 0, [])],
)
def test_what_may_go(needed, keep, gone):
    assert to_prune(["a", "b", "c", "x"], ["c", "b", "a"], needed, keep) == gone
