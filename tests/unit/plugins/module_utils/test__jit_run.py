"""A warm-up from the set to jit.json, with a job that is told what to answer; the gate; what is published."""

from __future__ import annotations

import functools
import json

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_publish as publishing
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_run as warm
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_state as kept
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import digest
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


def test_every_server_and_every_architecture_counts(settings, tmp_path):
    config = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    argvs = [["--port", "1"], ["--port", "2", "--kv-cache-dtype", "fp8_e4m3"], ["--port", "3"]]
    argvs = [[*argv, "--attention-backend", "flashinfer"] for argv in argvs]
    given = {"modules": [], "derive": True, "model": str(tmp_path), "argv": argvs[0], "more_argv": argvs}
    job = Job(done(ROW))
    out = go(settings(**given, archs=["12.0f", "9.0a"]), job)
    kinds = [entry["args"][2] for entry in job.asked["entries"] if entry["call"].startswith("prefill.")]
    assert {"torch.bfloat16", "torch.float8_e4m3fn"} == set(kinds)
    (other,) = job.asked["others"]
    assert (job.asked["arch"], other["arch"], other["capability"]) == ("12.0f", "9.0a", "9.0")
    backends = [
        {entry["args"][0] for entry in part["entries"] if entry["call"].startswith("prefill.")}
        for part in (job.asked, other)
    ]
    assert backends == [{"fa2"}, {"fa2", "fa3"}]
    assert sum(line.startswith("9.0a: head_dim 64") for line in out.lines) == 2  # not once for each port
    refused = go(settings(archs=["12.0f", "9.0a"], publish_dir=f"{tmp_path}/k"), job)
    assert [item.code for item in refused.problems] == ["publish_one_arch"]


def test_what_one_kind_of_gpu_taught_is_not_built_for_the_other(settings, tmp_path):
    go(settings(), Job(done(ROW)))
    name = "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32"
    name += "_head_dim_qk_64_head_dim_vo_64_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_sm90"
    module_file(tmp_path, name)
    job = Job(done(ROW))
    go(settings(archs=["12.0f", "9.0a"]), job)
    assert [len(part["entries"]) for part in (job.asked, *job.asked["others"])] == [1, 2]


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
    libraries = {"norm": [str(path), 6, 2, 3, digest(str(path))], "sgl_kernel_jit_x": own}
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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda package: (package / "modules/norm/norm.so").unlink(),
        lambda package: (package / "modules/norm/norm.so").write_bytes(b"kern"),
        lambda package: (package / "modules/norm/norm.so").write_bytes(b"\0" * 6),
        lambda package: (package / "__init__.py").unlink(),
        lambda package: (package / "__init__.py").write_text(""),
        lambda package: (package.parent / publishing.RECORD).write_bytes(b"\xff"),
    ],
)
def test_what_was_published_and_is_damaged_is_published_again(tmp_path, spoil):
    library = tmp_path / "norm.so"
    library.write_bytes(b"kernel")
    libraries = {"norm": [str(library), digest(str(library))]}
    again = functools.partial(publishing.publish, f"{tmp_path}/k", "1", "9.0a", libraries)
    assert (again(check=True), again(check=False), again(check=False)) == (True, True, False)
    spoil(tmp_path / "k" / publishing.PACKAGE)
    assert (again(check=True), again(check=False), again(check=False)) == (True, True, False)
    assert (tmp_path / "k" / publishing.PACKAGE / "modules/norm/norm.so").read_bytes() == b"kernel"


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


EARLY = Look(True, ("the last module is being built",), early=True)


def stamp(path):
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ino, "digest"]


def test_a_server_starts_early_and_only_what_it_compiled_is_its_own(settings, tmp_path):
    module_file(tmp_path, "norm")
    out = go(settings(start_early="sglang@0.service"), Job(EARLY))
    assert (out.pending, out.watch) == (True, {"joined": True, "seen": 1, "starts": 1, "early": True})
    assert warm.learn(settings()).lines == [
        "no warm-up for this model and release was recorded: nothing to compare with"
    ]
    mine, theirs = module_file(tmp_path, "sampling"), module_file(tmp_path, "page")
    request = kept.load(f"{tmp_path}/etc")["pending"]
    rows = [{**ROW, "name": "norm"}, {**ROW, "name": "sampling"}]
    job = Job(done(*rows, id=request, libraries={"sampling": stamp(mine)}))
    out = go(settings(), job, watch=out.watch)
    assert (job.starts, out.pending, out.changed) == (0, False, True)
    assert "pending" not in kept.load(f"{tmp_path}/etc")
    assert warm.learn(settings()).learned == ["page"], theirs


def test_what_was_killed_and_built_again_counts_as_the_servers(settings, tmp_path):
    out = go(settings(start_early="sglang@0.service"), Job(EARLY))
    request, path = kept.load(f"{tmp_path}/etc")["pending"], module_file(tmp_path, "norm")
    go(settings(), Job(done({**ROW, "again": True}, id=request, libraries={"norm": stamp(path)})), watch=out.watch)
    assert warm.learn(settings()).learned == ["norm"]


def test_one_that_dies_while_a_server_starts_is_not_started_again(settings):
    job = Job(EARLY, Look(False))
    out = go(settings(start_early="sglang@0.service"), job)
    out = go(settings(), job, watch=out.watch)
    assert (job.starts, [item.code for item in out.problems]) == (1, ["warm_up_died"])


def test_what_runs_is_not_stopped_early(settings):
    class Systemd(Runner):
        def run(self, argv, **_more):
            return Result(0, "Id=sglang@0.service\nActiveState=active\nSubState=running\n", "")

    ticks = iter(range(99))
    job = Job(EARLY, done(ROW))
    out = warm.run(
        settings(start_early="sglang@0.service"), Systemd(), job=job, clock=lambda: next(ticks), sleep=lambda _: None
    )
    assert (out.pending, out.changed) == (False, True)


def test_a_deploy_that_broke_off_meanwhile_learns_nothing_wrong(settings, tmp_path):
    go(settings(start_early="sglang@0.service"), Job(EARLY))
    module_file(tmp_path, "norm")
    go(settings(), Job(done({**ROW, "state": "already"})))
    state = kept.load(f"{tmp_path}/etc")
    assert "manifests" not in state
    assert "pending" not in state
