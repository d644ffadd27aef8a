"""What goes wrong around a CUDA_HOME: damage, foreign folders, failed and killed runs, full disks, other users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_inplace as inplace
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_wheels as wheels
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_apply import ApplyError
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_folder import check_folder
from toolkits import Desk, Host, Site, codes, snapshot, system, write

# xdist's workers have threads; a forked run uses none of them, and is gone within a second
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@pytest.fixture
def desk(tmp_path, monkeypatch):
    return Desk(tmp_path, monkeypatch)


@pytest.fixture
def open_desk(monkeypatch):
    """A desk in a folder that other users can reach."""
    top = Path(tempfile.mkdtemp(prefix="gpufleet-"))
    top.chmod(0o755)
    yield Desk(top, monkeypatch)
    shutil.rmtree(top)


def as_nobody(work):
    """Run something as another user, in a process of its own; returns what it returned."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(sending, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said)


# -- damage ------------------------------------------------------------------------------------------------------------


def damage(path, how):
    path = Path(path)
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut off":
        path.write_bytes(path.read_bytes()[:3])
    elif how == "replaced":  # as long as it was
        path.write_bytes(b"x" * path.stat().st_size)
    elif how == "a link":
        path.unlink()
        path.symlink_to("/etc/hostname")
    elif how == "gone":
        path.unlink()
    elif how == "not executable":
        path.chmod(0o644)
    elif how == "a folder":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", ["empty", "cut off", "replaced", "a link", "gone", "not executable", "a folder"])
@pytest.mark.parametrize("name", ["lib/stubs/libcuda.so", "bin/nvcc"])
def test_a_damaged_stub_or_copy_is_made_again(desk, name, how):
    (desk.site.root / "bin/nvcc").chmod(0o644)  # it is copied then
    home = desk.run().cuda_home
    before = snapshot(home)
    damage(f"{home}/{name}", how)
    assert desk.run(check=True).changed
    out = desk.run()
    assert (out.changed, out.proven, out.cuda_home) == (True, True, home)
    assert snapshot(home) == before
    assert os.access(f"{home}/{name}", os.X_OK)
    assert not desk.run().changed


@pytest.mark.parametrize("how", ["empty", "cut off", "replaced", "a link", "gone"])
def test_a_damaged_text_is_written_again(desk, how):
    desk.python = replace(desk.python, trees=())
    root = system(desk.top / "root/usr/local/cuda-13.0")
    (root / "conda-meta").mkdir()  # shares its folders: its profile is ours
    target = {"cuda_home": str(root)}
    (root / "lib64").rename(root / "lib")
    home = desk.run(**target).cuda_home
    before = snapshot(home)
    damage(f"{home}/bin/nvcc.profile", how)
    assert desk.run(**target).changed
    assert snapshot(home) == before
    assert not desk.run(**target).changed


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("bin/ptxas", "/bin/true"),
        ("include/cuda.h", "/nonexistent"),
        ("lib64", "/usr/lib"),
        ("include/nv", "/nonexistent"),
        ("lib/libcudart.so", "x.so"),
    ],
)
def test_a_link_that_leads_elsewhere_is_set_right(desk, name, target):
    home = desk.run().cuda_home
    before = snapshot(home)
    os.unlink(f"{home}/{name}")
    os.symlink(target, f"{home}/{name}")
    assert desk.run().changed
    assert snapshot(home) == before


@pytest.mark.parametrize("name", ["include", "lib", "nvvm", "include/cccl", "include/cuda.h"])
def test_a_tree_that_lost_a_part_gets_it_back(desk, name):
    home = Path(desk.run().cuda_home)
    before = snapshot(home)
    if (home / name).is_symlink():
        (home / name).unlink()
    else:
        shutil.rmtree(home / name)
    assert desk.run(check=True).changed
    assert desk.run().changed
    assert snapshot(home) == before


