"""The worker's own decisions, with real child processes; what is cut off is recognised before it is loaded."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_calls as calls
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_checks as checks
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_shares as shares
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_worker as worker
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_elf import broken

GIB = 1 << 30


@pytest.mark.parametrize(
    ("modules", "cores", "available", "wish", "expected"),
    [
        (10, 16, 128 * GIB, 0, (10, 11)),
        (10, 2, 20 * GIB, 0, (2, 2)),
        (3, 16, 128 * GIB, 0, (3, 16)),
        (10, 16, 4 * GIB, 0, (3, 1)),
        (10, 64, GIB // 2, 0, (1, 1)),
        (10, 2, 20 * GIB, 5, (5, 2)),
        (1, 16, 128 * GIB, 8, (1, 16)),
    ],
)
def test_workers_from_cores_and_memory(modules, cores, available, wish, expected):
    assert shares.workers_for(modules, cores, available, 1126 << 20, wish) == expected


def test_first_error_is_no_command():
    text = """[1/3] nvcc -isystem /x/error/include -c a.cu
FAILED: [code=1] a.cuda.o
nvcc -isystem /x -c a.cu -o a.cuda.o
/usr/include/cuda_fp16.h:4500:10: fatal error: nv/target: No such file or directory
compilation terminated.
ninja: build stopped: subcommand failed."""
    assert worker.first_error(text).startswith("/usr/include/cuda_fp16.h:4500:10: fatal error")
    assert worker.why(text)["code"] == "nv_target_missing"
    assert worker.why("odd")["code"] == "build_failed"
    assert worker.first_error("") == "no output"


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "lib.so"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    source = tmp_path / "lib.c"
    source.write_text("static char filler[200000] = {1}; char *f(void) { return filler; }")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return path


def test_a_library_that_was_cut_off_is_known_by_its_headers(library, tmp_path):
    assert broken(str(library)) == ""
    size = library.stat().st_size
    for length in (0, 10, 63, 64, 1000, size // 2, size - 1):
        cut = tmp_path / "cut.so"
        cut.write_bytes(library.read_bytes()[:length])
        assert broken(str(cut)), length
    assert broken(str(tmp_path / "gone.so")) == "No such file or directory"


def make(tmp_path, **more):
    request = {"id": "1", "out": str(tmp_path), "cache_dirs": [str(tmp_path)], "workers": 2, "mode": "build"}
    request.update(entries=[], memory_per_worker=1 << 20, capability="12.0", arch="12.0f", argv=[], **more)
    return worker.Worker(request)


def modules(*names):
    return [calls.Module("flashinfer", name, {"kind": "flashinfer", "name": name}) for name in names]


def lines(tmp_path):
    return [json.loads(line)["text"] for line in (tmp_path / worker.PROGRESS).read_text().splitlines()]


def test_a_child_for_each_module_and_what_went_wrong(tmp_path, monkeypatch):
    def build(module, _held):
        if module.name == "bad":
            raise RuntimeError("Ninja build failed.\nx.cu:1: error: no such thing")

    monkeypatch.setattr(worker, "_build", build)
    run = make(tmp_path)
    run.build(modules("one", "bad", "two"))
    assert {row["name"]: row["state"] for row in run.rows} == {"one": "compiled", "bad": "failed", "two": "compiled"}
    assert next(row for row in run.rows if row["name"] == "bad")["error"] == "x.cu:1: error: no such thing"
    assert sum("of 3:" in line for line in lines(tmp_path)) == 3


def test_killed_ones_are_built_once_more_with_fewer_workers(tmp_path, monkeypatch):
    def build(module, _held):
        mark = tmp_path / f"{module.name}.tried"
        if module.name == "always" or (module.name == "once" and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(worker, "_build", build)
    run = make(tmp_path)
    run.build(modules("once", "always", "fine"))
    found = {row["name"]: row for row in run.rows}
    assert [found[name]["state"] for name in ("once", "fine", "always")] == ["compiled", "compiled", "failed"]
    assert found["always"]["code"] == "compiler_killed"
    assert any("2 were killed" in line and "1 at a time" in line for line in lines(tmp_path))


def test_a_compiler_that_the_kernel_killed_counts_as_killed(tmp_path, monkeypatch):
    def build(module, _held):
        mark = tmp_path / "tried"
        if not mark.exists():
            mark.touch()
            raise RuntimeError("Ninja build failed.\nKilled\nnvcc error : 'cicc' died due to signal 9 (Kill signal)")

    monkeypatch.setattr(worker, "_build", build)
    run = make(tmp_path)
    run.build(modules("big"))
    assert [row["state"] for row in run.rows] == ["compiled"]


def test_a_compiler_that_hangs_is_killed_with_all_below_it_and_named(tmp_path, monkeypatch):
    (tmp_path / "norm.cu").touch()
    (tmp_path / "cicc").write_text(f"echo $$ >> {tmp_path}/pids; exec tail -f {tmp_path}/norm.cu")

    def build(_module, _held):  # as ninja does: each compiler in a group of its own
        subprocess.run(["sh", "-c", f"setsid sh {tmp_path}/cicc & sh {tmp_path}/cicc"], check=True)

    monkeypatch.setattr(worker, "_build", build)
    run = make(tmp_path, module_timeout=1)
    run.build(modules("norm"))
    (row,) = run.rows
    assert (row["state"], row["code"]) == ("failed", "compiler_hung")
    said = "norm was not built within 1 s (sglang_server_jit_module_timeout); at work was: tail norm.cu"
    assert row["error"] == said
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids)


def early(tmp_path):
    return [json.loads(line).get("early", False) for line in (tmp_path / worker.PROGRESS).read_text().splitlines()]


def test_a_server_may_start_once_each_module_that_is_left_has_its_lock_held(tmp_path, monkeypatch):
    go = tmp_path / "go"

    def build(module, held):
        if module.spec is None:
            return  # SGLang's own have no lock: they must be done
        held()
        while not go.exists():
            time.sleep(0.01)

    said = worker.Worker.say

    def say(self, text, **more):
        said(self, text, **more)
        if more.get("early"):
            go.touch()

    monkeypatch.setattr(worker, "_build", build)
    monkeypatch.setattr(worker.Worker, "say", say)
    run = make(tmp_path)
    held = modules("norm", "sampling")
    for module in held:
        module.spec = object()
    run.build_batch([*held, *modules("own")], 3, 1, 0)
    assert early(tmp_path) == [False, True, False, False]  # after the module without a lock, before the other two
    assert lines(tmp_path)[1].startswith("not built yet: 2;")


@pytest.mark.parametrize(("workers", "silent"), [(2, "norm"), (1, "")], ids=["no lock yet", "one in the queue"])
def test_no_server_may_start_before(tmp_path, monkeypatch, workers, silent):
    def build(module, held):
        if module.name != silent:
            held()
        time.sleep(0.2 if module.name == "norm" else 0.6)

    monkeypatch.setattr(worker, "_build", build)
    make(tmp_path).build_batch(modules("norm", "page"), workers, 1, 0)
    assert early(tmp_path) == [False, True, False]  # not before norm was built


def test_no_server_may_start_beside_a_failure(tmp_path, monkeypatch):
    def build(module, held):
        if module.name == "bad":
            raise RuntimeError("x.cu:1: error: no such thing")
        time.sleep(0.3)
        held()
        time.sleep(0.3)

    monkeypatch.setattr(worker, "_build", build)
    make(tmp_path).build_batch(modules("norm", "bad"), 2, 1, 0)
    assert not any(early(tmp_path))


def test_the_longest_are_begun_first_and_the_rest_gives_way():
    found = modules("cascade", "batch_prefill_x", "batch_prefill_x_sm90", "sampling", "norm")
    for module in found:
        module.spec = object()
    found += modules("sgl_kernel_jit_x")
    order = [module.name for module in sorted(found, key=shares.weight, reverse=True)]
    assert order == ["sampling", "batch_prefill_x_sm90", "batch_prefill_x", "norm", "cascade", "sgl_kernel_jit_x"]
    assert [shares.niceness(module) for module in found] == [5, 5, 0, 0, 5, 0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_of_somebody_else_is_named(tmp_path):
    tmp_path.chmod(0o555)
    (found,) = checks.obstacles([str(tmp_path)])
    assert found.code == "cache_readonly"
    assert str(tmp_path) in found.message


def test_missing_tools_are_all_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    assert [item.code for item in checks.tools()] == ["ninja_missing", "nvcc_missing", "cxx_missing"]


GETTER = """
def _jit_x_module(head_dim: int, dtype, half: bool = True):
    args = make_cpp_args(head_dim, is_arch_support_pdl(), dtype, half)
    return load_jit("x", *args, cuda_files=["x.cuh"])
