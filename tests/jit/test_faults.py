"""What goes wrong on hosts: the cause is named, and the next run ends good with nothing corrupt."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_bound import descendants
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_elf import broken
from conftest import PARTS
from kernels import Kernels

ROOT = os.geteuid() == 0
FAST = ["silu_and_mul"]
MEMORY = 850 << 20  # three at once need 1.2 GiB, one 0.65


def codes(result):
    return [item["code"] for item in result["problems"]]


def good(kernels, *names):
    """The next run builds what is missing, and a server then compiles nothing; returns how long the run took."""
    done = kernels.warm(modules=list(names))
    assert not done.get("failed"), done
    served = kernels.serve("getter", *names)
    assert (served.rc, served.compiled) == (0, []), served.output
    return done["took"]


def test_no_ninja_no_compiler(kernels, tmp_path):
    (tmp_path / "bin").mkdir()
    done = kernels.warm(modules=FAST, environment={"PATH": str(tmp_path / "bin"), "CUDA_HOME": "/nonexistent"})
    assert done["failed"]
    assert codes(done) == ["ninja_missing", "nvcc_missing", "cxx_missing"]
    assert "pip install ninja" in done["msg"]


@pytest.mark.skipif(not ROOT, reason="only root can mount")
def test_full_disk_then_good(kernels):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(kernels.cache)], check=True)
    try:
        done = kernels.warm(modules=FAST)
        assert done["failed"]
        assert codes(done) == ["no_space"]
        subprocess.run(["mount", "-o", "remount,size=64m", str(kernels.cache)], check=True)
        good(kernels, *FAST)
    finally:
        subprocess.run(["umount", "-l", str(kernels.cache)], check=True)


@pytest.mark.skipif(not ROOT, reason="only root can mount")
def test_a_cache_that_is_read_only(kernels):
    """One that belongs to somebody else is in the integration target, where the interpreter is everybody's."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(kernels.cache)], check=True)
    try:
        done = kernels.warm(modules=FAST)
        assert codes(done) == ["cache_readonly"]
        assert "Read-only file system" in done["msg"]
    finally:
        subprocess.run(["umount", "-l", str(kernels.cache)], check=True)


def test_a_build_that_fails_says_its_first_real_error(kernels):
    done = kernels.warm(modules=FAST, environment={"CPATH": "", "NVCC_APPEND_FLAGS": "-DTORCH_BAD -include none.h"})
    assert done["failed"]
    assert "none.h" in done["modules"][0]["error"]
    good(kernels, *FAST)


def test_two_runs_at_once_build_once(kernels):
    processes = [kernels.start(modules=FAST) for _number in range(2)]
    results = [json.loads(process.stdout.read().strip().splitlines()[-1]) for process in processes]
    for process in processes:
        process.wait()
    assert not any(result.get("failed") for result in results), results
    states = sorted(result["modules"][0]["state"] for result in results)
    assert states in (["already", "compiled"], ["compiled", "compiled"])  # waited, or joined the same run
    good(kernels, *FAST)


def at_work(program, folder):
    """Return the pids of a compiler's part that works below a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(program.encode()) and os.readlink(path / "cwd").startswith(str(folder)):
                found.append(int(path.name))
    return found


def test_a_compiler_that_is_killed_as_when_memory_ends(kernels):
    process = kernels.start(modules=FAST)
    end, killed = time.monotonic() + 120, []
    while not killed and time.monotonic() < end:
        killed = at_work("cicc", kernels.cache)
        time.sleep(0.01)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    done = json.loads(process.stdout.read().strip().splitlines()[-1])
    process.wait()
    assert killed
    assert done["modules"][0]["state"] == "compiled", done
    assert any("1 were killed" in line for line in done["progress"]), done["progress"]
    good(kernels, *FAST)


def test_a_compiler_that_hangs(kernels):
    """Here one that takes longer than a second: it is ended with all that it started, and named."""
    done = kernels.warm(modules=["page"], module_timeout=1)
    assert codes(done) == ["compiler_hung"]
    assert "page was not built within 1 s (sglang_server_jit_module_timeout)" in done["msg"]
    assert [at_work(name, kernels.cache) for name in ("nvcc", "cicc", "ninja")] == [[], [], []]
    good(kernels, *FAST)


@pytest.fixture
def limited(tmp_path):
    """A control group whose memory the kernel limits; whatever is in it then leaves it."""
    v1 = Path("/sys/fs/cgroup/memory")
    above, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = above / f"gpufleet-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(f"{MEMORY}")
    except OSError as exc:
        pytest.skip(f"no control group with a memory limit can be made: {exc}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        (above / "cgroup.procs").write_text(pid)
    group.rmdir()


@pytest.mark.matrix
def test_a_memory_limit_kills_compilers_and_fewer_at_once_fit(kernels, limited):
    if kernels.job().systemd:
        pytest.skip("the worker is a unit here, with a group of its own")
    names = ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]
    process = kernels.start(modules=names, workers=3)
    (limited / "cgroup.procs").write_text(str(kernels.worker_pid()))
    done = json.loads(process.stdout.read().strip().splitlines()[-1])
    process.wait()
    assert any("were killed, as by the kernel when memory ends" in line for line in done["progress"]), done
    assert not done.get("failed"), done
    good(kernels, *names[:2])


@pytest.mark.matrix
def test_two_environments_take_turns_in_one_cache(kernels, toolkit_lab):
    """Each is the other's stale build: said beforehand, built again by the warm-up, never by a server."""
    other = toolkit_lab.environment("jit-other", PARTS, flashinfer="0.7.2.post1")
    theirs = Kernels(other, other.module().result["cuda_home"], kernels.folder)
    good(kernels, *FAST)
    assert theirs.states(modules=FAST, _check=True) == {FAST[0]: "would_compile"}
    good(theirs, *FAST)
    assert kernels.states(modules=FAST, _check=True) == {FAST[0]: "would_compile"}
    toolkit_lab.discard(other)


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.matrix)])
def test_killed_at_random_moments(kernels, times):
    """Every other time the worker alone, whose compilers then go on; the next run ends good each time."""
    if kernels.job().systemd:
        pytest.skip("the worker is a unit here, whose processes end together")
    chance, span, broken_ones, ends = random.Random(7), 9.0, 0, 0
    for number in range(times):
        process = kernels.start(modules=FAST)
        pid = kernels.worker_pid()
        time.sleep(chance.uniform(0, span))
        process.kill()
        process.wait()
        for victim in [pid, *(descendants(pid) if number % 2 else ())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                ends += victim == pid
        broken_ones += sum(bool(broken(path)) for path in kernels.stamps())
        span = good(kernels, *FAST)
        shutil.rmtree(kernels.cache / ".cache")
    assert ends > 0
    print(f"{times} times, {ends} of them at work; libraries that were not whole right after: {broken_ones}")


def test_a_lost_connection_does_not_lose_the_build(kernels):
    process = kernels.start(modules=FAST)
    pid = kernels.worker_pid() if not kernels.job().systemd else 0
    process.kill()
    process.wait()
    done = kernels.warm(modules=FAST)
    assert done["modules"][0]["state"] in ("compiled", "already")
    assert done["progress"][0] == "joined the warm-up that is at work already" or pid == 0
