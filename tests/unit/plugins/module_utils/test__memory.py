"""The memory plan's arithmetic against engines that ran, and against their sources."""

from __future__ import annotations

import dataclasses
import json

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _memory_model
from ansible_collections.gpufleet.sglang.plugins.module_utils._memory import (
    Asked,
    Room,
    asked_from,
    by_strategy,
    forecast,
    gap_percent,
    reserve_mib,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._memory_model import Footprint, ModelUnknown

GIB = 1 << 30
H200 = Room(143771, 143150)  # nvidia-smi on an idle one
QWEN3 = {  # the model of the H200 runs
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 2048,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
NEXT = {  # Qwen3-Next-80B-A3B
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048, "vocab_size": 151936,
    "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
    "intermediate_size": 5120, "num_experts": 512, "moe_intermediate_size": 512, "torch_dtype": "bfloat16",
    "shared_expert_intermediate_size": 512,
}  # fmt: skip


def write(folder, config, **tensors):
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, (kind, size) in tensors.items():
            header[name.replace("__", ".")] = {"dtype": kind, "shape": [size], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


@pytest.mark.parametrize(
    ("version", "fraction", "free", "logged"),
    [
        ("0.5.17", 0.3, 143150, 10903115),  # logs/gpu-h200/cold.log, warm.log
        ("0.5.17", 0.1, 143150, 3605358),  # logs/gpu-h200/unit-bulk-warm-lost.log
    ],
)
def test_a_dense_model_on_an_h200_as_logged(tmp_path, version, fraction, free, logged):
    model = _memory_model.footprint(write(tmp_path, QWEN3), load_format="dummy")
    assert model.kv_token == 4096
    told = forecast(0, Room(143771, free), model, Asked(version, fraction=fraction, max_requests=64))
    print(f"foretold {told.kv_tokens}, logged {logged}: {gap_percent(told.kv_tokens, logged):.2f} %")
    assert gap_percent(told.kv_tokens, logged) < 1
    assert (told.max_running_requests, told.binds_requests) == (64, "max_running_requests")


def test_the_cpu_engines_own_fraction_as_logged():
    """logs/cpu: 24105 MiB in all, mem_fraction_static 0.716; a cap of 8192 tokens binds."""
    told = forecast(0, Room(24105, 22900, "cpu"), Footprint(1 << 20, 256, 2048), Asked("0.5.23", max_tokens=8192))
    assert (told.fraction, told.fraction_from) == (0.716, "engine")
    assert (told.kv_tokens, told.binds_tokens, told.max_running_requests) == (8192, "max_total_tokens", 2048)


@pytest.mark.parametrize(
    ("total", "asked", "expected"),
    [
        (81559, Asked("0.5.23"), 512 + 8192 * 1.5 + 128 + 512 + 8 * 58),  # 80 GB: chunk 8192, graphs to 256
        (81559, Asked("0.5.23", chunk=2048, decode_batch=8), 10 * 1024),  # never less above 60 GB
        (24564, Asked("0.5.23"), 512 + 4096 * 1.5 + 128 + 96 + 8 * 50),
        (24564, Asked("0.5.16"), 512 + 2048 * 1.5 + 128 + 48 + 8 * 42),
        (24564, Asked("0.5.23", decode_graphs=False, prefill_graphs=False), 512 + 4096 * 1.5 + 128),
    ],
)
def test_what_the_engine_keeps_for_graphs(total, asked, expected):
    assert reserve_mib(asked, Room(total, total)) == expected


@pytest.mark.parametrize(
    ("config", "kv_dtype", "expected"),
    [
        (QWEN3, "auto", 4 * 2 * 2 * 128 * 2),
        (QWEN3, "fp8_e4m3", 4 * 2 * 2 * 128),
        ({**QWEN3, "num_key_value_heads": None, "head_dim": None}, "auto", 4 * 8 * 2 * 128 * 2),  # MHA
        ({**QWEN3, "torch_dtype": "float32"}, "auto", 4096),  # served in 16 bits
        ({"architectures": ["X"], "text_config": QWEN3}, "auto", 4096),
        (
            {**QWEN3, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            "auto",
            4 * (512 + 64) * 2,
        ),
        (
            {**QWEN3, "model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
            "auto",
            4 * ((512 + 64) * 2 + 132),
        ),
        (
            {
                **QWEN3,
                "architectures": ["GptOssForCausalLM"],
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "auto",
            2 * 1024 + 0.8 * 2 * 1024,
        ),
        ({**QWEN3, "layer_types": ["sliding_attention"] * 4}, "auto", 4096),  # an engine that keeps no second pool
        ({**QWEN3, "quantization_config": {"kv_cache_quant_algo": "FP8"}}, "auto", 2048),
    ],
)
def test_bytes_of_a_token(tmp_path, config, kv_dtype, expected):
    config = {key: value for key, value in config.items() if value is not None}
    model = _memory_model.footprint(write(tmp_path, config), kv_dtype=kv_dtype, load_format="dummy")
    assert model.kv_token == expected


def test_a_hybrid_models_state(tmp_path):
    model = _memory_model.footprint(write(tmp_path, NEXT), load_format="dummy")
    assert model.kv_token == 12 * 2 * 2 * 256 * 2
    assert model.state_slot == 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    halved = _memory_model.footprint(tmp_path, load_format="dummy", ssm_dtype="bfloat16")
    assert halved.state_slot == 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 2)
    by_list = {**NEXT, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}
    assert _memory_model.footprint(write(tmp_path, by_list), load_format="dummy") == model


HYBRID = Footprint(60 * GIB, 24576, 262144, 77266944, extra_buffer=True)


@pytest.mark.parametrize(
    ("asked", "chosen", "each"),
    [
        (Asked("0.5.23"), "extra_buffer", 5),
        (Asked("0.5.13"), "no_buffer", 3),  # auto became extra_buffer with 0.5.14
        (Asked("0.5.23", overlap=False), "no_buffer", 3),
        (Asked("0.5.23", strategy="no_buffer"), "no_buffer", 3),
        (Asked("0.5.23", strategy="extra_buffer", overlap=False), "extra_buffer", 4),
        (Asked("0.5.23", strategy="extra_buffer_lazy"), "extra_buffer_lazy", 4),
        (Asked("0.5.23", radix=False), "none", 1),
        (Asked("0.5.23", strategy="extra_buffer", skip_decode_lock=True), "extra_buffer", 4),
        (Asked("0.5.23", strategy="no_buffer", skip_decode_lock=True), "no_buffer", 3),
    ],
)
def test_state_slots_of_a_request(asked, chosen, each):
    told = forecast(0, Room(97887, 97200), HYBRID, dataclasses.replace(asked, fraction=0.85))
    assert (told.strategy, told.slots_per_request) == (chosen, each)
    # the engine's equations: slots and one of padding take 0.9/1.9 of the budget, the KV cache the rest
    budget = (97200 - 680) * 0.85 * (1 << 20) - 60 * GIB
    slots = int((budget * 0.9 / 1.9 - HYBRID.state_slot) // HYBRID.state_slot)
    assert (told.state_slots, told.max_running_requests) == (slots, slots // each)
    assert told.kv_tokens == pytest.approx((budget - (slots + 1) * HYBRID.state_slot) / 24576, abs=2)
    assert told.binds_requests == "state slots"


def test_a_strategys_price():
    room, asked = Room(97887, 97200), Asked("0.5.23", fraction=0.85)
    slots = forecast(0, room, HYBRID, asked).state_slots
    assert by_strategy(0, room, HYBRID, asked) == {
        "no_buffer": slots // 3,
        "extra_buffer": slots // 5,
        "extra_buffer_lazy": slots // 4,
    }
    assert by_strategy(0, room, Footprint(1, 2, 3), asked) == {}


def test_slots_that_are_given():
    told = forecast(0, Room(97887, 97200), HYBRID, Asked("0.5.23", fraction=0.85, state_slots=100))
    assert (told.state_slots, told.max_running_requests) == (100, 20)
    told = forecast(0, Room(97887, 97200), HYBRID, Asked("0.5.23", fraction=0.85, radix=False, max_requests=72))
    assert (told.state_slots, told.max_running_requests) == (72, 72)


def test_weights_come_from_the_files(tmp_path):
    write(tmp_path, QWEN3, a=("BF16", 4000), b=("F32", 400), c=("F8_E4M3", 100), mtp__x=("BF16", 9999))
    assert _memory_model.weights_bytes(tmp_path, 2) == 4000 + 200 + 100
    model = _memory_model.footprint(tmp_path)
    assert (model.weights, model.notes) == (4300, ())
    assert _memory_model.footprint(tmp_path, quantization="fp8").weights == 4300 * 8 // 16
    index = {"weight_map": {"a": "model.safetensors"}}
    (tmp_path / "stray.safetensors").write_bytes(b"not weights")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _memory_model.weights_bytes(tmp_path, 2) == 4300


@pytest.mark.parametrize(
    "config",
    [
        "not json",
        {"model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_d_ssm": 8, "hidden_size": 8, "vocab_size": 8},
        {**QWEN3, "num_hidden_layers": None},
    ],
)
def test_a_model_that_does_not_say(tmp_path, config):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ModelUnknown):
        _memory_model.footprint(tmp_path, load_format="dummy")


def test_a_kv_dtype_that_is_not_known(tmp_path):
    with pytest.raises(ModelUnknown, match="nvfp4"):
        _memory_model.footprint(write(tmp_path, QWEN3), kv_dtype="nvfp4", load_format="dummy")


def test_a_hub_model_is_found_in_the_servers_cache(tmp_path):
    folder = tmp_path / "hub/models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc\n")
    environment = {"HF_HOME": str(tmp_path)}
    assert _memory_model.locate("org/name", environment) is None
    (folder / "snapshots/abc").mkdir(parents=True)
    assert _memory_model.locate("org/name", environment) == folder / "snapshots/abc"
    assert _memory_model.locate(str(tmp_path), {}) == tmp_path


def test_flags_are_read_off_the_command_line():
    argv = ["/v/bin/sglang", "serve", "--mem-fraction-static", "0.8", "--disable-radix-cache", "--page-size=16"]
    asked = asked_from([*argv, "--cuda-graph-max-bs", "8", "--max-total-tokens", "many"], {}, "0.5.12")
    assert (asked.fraction, asked.radix, asked.page, asked.decode_batch) == (0.8, False, 16, 8)
    assert (asked.max_tokens, asked.overlap, asked.strategy, asked.version) == (None, True, "auto", "0.5.12")


def test_a_gap_to_nothing_is_infinite():
    assert gap_percent(90, 100) == 10
    assert gap_percent(90, 0) == float("inf")