@pytest.mark.parametrize("name", ["include/cuda/std/version", "include/cccl/cuda/argument", "bin/gcc", "x"])
def test_what_others_put_into_a_tree_goes(desk, name):
    home = desk.run().cuda_home
    before = snapshot(home)
    write(Path(home) / name)
    assert desk.run().changed
    assert snapshot(home) == before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"made": {}}', '{"made": []}'])
def test_a_damaged_record_is_written_again(desk, text):
    home = desk.run().cuda_home
    before = snapshot(home)
    Path(home, "gpufleet-toolkit.json").write_text(text)
    assert desk.run().changed
    assert snapshot(home) == before


def test_links_that_lead_nowhere_in_a_toolkit_are_left_out(desk):
    (desk.site.root / "lib/libold.so.1").symlink_to("/nonexistent")
    (desk.site.root / "include/crt/old.h").symlink_to("/nonexistent")
    (desk.site.root / "include/crt/loop").symlink_to("..")
    assert desk.run().proven
    assert not desk.run().changed


def test_every_entry_is_a_file_or_leads_to_one(desk):
    home = Path(desk.run().cuda_home)
    outward = [p for p in home.rglob("*") if p.is_symlink() and os.readlink(p).startswith("/")]
    assert len(outward) > 15
    assert not [path for path in outward if path.is_dir()]
    assert {str(p.relative_to(home)) for p in home.rglob("*") if p.is_symlink() and p.is_dir()} == {
        "lib64", "include/nv", *(f"targets/{os.uname().machine}-linux/{n}" for n in ("include", "lib", "lib64")),
    }  # fmt: skip


# -- folders that others can change ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "owner", "word"),
    [
        (0o777, 0, "can be written to by others (mode 0777): chmod go-w"),
        (0o1777, 0, "is not there yet"),  # as /tmp: the name can be taken by anybody
        (0o775, 0, ""),  # root's own group
        (0o755, NOBODY, "belongs to user 65534"),
        (0o755, 0, ""),
    ],
)
@as_root
def test_a_folder_below_one_that_others_can_change_is_refused(open_desk, mode, owner, word):
    above = open_desk.top / "above"
    (above / "made").mkdir(parents=True)
    os.chown(above, owner, 0)
    above.chmod(mode)
    for folder in (above / "cuda", above / "made/deep/cuda"):
        said = check_folder(str(folder), 0)
        expected = "" if mode & 0o1000 and folder.parent != above else word  # what is ours there stays ours
        assert (expected in said) if expected else said == ""
    out = open_desk.run(folder=str(above / "cuda"))
    assert ("folder_unsafe" in codes(out)) == bool(word)
    assert (above / "cuda").exists() != bool(word)
    if word:
        (found,) = [item for item in out.problems if item.code == "folder_unsafe"]
        assert str(above) in found.message
        assert "Use a folder below one" in found.message


@pytest.mark.parametrize("inside", [True, False])
def test_a_record_of_somebody_elses_moves_nothing(desk, inside):
    """Neither one in a folder that others can write to, nor one that names paths outside its tree."""
    desk.run(repair="in_place")
    link, victim = desk.top / "link", desk.site.root / "lib64"
    link.symlink_to("/etc/hostname")
    record = Path(inplace.record_path(desk.settings.folder, str(desk.site.root)))
    data = json.loads(record.read_text())
    data["additions"] = [{"path": str(victim if inside else link), "kind": "link", "mark": os.readlink(link)}]
    if inside:
        victim.unlink()
        victim.symlink_to("/etc/hostname")
        (desk.top / "cuda").chmod(0o777)
    record.write_text(json.dumps(data))
    desk.run()
    assert link.is_symlink()
    assert victim.is_symlink()


@as_root
def test_a_folder_behind_a_link_is_judged_by_where_it_lies(open_desk):
    real = open_desk.top / "real"
    real.mkdir()
    real.chmod(0o777)
    (open_desk.top / "link").symlink_to(real)
    assert "written to by others" in check_folder(f"{open_desk.top}/link/cuda", 0)
    real.chmod(0o755)
    assert check_folder(f"{open_desk.top}/link/cuda", 0) == ""


