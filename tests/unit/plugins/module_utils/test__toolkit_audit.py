"""Damaged wheels and private sets, given-away trees, folders with two spellings: seen, named, mended."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_finish as finish
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_run as tool
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_wheels as wheels
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_apply import remove_tree
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_folder import check_folder, one_spelling
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_state import references
from ansible_collections.gpufleet.sglang.plugins.modules.cuda_toolkit import refusal
from toolkits import Desk, Site, codes, snapshot, system, write

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def desk(tmp_path, monkeypatch):
    return Desk(tmp_path, monkeypatch)


def swap_content(path):
    """Exchange a file's content for zeros: its size and its time stay."""
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


HOW = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeroed": swap_content,
    "patched": lambda path: path.write_text(f"{path.read_text()}// by hand\n"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a stray": lambda path: write(path.parent / "stray.h"),
    "a stray link": lambda path: (path.parent / "more").symlink_to("/usr/include"),
    "open": lambda path: path.chmod(0o777),
    "open folder": lambda path: path.parent.chmod(0o777),
    "closed": lambda path: path.chmod(0o600),
    "closed folder": lambda path: path.parent.chmod(0o700),
    "folder not to be entered": lambda path: path.parent.chmod(0o744),
    "given away": lambda path: os.chown(path, NOBODY, NOBODY),
    "folder given away": lambda path: os.chown(path.parent, NOBODY, NOBODY),
}


# -- the environment's own wheels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "how", "code", "wheel"),
    [
        ("include/cuda.h", "gone", "wheel_damaged", "nvidia-cuda-runtime==13.0.96"),
        ("include/cuda.h", "cut off", "wheel_damaged", "nvidia-cuda-runtime==13.0.96"),
        ("include/cuda.h", "zeroed", "wheel_damaged", "nvidia-cuda-runtime==13.0.96"),
        ("include/cuda.h", "patched", "wheel_changed", "nvidia-cuda-runtime==13.0.96"),
        ("include/crt/host_config.h", "gone", "wheel_damaged", "nvidia-cuda-crt==13.0.88"),
        ("include/cccl/cuda/std/version", "gone", "cccl_damaged", "nvidia-cuda-cccl==13.0.85"),
        ("include/cccl/cub/cub.cuh", "zeroed", "cccl_damaged", "nvidia-cuda-cccl==13.0.85"),
        ("bin/cudafe++", "zeroed", "wheel_damaged", "nvidia-cuda-nvcc==13.0.88"),
        ("bin/cudafe++", "patched", "wheel_damaged", "nvidia-cuda-nvcc==13.0.88"),
        ("bin/nvcc.profile", "patched", "wheel_changed", "nvidia-cuda-nvcc==13.0.88"),
        ("bin/nvcc.profile", "cut off", "wheel_changed", "nvidia-cuda-nvcc==13.0.88"),
        ("bin/crt/link.stub", "gone", "wheel_damaged", "nvidia-cuda-nvcc==13.0.88"),
        ("nvvm/bin/cicc", "zeroed", "wheel_damaged", "nvidia-nvvm==13.0.88"),
        ("nvvm/bin/cicc", "empty", "wheel_damaged", "nvidia-nvvm==13.0.88"),
        ("lib/libcudadevrt.a", "gone", "wheel_changed", "nvidia-cuda-runtime==13.0.96"),
    ],
)
def test_a_file_that_is_not_as_its_wheel_brought_it_is_named(tmp_path, monkeypatch, name, how, code, wheel):
    desk = Desk(tmp_path, monkeypatch, torch_cuda="13.0", flashinfer=True)
    monkeypatch.setattr(wheels, "install", no_wheels)
    home = desk.run().cuda_home
    path = desk.site.root / name
    HOW[how](path)
    for skew in ("fail", "fail", "install"):
        out = desk.run(skew=skew)
        (found,) = [item for item in out.findings if item.code == code]
        assert str(path) in found.message
        assert wheel in found.message
        assert f"{desk.python.path} -m pip install --force-reinstall --no-deps {wheel}" in found.remedy
        # a patch and what compiling does not need are warnings; of CCCL there is another one, the engine's
        assert out.proven == (code != "wheel_damaged"), out.problems
    assert out.cuda_home == home or (out.proven and out.cuda_home)
    assert not desk.run(skew="install").changed


