"""What goes wrong on hosts: the cause is named, and the next run ends good with nothing corrupt."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest

ROOT = os.geteuid() == 0
FAST = ["silu_and_mul"]


def codes(result):
    return [item["code"] for item in result["problems"]]


def good(kernels, *names):
    """The next run builds what is missing, and a server then compiles nothing."""
    done = kernels.warm(modules=list(names))
    assert not done.get("failed"), done
    served = kernels.serve("getter", *names)
    assert (served.rc, served.compiled) == (0, []), served.output


def test_no_ninja_no_compiler(kernels, tmp_path):
    (tmp_path / "bin").mkdir()
    done = kernels.warm(modules=FAST, environment={"PATH": str(tmp_path / "bin"), "CUDA_HOME": "/nonexistent"})
    assert done["failed"]
    assert codes(done) == ["ninja_missing", "nvcc_missing", "cxx_missing"]
    assert "pip install ninja" in done["msg"]


@pytest.mark.skipif(not ROOT, reason="only root can mount")
def test_full_disk_then_good(kernels):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(kernels.cache)], check=True)
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


def test_killed_at_random_moments(kernels, request):
    if kernels.job().systemd:
        pytest.skip("the worker is a unit here, whose processes end together")
    full = request.config.getoption("-m") != "not matrix"
    chance, ends = random.Random(7), 0
    for _number in range(20 if full else 3):
        process = kernels.start(modules=FAST)
        pid = kernels.worker_pid()
        time.sleep(chance.uniform(0, 9))
        try:
            os.kill(pid, signal.SIGKILL)
            ends += 1
        except ProcessLookupError:
            pass
        process.kill()
        process.wait()
        while kernels.job().alive():  # a second start of the module's own
            time.sleep(0.2)
        if chance.random() < 0.5:
            shutil.rmtree(kernels.cache / ".cache", ignore_errors=True)
    good(kernels, *FAST)
    assert ends > 0
    print(f"killed {ends} times")


def test_a_lost_connection_does_not_lose_the_build(kernels):
    process = kernels.start(modules=FAST)
    pid = kernels.worker_pid() if not kernels.job().systemd else 0
    process.kill()
    process.wait()
    done = kernels.warm(modules=FAST)
    assert done["modules"][0]["state"] in ("compiled", "already")
    assert done["progress"][0] == "joined the warm-up that is at work already" or pid == 0