@as_root
def test_another_users_link_in_a_sticky_folder_is_refused(open_desk):
    shared = open_desk.top / "shared"
    (shared / "real").mkdir(parents=True)
    shared.chmod(0o1777)
    (shared / "link").symlink_to(shared / "real")
    assert check_folder(f"{shared}/link/cuda", 0) == ""
    os.lchown(shared / "link", NOBODY, NOBODY)
    assert f"{shared}/link" in check_folder(f"{shared}/link/cuda", 0)


@as_root
def test_the_service_user_in_its_own_home(open_desk):
    home = open_desk.top / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    for path in (home / "cuda", home / "etc"):
        assert "belongs to user" in check_folder(str(path), 0)  # for root it is another's

    def work():
        changes = {"folder": str(home / "cuda"), "config_dir": str(home / "etc")}
        out, again = open_desk.run(**changes), open_desk.run(**changes)
        open_desk.settings = replace(open_desk.settings, **changes)
        made = Path(out.cuda_home or "/nonexistent", "lib64/libcudart.so").exists()
        gone = open_desk.remove().changed and not any(home.iterdir())
        return [out.proven, again.proven, again.changed, made, gone, [item.text() for item in out.problems]]

    assert as_nobody(work) == [True, True, False, True, True, []]


@as_root
@pytest.mark.parametrize("name", ["include", "include/crt", "nvvm", "lib", "bin"])
def test_a_folder_that_cannot_be_read_is_named(open_desk, name):
    home = open_desk.top / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    closed = open_desk.site.root / name
    closed.chmod(0o700)

    def work():
        out = open_desk.run(folder=str(home / "cuda"), config_dir=str(home / "etc"))
        return [out.proven, [item.text() for item in out.problems]]

    proven, problems = as_nobody(work)
    assert not proven
    assert any(str(closed) in text for text in problems), problems


@as_root
def test_folders_that_the_service_user_may_not_write_to(open_desk):
    for name in ("cuda", "etc"):
        write(open_desk.top / name / (".gpufleet-cuda" if name == "cuda" else "x"))
        (open_desk.top / name).chmod(0o755)

    def work():
        return sorted(codes(open_desk.run()))

    assert {"folder_unwritable", "record_unwritable"} <= set(as_nobody(work))


# -- words -------------------------------------------------------------------------------------------------------------


def remedies(out, code="lib64_missing"):
    return [item["remedy"] for item in out.listed() if item["code"] == code]


def test_a_finding_says_what_became_of_it(desk):
    (planned,) = remedies(desk.run(check=True))
    assert planned.startswith("Nothing was changed yet (check mode)")
    assert {item["repaired"] for item in desk.run(check=True).listed()} == {False}
    out = desk.run()
    assert remedies(out) == [f"Repaired in {out.cuda_home}"]
    desk.runner.probe, desk.runner.said = 1, "sh: 1: cudafe++: not found"
    failed = desk.run(prove_again=True)
    assert "is not used: it was not proven" in remedies(failed)[0]
    assert {item["repaired"] for item in failed.listed()} == {False}


def test_pinned_builds_are_said_to_be_deleted_only_when_they_are(desk):
    desk.site.packages["flashinfer-python"] = "0.6.9"
    desk.run()
    write(desk.top / ".cache/flashinfer/0.6.9/120f/cached_ops/page/build.ninja", "cuda_home = /old\n")
    (planned,) = [item for item in desk.run(check=True).listed() if item["code"] == "ninja_pinned"]
    assert (planned["repaired"], "To be deleted" in planned["remedy"]) == (False, True)
    (done,) = [item for item in desk.run().listed() if item["code"] == "ninja_pinned"]
    assert (done["repaired"], done["remedy"].startswith("Deleted")) == (True, True)


def test_a_refused_run_says_nothing_of_repairs(desk):
    for changes in ({"repair": "none"}, {"folder": "relative"}):
        out = desk.run(**changes)
        assert out.problems
        assert "Repaired" not in json.dumps(out.listed())
        assert not any(item["repaired"] for item in out.listed())


