"""A warm-up from the set to jit.json, with a job that is told what to answer; the gate; what is published."""

from __future__ import annotations

import json

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_publish as publishing
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_run as warm
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_state as kept
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_job import Look
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result

ROW = {"name": "norm", "kind": "flashinfer", "state": "compiled", "seconds": 20.0}


class Runner:
    def run(self, argv, **_more):
        return Result(127, "", f"{argv[0]}: not found")


class Job:
    """Answers each look with the next of its answers; may_start says how often it can be started."""

    def __init__(self, *looks, may_start=9, request=None):
        self.looks, self.may_start, self.asked, self.env = list(looks), may_start, request or {}, {}
        self.starts = 0

    def request(self):
        return self.asked

    def start(self, request, python, environment):
        if self.may_start <= self.starts:
            return False
        self.starts += 1
        self.asked, self.env = request, environment
        return True

    def look(self, seen=0):
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def last_words(self):
        return "first\nKilled"


def done(*rows, **more):
    return Look(False, (), {"rows": list(rows), "arch": "12.0a", "flashinfer": "0.7.2", **more})


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "cache/.cache/flashinfer/0.7.2/120a/cached_ops/norm").mkdir(parents=True)
    environment = {
        "HOME": str(tmp_path),
        "FLASHINFER_WORKSPACE_BASE": f"{tmp_path}/cache",
        "SGLANG_JIT_CACHE_DIR": f"{tmp_path}/cache/jit",
        "TVM_FFI_CACHE_DIR": f"{tmp_path}/cache/tvm-ffi",
    }

    def make(**more):
        given = {"modules": ["norm"], "derive": False, "archs": ["12.0f"], "environment": environment}
        given.update(model="/m", release="1", cache_dir=f"{tmp_path}/cache", config_dir=f"{tmp_path}/etc")
        return warm.Settings(**{"python": "/v/bin/python", **given, **more})

    return make


def module_file(tmp_path, name, content=b"x"):
    path = tmp_path / f"cache/.cache/flashinfer/0.7.2/120a/cached_ops/{name}/{name}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def go(settings, job, **more):
    ticks = iter(range(10_000))
    return warm.run(settings, Runner(), job=job, clock=lambda: next(ticks), sleep=lambda _seconds: None, **more)


def test_built_then_written_down(settings, tmp_path):
    module_file(tmp_path, "norm")
    job = Job(Look(True, ("module 1 of 1: norm built in 20.0 s",)), done(ROW))
    out = go(settings(), job)
    assert out.changed
    assert out.progress == ["module 1 of 1: norm built in 20.0 s"]
    assert out.lines[-1] == "1 modules: 1 compiled in 20 s of work"
    assert (job.asked["capability"], job.asked["arch"], job.asked["mode"]) == ("12.0", "12.0f", "build")
    state = kept.load(f"{tmp_path}/etc")
    assert state["report"]["compiled"] == 1
    assert [path.rpartition("/")[2] for path in state["snapshot"]] == ["norm.so"]


def test_nothing_built_is_no_change_and_keeps_the_last_seconds(settings, tmp_path):
    go(settings(), Job(done(ROW)))
    out = go(settings(), Job(done({**ROW, "state": "already"})))
    assert not out.changed
    assert kept.load(f"{tmp_path}/etc")["report"]["modules"][0]["seconds"] == 20.0


def test_a_slice_ends_and_the_next_one_goes_on(settings):
    job = Job(Look(True, ("one",)), Look(True), Look(True), done(ROW))
    out = go(settings(), job, seconds=1)
    assert out.watch == {"joined": True, "seen": 1, "starts": 1}
    assert go(settings(), job, seconds=99, watch=out.watch).changed
    assert job.starts == 1


def test_a_run_at_work_with_the_same_set_is_joined(settings):
    first = Job(done(ROW))
    go(settings(), first)
    joined = Job(done(ROW), may_start=0, request=first.asked)
    assert go(settings(), joined).progress == ["joined the warm-up that is at work already"]


def test_another_set_waits_its_turn(settings):
    job = Job(done(ROW), may_start=0, request={"id": "other"})
    out = go(settings(), job, seconds=3)
    assert out.progress == ["another warm-up is at work in this cache: waiting for it"]
    job.may_start = 9
    assert go(settings(), job, seconds=9, watch=out.watch).changed


def test_one_that_died_is_started_once_more(settings):
    job = Job(Look(False), done(ROW))
    assert go(settings(), job).changed
    assert job.starts == 2
    job = Job(Look(False))
    out = go(settings(), job)
    assert job.starts == 2
    assert [item.code for item in out.problems] == ["warm_up_died"]
    assert "Killed" in out.problems[0].message


def test_a_failed_module_names_its_cause(settings):
    row = {**ROW, "state": "failed", "error": "nv/target: No such file", "code": "nv_target_missing", "remedy": "R"}
    out = go(settings(), Job(done(row)))
    assert [(item.code, item.message) for item in out.problems] == [
        ("nv_target_missing", "norm could not be built: nv/target: No such file")
    ]
    problem = {"code": "ninja_missing", "message": "no ninja", "remedy": "pip"}
    out = go(settings(), Job(done(row, problems=[problem])))
    assert [item.code for item in out.problems] == ["ninja_missing"]  # once, not for each module


