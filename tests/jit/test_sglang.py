"""SGLang's own kernels, with the real engine: built ahead, loaded without compiling, and known again by their names."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_state import compiled
from conftest import PARTS, TOP
from kernels import BUILDS, Kernels

CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
OWN = ["clamp_position", "activation", "fused_rope", "qknorm", "kvcache"]
# nothing of FlashInfer's: that is the other tests'
ARGV = ["--attention-backend", "triton", "--sampling-backend", "pytorch"]


@pytest.fixture(scope="module")
def engine(toolkit_lab, tmp_path_factory):
    env = toolkit_lab.environment("sglang", PARTS, flashinfer="0.7.2.post1", torch=False)
    wheels = ["--no-index", "--no-deps", "--no-compile", "--find-links", str(TOP / ".cache/wheels")]
    python = env.folder / "venv/bin/python"
    toolkit_lab.pip(*wheels, "-r", str(TOP / "tests/cpu-engine/requirements.lock"), python=python)
    toolkit_lab.pip("--no-compile", "ninja==1.13.0", "filelock", "einops", "tabulate", "nvidia-ml-py", python=python)
    home = env.module().result["cuda_home"]
    yield Kernels(env, home, tmp_path_factory.mktemp("sglang"))
    toolkit_lab.discard(env)


@pytest.mark.matrix
def test_own_kernels(engine, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    values = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "SGLANG_CACHE_DIR": str(engine.cache)}
    given = {"derive": True, "model": str(tmp_path), "argv": ARGV, "environment": values}
    first = engine.warm(**given)
    mine = {row["name"]: row["state"] for row in first["modules"] if row["kind"] == "sglang"}
    assert len(mine) == len(OWN), first
    assert set(mine.values()) == {"compiled"}, first

    before = engine.stamps()
    done = subprocess.run(
        [engine.env.python, str(BUILDS / "own.py"), "12.0"],
        capture_output=True,
        check=False,
        text=True,
        env={**engine.environment, **values},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.strip().splitlines()[-1])) == 3
    assert compiled(before, engine.stamps()) == []

    again = engine.warm(**given)
    assert not again["changed"]
    names = sorted(row["name"] for row in again["modules"] if row["kind"] == "sglang")
    assert all(name.startswith("sgl_kernel_jit_") for name in names)
    # what a canary leaves are names: each leads back to the call that makes it
    known = engine.states(modules=names, environment=values)
    assert known == dict.fromkeys(names, "already")
    shutil.rmtree(engine.cache)
    print(f"own kernels: {first['took']:.0f} s, again {again['took']:.1f} s")