# -- skew --------------------------------------------------------------------------------------------------------------

NEWER = {"nvidia_cuda_crt": "13.5.37", "nvidia_nvvm": "13.5.37", "nvidia_cuda_nvcc": "13.5.37"}


def test_skew_fail_fails_where_another_toolkit_would_do_and_names_it(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch, nvcc="13.5.37", wheels=NEWER, torch_cuda="13.0")
    root = system(tmp_path / "root/usr/local/cuda-13.0")
    out = desk.run(skew="fail")
    assert (out.proven, out.cuda_home) == (False, None)
    assert [item.code for item in out.problems] == ["skew_runtime"]
    (other,) = [item for item in out.listed() if item["code"] == "toolkit_other"]
    assert f"cuda_toolkit_fix_cuda_home={root}" in other["remedy"]
    assert desk.run(skew="fail", cuda_home=str(root)).cuda_home == str(root)
    assert desk.run(skew="install").cuda_home == str(root)


PARTS = {  # what is missing -> code; each is a fault that was seen in the field, with its log
    "bin/nvcc": "nvcc_missing",
    "bin/nvcc.profile": "nvcc_profile_missing",
    "bin/cudafe++": "cudafe_missing",
    "bin/ptxas": "ptxas_missing",
    "bin/fatbinary": "fatbinary_missing",
    "nvvm/bin": "cicc_missing",
    "nvvm": "cicc_missing",
    "include/crt": "crt_missing",
    "include/cuda_runtime.h": "runtime_missing",
    "lib/libcudart.so.13": "libcudart_missing",
}


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch):
    """Private sets come from here; the names of what was asked for."""
    asked = []

    def install(_runner, private, _python, _origin):
        asked.append(private.requirement)
        made = Site(tmp_path / "made")
        os.makedirs(os.path.dirname(private.folder), exist_ok=True)
        made.folder.rename(private.folder)
        write(Path(private.folder) / wheels.RECORD, "{}")

    monkeypatch.setattr(wheels, "install", install)
    return asked


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_named_and_refused_or_replaced_by_one_set(tmp_path, monkeypatch, wheelhouse, part):
    desk = Desk(tmp_path, monkeypatch, part, torch_cuda="13.0")
    before = snapshot(desk.site.folder)
    refused = desk.run(skew="fail")
    assert PARTS[part] in codes(refused, repaired=False)
    assert not refused.proven
    (problem,) = [item for item in refused.problems if item.code == PARTS[part]]
    assert 'pip install "cuda-toolkit[' in problem.remedy
    out = desk.run()
    assert (out.proven, out.problems) == (True, [])
    assert PARTS[part] in codes(out, repaired=True)
    assert wheelhouse == ["cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"]
    assert not desk.run().changed
    assert snapshot(desk.site.folder) == before


def test_the_half_of_a_cccl_that_an_uninstall_leaves_is_not_used(tmp_path, monkeypatch, wheelhouse):
    gone = ("include/nv", "include/cccl/nv", "include/cccl/thrust")
    desk = Desk(tmp_path, monkeypatch, *gone, wheels={"nvidia_cuda_cccl": ""})
    out = desk.run()
    assert out.proven
    assert wheelhouse == ["cuda-toolkit[cccl]==13.0.*"]
    targets = {os.readlink(path) for path in Path(out.cuda_home, "include/cccl").rglob("*") if path.is_symlink()}
    assert targets
    assert not [target for target in targets if target.startswith(str(desk.site.root))]


def test_an_environment_without_nvcc_is_no_skew(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch, "bin", "nvvm", torch_cuda="13.0")
    root = system(tmp_path / "root/usr/local/cuda-13.0")
    assert desk.run(skew="fail").cuda_home == str(root)