def test_check_mode_writes_nothing(settings, tmp_path):
    job = Job(done({**ROW, "state": "would_compile"}))
    assert go(settings(), job, check=True).changed
    assert job.asked["mode"] == "check"
    assert not (tmp_path / "etc").exists()


def test_no_architecture_is_said(settings):
    assert [item.code for item in go(settings(archs=[]), Job(done())).problems] == ["arch_unknown"]


def test_what_forbids_compiling_is_left_out_for_building(settings):
    serving = {"FLASHINFER_DISABLE_JIT": "1", "SGLANG_CRASH_ON_JIT_COMPILE": "1", "PYTHONPATH": "/pub:/own", "A": "b"}
    found = settings(environment=serving, publish_dir="/pub").building
    assert found == {"A": "b", "PYTHONPATH": "/own"}


def test_the_gate_learns_what_a_server_compiled(settings, tmp_path):
    module_file(tmp_path, "norm")
    assert warm.learn(settings()).learned == []  # nothing to compare with yet
    go(settings(), Job(done(ROW)))
    assert warm.learn(settings()).learned == []
    module_file(tmp_path, "sampling")
    (tmp_path / "cache/jit/sm120f/sgl_kernel_jit_x_1/build-1/deps-1").mkdir(parents=True)
    (tmp_path / "cache/jit/sm120f/sgl_kernel_jit_x_1/build-1/deps-1/sgl_kernel_jit_x_1.so").write_bytes(b"x")
    assert warm.learn(settings(), check=True).learned == ["sampling", "sgl_kernel_jit_x_1"]
    assert warm.learn(settings()).learned == ["sampling", "sgl_kernel_jit_x_1"]
    assert warm.learn(settings()).learned == []
    job = Job(done(ROW))
    go(settings(modules=[], release="2"), job)  # the next release builds the same set
    assert [item.get("call") or item.get("name") for item in job.asked["entries"]] == [
        "sampling.get_sampling_module",
        "sgl_kernel_jit_x_1",
    ]


def test_what_is_compiled_later_is_learned_by_the_next_run(settings, tmp_path):
    module_file(tmp_path, "norm")
    go(settings(), Job(done(ROW)))
    module_file(tmp_path, "cascade")
    job = Job(done(ROW))
    go(settings(), job)
    assert [item["call"] for item in job.asked["entries"]] == ["norm.get_norm_module", "cascade.get_cascade_module"]


def test_rebuilt_is_compiled_too(tmp_path):
    before = {"/c/norm.so": [1, 2, 3], "/c/page.so": [1, 2, 3]}
    assert kept.compiled(before, {**before, "/c/norm.so": [1, 9, 4]}) == ["norm"]
    assert kept.compiled(before, {}) == []


def test_published_as_flashinfer_finds_it(settings, tmp_path):
    path = module_file(tmp_path, "norm", b"kernel")
    own = [f"{tmp_path}/cache/jit/x.so", 1, 2, 3, "d"]
    libraries = {"norm": [str(path), 6, 2, 3, "digest"], "sgl_kernel_jit_x": own}
    folder = f"{tmp_path}/kernels/1"
    out = go(settings(publish_dir=folder), Job(done(ROW, libraries=libraries)))
    assert out.published
    assert out.lines[-1] == f"1 FlashInfer modules published in {folder}"
    modules = tmp_path / "kernels/1/flashinfer_jit_cache/modules"
    assert (modules / "norm/norm.so").read_bytes() == b"kernel"
    scope = {"__file__": f"{modules.parent}/__init__.py"}
    exec((modules.parent / "__init__.py").read_text(), scope)
    (provider,) = scope["get_jit_cache_providers"]()
    assert scope["get_jit_cache_dir"]() == str(modules)
    assert (provider.version, provider.modules) == ("0.7.2", {"norm"})
    assert provider.cuda_architectures == {"sm120a"}
    assert not go(settings(publish_dir=folder), Job(done({**ROW, "state": "already"}, libraries=libraries))).changed
    assert sorted(item.name for item in (tmp_path / "kernels").iterdir()) == ["1"]


def test_a_full_disk_leaves_what_was_published(tmp_path):
    library = tmp_path / "norm.so"
    library.write_bytes(b"one")
    publishing.publish(f"{tmp_path}/k", "1", "9.0a", {"norm": [str(library), "a"]}, check=False)
    with pytest.raises(Exception, match="what was published before is still there"):
        publishing.publish(f"{tmp_path}/k", "1", "9.0a", {"norm": [f"{tmp_path}/gone.so", "b"]}, check=False)
    assert json.loads(publishing.published(f"{tmp_path}/k"))["modules"] == {"norm": "a"}


def test_sizes_of_the_caches(tmp_path):
    (tmp_path / "triton/a").mkdir(parents=True)
    (tmp_path / "triton/a/x").write_bytes(b"\0" * (3 << 20))
    assert warm.sizes(str(tmp_path)) == [{"name": "triton", "path": f"{tmp_path}/triton", "files": 1, "mib": 3.0}]
    report = {"already": 2, "compiled": 0, "failed": 1}
    assert warm.report_lines([], report) == ["last warm-up: 2 already, 1 failed"]
