"""Each trap: what people first try leaves a server compiling (or dying), the module does not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kernels import BUILDS, read_only

CONFIGS = [
    # head_dim, heads, KV heads, KV dtype, flag of SGLang
    (64, 8, 4, "bfloat16", "auto"),
    pytest.param(128, 32, 8, "bfloat16", "auto", marks=pytest.mark.matrix),
    pytest.param(256, 16, 8, "bfloat16", "auto", marks=pytest.mark.matrix),
    (128, 32, 8, "float8_e4m3fn", "fp8_e4m3"),
]


def test_built_once_then_loaded_without_compiling(built):
    assert {row["name"]: row["state"] for row in built.first["modules"]} == {
        "silu_and_mul": "compiled",
        "page": "compiled",
    }
    assert built.first["changed"]
    assert all(row["seconds"] > 0 for row in built.first["modules"])
    served = built.serve("getter", "silu_and_mul", "page")
    assert (served.rc, served.compiled) == (0, []), served.output
    again = built.warm(modules=["silu_and_mul", "page"])
    assert not again["changed"]
    assert again["counts"]["already"] == 2
    print(f"first {built.first['took']:.1f} s, again {again['took']:.1f} s")


def test_the_bulk_builder_warms_nothing(kernels):
    assert kernels.serve("bulk", "silu_and_mul").rc == 0
    assert kernels.states(modules=["silu_and_mul"], _check=True) == {"silu_and_mul": "would_compile"}  # seen
    assert kernels.serve("getter", "silu_and_mul").compiled == ["silu_and_mul"]  # a server builds it again
    assert kernels.states(modules=["silu_and_mul"]) == {"silu_and_mul": "already"}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"CUDA_HOME": "{home}/"}, id="CUDA_HOME"),
        pytest.param({"CC": "/usr/bin/gcc"}, id="CC"),
        pytest.param({"FLASHINFER_NVCC_THREADS": "4"}, id="FLASHINFER_NVCC_THREADS", marks=pytest.mark.matrix),
        pytest.param({"FLASHINFER_JIT_DEBUG": "1"}, id="FLASHINFER_JIT_DEBUG", marks=pytest.mark.matrix),
    ],
)
def test_another_environment_is_another_build(built, change):
    values = {key: text.format(home=built.home) for key, text in change.items()}
    assert built.states(modules=["page"], _check=True) == {"page": "already"}
    assert built.states(modules=["page"], environment=values, _check=True) == {"page": "would_compile"}


def test_two_kinds_of_gpus_in_one_host(kernels):
    """Each architecture has a folder of its own; one server's modules are no use to the other."""
    archs = ["12.0f", "9.0a"]
    done = kernels.warm(modules=["silu_and_mul"], arch_list=archs)
    assert {row["name"]: row["state"] for row in done["modules"]} == {
        "silu_and_mul": "compiled",
        "silu_and_mul (9.0a)": "compiled",
    }
    for arch in archs:
        served = kernels.serve("getter", "silu_and_mul", FLASHINFER_CUDA_ARCH_LIST=arch)
        assert (served.rc, served.compiled) == (0, []), served.output
    assert not kernels.warm(modules=["silu_and_mul"], arch_list=archs)["changed"]