def test_check_mode_shows_what_a_set_of_wheels_will_be_link_by_link(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch, nvcc="13.5.37", wheels=NEWER, torch_cuda="13.0")
    write(desk.site.root / "lib/libcublas.so.13")
    out = desk.run(check=True)
    text = out.diff[0]["after"]
    (place,) = {line.split(" ")[0] for line in text.splitlines() if "to be installed" in line}
    for line in (
        f"bin/nvcc -> {place}/nvidia/cu13/bin/nvcc",
        f"nvvm/bin/cicc -> {place}/nvidia/cu13/nvvm/bin/cicc",
        f"lib/libcublas.so.13 -> {desk.site.root}/lib/libcublas.so.13",
        "lib/libcublas.so -> libcublas.so.13",
        "lib64 -> lib",
        "include/nv -> cccl/nv",
        f"lib/stubs/libcuda.so (generated from {place}/nvidia/cu13/include/cuda.h)",
    ):
        assert f"{line}\n" in text
    assert "known once it is there" in text
    assert f"{desk.site.root}/bin/nvcc" not in text
    assert not (desk.top / "cuda").exists()


def test_check_mode_shows_a_cccl_that_is_to_be_installed(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch, "include/cccl", "include/nv")
    text = desk.run(check=True).diff[0]["after"]
    assert f"bin/nvcc -> {desk.site.root}/bin/nvcc\n" in text
    assert "include/cccl/... -> a link per file of " in text
    assert "nvidia/cu13/include/cccl" in text


# -- runs that fail ----------------------------------------------------------------------------------------------------


def fail(desk):
    desk.runner.probe, desk.runner.said = 1, "/tmp/x.cu: error: something new"


def test_a_failed_run_is_idempotent(desk):
    home = desk.run().cuda_home
    fail(desk)
    assert desk.run(prove_again=True).cuda_home == home
    record = desk.record()
    assert (record["cuda_home"], record["proven"]) == (home, False)
    out = desk.run(prove_again=True)
    assert (out.proven, out.changed) == (False, False)
    assert desk.record() == record


def test_a_probe_that_fails_says_the_same_each_time(tmp_path, monkeypatch):
    class Compiler(Host):
        def run(self, argv, **kwargs):
            if argv[0] == "/usr/bin/env":
                said = f"{kwargs['cwd']}/probe.cu(3): error: no"
                return replace(super().run(argv, **kwargs), rc=1, stderr=said)
            return super().run(argv, **kwargs)

    desk = Desk(tmp_path, monkeypatch, runner=Compiler())
    desk.run()
    assert not desk.run().changed
    assert "`probe.cu(3): error: no`" in json.dumps(desk.record())


def test_space_that_comes_and_goes_changes_no_record(desk, monkeypatch):
    from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_host as host

    for number, changed in ((10, True), (11, False)):
        monkeypatch.setattr(host, "_free", lambda folder, number=number: number)
        out = desk.run()
        assert f"{number} MiB free" in json.dumps(out.listed())
        assert out.changed == changed


def test_a_failed_run_names_no_cuda_home_of_another_venv(desk):
    home = desk.run().cuda_home
    desk.site.renew("bin/cudafe++", "of another build")
    fail(desk)
    out = desk.run(python=f"{desk.python.path}-other")
    assert (out.proven, out.cuda_home, desk.record()["cuda_home"]) == (False, None, None)
    assert not desk.run(python=f"{desk.python.path}-other").changed
    assert Path(home).is_dir()  # what units run with stays
    desk.runner.probe = 0
    assert desk.run().proven


def test_a_venv_that_is_gone_names_no_cuda_home(desk, monkeypatch):
    from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_run as tool

    desk.run()
    monkeypatch.setattr(tool, "ask", lambda runner, path: f"{path} does not run")
    assert desk.run(python="/nonexistent/bin/python").cuda_home is None
    assert not desk.run(python="/nonexistent/bin/python").changed


