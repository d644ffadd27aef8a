"""Releases really made: pip runs, offline, on tiny wheels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._options import EngineOptions
from ansible_collections.gpufleet.sglang.plugins.module_utils._release import PART, RECORD, ReleaseError, Spec, look
from ansible_collections.gpufleet.sglang.plugins.module_utils._release_build import Tools, ensure
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner
from ansible_collections.gpufleet.sglang.tests.unit.plugins.module_utils import wheelhouse

BASE = getattr(sys, "_base_executable", sys.executable)
LOCK = "sglang==0.5.23+t\ntinydep==1.0\n"


@pytest.fixture
def tools():
    return Tools(SubprocessRunner())


@pytest.fixture
def spec(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheelhouse.engine(wheels)
    wheelhouse.dependency(wheels)
    return Spec(
        name="r1",
        releases_dir=str(tmp_path / "releases"),
        options_dir=str(tmp_path / "etc"),
        wheel_dir=str(wheels),
        lock=LOCK,
        python=BASE,
        device="cpu",
        installer="pip",
    )


def problems_of(spec, tools, check=False):
    with pytest.raises(ReleaseError) as caught:
        ensure(spec, tools, check=check)
    return "\n".join(caught.value.problems)


def test_make_check_again_and_verify_as_an_existing_venv(spec, tools):
    predicted = ensure(spec, tools, check=True)
    assert predicted.changed
    assert predicted.release.version == ""
    assert not Path(spec.releases_dir).exists()
    assert not Path(spec.options_dir).exists()

    old = os.umask(0o077)
    try:
        made = ensure(spec, tools, check=False)
    finally:
        os.umask(old)
    assert made.changed
    assert made.diff == predicted.diff
    assert made.release.version == made.expected_version == predicted.expected_version == "0.5.23+t"
    assert not (Path(spec.folder) / PART).exists()
    record = json.loads((Path(spec.folder) / RECORD).read_text())
    assert record["packages"] == {"sglang": "0.5.23+t", "tinydep": "1.0"}
    for path in (spec.folder, spec.options_dir, spec.folder + "/lib", spec.releases_dir):
        assert os.stat(path).st_mode & 0o755 == 0o755
    options = EngineOptions.load(spec.options_path)
    assert (options.version, options.venv, len(options.options)) == ("0.5.23+t", spec.folder, 7)

    for check in (True, False):
        again = ensure(spec, tools, check=check)
        assert not again.changed
        assert again.diff == []

    existing = replace(spec, name="", venv=spec.folder, options_dir=spec.options_dir + "2", wheel_dir="")
    seen = ensure(existing, tools, check=False)
    assert seen.changed  # the option list of this name is new
    assert not ensure(existing, tools, check=False).changed
    different = problems_of(replace(existing, lock=LOCK + "missing==1\n", version=""), tools)
    assert "missing: 1 is pinned, not installed" in different


def test_options_can_be_left_for_a_later_call(spec, tools):
    first = ensure(replace(spec, read_options=False), tools, check=False)
    assert (first.changed, first.options_due) == (True, True)  # the release was made
    assert not Path(spec.options_path).exists()
    for check in (True, False):
        later = ensure(replace(spec, read_options=False), tools, check=check)
        assert (later.changed, later.options_due) == (False, True)
    now = ensure(spec, tools, check=False)
    assert (now.changed, now.options_due) == (True, False)
    assert not ensure(replace(spec, read_options=False), tools, check=False).options_due


def test_an_engine_upgraded_in_place_is_read_anew(spec, tools):
    ensure(spec, tools, check=False)
    parser = next(Path(spec.folder).glob("lib/python3*/site-packages/sglang/srt/server_args.py"))
    parser.write_text(wheelhouse.PARSER.replace("--enable-metrics", "--enable-everything"))
    assert ensure(spec, tools, check=True).changed
    assert not EngineOptions.load(spec.options_path).has("enable-everything")
    assert ensure(spec, tools, check=False).changed
    assert EngineOptions.load(spec.options_path).has("enable-everything")
    assert not ensure(spec, tools, check=False).changed


def test_another_lock_on_the_same_name_and_a_changed_venv_are_refused(spec, tools):
    ensure(spec, tools, check=False)
    wheelhouse.dependency(Path(spec.wheel_dir), "1.1")
    other = replace(spec, lock=LOCK.replace("1.0", "1.1"))
    for check in (True, False):
        found = problems_of(other, tools, check)
        assert "tinydep==1.0 -> tinydep==1.1" in found
        assert "choose a new release name" in found
    assert ensure(replace(other, name="r2"), tools, check=False).changed

    pip = [spec.python_path, "-m", "pip", "install", "-q", "--no-index", "--find-links", spec.wheel_dir, "tinydep==1.1"]
    subprocess.run(pip, check=True, capture_output=True, env={**os.environ, "PIP_FIND_LINKS": ""})
    assert "tinydep: 1.0 is pinned, 1.1 is installed" in problems_of(spec, tools)


def test_a_folder_we_did_not_make_is_left_alone(spec, tools):
    mine = Path(spec.folder) / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    assert "was not made by this collection" in problems_of(spec, tools)
    assert mine.read_text() == "precious"


def test_missing_and_misfitting_wheels_are_named_at_once(spec, tools):
    wheelhouse.wheel(Path(spec.wheel_dir), "odd", "1", {}, tag="cp27-cp27m-linux_x86_64")
    bad = replace(spec, lock=LOCK + "odd==1\nabsent==2\n")
    found = problems_of(bad, tools)
    assert "no file for 1 of 4 pinned packages: absent==2" in found
    assert "1 file(s) don't fit: odd-1-cp27-cp27m-linux_x86_64.whl is for cp27" in found
    assert not Path(spec.folder).exists()
    predicted = ensure(bad, tools, check=True)
    assert len(predicted.warnings) == 2
    gone = problems_of(replace(spec, wheel_dir="/nowhere/wheels"), tools)
    assert "wheel_dir /nowhere/wheels: No such file or directory" in gone


@pytest.mark.parametrize("kind", ["pip", "uv"])
def test_a_wrong_hash_leaves_nothing_that_looks_finished(spec, tools, kind):
    uv = Path(sys.executable).with_name("uv")
    if kind == "uv":
        if not uv.exists():
            pytest.skip("no uv beside this Python")
        os.environ["PATH"] = f"{uv.parent}:{os.environ['PATH']}"
    spec = replace(spec, installer=kind)
    good = wheelhouse.sha256(Path(spec.wheel_dir) / "sglang-0.5.23+t-py3-none-any.whl")
    right = wheelhouse.sha256(Path(spec.wheel_dir) / "tinydep-1.0-py3-none-any.whl")
    lock = "sglang==0.5.23+t --hash=sha256:{}\ntinydep==1.0 \\\n    --hash=sha256:{}\n"
    found = problems_of(replace(spec, lock=lock.format(good, "0" * 64)), tools)
    assert "isn't the one the lock was made from" in found
    assert look(spec.folder).state == "partial"
    made = ensure(replace(spec, lock=lock.format(good, right)), tools, check=False)
    assert made.changed
    assert made.installer == kind
    assert look(spec.folder).state == "complete"
    assert not ensure(spec, tools, check=False).changed


def test_no_space_no_python_no_ensurepip(spec, tools, runner):
    assert "the release needs about 4.0 GiB" in problems_of(
        replace(spec, wheel_dir="", lock="", version="1"), replace(tools, free_bytes=lambda path: 2**30)
    )
    assert "no Python 3.11 or newer: /no/python: not found" in problems_of(replace(spec, python="/no/python"), tools)
    answer = {"version": [3, 11, 2], "executable": "p", "machine": "x86_64", "libc": "glibc 2.36", "ensurepip": False}
    answer.update(venv=True, packages={}, engine="", fingerprint="")
    runner.on("/usr/bin/python3", stdout=json.dumps(answer))
    debian = replace(tools, runner=runner, debian=True)
    bare = replace(spec, python="/usr/bin/python3")
    assert "it needs the system package python3-venv first" in problems_of(bare, debian)
    assert ensure(bare, debian, check=True).system_packages == ["python3-venv"]
    assert ensure(bare, replace(debian, debian=False), check=True).system_packages == []


RUN = """
import dataclasses, json, sys
from ansible_collections.gpufleet.sglang.plugins.module_utils._release import Spec
from ansible_collections.gpufleet.sglang.plugins.module_utils._release_build import Tools, ensure
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner
outcome = ensure(Spec(**json.loads(sys.argv[1])), Tools(SubprocessRunner()), check=False)
print(json.dumps(outcome.changed))
"""


def start(spec):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [sys.executable, "-c", RUN, json.dumps(vars(spec))]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_killed_in_the_middle_then_run_again(spec, tools):
    wheelhouse.dependency(Path(spec.wheel_dir), count=4000)  # long enough to be caught unpacking
    child = start(spec)
    deadline = time.monotonic() + 60
    unpacked = Path(spec.folder)
    while time.monotonic() < deadline and not list(unpacked.glob("lib/python3*/site-packages/tinydep/m1*.py")):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert look(spec.folder).state == "partial"
    log = Path(spec.log_path).read_text()
    assert "Successfully installed" not in log
    time.sleep(0.5)  # the installer died with its parent: nothing more is written
    size = len(list(unpacked.rglob("*")))
    time.sleep(0.5)
    assert len(list(unpacked.rglob("*"))) == size
    assert ensure(spec, tools, check=True).changed

    again = ensure(spec, tools, check=False)
    assert again.changed
    assert look(spec.folder).state == "complete"
    assert len(list(unpacked.glob("lib/python3*/site-packages/tinydep/*.py"))) == 4000
    assert not ensure(spec, tools, check=False).changed


def test_two_at_once_make_one(spec):
    children = [start(spec), start(spec)]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert sorted(output[0].strip() for output in outputs) == ["false", "true"]


def test_an_existing_venv_must_be_one(spec, tools, tmp_path):
    assert "there is no bin/python in it" in problems_of(replace(spec, venv=str(tmp_path / "none")), tools)
    subprocess.run([BASE, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True)
    bare = replace(spec, venv=str(tmp_path / "v"), lock="")
    assert "sglang is not installed in it" in problems_of(bare, tools)
    assert "tinydep: 1.0 is pinned, not installed" in problems_of(replace(bare, lock=LOCK), tools)