def test_sglang_sets_the_architecture_itself(built, tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    values = {"PYTHONPATH": str(tmp_path)}  # with SGLang in the environment 12.0f becomes 12.0a
    assert built.states(modules=["page"], environment=values, _check=True) == {"page": "would_compile"}


def test_a_library_that_was_cut_off_kills_a_server_and_is_built_again(built):
    os.truncate(built.library("page"), 100_000)
    assert built.serve("getter", "page").rc == -signal.SIGBUS
    assert built.serve("getter", "page").rc == -signal.SIGBUS  # it never heals
    assert built.states(modules=["page"], _check=True) == {"page": "would_compile"}
    assert built.states(modules=["page"]) == {"page": "compiled"}
    served = built.serve("getter", "page")
    assert (served.rc, served.compiled) == (0, [])


@pytest.mark.parametrize("capability", ["12.0", pytest.param("9.0", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "kv", "flag"), CONFIGS)
def test_derived_is_what_the_attention_backend_asks_for(
    kernels, tmp_path, capability, head_dim, heads, kv_heads, kv, flag
):
    words = [str(head_dim), str(heads), str(kv_heads), kv, capability]
    arch = f"{capability}a"
    done = subprocess.run(
        [kernels.env.python, str(BUILDS / "asked.py"), *words],
        capture_output=True,
        check=False,
        text=True,
        env={**kernels.environment, "FLASHINFER_CUDA_ARCH_LIST": arch},
    )
    assert done.returncode == 0, done.stderr
    asked = set(json.loads(done.stdout.splitlines()[-1]))
    config = {"model_type": "llama", "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config.update(head_dim=head_dim, hidden_size=heads * head_dim, torch_dtype="bfloat16", hidden_act="silu")
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--attention-backend", "flashinfer", "--kv-cache-dtype", flag]
    states = kernels.states(derive=True, model=str(tmp_path), argv=argv, arch_list=[arch], _check=True)
    derived = {name for name in states if name.startswith("batch_")}
    assert derived == asked
    assert {"norm", "sampling", "cascade"} <= set(states)


def test_the_public_generators_name_is_not_the_servers(kernels, tmp_path):
    """In 0.7 gen_batch_prefill_module() builds a module that no server loads."""
    code = (
        "import torch; from flashinfer.jit.attention import gen_batch_prefill_module as g; b = torch.bfloat16; "
        "print(g('fa2', b, b, b, torch.int32, 64, 64, 0, False, False, False).name)"
    )
    argv = [kernels.env.python, "-c", code]
    naive = subprocess.run(argv, capture_output=True, check=True, text=True, env=kernels.environment).stdout.split()[-1]
    states = kernels.states(modules=[naive], _check=True)
    assert list(states) == [f"{naive}_kv_stride_equal"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_published_modules_need_no_compiler_and_no_cache(built, tmp_path):
    folder = f"{tmp_path}/kernels"
    done = built.warm(modules=["silu_and_mul", "page"], publish_dir=folder)
    assert done["changed"]
    assert not built.warm(modules=["silu_and_mul", "page"], publish_dir=folder)["changed"]
    serving = {
        "PYTHONPATH": folder,
        "FLASHINFER_DISABLE_JIT": "1",
        "FLASHINFER_WORKSPACE_BASE": f"{tmp_path}/log",
        "PATH": "/usr/bin:/bin",
        "CUDA_HOME": "/nonexistent",
    }
    with read_only(built.cache), read_only(Path(folder)):
        served = built.serve("getter", "silu_and_mul", "page", **serving)
        missing = built.serve("getter", "rope", **serving)
    assert (served.rc, served.compiled) == (0, []), served.output
    assert max(served.said.values()) < 1
    assert missing.rc != 0
    assert "MissingJITCacheError" in missing.output
    assert not list((tmp_path / "log").rglob("*.so"))


def test_a_server_started_early_waits_at_the_lock_and_compiles_nothing(kernels):
    names = ["silu_and_mul", "page"]
    early = kernels.warm(modules=names, workers=2, start_early="sglang@0.service")
    assert early["pending"], early
    assert not kernels.stamps()  # nothing is built yet: the server below comes in the middle
    served = kernels.serve("getter", *names)
    assert served.rc == 0, served.output
    assert max(served.said.values()) > 2
    joined = kernels.warm(modules=names, workers=2, pending=early["pending"])
    assert not joined.get("failed"), joined
    assert joined["counts"]["compiled"] == 2
    for name in names:  # each file was made once
        log = (kernels.library(name).parent / ".ninja_log").read_text().splitlines()[1:]
        made = [line.split("\t")[3] for line in log]
        assert len(made) == len(set(made)), log
    assert kernels.warm(state="learned")["learned"] == []
    print(f"waited {served.said}, whole {early['took']:.1f} s + {joined['took']:.1f} s")


def test_what_a_server_compiles_itself_fails_the_strict_gate_and_is_learned(kernels):
    early = kernels.warm(modules=["gelu_and_mul"], start_early="sglang@0.service")
    assert early["pending"], early
    assert kernels.serve("getter", "silu_and_mul").rc == 0
    assert not kernels.warm(modules=["gelu_and_mul"], pending=early["pending"]).get("failed")
    gate = kernels.warm(state="learned", strict=True)
    assert gate["failed"]
    assert gate["learned"] == ["silu_and_mul"]
    assert "compiled by a server: silu_and_mul" in gate["msg"]
    # the next run knows it, on a cache that holds nothing too
    shutil.rmtree(kernels.library("silu_and_mul").parent)
    assert kernels.states(modules=["gelu_and_mul"]) == {"gelu_and_mul": "already", "silu_and_mul": "compiled"}
    assert kernels.warm(state="learned", strict=True)["learned"] == []


def test_a_build_that_fails_beside_a_server_names_its_error(kernels):
    early = kernels.warm(modules=["gelu_and_mul"], start_early="sglang@0.service")
    end = time.monotonic() + 30
    while not (found := list(kernels.cache.glob(".cache/flashinfer/*/*/cached_ops/gelu_and_mul/build.ninja"))):
        assert time.monotonic() < end
        time.sleep(0.02)
    (found[0].parent / "gelu_and_mul.so").mkdir()  # the linker cannot write there
    joined = kernels.warm(modules=["gelu_and_mul"], pending=early["pending"])
    assert joined["failed"]
    assert "gelu_and_mul could not be built" in joined["msg"]