@as_root
def test_a_full_disk_leaves_the_old_tree_and_is_named(open_desk):
    folder = open_desk.top / "cuda"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=60,mode=755", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        home = open_desk.run().cuda_home
        assert home, open_desk.run().problems
        before = snapshot(home)
        open_desk.site.renew("bin/cudafe++", "of another build")
        out = open_desk.run()
        assert {"no_space", "not_written"} <= codes(out, repaired=False)
        assert (out.proven, out.cuda_home, snapshot(home)) == (False, home, before)
        assert not list(folder.glob("*.new"))
        assert not open_desk.run().changed
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_run_killed_at_any_moment_leaves_whole_trees_and_no_litter(desk):
    desk.run(repair="in_place")
    desk.run()
    started = time.monotonic()
    desk.remove()
    desk.run()
    span = time.monotonic() - started
    for number in range(30):
        child = os.fork()
        if not child:
            try:
                if number % 3 == 2:
                    desk.remove()
                desk.run(repair=("compose", "in_place")[number % 2])
            finally:
                os._exit(0)
        time.sleep(span * (number % 10) / 8)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for tree in (desk.top / "cuda").glob("13.*"):
            if tree.suffix not in (".new", ".old"):
                assert (tree / "lib64/libcudart.so").exists()
                assert (tree / "gpufleet-toolkit.json").stat().st_size > 0
    out = desk.run()
    assert out.proven, out.problems
    assert not desk.run().changed
    left = [
        p.name for p in (desk.top / "cuda").rglob("*") if p.suffix in (".new", ".old") or p.name.startswith(".tool")
    ]
    assert left == []
    assert sorted(p.name for p in desk.site.root.iterdir()) == ["bin", "include", "lib", "nvvm"]
    desk.remove()
    assert not (desk.top / "cuda").exists()
    assert not (desk.top / "etc").exists()


# -- in place ----------------------------------------------------------------------------------------------------------


def test_anothers_link_that_leads_nowhere_comes_back(desk):
    (desk.site.root / "lib64").symlink_to("/gone/lib64")
    (desk.site.root / "lib/libcudart.so").symlink_to("/gone/libcudart.so")
    (desk.site.root / "lib/stubs").mkdir()
    (desk.site.root / "lib/stubs/libcuda.so").symlink_to("/gone/libcuda.so")
    before = snapshot(desk.site.folder)
    for _round in range(2):
        assert desk.run(repair="in_place").proven
        assert (desk.site.root / "lib64/libcudart.so").exists()
    assert not desk.run(repair="in_place").changed
    desk.remove()
    assert snapshot(desk.site.folder) == before


@pytest.mark.parametrize("moment", ["stub", "replace", "symlink"])
def test_a_run_killed_in_place_is_undone_whole(desk, monkeypatch, moment):
    (desk.site.root / "lib/libcudart.so").symlink_to("/gone/libcudart.so")
    before = snapshot(desk.site.folder)

    class Killed(BaseException):
        pass

    def kill(*_arguments):
        raise Killed

    child = os.fork()
    if not child:  # as killed: nothing is tidied up
        if moment == "stub":
            monkeypatch.setattr(inplace, "digest", lambda path: os._exit(9))
        else:
            monkeypatch.setattr(os, moment, lambda *names: os._exit(9) if str(names[-1]).startswith(
                str(desk.site.root)) else os.rename(*names))  # fmt: skip
        desk.run(repair="in_place")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    if moment != "symlink":
        assert (desk.site.root / "lib/stubs/libcuda.so.new").exists()
    desk.remove()
    assert snapshot(desk.site.folder) == before


def test_after_a_killed_run_in_place_the_next_one_tidies_up(desk, monkeypatch):
    child = os.fork()
    if not child:
        monkeypatch.setattr(inplace, "digest", lambda path: os._exit(9))
        desk.run(repair="in_place")
        os._exit(0)
    os.waitpid(child, 0)
    assert desk.run(repair="in_place").proven
    assert sorted(os.listdir(desk.site.root / "lib/stubs")) == ["libcuda.so"]


