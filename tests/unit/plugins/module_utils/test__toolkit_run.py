"""From a host to a CUDA_HOME: composing, proving, keeping, pruning, taking back; compilers are doubles."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_apply as apply
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_compose as comp
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_finish as finish
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_wheels as wheels
from toolkits import Desk, Site, codes, snapshot, system, tree, write

REPAIRED = {"lib64_missing", "libcudart_so_missing", "libcuda_stub_missing"}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    return Desk(tmp_path, monkeypatch)


def test_composed_proven_and_written_down(desk):
    before = snapshot(desk.site.folder)
    out = desk.run()
    assert (out.proven, out.changed, out.problems) == (True, True, [])
    home = Path(out.cuda_home)
    assert home.parent == desk.top / "cuda"
    assert home.name.startswith("13.0.88-")
    assert codes(out) == REPAIRED
    links = {
        "bin/nvcc": f"{desk.site.root}/bin/nvcc",
        "nvvm/bin/cicc": f"{desk.site.root}/nvvm/bin/cicc",
        "include/crt/host_config.h": f"{desk.site.root}/include/crt/host_config.h",
        "include/cccl/cuda/std/version": f"{desk.site.root}/include/cccl/cuda/std/version",
        "include/nv": "cccl/nv",
        "lib64": "lib",
        "lib/libcudart.so": "libcudart.so.13",
    }
    assert {name: os.readlink(home / name) for name in links} == links
    assert (home / "lib64/stubs/libcuda.so").is_file()
    assert (home / "lib64/stubs/libcuda.so").stat().st_mode & 0o777 == 0o755
    record = desk.record()
    assert (record["cuda_home"], record["path"]) == (str(home), f"{home}/bin")
    assert record["versions"]["nvcc"] == "13.0.88"
    assert "lib/libcudart.so -> libcudart.so.13" in record["repairs"]
    assert all(item["repaired"] for item in record["findings"])
    assert snapshot(desk.site.folder) == before


def test_a_second_run_changes_nothing_and_compiles_nothing(desk):
    desk.run()
    before = snapshot(desk.top)
    desk.runner.calls.clear()
    out = desk.run()
    assert (out.proven, out.changed, out.diff, out.proofs) == (True, False, [], [])
    assert not [call for call in desk.runner.calls if "nvcc" in call[0] and "--version" not in call]
    assert snapshot(desk.top) == before


def test_check_mode_shows_every_link_and_writes_nothing(desk):
    before = snapshot(desk.top)
    out = desk.run(check=True)
    assert (out.proven, out.changed) == (True, True)
    tree_diff = out.diff[0]
    assert tree_diff["before"] == ""
    assert "lib/libcudart.so -> libcudart.so.13\n" in tree_diff["after"]
    assert f"bin/nvcc -> {desk.site.root}/bin/nvcc\n" in tree_diff["after"]
    assert "lib/stubs/libcuda.so (generated from " in tree_diff["after"]
    assert snapshot(desk.top) == before
    desk.run()
    assert not desk.run(check=True).changed


def test_another_toolkit_behind_the_same_names_is_another_folder(desk):
    first = desk.run().cuda_home
    desk.site.renew("bin/cudafe++", "of another build")
    out = desk.run()
    assert out.cuda_home != first
    assert "bin/cudafe++" in out.diff[0]["before"]
    assert out.pruned == [first]
    assert [path.name for path in (desk.top / "cuda").glob("13*")] == [Path(out.cuda_home).name]


def test_a_folder_that_a_unit_still_names_stays(desk):
    first = desk.run().cuda_home
    instance = {
        "gpu": 0, "unit": "sglang@0.service", "host": "", "port": 1, "argv": [],
        "environment_file": "", "unit_file": "", "environment": {"CUDA_HOME": first},
    }  # fmt: skip
    (desk.top / "etc/0.json").write_text(json.dumps(instance))
    assert desk.run().drift == []
    desk.site.renew("bin/cudafe++", "of another build")
    out = desk.run()
    assert out.pruned == []
    assert [item.to_dict() for item in out.drift] == [{"unit": "sglang@0.service", "cuda_home": first}]
    instance["environment"]["CUDA_HOME"] = out.cuda_home
    (desk.top / "etc/0.json").write_text(json.dumps(instance))
    assert desk.run().pruned == [first]


@pytest.mark.parametrize("name", ["bin/nvcc", "lib64", "include/nv", "lib/stubs/libcuda.so"])
def test_a_damaged_tree_is_made_again(desk, name):
    home = desk.run().cuda_home
    before = snapshot(home)
    os.unlink(f"{home}/{name}")
    out = desk.run()
    assert (out.changed, out.cuda_home) == (True, home)
    assert snapshot(home) == before


def test_a_failed_probe_keeps_what_the_servers_have(desk):
    home = desk.run().cuda_home
    desk.site.renew("bin/cudafe++", "of another build")
    desk.runner.probe, desk.runner.said = 1, "sh: 1: cudafe++: not found"
    out = desk.run()
    assert (out.proven, out.cuda_home) == (False, home)
    assert "probe_cudafe_missing" in codes(out, repaired=False)
    assert Path(home).is_dir()
    assert desk.record()["cuda_home"] == home
    assert desk.record()["proven"] is False


def test_without_a_compiler_all_is_told_and_nothing_is_proven(tmp_path, monkeypatch):
    from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_host as host

    monkeypatch.setattr(host, "SYSTEM_PATH", "/nonexistent")
    desk = Desk(tmp_path, monkeypatch)
    for name in ("gcc", "c++", "ninja"):
        (tmp_path / "venv/bin" / name).unlink()
    out = desk.run(archs=())
    assert {"ninja_missing", "gcc_missing", "arch_unknown"} <= codes(out, repaired=False)
    assert (out.proven, out.cuda_home) == (False, None)


@pytest.mark.parametrize("skew", ["fail", "install"])
def test_skew(tmp_path, monkeypatch, skew):
    old = {"nvidia_cuda_crt": "13.5.37", "nvidia_nvvm": "13.5.37", "nvidia_cuda_nvcc": "13.5.37"}
    desk = Desk(tmp_path, monkeypatch, nvcc="13.5.37", wheels=old, torch_cuda="13.0")
    before = snapshot(desk.site.folder)

    def install(runner, private, python, origin):
        made = Site(tmp_path / "made")
        os.makedirs(os.path.dirname(private.folder), exist_ok=True)
        made.folder.rename(private.folder)
        write(Path(private.folder) / wheels.RECORD, "{}")

    monkeypatch.setattr(wheels, "install", install)
    check = desk.run(check=True, skew=skew)
    out = desk.run(skew=skew)
    assert snapshot(desk.site.folder) == before
    if skew == "fail":
        assert (check.proven, out.proven, out.cuda_home) == (False, False, None)
        (problem,) = out.problems
        assert problem.code == "skew_runtime"
        line = f'{desk.python.path} -m pip install "cuda-toolkit[nvcc,crt,nvvm,cccl]==13.0.*"'
        assert problem.remedy == f"Install one version: {line}"
        return
    assert (check.changed, check.proven) == (True, True)
    assert "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*, to be installed" in check.diff[0]["after"]
    assert (out.proven, out.problems) == (True, [])
    private = desk.record()["private"]
    assert os.readlink(f"{out.cuda_home}/bin/nvcc") == f"{private}/nvidia/cu13/bin/nvcc"
    assert os.readlink(f"{out.cuda_home}/include/cuda_runtime.h").startswith(private)
    assert not [t for t in snapshot(out.cuda_home).values() if isinstance(t, str) and t.startswith(str(desk.site.root))]
    assert not desk.run(skew=skew).changed


def no_wheels(runner, private, python, origin):
    raise wheels.WheelError("installing it failed: no network")


def test_cccl_falls_back_to_the_engines_and_stays_there(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "install", no_wheels)
    desk = Desk(tmp_path, monkeypatch, "include/cccl", "include/nv", flashinfer=True)
    out = desk.run()
    assert out.proven
    assert out.versions["cccl"] == "3.6.0"
    assert "cccl_engine" in codes(out)
    header = "cuda/std/__cccl/version.h"
    target = f"{desk.python.flashinfer}/data/cccl/libcudacxx/include/{header}"
    assert os.readlink(f"{out.cuda_home}/include/cccl/{header}") == target
    assert desk.run().cuda_home == out.cuda_home
    assert not desk.run().changed
    assert desk.run(cccl="wheel").proven is False


def test_no_cccl_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "install", no_wheels)
    desk = Desk(tmp_path, monkeypatch, "include/cccl", "include/nv")
    out = desk.run()
    assert not out.proven
    assert "wheels_unreachable" in codes(out, repaired=False)


def test_cccl_of_the_engine_on_request(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch, flashinfer=True)
    assert desk.run(cccl="engine").versions["cccl"] == "3.6.0"
    assert desk.run(cccl="toolkit").versions["cccl"] == "3.0.1"


def test_cuda_12_wheels_are_refused_with_the_remedy(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch)
    desk.python = replace(desk.python, trees=(), split=True, packages={"nvidia-cuda-nvcc-cu12": "12.8.93"})
    out = desk.run()
    (problem,) = out.problems
    assert problem.code == "wheels_cu12"
    assert "neither nvcc nor cicc" in problem.message
    assert "12.8 or 12.9" in problem.remedy
    system(tmp_path / "root/usr/local/cuda-13.0")
    assert {item.code for item in desk.run().problems} == {"wheels_cu12", "skew_torch"}
    system(tmp_path / "root/usr/local/cuda-12.9", nvcc="12.9.86", cudart="12090", cccl="2008000")
    out = desk.run()
    assert out.proven
    assert out.cuda_home == str(tmp_path / "root/usr/local/cuda-12.9")


def test_a_system_toolkit_that_passes_is_left_alone(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch)
    desk.python = replace(desk.python, trees=())
    root = system(tmp_path / "root/usr/local/cuda-13.0")
    out = desk.run()
    assert (out.cuda_home, desk.record()["how"]) == (str(root), "as it is")
    assert apply.trees(desk.settings.folder) == []
    assert not desk.run().changed
    assert desk.run(repair="none").proven


def test_a_system_toolkit_without_a_stub_is_composed(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch)
    desk.python = replace(desk.python, trees=())
    root = system(tmp_path / "root/usr/local/cuda-13.0")
    (root / "lib64/stubs/libcuda.so").unlink()
    out = desk.run()
    assert out.proven
    assert os.path.dirname(out.cuda_home) == desk.settings.folder
    assert os.readlink(f"{out.cuda_home}/bin/nvcc") == f"{root}/bin/nvcc"
    assert Path(out.cuda_home, "lib64/libcudart.so").exists()


def test_an_nvcc_that_is_not_executable_is_copied(desk):
    (desk.site.root / "bin/nvcc").chmod(0o644)
    out = desk.run()
    assert not Path(out.cuda_home, "bin/nvcc").is_symlink()
    assert os.access(f"{out.cuda_home}/bin/nvcc", os.X_OK)


def test_mixed_cccl_is_replaced_by_one(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch, flashinfer=True)
    monkeypatch.setattr(wheels, "install", no_wheels)
    write(desk.site.root / "include/cuda/std/__cccl/version.h", "#define CCCL_VERSION 3006000\n")
    out = desk.run()
    assert out.proven
    assert "cccl_mixed" in codes(out, repaired=True)
    assert not os.path.lexists(f"{out.cuda_home}/include/cuda")
    assert desk.python.flashinfer in os.readlink(f"{out.cuda_home}/include/cccl/cub/cub.cuh")


def test_builds_that_pin_another_home_are_cleared(desk):
    desk.site.packages["flashinfer-python"] = "0.6.9"
    path = write(desk.top / ".cache/flashinfer/0.6.9/120f/cached_ops/page/build.ninja", "cuda_home = /old\n")
    assert desk.run(check=True).changed
    assert path.exists()
    out = desk.run()
    assert "ninja_pinned" in codes(out, repaired=True)
    assert not path.exists()
    assert not desk.run().changed


@pytest.mark.parametrize("value", ["relative", "/a:/b"])
def test_a_bad_cuda_home_is_refused(desk, value):
    assert [item.code for item in desk.run(cuda_home=value).problems] == ["cuda_home_bad"]


def test_in_place_adds_records_and_takes_back(desk):
    before = snapshot(desk.site.folder)
    assert desk.run(check=True, repair="in_place").changed
    assert snapshot(desk.site.folder) == before
    out = desk.run(repair="in_place")
    assert (out.proven, out.cuda_home) == (True, str(desk.site.root))
    after = snapshot(desk.site.folder)
    added = {name for name in after if name not in before}
    top = "nvidia/cu13"
    assert added == {f"{top}/{n}" for n in ("lib64", "lib/libcudart.so", "lib/stubs", "lib/stubs/libcuda.so")}
    assert {name: after[name] for name in before} == before
    assert not desk.run(repair="in_place").changed
    (desk.site.root / "lib/libcudart.so").unlink()  # as after `pip install -U`
    assert desk.run(repair="in_place").changed
    assert (desk.site.root / "lib/libcudart.so").exists()
    assert finish.remove(desk.settings.folder, desk.settings.config_dir, check=True).changed
    assert finish.remove(desk.settings.folder, desk.settings.config_dir).changed
    assert snapshot(desk.site.folder) == before
    assert not (desk.top / "cuda").exists()


def test_composing_after_in_place_takes_the_additions_back(desk):
    before = snapshot(desk.site.folder)
    desk.run(repair="in_place")
    out = desk.run()
    assert out.cuda_home.startswith(desk.settings.folder)
    assert snapshot(desk.site.folder) == before
    assert not desk.run().changed


def test_a_release_is_never_changed_in_place(desk):
    write(desk.top / "venv/gpufleet-release.json")
    before = snapshot(desk.site.folder)
    assert [item.code for item in desk.run(repair="in_place").problems if item.code == "in_place_release"]
    assert snapshot(desk.site.folder) == before


def test_in_place_leaves_by_a_link_nothing(desk, tmp_path):
    outside = tmp_path / "outside"
    (desk.site.root / "lib").rename(outside)
    (desk.site.root / "lib").symlink_to(outside)
    names = sorted(os.listdir(outside))
    out = desk.run(repair="in_place")
    assert not out.proven
    assert sorted(os.listdir(outside)) == names


def test_removal_leaves_what_another_configuration_uses(desk):
    home = desk.run().cuda_home
    desk.run(config_dir=str(desk.top / "etc2"))
    out = finish.remove(desk.settings.folder, desk.settings.config_dir)
    assert out.pruned == []
    assert Path(home).is_dir()
    assert finish.remove(desk.settings.folder, str(desk.top / "etc2")).changed
    assert not (desk.top / "cuda").exists()
    assert not finish.remove(desk.settings.folder, str(desk.top / "etc2")).changed


@pytest.mark.parametrize(
    ("prepare", "word"),
    [
        (lambda path: path.symlink_to("/tmp"), "is a link"),
        (lambda path: path.write_text(""), "no folder"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "written to by others"),
        (lambda path: (path.mkdir(), os.chown(path, 65534, 65534)), "belongs to user 65534"),
    ],
)
def test_an_unsafe_folder_is_refused(desk, prepare, word):
    if word.startswith("belongs") and os.geteuid():
        pytest.skip("only root can give a folder away")
    prepare(desk.top / "cuda")
    for folder in (f"{desk.top}/cuda", f"{desk.top}/cuda/"):
        found = [item for item in desk.run(folder=folder).problems if item.code == "folder_unsafe"]
        assert word in found[0].message


@pytest.mark.parametrize("name", ["config.old", "wheels/torch-set/x", "a/b"])
def test_a_folder_of_somebody_elses_is_refused_and_left_alone(desk, name):
    """What was there before without our mark is not ours: nothing in it is swept, pruned or removed."""
    write(desk.top / "cuda" / name)
    desk.top.joinpath("cuda").chmod(0o755)
    assert "not ours" in str(desk.run().listed())
    assert (desk.top / "cuda" / name).exists()
    assert not (desk.top / "cuda/.gpufleet-cuda").exists()


@pytest.mark.parametrize("name", ["wheels", "in-place", ".users"])
def test_nothing_is_written_through_a_link_in_the_folder(desk, name):
    victim = desk.top / "victim"
    write(victim / "keep.new")
    write(desk.top / "cuda/.gpufleet-cuda")
    desk.top.joinpath("cuda").chmod(0o755)
    (desk.top / "cuda" / name).symlink_to(victim)
    assert "is a link" in str(desk.run().listed())
    assert [path.name for path in victim.iterdir()] == ["keep.new"]


def test_leftovers_of_killed_runs_are_swept(desk):
    write(desk.top / "cuda/.gpufleet-cuda")
    write(desk.top / "cuda/13.0.88-0123456789ab.new/bin/nvcc")
    write(desk.top / "cuda/13.0.88-0123456789ab.old/bin/nvcc")
    write(desk.top / "cuda/wheels/13.0-01234567.new/x")
    write(desk.top / "cuda/..seals.json.abc")
    write(desk.top / "cuda/..users.abc")
    desk.top.joinpath("cuda").chmod(0o755)
    write(desk.top / "cuda/backup-2026.old/x")  # somebody else's
    desk.run()
    left = [path.name for path in (desk.top / "cuda").glob("*.*") if path.suffix in (".new", ".old")]
    assert left == ["backup-2026.old"]
    assert not (desk.top / "cuda/wheels/13.0-01234567.new").exists()
    assert list((desk.top / "cuda").glob("..*.abc")) == []


def test_a_failure_while_writing_leaves_the_old_tree(desk, monkeypatch):
    home = desk.run().cuda_home
    before = snapshot(home)
    desk.site.renew("bin/cudafe++", "of another build")

    def full(target, name):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "symlink", full)
    out = desk.run()
    assert "not_written" in codes(out, repaired=False)
    assert out.cuda_home == home
    assert snapshot(home) == before
    assert [path.name for path in (desk.top / "cuda").glob("*.new")] == []


def test_the_drivers_library_is_used_when_there_is_one(desk, monkeypatch):
    monkeypatch.setattr(comp, "soname", lambda path: "libcuda.so.1" if str(path).endswith("libcuda.so.1") else None)
    driver = write(desk.top / f"root/usr/lib/{os.uname().machine}-linux-gnu/libcuda.so.1")
    out = desk.run()
    assert os.readlink(f"{out.cuda_home}/lib/stubs/libcuda.so") == str(driver)


def test_conda_and_debian_take_only_cudas_files(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch)
    desk.python = replace(desk.python, trees=())
    conda = tmp_path / "conda"
    made = tree(tmp_path / "made")
    target = conda / f"targets/{comp.machine_folder()}"
    target.mkdir(parents=True)
    (made / "include").rename(target / "include")
    (made / "lib").rename(target / "lib")
    (made / "bin").rename(conda / "bin")
    (made / "nvvm").rename(conda / "nvvm")
    write(conda / "bin/python3")
    write(conda / "lib/libssl.so.3")
    write(conda / "conda-meta/history")
    write(conda / "bin/nvcc", "#!/bin/sh\necho release 13.0, V13.0.88\n")
    out = desk.run(cuda_home=str(conda))
    assert out.proven
    assert os.path.exists(f"{out.cuda_home}/lib64/libcudart.so")
    assert not os.path.lexists(f"{out.cuda_home}/bin/python3")
    assert not os.path.lexists(f"{out.cuda_home}/lib/libssl.so.3")
    assert desk.record()["layout"] == "conda"
