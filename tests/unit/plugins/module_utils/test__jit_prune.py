"""What releases that are gone leave in the caches."""

from __future__ import annotations

import fcntl
import os

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_prune as pruning
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_state as kept
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_worker import LOCK

OPS = ".cache/flashinfer/{}/120a/cached_ops/{}/{}.so"


@pytest.fixture
def host(tmp_path):
    """Releases 1 (gone) and 2: each with its own FlashInfer, one kernel of SGLang's in common."""
    files = {
        "1": [OPS.format("0.7.1", "norm", "norm"), "jit/own_a/own_a.so", "tvm-ffi/both_1/main.so"],
        "2": [OPS.format("0.7.2", "norm", "norm"), "tvm-ffi/both_1/main.so"],
    }
    paths = {name: [f"{tmp_path}/cache/{path}" for path in items] for name, items in files.items()}
    for path in [path for items in paths.values() for path in items]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "w").close()
    sources = tmp_path / "cache/.cache/flashinfer/0.7.1/120a/generated/norm"
    sources.mkdir(parents=True)
    for name in "12":
        (tmp_path / f"kernels/{name}").mkdir(parents=True)
        (tmp_path / f"kernels/{name}/published.json").touch()
    (tmp_path / "kernels/mine").mkdir()
    (tmp_path / "releases/2").mkdir(parents=True)
    (tmp_path / "cache" / LOCK).touch()
    manifests = {"/m": {"1": [{"kind": "flashinfer", "name": "a"}], "2": [{"kind": "flashinfer", "name": "b"}]}}
    libraries = {**paths, "0": ["/etc/passwd", f"{tmp_path}/cache/../releases/2/x.so"]}
    kept.save(f"{tmp_path}/etc", {"libraries": libraries, "manifests": manifests})
    where = {f"{name}_dir": f"{tmp_path}/{name}" for name in ("cache", "releases", "kernels")}
    return {**where, "config_dir": f"{tmp_path}/etc", "release": "2"}


def left(tmp_path):
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("cache/**/*.so"))


def test_what_only_releases_that_are_gone_needed_goes(host, tmp_path):
    would = pruning.prune(host, check=True)
    assert len(left(tmp_path)) == 4
    out = pruning.prune(host)
    assert (out.releases, out.paths) == (["0", "1"], would.paths)
    assert left(tmp_path) == ["cache/" + OPS.format("0.7.2", "norm", "norm"), "cache/tvm-ffi/both_1/main.so"]
    assert not (tmp_path / "cache/.cache/flashinfer/0.7.1/120a/generated/norm").exists()
    assert sorted(os.listdir(tmp_path / "kernels")) == ["2", "mine"]
    assert (tmp_path / "releases/2").is_dir()  # a path that leads out of the cache is nobody's kernel
    state = kept.load(host["config_dir"])
    assert (list(state["libraries"]), list(state["manifests"]["/m"])) == (["2"], ["2"])
    assert pruning.prune(host).releases == []


def test_not_while_kernels_are_built(host, tmp_path):
    with open(tmp_path / "cache" / LOCK) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        out = pruning.prune(host)
    assert (out.releases, out.lines) == ([], ["a warm-up is at work: kernels of releases that are gone stay for now"])
    assert len(left(tmp_path)) == 4


def test_what_each_release_was_built_with_is_remembered():
    state = {"libraries": {"1": ["/c/a.so"]}}
    assert pruning.remember(state, "1", {"b": ["/c/b.so", 1, 2, 3, "x"]}) == {"1": ["/c/a.so", "/c/b.so"]}
    assert pruning.remember(state, "2", {"b": ["/c/b.so"]}) == {"1": ["/c/a.so"], "2": ["/c/b.so"]}
    assert pruning.remember({}, "2", {}) == {}