def test_a_venv_whose_path_has_a_blank(tmp_path, monkeypatch):
    desk = Desk(tmp_path / "a b", monkeypatch)
    desk.settings = replace(desk.settings, folder=str(tmp_path / "cuda"))
    out = desk.run()
    assert out.proven
    assert os.readlink(f"{out.cuda_home}/bin/nvcc") == f"{desk.site.root}/bin/nvcc"
    assert not desk.run().changed
    refused = desk.run(repair="in_place")
    assert "blanks" in str([item.text() for item in refused.problems if item.code == "cuda_home_bad"])
    assert not (desk.site.root / "lib64").exists()


# -- taking back -------------------------------------------------------------------------------------------------------


def test_removal_takes_the_record_and_only_what_is_ours(desk, monkeypatch):
    desk.run()
    write(desk.top / "cuda/wheels/others/x")
    write(desk.top / "cuda/in-place/notes.json", "{}")
    write(desk.top / "cuda/wheels/13.0-0123abcd" / wheels.RECORD, "{}")
    write(desk.top / "cuda/others.old/x")
    assert desk.remove(check=True).changed
    assert desk.record()
    out = desk.remove()
    assert f"{desk.top}/cuda/wheels/13.0-0123abcd" in out.pruned
    assert {str(p.relative_to(desk.top / "cuda")) for p in (desk.top / "cuda").rglob("*") if p.is_file()} == {
        "wheels/others/x", "in-place/notes.json", "others.old/x",
    }  # fmt: skip
    assert not (desk.top / "etc").exists()
    assert not desk.remove().changed


def test_folders_that_were_made_above_go_too_and_others_stay(desk):
    (desk.top / "there").mkdir()
    desk.settings = replace(desk.settings, folder=f"{desk.top}/there/a/b/cuda")
    desk.run()
    desk.run()
    desk.remove()
    assert list((desk.top / "there").iterdir()) == []
    desk.run()
    write(desk.top / "there/a/x")
    desk.remove()
    assert [path.name for path in (desk.top / "there/a").iterdir()] == ["x"]


def test_pruning_leaves_folders_of_others_alone(desk):
    desk.run()
    write(desk.top / "cuda/wheels/others/x")
    desk.run()
    assert (desk.top / "cuda/wheels/others/x").exists()


def test_removal_of_a_toolkit_that_was_good_as_it_is_takes_the_record(desk):
    desk.python = replace(desk.python, trees=())
    system(desk.top / "root/usr/local/cuda-13.0")
    assert desk.run(repair="none").proven
    assert not (desk.top / "cuda").exists()
    assert desk.remove().changed
    assert not (desk.top / "etc").exists()


def test_removal_takes_the_record_that_a_failed_run_on_another_folder_kept(desk):
    home = desk.run().cuda_home
    (desk.top / "open").mkdir()
    (desk.top / "open").chmod(0o777)
    mine = desk.settings
    desk.settings = replace(mine, folder=str(desk.top / "open/cuda"))
    assert desk.run().problems
    assert desk.record()["cuda_home"] == home
    desk.settings = mine
    assert desk.remove().changed
    assert not (desk.top / "etc").exists()


def test_removal_leaves_the_record_of_another_folder(desk):
    desk.run()
    other = replace(desk.settings, folder=str(desk.top / "cuda2"))
    desk.settings, mine = other, desk.settings
    assert not desk.remove().changed
    desk.settings = mine
    assert desk.record()["cuda_home"]


def test_removal_is_refused_while_a_server_compiles_with_it(desk):
    home = desk.run().cuda_home
    instance = {
        "gpu": 0, "unit": "sglang@0.service", "host": "", "port": 1, "argv": [],
        "environment_file": "", "unit_file": "", "environment": {"CUDA_HOME": home},
    }  # fmt: skip
    (desk.top / "etc/0.json").write_text(json.dumps(instance))
    with pytest.raises(ApplyError, match=r"sglang@0\.service .* compiles with it\. Remedy"):
        desk.remove()
    assert Path(home).is_dir()
    assert desk.record()["cuda_home"] == home
    (desk.top / "etc/0.json").unlink()
    assert desk.remove().changed
    assert not (desk.top / "cuda").exists()
