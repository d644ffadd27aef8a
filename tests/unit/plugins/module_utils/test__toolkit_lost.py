"""Records that are lost or damaged: nothing of ours stays for good, nothing of ours is in the way, no traceback."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_apply as apply
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_state as state
from toolkits import Desk, write


@pytest.fixture
def desk(tmp_path, monkeypatch):
    return Desk(tmp_path, monkeypatch)


def test_trees_and_sets_without_their_records_are_taken_back(desk):
    tree = desk.run().cuda_home
    write(desk.top / "cuda/wheels/13.0.2-0123abcd/nvidia/x")  # a set whose record is gone
    os.unlink(f"{tree}/gpufleet-toolkit.json")
    assert apply.private_sets(str(desk.top / "cuda")) == [f"{desk.top}/cuda/wheels/13.0.2-0123abcd"]
    assert desk.remove().changed
    assert not (desk.top / "cuda").exists()
    assert desk.run().proven


@pytest.mark.parametrize("name", ["notes", "13.0", "13.0-0123abcd", "x-0123abcd0123", "13.0-0123abcd0123.bak"])
def test_a_folder_of_others_is_no_tree(desk, name):
    desk.run()
    write(desk.top / f"cuda/{name}/x")
    assert f"{desk.top}/cuda/{name}" not in apply.trees(str(desk.top / "cuda"))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\0\0\0", []),
        (b"\xff\xfe/etc\n/etc/sglang\n", ["/etc/sglang"]),
        (b"etc\n/etc/sg\0lang\n/etc/sglang\n", ["/etc/sglang"]),
    ],
)
def test_users_that_cannot_be_read(tmp_path, data, expected):
    (tmp_path / state.USERS).write_bytes(data)
    assert state.users(str(tmp_path)) == expected


def test_a_run_and_a_removal_with_damaged_users(desk):
    desk.run()
    (desk.top / "cuda/.users").write_bytes(b"\0" * 40)
    assert desk.run().proven
    assert state.users(str(desk.top / "cuda")) == [str(desk.top / "etc")]
    (desk.top / "cuda/.users").write_bytes(b"\xff\0")
    assert desk.remove().changed
    assert not (desk.top / "cuda").exists()


def test_a_record_too_deep_to_read_is_none(desk):
    desk.run()
    (desk.top / "etc/toolkit.json").write_text("[" * 100_000)
    assert desk.run().proven
    (desk.top / "etc/toolkit.json").write_text("[" * 100_000)
    assert desk.remove().changed


def test_a_failed_run_on_another_folder_keeps_where_the_home_lies(desk):
    desk.run()
    (desk.top / "open").mkdir()
    (desk.top / "open").chmod(0o777)
    mine = desk.settings
    desk.settings = replace(mine, folder=str(desk.top / "open/cuda"))
    assert desk.run().problems
    assert desk.record()["folder"] == str(desk.top / "cuda")
    assert not desk.remove().changed  # nothing of it is there, and the record is the good folder's
    assert desk.record()["cuda_home"]


def test_an_empty_folder_that_a_killed_removal_left_goes(desk):
    desk.run()
    record = (desk.top / "etc/toolkit.json").read_text()
    desk.remove()
    write(desk.top / "etc/toolkit.json", record)
    (desk.top / "cuda").mkdir()
    assert desk.remove().changed
    assert not (desk.top / "cuda").exists()


def test_no_half_mark(desk, monkeypatch):
    def full(self, *_args, **_more):
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full)
        assert any("No space" in item.text() for item in desk.run().problems)
    assert not (desk.top / "cuda" / apply.MARK).exists()
    assert desk.run().proven
    desk.remove()
    assert not (desk.top / "cuda").exists()
