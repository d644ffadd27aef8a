# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Additions in place that were damaged, replaced, are out of date, or whose record is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_inplace as inplace
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_stub import MARK, make_stub
from toolkits import Desk, codes, line_of, snapshot, write

STUB = "lib/stubs/libcuda.so"
LOST = "in_place_unrecorded"


@pytest.fixture
def desk(tmp_path, monkeypatch):
    return Desk(tmp_path, monkeypatch)


@pytest.fixture
def added(desk):
    """A tree with our additions; before is what it was."""
    desk.before = snapshot(desk.site.folder)
    assert desk.run(repair="in_place").proven
    desk.record_file = Path(inplace.record_path(desk.settings.folder, str(desk.site.root)))
    return desk


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A whole libcuda.so.1 without our mark, as NVIDIA's stub is."""
    top = tmp_path_factory.mktemp("library")
    write(top / "cuda.h", "typedef int CUresult;\nCUresult cuInit(unsigned int);\n")
    make_stub(SubprocessRunner(), str(top), str(top / "ours.so"), "gcc")
    content = (top / "ours.so").read_bytes()
    assert MARK.encode() in content
    path = top / "libcuda.so"
    path.write_bytes(content.replace(MARK.encode(), b"x" * len(MARK)))
    return path


def relink(name, aim):
    def change(root):
        (root / name).unlink()
        (root / name).symlink_to(aim)

    return change


def rewrite(name, content):
    def change(root):
        (root / name).unlink()
        (root / name).write_bytes(content)

    return change


DAMAGES = [
    rewrite(STUB, b""),
    rewrite(STUB, b"\0" * 8000),
    rewrite(STUB, MARK.encode()),  # ours, cut off
    relink(STUB, "/etc/hostname"),
    relink("lib64", "bin"),
    rewrite("lib64", b"junk"),
    rewrite("lib/libcudart.so", b"junk"),
    relink("lib/libcudart.so", "libcudadevrt.a"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_addition_is_taken_back(added, damage):
    damage(added.site.root)
    added.remove()
    assert snapshot(added.site.folder) == added.before


@pytest.mark.parametrize("damage", [*DAMAGES, relink("lib64", "gone"), relink(STUB, "gone")])
def test_a_damaged_addition_is_made_again_and_proven_anew(added, damage):
    whole = snapshot(added.site.folder)
    damage(added.site.root)
    damaged = snapshot(added.site.folder)
    assert added.run(repair="in_place", check=True).changed
    assert snapshot(added.site.folder) == damaged
    out = added.run(repair="in_place")
    assert (out.changed, out.proven) == (True, True)
    assert snapshot(added.site.folder) == whole
    again = added.run(repair="in_place")
    assert (again.changed, again.proofs) == (False, [])
    added.remove()
    assert snapshot(added.site.folder) == added.before


@pytest.mark.parametrize("content", [b"", b"\0" * 8000])
def test_a_stub_made_again_is_proven_again(added, content):
    rewrite(STUB, content)(added.site.root)
    assert added.run(repair="in_place").proofs


def brought(root, name):
    """Let a wheel's RECORD have a file as it is now."""
    record = next(root.parents[1].glob("nvidia_cuda_runtime-*.dist-info")) / "RECORD"
    lines = [line for line in record.read_text().splitlines() if not line.startswith(f"nvidia/cu13/{name},")]
    record.write_text("\n".join([*lines, line_of(name, root / name)]) + "\n")


def newer_wheel(root, library):
    (root / STUB).write_text("of a newer wheel")
    brought(root, STUB)


def own_folder(root, library):
    shutil.copytree(root / "lib", root / "own", symlinks=True)
    (root / "lib64").unlink()
    (root / "own").rename(root / "lib64")


def own_link(root, library):
    shutil.copytree(root / "lib", root / "own", symlinks=True)
    relink("lib64", "own")(root)


def own_library(root, library):
    shutil.copyfile(library, root / "lib/libcudart.so.13")
    brought(root, "lib/libcudart.so.13")
    rewrite("lib/libcudart.so", library.read_bytes())(root)


@pytest.mark.parametrize(
    ("name", "replace"),
    [
        (STUB, newer_wheel),
        (STUB, lambda root, library: rewrite(STUB, library.read_bytes())(root)),
        (STUB, lambda root, library: relink(STUB, library)(root)),
        ("lib64", own_folder),
        ("lib64", own_link),
        ("lib/libcudart.so", own_library),
    ],
)
def test_what_another_put_in_its_place_is_left_alone(added, library, name, replace):
    replace(added.site.root, library)
    theirs = snapshot(added.site.folder)
    out = added.run(repair="in_place")
    assert out.proven, out.problems
    assert out.proofs  # anew: it is linked with something else
    assert snapshot(added.site.folder) == theirs
    assert str(added.site.root / name) not in [item.path for item in inplace.load(str(added.record_file))]
    again = added.run(repair="in_place")
    assert (again.changed, again.proofs) == (False, [])
    added.remove()
    assert os.path.lexists(added.site.root / name)


def test_the_stub_follows_its_header(added):
    status = os.stat(added.site.root / STUB)
    added.site.renew("include/cuda.h", "CUresult CUDAAPI cuInit(unsigned int); CUresult CUDAAPI cuNew(void);\n")
    assert added.run(repair="in_place", check=True).changed
    assert added.run(repair="in_place").changed
    assert os.stat(added.site.root / STUB).st_ino != status.st_ino
    assert not added.run(repair="in_place").changed


def unlink(path):
    path.unlink()


def other_shape(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "additions": [{"path": 1}]}))


