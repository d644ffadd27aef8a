"""The files around a plan."""

from __future__ import annotations

import stat

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _plan_files
from engines import engine


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_write_once_then_leave_alone(tmp_path):
    path = tmp_path / "etc/plan.json"
    assert _plan_files.write_plan(path, "", "x", dry=True) is True
    assert not path.parent.exists()
    assert _plan_files.write_plan(path, "", "x", dry=False) is True
    assert (path.read_text(), mode(path)) == ("x", 0o600)
    before = path.stat().st_mtime_ns
    assert _plan_files.write_plan(path, "x", "x", dry=False) is False
    assert path.stat().st_mtime_ns == before
    path.chmod(0o644)
    assert _plan_files.write_plan(path, "x", "x", dry=False) is True
    assert mode(path) == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("text", "home", "findings"),
    [
        (None, None, 0),
        ('{"cuda_home": "/cuda"}', "/cuda", 0),
        ('{"cuda_home": null}', None, 0),
        ("{", None, 1),
        ("[]", None, 1),
    ],
)
def test_cuda_home(tmp_path, text, home, findings):
    path = tmp_path / "toolkit.json"
    if text is not None:
        path.write_text(text)
    got, found = _plan_files.cuda_home(str(path))
    assert (got, len(found)) == (home, findings)
    assert _plan_files.cuda_home(None) == (None, [])


def test_engine_options(tmp_path):
    path = tmp_path / "options.json"
    assert _plan_files.engine_options(None) is None
    assert _plan_files.engine_options(str(path)) is None
    path.write_text(engine("0.5.16").to_json())
    assert _plan_files.engine_options(str(path)) == engine("0.5.16")
    path.write_text("{}")
    with pytest.raises(_plan_files.PlanInputError, match=r"options\.json"):
        _plan_files.engine_options(str(path))
