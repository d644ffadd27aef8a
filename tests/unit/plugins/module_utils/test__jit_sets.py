"""Which kernels follow from a model and its flags, and which call a name in a cache means."""

from __future__ import annotations

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_sets as sets

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
FLASHINFER = {"attention-backend": "flashinfer", "sampling-backend": "flashinfer"}


def calls(config=QWEN3, capability="12.0", **flags):
    entries, _lines = sets.derive(sets.Asked(config, capability, flags))
    return [(item["call"].rpartition(".")[2], *item["args"]) for item in entries]


def prefill(backend, kv="torch.bfloat16", dim=128, dtype="torch.bfloat16"):
    shape = (dtype, kv, dtype, "torch.int32", dim, dim, 0, False, False, False)
    return ("get_batch_prefill_module", backend, *shape)


def test_what_the_h200_run_compiled():
    """logs/gpu-h200: norm, fa2 and fa3; then qknorm, fused_rope, kvcache, activation, clamp_position."""
    found = calls(capability="9.0", **FLASHINFER)
    assert found == [
        ("get_norm_module",),
        ("get_sampling_module",),
        prefill("fa2"),
        prefill("fa3"),
        ("get_cascade_module",),
        prefill("fa2"),
        ("_jit_clamp_position_module", "torch.int64"),
        ("activation_module", "torch.bfloat16"),
        ("_jit_fused_rope_module", True, 128, "torch.bfloat16", "torch.bfloat16"),
        ("_jit_qknorm_module", 128, "torch.bfloat16"),
        ("_jit_kvcache_module", 512, 512),
    ]


@pytest.mark.parametrize(
    ("capability", "flags", "expected"),
    [
        ("9.0", {}, ("fa3", "fa3")),
        ("10.0", {}, ("trtllm_mha", "trtllm_mha")),
        ("12.0", {}, ("flashinfer", "flashinfer")),
        ("8.9", {}, ("flashinfer", "flashinfer")),
        ("12.0", {"attention-backend": "triton"}, ("triton", "triton")),
        (
            "12.0",
            {"attention-backend": "triton", "decode-attention-backend": "flashinfer"},
            ("triton", "flashinfer"),
        ),
    ],
)
def test_backends_are_chosen_as_the_engine_does(capability, flags, expected):
    assert sets.backends(sets.Asked({}, capability, flags), mla=False) == expected


@pytest.mark.parametrize(
    ("change", "flags", "row", "decode"),
    [
        ({}, {}, 512, prefill("fa2")),
        ({}, {"kv-cache-dtype": "fp8_e4m3"}, 256, prefill("fa2", "torch.float8_e4m3fn")),
        ({}, {"tp-size": "2"}, 256, prefill("fa2")),
        ({"head_dim": 64}, {}, 256, prefill("fa2", dim=64)),
        ({"head_dim": 256}, {}, 1024, prefill("fa2", dim=256)),
        ({"head_dim": None}, {}, 512, prefill("fa2")),
        (
            {"num_key_value_heads": 4},
            {},
            1024,
            ("get_batch_decode_module", *(3 * ("torch.bfloat16",)), "torch.int32", 128, 128, 0, False, False),
        ),
        ({"torch_dtype": "float32"}, {}, 512, prefill("fa2", "torch.float16", dtype="torch.float16")),
        ({}, {"dtype": "half"}, 512, prefill("fa2", "torch.float16", dtype="torch.float16")),
    ],
)
def test_shape_follows_from_config_and_flags(change, flags, row, decode):
    found = calls({**QWEN3, **change}, **flags)
    assert ("_jit_kvcache_module", row, row) in found
    assert decode in found


def test_what_is_not_needed_is_not_built():
    names = [item[0] for item in calls(**{"attention-backend": "triton", "sampling-backend": "pytorch"})]
    assert names[0] == "get_norm_module"
    assert not {"get_sampling_module", "get_batch_prefill_module", "get_cascade_module"} & set(names)
    entries, lines = sets.derive(sets.Asked({"model_type": "mamba"}, "12.0"))
    assert entries == []
    assert "the canary teaches the set" in lines[0]
    mla = calls({**QWEN3, "model_type": "deepseek_v3", "kv_lora_rank": 512}, **FLASHINFER)
    assert not {"get_batch_prefill_module", "_jit_kvcache_module"} & {item[0] for item in mla}


def test_a_text_model_within_another_and_neighbouring_rotation():
    inner = {**QWEN3, "model_type": "glm4", "partial_rotary_factor": 0.5}
    found = calls({"model_type": "some_vl", "text_config": inner})
    assert ("_jit_fused_rope_module", False, 64, "torch.bfloat16", "torch.bfloat16") in found


@pytest.mark.parametrize(
    ("name", "call", "args"),
    [
        ("norm", "norm.get_norm_module", []),
        ("silu_and_mul", "activation.get_act_and_mul_module", ["silu"]),
        ("gelu_tanh_and_mul", "activation.get_act_and_mul_module", ["gelu_tanh"]),
        (
            "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_e4m3_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128"
            "_head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_kv_stride_equal",
            "prefill.get_batch_prefill_module",
            list(prefill("fa2", "torch.float8_e4m3fn")[1:]),
        ),
        (
            "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128"
            "_head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_sm90",
            "prefill.get_batch_prefill_module",
            list(prefill("fa3")[1:]),
        ),
        (
            "batch_decode_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32_head_dim_qk_64"
            "_head_dim_vo_64_posenc_1_use_swa_True_use_logits_cap_True",
            "decode.get_batch_decode_module",
            [*(3 * ["torch.float16"]), "torch.int32", 64, 64, 1, True, True],
        ),
    ],
)
def test_a_name_in_a_cache_is_a_call(name, call, args):
    assert sets.entry_of(name) == {"kind": "flashinfer", "call": call, "args": args}


def test_a_name_without_a_known_call_stays_a_name():
    assert sets.entry_of("fp4_gemm_cutlass") == {"kind": "flashinfer", "name": "fp4_gemm_cutlass"}
    own = "sgl_kernel_jit_qknorm_128_true_bf16_t_0123456789abcdef"
    assert sets.entry_of(f"{own}__arch_9.0a__tvmffi_0.1.11") == {"kind": "sglang", "name": own}


def test_what_a_user_may_give():
    entry = {"kind": "sglang", "call": "kernels.ops.x", "args": [1], "seconds": 3}
    assert sets.given(["norm", entry]) == [
        {"kind": "flashinfer", "call": "norm.get_norm_module", "args": []},
        {"kind": "sglang", "call": "kernels.ops.x", "args": [1]},
    ]
    for wrong in ("", 3, {"kind": "cuda", "name": "x"}, {"kind": "sglang"}):
        with pytest.raises(ValueError, match="neither a module's name nor an entry"):
            sets.given([wrong])


def test_merged_each_once_the_first_list_first():
    one, two = {"kind": "flashinfer", "name": "a"}, {"kind": "flashinfer", "name": "b"}
    assert sets.merge([two], [one, two]) == [two, one]


def test_flags_of_a_command_line():
    argv = ["/v/bin/python", "-m", "sglang.launch_server", "--dtype", "half", "--tp-size=2", "--trust-remote-code"]
    assert sets.flags_of(argv) == {"dtype": "half", "tp-size": "2", "trust-remote-code": ""}
