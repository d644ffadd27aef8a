"""A job of real processes: started, looked at, joined, dead; and its files are nobody else's."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_job as jobs
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner


@pytest.fixture
def job(tmp_path, monkeypatch):
    found = jobs.Job(SubprocessRunner(), str(tmp_path))
    found.folder, found.systemd, found.user = tmp_path / "job", False, ""
    found.out = found.folder / "out"
    return found


def request(tmp_path, **more):
    """A set of one module of an engine that is not there: the worker runs, and says so."""
    entries = [{"kind": "flashinfer", "call": "norm.get_norm_module"}]
    given = {"id": "1", "mode": "build", "entries": entries, "cache_dirs": [str(tmp_path / "cache")]}
    return {**given, "capability": "12.0", "arch": "12.0f", "workers": 0, "memory_per_worker": 1 << 30, **more}


def until_dead(job):
    end = time.monotonic() + 60
    while job.alive() and time.monotonic() < end:
        time.sleep(0.05)
    return job.look()


def test_the_worker_runs_from_the_job_alone(job, tmp_path):
    before = os.umask(0o077)
    try:
        assert job.start(request(tmp_path), sys.executable, {"PATH": "/usr/bin:/bin"})
    finally:
        os.umask(before)
    seen = until_dead(job)
    assert not seen.alive
    assert [item["message"] for item in seen.result["problems"]] == ["ModuleNotFoundError: No module named 'torch'"]
    assert "No module named 'torch'" in job.last_words()
    assert job.folder.stat().st_mode & 0o777 == 0o755
    code = job.folder / jobs.PACKAGE / "_jit_worker.py"
    assert code.parent.stat().st_mode & 0o005 == 0o005
    assert job.start(request(tmp_path, id="2"), sys.executable, {"PATH": "/usr/bin:/bin"})
    assert job.request()["id"] == "2"
    until_dead(job)


def test_one_that_is_at_work_is_left_alone(job, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "CODE", "import time; time.sleep(60)  # {folder}")
    assert job.start(request(tmp_path), sys.executable, {"PATH": "/usr/bin:/bin"})
    assert job.alive()
    assert not job.start(request(tmp_path, id="2"), sys.executable, {})
    assert job.request()["id"] == "1"
    os.kill(int((job.folder / "pid").read_text().split()[0]), 9)
    seen = until_dead(job)
    assert (seen.alive, seen.result) == (False, None)


def test_a_result_of_an_earlier_request_is_not_taken(job, tmp_path):
    job.prepare()
    (job.folder / "request.json").write_text(json.dumps({"id": "new"}))
    (job.out / "result.json").write_text(json.dumps({"id": "old", "rows": []}))
    assert job.look().result is None
    (job.out / "result.json").unlink()
    (job.out / "result.json").symlink_to("/etc/passwd")  # written by another user: links are not followed
    assert job.look().result is None


def test_progress_from_where_it_was_left(job):
    job.prepare()
    (job.out / "progress.jsonl").write_text('{"text": "one"}\n{"text": "two"}\nhalf a li')
    assert job.look().lines == ("one", "two")
    assert job.look(1).lines == ("two",)


def test_a_folder_of_somebody_else_is_refused(job, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    job.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(jobs.JobError, match="not a folder of ours alone"):
        job.prepare()


def test_an_interpreter_that_is_not_there(job, tmp_path):
    with pytest.raises(jobs.JobError, match="No such file or directory"):
        job.start(request(tmp_path), "/nonexistent/python", {})