def written(text):
    return lambda path: path.write_text(text)


SPOILT = [unlink, other_shape, *(written(text) for text in ("", "\0" * 90, "{}", "[1]", '{"root": 1'))]


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("spoil", SPOILT)
def test_without_a_usable_record_additions_are_recorded_anew(added, spoil, forgotten):
    spoil(added.record_file)
    if forgotten:  # toolkit.json too: the stub's mark tells
        (added.top / "etc/toolkit.json").unlink()
    assert added.run(repair="in_place", check=True).changed
    out = added.run(repair="in_place")
    assert (out.changed, out.proven) == (True, True)
    assert not added.run(repair="in_place").changed
    added.remove()
    assert snapshot(added.site.folder) == added.before
    assert not (added.top / "cuda").exists()


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("how", ["compose", "remove"])
def test_without_a_usable_record_what_stays_is_named(added, spoil, how):
    spoil(added.record_file)
    whole = snapshot(added.site.folder)
    for _round in range(2):
        out = added.run() if how == "compose" else added.remove(check=not _round)
        (found,) = [item for item in out.findings if item.code == LOST]
        for name in ("lib64", "lib/libcudart.so", STUB):
            assert f"{added.site.root}/{name}" in found.text()
        assert "repair in_place" in found.remedy
        assert snapshot(added.site.folder) == whole
    if how == "compose":
        assert out.proven
        assert not out.changed
        assert str(added.site.root / STUB) not in str(snapshot(out.cuda_home))
        added.remove()
    assert not (added.top / "cuda").exists()
    assert added.run(repair="in_place").proven  # nothing blocks it
    added.remove()
    assert snapshot(added.site.folder) == added.before


def test_garbage_about_an_unknown_tree_is_named_and_goes(desk):
    desk.run()
    write(desk.top / "cuda/in-place/0123456789ab.json")
    (found,) = desk.remove().findings
    assert "0123456789ab.json is unreadable" in found.text()
    assert not (desk.top / "cuda").exists()


@pytest.mark.parametrize("repair", ["compose", "in_place"])
def test_links_that_people_made_are_not_taken_for_ours(desk, repair):
    (desk.site.root / "lib64").symlink_to("lib")
    (desk.site.root / "lib/libcudart.so").symlink_to("libcudart.so.13")
    before = snapshot(desk.site.folder)
    assert LOST not in codes(desk.run(repair=repair))
    assert not desk.run(repair=repair).changed
    assert desk.remove().findings == []
    assert snapshot(desk.site.folder) == before


@pytest.mark.parametrize(
    ("name", "aim", "ours"),
    [
        (STUB, "/usr/lib64/libcuda.so.1", True),
        (STUB, "/opt/libcuda.so.1", False),
        ("lib/libcudart.so", "libcudart.so.13.0.96", True),
        ("lib/libcudart.so", "libcudart.so.old", False),
        ("lib64", "bin", False),
        ("include/cub", "cccl/cub", True),
        ("include/cccl/cuda", "{folder}/wheels/13.0-0123abcd/nvidia/cu13/include/cccl/cuda", True),
        ("include/cccl/cuda", "{site}/flashinfer/data/cccl/libcudacxx/include/cuda", True),
        ("include/cccl/cuda", "/opt/cccl/cuda", False),
    ],
)
def test_a_link_is_known_by_where_it_leads(added, name, aim, ours):
    path = added.site.root / name
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    path.symlink_to(aim.format(folder=added.settings.folder, site=added.site.folder))
    before = added.record()
    added.record_file.unlink()
    found = inplace.lost(added.settings.folder, str(added.site.root), before)
    assert (str(path) in [item.path for item in found]) == ours