def test_a_patched_file_is_another_toolkit_with_a_proof_of_its_own(desk):
    first = desk.run().cuda_home
    HOW["patched"](desk.site.root / "include/cuda.h")
    out = desk.run()
    assert (out.proven, len(out.proofs)) == (True, 1)
    assert out.cuda_home != first
    assert "wheel_changed" not in codes(out, repaired=True)


def test_a_file_that_two_wheels_bring_is_either_ones(desk):
    shared = "nvidia/cu13/include/cuda.h"
    record = Path(desk.site.infos["nvidia-cuda-crt"], "RECORD")
    record.write_text(f"{record.read_text()}{shared},sha256=another,7\n")
    assert not codes(desk.run()) & {"wheel_damaged", "wheel_changed"}


@pytest.mark.parametrize("size", ["", "x", "\u00b2", "\uff13"])
def test_a_record_with_a_size_that_is_no_number(desk, size):
    record = Path(desk.site.infos["nvidia-cuda-crt"], "RECORD")
    record.write_text(f"{record.read_text().strip().rpartition(',')[0]},{size}\n")
    assert desk.run().proven


def test_files_are_read_only_when_their_stat_changes(desk, monkeypatch):
    from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_audit as audit

    desk.run()
    asked = []
    monkeypatch.setattr(audit, "_differs", lambda path, owned: asked.append(path) or "")
    desk.run()
    assert asked == []
    os.utime(desk.site.root / "include/cuda.h")
    desk.run()
    assert len(asked) > 10


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', '{"x": {"stamp": 1, "differ": []}}'])
def test_seals_that_cannot_be_read_are_made_anew(desk, text):
    desk.run()
    write(desk.top / "cuda/.seals.json", text).chmod(0o600)
    assert not desk.run().changed
    assert str(desk.site.root) in json.loads((desk.top / "cuda/.seals.json").read_text())


# -- private sets ------------------------------------------------------------------------------------------------------


def no_wheels(runner, private, python, origin):
    raise wheels.WheelError("installing it failed: no network")


@pytest.fixture
def skewed(tmp_path, monkeypatch):
    """A desk whose environment needs a private set, and the names of the sets that were installed."""
    old = {"nvidia_cuda_crt": "13.5.37", "nvidia_nvvm": "13.5.37", "nvidia_cuda_nvcc": "13.5.37"}
    desk = Desk(tmp_path, monkeypatch, nvcc="13.5.37", wheels=old, torch_cuda="13.0")
    desk.installed = []

    def install(_runner, private, _python, _origin):
        desk.installed.append(private.requirement)
        made = Site(tmp_path / "made")
        remove_tree(private.folder)
        os.makedirs(os.path.dirname(private.folder), exist_ok=True)
        made.folder.rename(private.folder)
        packages = sorted(path.name[: -len(".dist-info")] for path in Path(private.folder).glob("*.dist-info"))
        write(Path(private.folder) / wheels.RECORD, json.dumps({"packages": packages}))

    monkeypatch.setattr(wheels, "install", install)
    desk.first = desk.run()
    desk.set = Path(desk.record()["private"])
    return desk


def move_behind_a_link(path, away):
    shutil.move(path, away)
    path.symlink_to(away)


DAMAGES = [
    *((name, how) for name in ("include/cuda.h", "nvvm/bin/cicc") for how in HOW),
    *(("include/cccl/cub/cub.cuh", how) for how in ("gone", "zeroed", "a stray")),
]