"""
# two modules of one function, as that of the activations makes them
CHOOSING = """
def activation_module(dtype, *, fast_math: bool = True):
    args = make_cpp_args(dtype, is_arch_support_pdl())
    return load_jit("activation" if fast_math else "rounded_activation", *args)
"""


@pytest.mark.parametrize(
    ("getter", "words", "expected"),
    [
        (GETTER, "x_128_true_bf16_t_false", ([128, "torch.bfloat16", False], {})),
        (GETTER, "x_64_false_fp8_e4m3_t_true_0123456789abcdef", ([64, "torch.float8_e4m3fn", True], {})),
        (GETTER, "x_128_true_bf16_t", None),  # of a release with fewer parameters
        (GETTER, "xy_128_true_bf16_t_true", None),
        (CHOOSING, "activation_bf16_t_true", (["torch.bfloat16"], {"fast_math": True})),
        (CHOOSING, "rounded_activation_fp16_t_true", (["torch.float16"], {"fast_math": False})),
    ],
)
def test_a_name_of_sglangs_tells_the_arguments(getter, words, expected):
    (node,) = ast.parse(getter).body
    name = calls.SGLANG_NAME.fullmatch(f"sgl_kernel_jit_{words}")
    assert calls._arguments(node, name["words"]) == expected


def test_two_variants_of_one_call_have_labels_of_their_own():
    def activation_module(dtype, *, fast_math=True):
        """Only its name counts."""

    variants = [functools.partial(activation_module, fast_math=value) for value in (True, False)]
    labels = [calls.sglang_label(called, ["torch.bfloat16"]) for called in (activation_module, *variants)]
    assert labels == [
        "activation_bfloat16",
        "activation_bfloat16_fast_math=True",
        "activation_bfloat16_fast_math=False",
    ]


def test_the_worker_needs_nothing_of_ansible(tmp_path):
    """It is run by the engine's Python, which has no ansible-core."""
    code = "import sys; sys.modules['ansible'] = None; " + (
        "from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_worker; print(_jit_worker.LOCK)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.stdout.strip() == worker.LOCK, done.stderr


@pytest.mark.parametrize(
    ("jobs", "text", "expected"),
    [
        ("8", "--split-compile <number>", "--split-compile=8"),
        ("1", "--split-compile <number>", ""),  # little memory, or one core
        ("8", "--split-compile-extended <number>", ""),  # an older nvcc
        ("", "--split-compile <number>", ""),
    ],
)
def test_a_large_file_is_optimised_side_by_side(tmp_path, monkeypatch, jobs, text, expected):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho '{text}'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MAX_JOBS", jobs)
    assert shares.split_compile() == expected


def test_no_split_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MAX_JOBS", "8")
    assert shares.split_compile() == ""


def test_only_the_longest_are_split_and_the_users_flags_stay(monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    monkeypatch.setattr(shares, "split_compile", lambda: "--split-compile=8")
    seen = []
    monkeypatch.setattr(calls, "flashinfer_build", lambda *_args: seen.append(os.environ["NVCC_APPEND_FLAGS"]))
    for name in ("norm", "sampling"):
        worker._build(calls.Module("flashinfer", name, {}, spec=argparse.Namespace()), lambda: None)
    assert seen == ["-lineinfo", "-lineinfo --split-compile=8"]


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (
            OSError("CUDA_HOME environment variable is not set."),
            ("failed", "CUDA_HOME environment variable is not set."),
        ),
        (RuntimeError("No supported CUDA architectures found for major versions [10]."), ("unused", "No supported")),
        (TypeError(), ("failed", "TypeError()")),
        (calls.UnknownCall("flashinfer.x: no such"), ("unknown", "flashinfer.x: no such")),
    ],
)
def test_an_entry_that_raises_is_named_and_the_others_go_on(monkeypatch, exc, expected):
    def call(entry):
        if entry["name"] == "odd":
            raise exc
        return calls.Module("flashinfer", entry["name"], entry)

    monkeypatch.setattr(calls, "flashinfer_module", call)
    monkeypatch.setattr(calls, "flashinfer_state", lambda _spec: calls.READY)
    monkeypatch.setattr(calls, "_without_ninja", lambda _module: calls.READY)
    entries = [{"kind": "flashinfer", "name": name} for name in ("odd", "norm")]
    found, (odd,) = calls.resolve(entries, repair=False)
    assert [module.name for module in found] == ["norm"]
    assert odd["name"] == "odd"
    assert (odd["state"], odd["why"][: len(expected[1])]) == expected


def test_a_full_disk_is_no_single_entrys_fault(monkeypatch):
    def call(_entry):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calls, "flashinfer_module", call)
    with pytest.raises(OSError, match="No space"):
        calls.resolve([{"kind": "flashinfer", "name": "norm"}], repair=False)
