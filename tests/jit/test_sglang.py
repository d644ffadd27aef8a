"""SGLang's own kernels, with the real engine: built ahead, loaded without compiling, and known again by their names."""

from __future__ import annotations

import shutil

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_sets import Asked, derive
from conftest import PARTS, TOP
from kernels import Kernels, read_only

CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


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


def own(engine, **environment):
    """Three kernels, by the calls of a server."""
    return engine.serve("12.0", script="own.py", **environment)


@pytest.mark.matrix
def test_own_kernels(engine, tmp_path):
    values = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "SGLANG_CACHE_DIR": str(engine.cache)}
    derived, _lines = derive(Asked(CONFIG, "12.0"))
    given = {"modules": [item for item in derived if item["kind"] == "sglang"], "environment": values}
    first = engine.warm(**given)
    assert [row["state"] for row in first["modules"]] == ["compiled"] * 5, first

    served = own(engine, **values)
    assert (served.rc, len(served.said), served.compiled) == (0, 3, []), served.output

    again = engine.warm(**given)
    assert not again["changed"]
    names = sorted(row["name"] for row in again["modules"])
    assert all(name.startswith("sgl_kernel_jit_") for name in names)
    # what a canary leaves are names: each leads back to the call that makes it
    known = engine.states(modules=names, environment=values)
    assert known == dict.fromkeys(names, "already")
    rounded = engine.states(modules=["sgl_kernel_jit_rounded_activation_bf16_t_true"], environment=values, _check=True)
    assert "unknown" not in rounded.values(), rounded

    # As units serve that may not compile: from the cache, which only the warm-up writes. SGLang looks its kernels up by
    # what the compilers say of themselves, so these must be there. What is not found is an error at once.
    serving = {**values, "SGLANG_CRASH_ON_JIT_COMPILE": "1", "PATH": "/usr/bin:/bin"}
    with read_only(engine.cache):
        served = own(engine, **serving)
    assert (served.rc, len(served.said), served.compiled) == (0, 3, []), served.output
    for change in ({"SGLANG_JIT_CACHE_DIR": str(tmp_path)}, {"CUDA_HOME": "/nonexistent"}):
        missing = own(engine, **serving, **change)
        assert (missing.rc, missing.compiled) == (1, [])
        assert "SGLANG_CRASH_ON_JIT_COMPILE forbids compiling" in missing.output
    assert not list(tmp_path.rglob("*.so"))
    shutil.rmtree(engine.cache)
    print(f"own kernels: {first['took']:.0f} s, again {again['took']:.1f} s")
