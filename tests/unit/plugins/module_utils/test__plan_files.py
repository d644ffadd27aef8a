"""The files around a plan."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _plan_files
from engines import engine


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
