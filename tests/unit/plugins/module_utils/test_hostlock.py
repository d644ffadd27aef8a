"""The host's lock: who gets it, who is refused, whose is taken over."""

from __future__ import annotations

import os

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._hostlock import (
    Holder,
    LockHeldError,
    hold,
    is_dead,
    look,
    release,
)

ONE = Holder("c1/1/1", "ann", "c1", "ctl1", "deploy", 0.0, 1)
SAME = Holder("c1/2/2", "bob", "c1", "ctl1", "remove", 0.0, 2)
FAR = Holder("c2/3/3", "eve", "c2", "ctl2", "stop", 0.0, 3)


@pytest.mark.parametrize(
    ("asker", "alive", "silent", "dead"),
    [
        (SAME, None, 9999, False),  # nobody has looked for its process yet
        (SAME, True, 9999, False),
        (SAME, False, 0, True),
        (FAR, None, 59, False),
        (FAR, None, 61, True),
        (FAR, False, 0, False),  # what another controller says of it counts for nothing
    ],
)
def test_is_dead(asker, alive, silent, dead):
    assert is_dead(ONE, asker, alive, silent, 60) is dead


def test_one_holds_others_are_told_and_a_dead_ones_is_taken_over(tmp_path):
    path = str(tmp_path / "lock")
    assert hold(ONE, 1000.0, {}, 60, path) == (True, "")
    assert hold(ONE, 1001.0, {}, 60, path) == (False, "")  # the next stage of the same run
    with pytest.raises(LockHeldError, match=r"ann on ctl1 \(pid 1\) runs deploy since 1970-01-01 00:16:40 UTC"):
        hold(SAME, os.stat(path).st_mtime, {}, 60, path)
    assert not release(SAME.run, path)
    new, before = hold(SAME, os.stat(path).st_mtime, {ONE.run: False}, 60, path)
    assert new
    assert "ann on ctl1" in before
    assert look(path)[0].who == "bob"
    os.utime(path, (5000.0, 5000.0))
    with pytest.raises(LockHeldError):
        hold(FAR, 5030.0, {}, 60, path)
    assert hold(FAR, 5061.0, {}, 60, path)[0]
    assert release(FAR.run, path)
    assert not os.path.exists(path)
