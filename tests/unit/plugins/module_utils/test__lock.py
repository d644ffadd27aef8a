"""Locks and wheel folders, as tables."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._lock import (
    LockError,
    Pin,
    differences,
    normalize_version,
    parse_lock,
    same_version,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._wheels import (
    Target,
    bytes_of,
    misfit,
    parse_wheel,
    wheel_problems,
)

DEBIAN12 = Target((3, 11), "x86_64", (2, 36))


@pytest.mark.parametrize(
    ("text", "pins"),
    [
        ("a==1", [Pin("a", "1")]),
        ("# head\nB_c.D==1.0  # note\n\n    # via x\n", [Pin("b-c-d", "1.0")]),
        ("huggingface_hub[cli]==1.33.0", [Pin("huggingface-hub", "1.33.0")]),
        ("torch==2.13.0+cpu", [Pin("torch", "2.13.0+cpu")]),
        ('a==1 ; python_version < "3.12"', [Pin("a", "1", 'python_version < "3.12"')]),
        (
            "a==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\nb==2",
            [Pin("a", "1", "", ("sha256:aa", "sha256:bb")), Pin("b", "2")],
        ),
        ("b==2\r\na==1\r\n", [Pin("a", "1"), Pin("b", "2")]),
        ("a===1", [Pin("a", "1")]),
        (
            'a==1 ; os_name == "nt"\na==2 ; os_name == "posix"',
            [Pin("a", "1", 'os_name == "nt"'), Pin("a", "2", 'os_name == "posix"')],
        ),
    ],
)
def test_parse(text, pins):
    assert parse_lock(text) == pins


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["it holds no package"]),
        ("a>=1\nb", ["line 1: 'a>=1': not an exact pin", "line 2: 'b': not an exact pin"]),
        ("a==1.*", ["not an exact pin"]),
        ("-r other.txt\na==1", ["line 1: '-r other.txt': a lock holds pins only"]),
        ("--index-url https://u:secret@h/s\na==1", ["'--index-url https://***@h/s': where packages come from"]),
        ("a @ https://h/a.whl\na==1", ["a direct address is no pin"]),
        ("a==1\nA==2", ["a is pinned twice: 1 and 2"]),
    ],
)
def test_parse_says_everything_that_is_wrong(text, problems):
    with pytest.raises(LockError) as caught:
        parse_lock(text)
    assert len(caught.value.problems) == len(problems)
    for found, wanted in zip(caught.value.problems, problems):
        assert wanted in found
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("1.0", "1.0.0", True),
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.13.0+cpu", "2.13.0+cu130", False),
        ("0.5.23+standin", "0.5.23+standin", True),
        ("4.0.0b36", "4.0.0-beta.36", True),
        ("0.2.1.1.post7", "0.2.1.1-7", True),
        ("2026.09.0", "2026.9.0", True),
        ("1.0rc1", "1.0", False),
        ("1.0.dev3", "1.0dev3", True),
        ("1!1.0", "1.0", False),
        ("odd_thing", "ODD_thing", True),
    ],
)
def test_same_version(wanted, found, same):
    assert same_version(wanted, found) is same


def test_normalize_keeps_a_zero():
    assert normalize_version("0.0") == "0"


def test_differences_come_all_at_once():
    pins = [
        Pin("a", "1"),
        Pin("b", "2"),
        Pin("c", "3", 'os_name == "nt"'),
        Pin("d", "4"),
        Pin("e", "5", "x"),
        Pin("e", "6", "y"),
    ]
    assert differences(pins, {"a": "1.0", "b": "9", "e": "6", "other": "1"}) == [
        "b: 2 is pinned, 9 is installed",
        "d: 4 is pinned, not installed",
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a-1-py3-none-any.whl", None),
        ("a-1-py2.py3-none-any.whl", None),
        ("a-1-cp311-cp311-manylinux_2_34_x86_64.whl", None),
        ("a-1-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", None),
        ("a-1-1-cp311-cp311-linux_x86_64.whl", None),
        ("a-1-cp312-cp312-manylinux_2_17_x86_64.whl", "is for cp312, this Python is 3.11"),
        ("a-1-cp311-cp311t-manylinux_2_17_x86_64.whl", "is for cp311, this Python is 3.11"),
        ("a-1-cp312-abi3-manylinux_2_17_x86_64.whl", "is for cp312, this Python is 3.11"),
        ("a-1-py313-none-any.whl", "is for py313, this Python is 3.11"),
        ("a-1-cp311-cp311-manylinux_2_39_x86_64.whl", "needs glibc 2.39, this machine has 2.36"),
        ("a-1-cp311-cp311-manylinux_2_17_aarch64.whl", "is for manylinux_2_17_aarch64, this machine is x86_64"),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", "is for musllinux_1_2_x86_64, this is a glibc system"),
        ("a-1-cp311-cp311-win_amd64.whl", "is for win_amd64, this machine is x86_64"),
        ("a-1.whl", "not a wheel"),
    ],
)
def test_misfit(name, reason):
    assert misfit(name, DEBIAN12) == reason


def test_a_folder_is_judged_whole():
    pins = [
        Pin("a", "1"),
        Pin("b", "2"),
        Pin("c-d", "3"),
        Pin("e", "1", "marker"),
        Pin("f", "1"),
        Pin("torch", "2.13.0+cpu"),
    ]
    files = [
        "a-1-py3-none-any.whl",
        "b-1-py3-none-any.whl",
        "c_d-3-cp312-cp312-linux_x86_64.whl",
        "f-1.tar.gz",
        "torch-2.13.0_cpu-cp311-cp311-linux_x86_64.whl",
        "readme.txt",
    ]
    assert wheel_problems(pins, files, DEBIAN12) == [
        "no file for 1 of 6 pinned packages: b==2 (there is b-1-py3-none-any.whl)",
        "1 file(s) don't fit: c_d-3-cp312-cp312-linux_x86_64.whl is for cp312, this Python is 3.11",
    ]
    assert wheel_problems(pins, [], None) == [
        "no file for 5 of 6 pinned packages: a==1, b==2, c-d==3, f==1, torch==2.13.0+cpu"
    ]


def test_size_counts_the_pinned_files_only():
    sizes = {"a-1-py3-none-any.whl": 10, "a-2-py3-none-any.whl": 1000, "b-1-py3-none-any.whl": 5}
    assert bytes_of([Pin("a", "1"), Pin("b", "1"), Pin("c", "1")], sizes) == 15


def test_parse_wheel_rejects_other_files():
    assert parse_wheel("a-1.tar.gz") is None
    assert parse_wheel("a.whl") is None