@as_root
@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_private_set_is_seen_and_installed_again(skewed, name, how):
    before = snapshot(skewed.set)
    HOW[how](skewed.set / "nvidia/cu13" / name)
    planned = skewed.run(check=True)
    assert planned.changed
    assert "wheels_damaged" in codes(planned)
    assert skewed.installed == ["cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"]
    out = skewed.run()
    assert (out.proven, out.changed, out.cuda_home) == (True, True, skewed.first.cuda_home)
    (found,) = [item for item in out.findings if item.code == "wheels_damaged"]
    assert str(skewed.set) in found.message
    assert len(skewed.installed) == 2
    assert snapshot(skewed.set) == before
    assert not skewed.run().changed


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: shutil.rmtree(next(folder.glob("nvidia_nvvm-*"))),
        lambda folder: next(folder.glob("nvidia_nvvm-*/RECORD")).write_text(""),
        lambda folder: (folder / wheels.RECORD).write_text("{"),
        lambda folder: (folder / wheels.RECORD).write_text("[]"),
        lambda folder: (folder / wheels.RECORD).unlink(),
        lambda folder: shutil.rmtree(folder / "nvidia"),
        lambda folder: shutil.rmtree(folder / "nvidia/cu13/include"),
        lambda folder: folder.chmod(0o777),
        lambda folder: move_behind_a_link(folder, folder.parents[2] / "mine"),
        lambda folder: move_behind_a_link(folder / "nvidia", folder.parents[2] / "mine"),
        lambda folder: move_behind_a_link(folder / "nvidia/cu13", folder.parents[2] / "mine"),
    ],
)
def test_a_private_set_that_is_half_gone_is_installed_again(skewed, spoil):
    before = snapshot(skewed.set)
    spoil(skewed.set)
    out = skewed.run()
    assert (out.proven, out.changed, out.cuda_home) == (True, True, skewed.first.cuda_home)
    assert snapshot(skewed.set) == before
    assert not skewed.run().changed


def test_a_damaged_private_set_stays_while_no_wheels_can_be_had(skewed, monkeypatch):
    HOW["gone"](skewed.set / "nvidia/cu13/include/crt/host_config.h")
    monkeypatch.setattr(wheels, "install", no_wheels)
    for _again in range(2):
        out = skewed.run()
        assert (out.proven, out.cuda_home) == (False, skewed.first.cuda_home)
        assert [item.code for item in out.problems] == ["skew_runtime", "wheels_unreachable"]
        assert "include/crt/host_config.h is missing" in str(out.listed())
    assert (skewed.set / "nvidia/cu13/bin/nvcc").exists()


# -- trees -------------------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in ("bin/nvcc", "lib/stubs/libcuda.so") for how in ("open", "closed", "given away")),
        *(("lib/stubs/libcuda.so", how) for how in ("open folder", "closed folder", "folder given away")),
        *(("bin/x", how) for how in ("open folder", "closed folder", "folder given away")),
        *(("x", how) for how in ("open folder", "closed folder", "folder given away")),
        ("gpufleet-toolkit.json", "open"),
        ("gpufleet-toolkit.json", "given away"),
    ],
)
def test_owners_and_modes_in_a_tree_are_as_we_made_them(desk, name, how):
    (desk.site.root / "bin/nvcc").chmod(0o644)  # it is copied then
    home = Path(desk.run().cuda_home)
    HOW[how](home / name)
    assert desk.run(check=True).changed
    out = desk.run()
    assert (out.changed, out.proven, out.cuda_home) == (True, True, str(home))
    modes = {oct(path.lstat().st_mode & 0o777) for path in [home, *home.rglob("*")] if not path.is_symlink()}
    assert modes == {"0o755", "0o644"}
    assert {path.lstat().st_uid for path in [home, *home.rglob("*")]} == {os.geteuid()}
    assert not desk.run().changed


