"""The long part: what a model needs, for two architectures and three FlashInfers; twenty modules at once."""

from __future__ import annotations

import shutil
import time

import pytest
from conftest import PARTS
from kernels import Kernels

SHAPE = "dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128_posenc_0_use_swa_False"
ATTENTION = {
    "decode": f"batch_decode_with_kv_cache_{SHAPE}_use_logits_cap_False",
    "prefill": f"batch_prefill_with_kv_cache_{SHAPE}_use_logits_cap_False_f16qk_False",
}

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("arch", ["12.0f", "9.0a"])
@pytest.mark.parametrize("name", ["decode", "prefill", "sampling", "norm", "rope", "cascade"])
def test_built_then_loaded_without_compiling(whole, tmp_path, arch, name):
    mine = Kernels(*whole, tmp_path, arch)
    done = mine.warm(modules=[ATTENTION.get(name, name)])
    assert [row["state"] for row in done["modules"]] == ["compiled"], done
    served = mine.serve("getter", name)
    assert (served.rc, served.compiled) == (0, []), served.output
    again = mine.warm(modules=[ATTENTION.get(name, name)])
    assert not again["changed"]
    print(f"{name} {arch}: {done['modules'][0]['seconds']} s, again {again['took']:.1f} s")
    shutil.rmtree(mine.cache)


@pytest.mark.parametrize("version", ["0.6.9", "0.7.4"])
def test_other_flashinfers(toolkit_lab, tmp_path, version):
    """0.6.9: another signature of build(), and a build file that is never written again."""
    env = toolkit_lab.environment(f"jit-{version}", PARTS, flashinfer=version)
    home = env.module().result["cuda_home"]
    mine = Kernels(env, home, tmp_path)
    done = mine.warm(modules=["silu_and_mul", "page"])
    assert {row["state"] for row in done["modules"]} == {"compiled"}, done
    served = mine.serve("getter", "silu_and_mul", "page")
    assert (served.rc, served.compiled) == (0, []), served.output
    assert not mine.warm(modules=["silu_and_mul", "page"])["changed"]
    # another spelling of the same CUDA_HOME: what 0.6.9 would keep for ever is built again, for the new one
    values = {"CUDA_HOME": f"{home}/"}
    assert mine.states(modules=["silu_and_mul"], environment=values) == {"silu_and_mul": "compiled"}
    assert f"cuda_home = {home}/" in (mine.library("silu_and_mul").parent / "build.ninja").read_text()
    served = mine.serve("getter", "silu_and_mul", **values)
    assert (served.rc, served.compiled) == (0, []), served.output
    print(f"FlashInfer {version}: {done['took']:.1f} s")
    toolkit_lab.discard(env)


def test_twenty_modules_again(made, tmp_path):
    """The second run imports once, not once for each module. Most are copies of the smallest: four seconds each."""
    mine = Kernels(*made, tmp_path)
    names = ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]
    first = mine.warm(modules=names)
    (source,) = mine.cache.glob(".cache/flashinfer/*/*/generated/silu_and_mul.cu")
    copies = [
        {"kind": "flashinfer", "call": "jit.core.gen_jit_spec", "args": [f"copy_{number}", [str(source)]]}
        for number in range(17)
    ]
    whole = [*names, *copies]
    rest = mine.warm(modules=whole)
    assert (first["counts"]["compiled"], rest["counts"]["compiled"]) == (3, 17), rest
    again = mine.warm(modules=whole)
    assert (again["changed"], again["counts"]["already"]) == (False, 20)
    began = time.monotonic()
    assert mine.serve("getter").rc == 0
    once = time.monotonic() - began
    print(f"20 modules: {first['took'] + rest['took']:.0f} s, again {again['took']:.1f} s; an import {once:.1f} s")
    assert again["took"] < 4 * once + 3  # on an idle machine 5 s; a busy one stretches both
    shutil.rmtree(mine.cache)
