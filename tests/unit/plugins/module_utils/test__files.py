"""Files: written together, or not at all."""

from __future__ import annotations

import os

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _files
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import (
    FileError,
    FileSpec,
    file_changes,
    remove_files,
    write_files,
)


def test_write_then_unchanged(tmp_path):
    spec = FileSpec(str(tmp_path / "a" / "b.env"), "x=1\n", 0o600)
    assert [change.before for change in file_changes([spec])] == [None]
    write_files([spec])
    assert file_changes([spec]) == []
    assert oct(os.stat(spec.path).st_mode & 0o777) == "0o600"
    assert os.listdir(tmp_path / "a") == ["b.env"]


def test_a_mode_is_a_change_and_shows_in_the_diff(tmp_path):
    path = tmp_path / "f"
    path.write_text("same\n")
    path.chmod(0o644)
    (change,) = file_changes([FileSpec(str(path), "same\n", 0o600)])
    assert change.diff["before"].startswith("# mode 0644")
    assert change.diff["after"].startswith("# mode 0600")


def test_a_secret_never_shows(tmp_path):
    (change,) = file_changes([FileSpec(str(tmp_path / "s"), "TOKEN=abc\n", 0o600, secret=True)])
    assert "abc" not in str(change.diff)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_full_disk_leaves_every_old_file(tmp_path, monkeypatch, fails_at):
    specs = [FileSpec(str(tmp_path / name), "new\n") for name in ("a", "b")]
    for spec in specs:
        (tmp_path / os.path.basename(spec.path)).write_text("old\n")
    calls = []

    def full(fd):
        calls.append(fd)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(_files.os, "fsync", full)
    with pytest.raises(FileError, match=f"{'ab'[fails_at - 1]}: No space left on device"):
        write_files(specs)
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["old\n", "old\n"]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_remove_says_what_was_there(tmp_path):
    (tmp_path / "a").write_text("")
    assert remove_files([str(tmp_path / "a"), str(tmp_path / "b")]) == [str(tmp_path / "a")]
