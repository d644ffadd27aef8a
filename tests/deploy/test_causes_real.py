"""Causes provoked with the real engine: each is named by its code within seconds of the death."""

from __future__ import annotations

import json
import re

import pytest
from causes import CAUSES, Bench

LIMIT = 5.0  # s from the end of the process (or the start of the task, when it came later) to the line that names it


@pytest.fixture(scope="module")
def bench(fleet, tmp_path_factory):
    bench = Bench(fleet, tmp_path_factory.mktemp("causes"))
    bench.clean()
    # room for the others: the fleet itself is only needed where its port is
    fleet.sh("systemctl stop --no-block sglang@1 sglang@2; systemctl kill -s KILL sglang@1 sglang@2", rc=None)
    yield bench
    bench.clean()
    fleet.sh("systemctl start sglang.target")


@pytest.mark.parametrize("group", CAUSES)
def test_causes(fleet, bench, group):
    causes = CAUSES[group]
    instances = bench.start(causes, 10 * list(CAUSES).index(group))
    run = bench.health(instances)
    for cause, item in zip(causes, instances, strict=True):
        if cause.after[1]:
            run.wait_for(rf"cause{item['gpu']}: ", 120)  # it is watched
        bench.act(cause, item)
    run.rc = run.process.wait(500)
    told = fleet.sh("cat /srv/health.json", rc=None)
    assert told, run.output
    servers = json.loads(told)["servers"]
    watched = next(when for when, text in run.lines if text.startswith("TASK"))
    found = {}
    for cause, server in zip(causes, servers, strict=True):
        said = server["diagnosis"] or {}
        number = server["gpu"]
        named = [
            when
            for when, text in run.lines
            if re.search(rf"GPU {number} cause{number}: (failed|unhealthy|foreign|stalled)", text)
        ]
        died = bench.died(server["unit"], run.started)
        # a port that another has is named before the server gets so far as to want it
        late = None if not named else named[0] - max(died, watched) if died else 0.0
        found[cause.name] = (said.get("code"), said.get("evidence"), late)
        first = (said.get("evidence") or ["-"])[0][:150]
        print(f"{cause.name}: {said.get('code')} after {late if late is None else round(late, 1)} s: {first}")
    bench.clean()
    for cause in causes:
        code, evidence, late = found[cause.name]
        assert code == cause.code, (cause.name, found, run.output)
        assert re.search(cause.said, " ".join(evidence)), (cause.name, evidence)
        assert late is not None and late <= LIMIT, (cause.name, late, run.output)