def test_an_empty_folder_of_others_in_a_tree_goes(desk):
    home = Path(desk.run().cuda_home)
    (home / "include/mine").mkdir()
    assert desk.run().changed
    assert not (home / "include/mine").exists()


@as_root
@pytest.mark.parametrize("name", ["wheels", "in-place", ".users", ".lock", ".gpufleet-cuda", ".seals.json"])
def test_what_others_own_or_link_in_the_folder_is_refused(desk, name):
    desk.run()
    path = desk.top / "cuda" / name
    if not path.exists():
        path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    assert f"{path} belongs to user {NOBODY}: chown it" in str(desk.run().problems)
    os.chown(path, 0, 0)
    path.rename(desk.top / "away")
    path.symlink_to(desk.top / "away")
    (problem,) = desk.run().problems
    assert f"{path} is a link: nothing is written through it. Remove it" in problem.message


# -- spellings ---------------------------------------------------------------------------------------------------------


def test_one_spelling(tmp_path):
    (tmp_path / "real/sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for text in ("real/cuda", "link/cuda", "link/sub/../cuda", "real//cuda/", "link/./cuda", "link/cuda/x/.."):
        assert one_spelling(f"{tmp_path}/{text}") == f"{tmp_path}/real/cuda", text
    assert one_spelling(f"{tmp_path}/link") == f"{tmp_path}/link"  # the folder itself is judged, not followed
    assert (one_spelling("/"), one_spelling("x/../y")) == ("/", "x/../y")
    assert "name one of its own" in check_folder("/", 0)


def spelled(desk, path):
    """Return spellings of a folder of the desk's."""
    link = desk.top / "by-link"
    if not link.exists():
        link.symlink_to(desk.top)
    return [f"{desk.top}/{path}", f"{link}/{path}", f"{desk.top}/venv/../{path}", f"{desk.top}//{path}/"]


def test_a_folder_by_another_name_is_the_same_folder(desk):
    first = desk.run()
    for folder, config in zip(spelled(desk, "cuda"), spelled(desk, "etc")):
        out = desk.run(folder=folder, config_dir=config)
        assert (out.changed, out.cuda_home, out.pruned) == (False, first.cuda_home, [])
    python = desk.python.path.replace(str(desk.top), f"{desk.top}/by-link")
    assert not desk.run(python=python).changed
    assert (desk.top / "cuda/.users").read_text() == f"{desk.top}/etc\n"
    assert finish.remove(spelled(desk, "cuda")[1], spelled(desk, "etc")[2]).changed
    assert not (desk.top / "cuda").exists()
    assert not (desk.top / "etc").exists()


def test_trees_of_two_spellings_do_not_prune_each_other(desk):
    mine = desk.run(cccl="toolkit", config_dir=f"{desk.top}/etc").cuda_home
    desk.site.renew("bin/cudafe++", "of another build")
    out = desk.run(folder=spelled(desk, "cuda")[1], config_dir=f"{desk.top}/etc2")
    assert out.cuda_home != mine
    assert out.pruned == []
    assert Path(mine).is_dir()


@pytest.mark.parametrize("spelling", range(4))
@pytest.mark.parametrize("by", ["unit", "process", "link", "record"])
def test_a_tree_in_use_is_found_by_any_name(desk, spelling, by):
    home = desk.run().cuda_home
    name = spelled(desk, f"cuda/{os.path.basename(home)}")[spelling].rstrip("/")
    if by == "link":
        (desk.top / "current").symlink_to(name)
        name = f"{desk.top}/current"
    text = {"unit": f"Environment=CUDA_HOME={name}\n", "process": f"A=1\0CUDA_HOME={name}\0B=2\0"}
    said = text.get(by, json.dumps({"environment": {"CUDA_HOME": name}}))
    places = {"unit": "unit/sglang@0.service", "process": "proc/12/environ"}
    write(desk.top / "used" / places.get(by, "etc/0.json"), said)
    used = desk.top / "used"
    found = references([home], [str(used / "etc")], str(used / "unit"), str(used / "proc"))
    assert len(found[home]) == 1
    assert references([f"{home[:-1]}!"], [], str(used / "unit"), str(used / "proc")) == {f"{home[:-1]}!": []}


# -- the record, and what a person reads -------------------------------------------------------------------------------


def test_a_mistyped_venv_leaves_the_record_of_the_good_one(desk, monkeypatch):
    home = desk.run().cuda_home
    before = desk.record()
    with monkeypatch.context() as patch:
        patch.setattr(tool, "ask", lambda runner, path: f"{path} does not run")
        out = desk.run(python="/nonexistent/bin/python")
        assert out.cuda_home is None
        assert [item.code for item in out.problems] == ["venv_missing"]
        record = desk.record()
        assert record.pop("failed")["python"] == "/nonexistent/bin/python"
        assert record == before
        assert not desk.run(python="/nonexistent/bin/python").changed
    assert desk.run().cuda_home == home
    assert desk.record() == before
    assert not desk.run().changed


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\0", "{}"])
def test_a_record_that_cannot_be_read_is_removed_too(desk, text):
    desk.run()
    (desk.top / "etc/toolkit.json").write_text(text)
    assert desk.remove().changed
    assert not (desk.top / "etc").exists()
    (desk.top / "etc").mkdir()
    (desk.top / "etc/toolkit.json").write_text(text)  # also where the trees are gone already
    assert desk.remove().changed
    assert not desk.remove().changed


@pytest.mark.parametrize("name", [".lock", ".gpufleet-cuda"])
def test_a_fault_of_the_folder_is_the_only_one_told(desk, name):
    desk.run()
    shutil.rmtree(desk.run().cuda_home)
    (desk.top / "cuda" / name).unlink()
    (desk.top / "cuda" / name).symlink_to("/etc/hostname")
    assert [item.code for item in desk.run().problems] == ["folder_unsafe"]


def test_a_fault_of_the_folder_is_told_without_what_a_private_set_mends(skewed):
    out = skewed.run(folder="/")
    assert [item.code for item in out.problems] == ["folder_unsafe"]
    assert "skew_runtime" in codes(out)


def test_a_full_disk_is_told_with_the_space_for_a_set_and_the_folder_to_set(skewed, monkeypatch):
    from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_host as host

    shutil.rmtree(skewed.set)
    monkeypatch.setattr(wheels, "install", no_wheels)
    monkeypatch.setattr(host, "_free", lambda folder: 300)
    problems = skewed.run().problems
    assert {item.code for item in problems} == {"no_space", "skew_runtime", "wheels_unreachable"}
    (space,) = [item for item in problems if str(skewed.top / "cuda") in item.message]
    assert "300 MiB free, 464 needed" in space.message
    assert "set cuda_toolkit_fix_dir to a folder on another one" in space.remedy


def test_a_refusal_says_what_else_would_do(tmp_path, monkeypatch):
    old = {"nvidia_cuda_crt": "13.5.37", "nvidia_nvvm": "13.5.37", "nvidia_cuda_nvcc": "13.5.37"}
    desk = Desk(tmp_path, monkeypatch, nvcc="13.5.37", wheels=old, torch_cuda="13.0")
    root = system(tmp_path / "root/usr/local/cuda-13.0")
    out = desk.run(skew="fail")
    text = refusal(out, out.problems)
    assert f"{root} (nvcc 13.0.88) would do, and is not used" in text
    assert f"cuda_toolkit_fix_cuda_home={root}" in text


def test_an_explicit_toolkit_behind_a_link_is_used_where_it_lies(desk):
    desk.python = replace(desk.python, trees=())
    root = system(desk.top / "root/usr/local/cuda-13.0")
    (root.parent / "cuda").symlink_to(root)
    assert desk.run(cuda_home=f"{root.parent}/cuda").cuda_home == str(root)
