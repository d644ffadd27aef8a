# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Which kernels a server will ask for: derived from its model and flags, or read from the names in a cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Entry = dict[str, Any]
INDEX = "torch.int32"  # of the indices of pages
FP8 = {"fp8_e4m3": "torch.float8_e4m3fn", "fp8_e5m2": "torch.float8_e5m2"}
DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16", "float": "float32"}
SIZES = {"torch.float16": 2, "torch.bfloat16": 2, "torch.float32": 4}
SHORT = {  # FlashInfer spells dtypes like this in names
    "f16": "torch.float16",
    "bf16": "torch.bfloat16",
    "e4m3": "torch.float8_e4m3fn",
    "e5m2": "torch.float8_e5m2",
    "i32": "torch.int32",
    "i64": "torch.int64",
}
GETTERS = {  # modules without parameters, and the call a server makes for them
    "norm": "norm.get_norm_module",
    "sampling": "sampling.get_sampling_module",
    "cascade": "cascade.get_cascade_module",
    "page": "page.get_page_module",
    "rope": "rope.get_rope_module",
}
ATTENTION = re.compile(
    r"batch_(?P<what>prefill|decode)_with_kv_cache_dtype_q_(?P<q>\w+?)_dtype_kv_(?P<kv>\w+?)_dtype_o_(?P<o>\w+?)"
    r"_dtype_idx_(?P<idx>\w+?)_head_dim_qk_(?P<qk>\d+)_head_dim_vo_(?P<vo>\d+)_posenc_(?P<pos>\d)"
    r"_use_swa_(?P<swa>True|False)_use_logits_cap_(?P<cap>True|False)(_f16qk_(?P<f16>True|False))?"
    r"(?P<rest>(_kv_stride_equal|_sm90)*)"
)
# Rotary embeddings that pair neighbours; all others pair halves ("neox").
NOT_NEOX = ("chatglm", "glm", "glm4", "cohere", "cohere2", "gptj", "ernie4_5", "ernie4_5_moe")
QK_NORM = ("qwen3", "qwen3_moe")
GATED = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class Asked:
    """What a server is started with, as far as kernels depend on it."""

    config: Mapping[str, Any]  # the model's config.json
    capability: str  # 9.0, 12.0
    flags: Mapping[str, str] = field(default_factory=dict)  # of the server's command line, without dashes


def flags_of(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line; one without a value is empty."""
    found: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            found[name] = value
            if has_value:
                name = ""
        elif name:
            found[name] = word
            name = ""
    return found


def flashinfer(call: str, *args: Any) -> Entry:
    """Return an entry for a call below the package flashinfer."""
    return {"kind": "flashinfer", "call": call, "args": list(args)}


def sglang(call: str, *args: Any) -> Entry:
    """Return an entry for a call below sglang's kernels."""
    return {"kind": "sglang", "call": f"kernels.ops.{call}", "args": list(args)}


def derive(asked: Asked) -> tuple[list[Entry], list[str]]:
    """Return the entries of a dense or MoE model with ordinary attention, and what was assumed, for people.

    What cannot be derived (MLA, mixtures of experts, quantized matrices, all-reduce) is learned from the canary.
    """
    config = {**asked.config, **(asked.config.get("text_config") or {})}
    heads = _int(config.get("num_attention_heads"))
    if not heads:
        return [], ["the model's config.json names no attention heads: nothing is derived, the canary teaches the set"]
    tensor = max(1, _int(asked.flags.get("tp-size") or asked.flags.get("tensor-parallel-size")))
    kv_heads = max(1, _int(config.get("num_key_value_heads")) or heads)
    head_dim = _int(config.get("head_dim")) or _int(config.get("hidden_size")) // heads
    dtype = dtype_of(config, asked.flags.get("dtype", "auto"))
    kv_dtype = FP8.get(asked.flags.get("kv-cache-dtype", "auto"), dtype)
    mla = bool(config.get("kv_lora_rank"))
    prefill, decode = backends(asked, mla)
    lines = [f"head_dim {head_dim}, {dtype[6:]}, KV {kv_dtype[6:]}, prefill {prefill}, decode {decode}"]
    if mla:
        lines.append("latent attention (MLA): its kernels are learned from the canary")

    found = [flashinfer("norm.get_norm_module")]
    if asked.flags.get("sampling-backend", "flashinfer") == "flashinfer":
        found.append(flashinfer("sampling.get_sampling_module"))
    if not mla and "flashinfer" in (prefill, decode):
        found += attention(asked, head_dim, dtype, kv_dtype, heads // kv_heads, prefill, decode)
    found += own(config, head_dim, dtype, mla)
    if not mla:
        row = max(1, kv_heads // tensor) * head_dim * (1 if kv_dtype in FP8.values() else SIZES[dtype])
        found.append(sglang("kvcache.kvcache._jit_kvcache_module", row, row))
    return found, lines


def dtype_of(config: Mapping[str, Any], flag: str) -> str:
    """Return the dtype that the weights are loaded in; float32 is served as float16."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "float16") if flag == "auto" else flag
    name = DTYPES.get(named.replace("torch.", ""), named.replace("torch.", ""))
    if flag == "auto" and name == "float32":
        name = "bfloat16" if str(config.get("model_type", "")).startswith("gemma") else "float16"
    return f"torch.{name}" if f"torch.{name}" in SIZES else "torch.bfloat16"


def backends(asked: Asked, mla: bool) -> tuple[str, str]:
    """Return the attention backends of prefill and decode, chosen as the engine does where none is named."""
    major = asked.capability.partition(".")[0]
    auto = {"9": "fa3", "10": "trtllm_mha"}.get(major, "triton" if mla else "flashinfer")
    both = asked.flags.get("attention-backend") or auto
    return asked.flags.get("prefill-attention-backend") or both, asked.flags.get("decode-attention-backend") or both


def attention(
    asked: Asked, head_dim: int, dtype: str, kv_dtype: str, group: int, prefill: str, decode: str
) -> list[Entry]:
    """Return what SGLang's FlashInfer backend asks for."""

    def batch_prefill(backend: str, kv: str) -> Entry:
        shape = [dtype, kv, dtype, INDEX, head_dim, head_dim, 0, False, False, False]
        return flashinfer("prefill.get_batch_prefill_module", backend, *shape)

    found = []
    tensor_cores = kv_dtype in FP8.values() or group >= 4
    if prefill == "flashinfer":
        # paged; then ragged, on the keys of this very request, hence never FP8; then what joins the two
        found.append(batch_prefill("fa2", kv_dtype))
        if not asked.capability.startswith("10."):
            found.append(batch_prefill("fa3" if asked.capability == "9.0" else "fa2", dtype))
        found.append(flashinfer("cascade.get_cascade_module"))
    if decode == "flashinfer" and tensor_cores:
        found.append(batch_prefill("fa2", kv_dtype))
    elif decode == "flashinfer":
        shape = [dtype, kv_dtype, dtype, INDEX, head_dim, head_dim, 0, False, False]
        found.append(flashinfer("decode.get_batch_decode_module", *shape))
    return found


def own(config: Mapping[str, Any], head_dim: int, dtype: str, mla: bool) -> list[Entry]:
    """Return SGLang's own kernels of an ordinary decoder."""
    kind = str(config.get("model_type", ""))
    found = [sglang("attention.clamp_position._jit_clamp_position_module", "torch.int64")]
    if str(config.get("hidden_act") or config.get("hidden_activation") or "silu") in GATED:
        found.append(sglang("activation.activation.activation_module", dtype))
    if not mla:
        rotated = int(head_dim * float(config.get("partial_rotary_factor") or 1.0))
        neox = kind not in NOT_NEOX
        found.append(sglang("attention.rope._jit_fused_rope_module", neox, rotated, dtype, dtype))
    if kind in QK_NORM:
        found.append(sglang("layernorm.norm._jit_qknorm_module", head_dim, dtype))
    return found


def entry_of(name: str) -> Entry:
    """Turn a module's name, as it lies in a cache, into the call that makes it."""
    if name.startswith("sgl_kernel_jit_"):
        return {"kind": "sglang", "name": name.partition("__arch_")[0]}
    if name in GETTERS:
        return flashinfer(GETTERS[name])
    activation = re.fullmatch(r"(silu|gelu|gelu_tanh)_and_mul", name)
    if activation:
        return flashinfer("activation.get_act_and_mul_module", activation.group(1))
    match = ATTENTION.fullmatch(name)
    if not match:
        return {"kind": "flashinfer", "name": name}
    shape: list[Any] = [SHORT.get(match[key], match[key]) for key in ("q", "kv", "o", "idx")]
    shape += [int(match["qk"]), int(match["vo"]), int(match["pos"]), match["swa"] == "True", match["cap"] == "True"]
    if match["what"] == "decode":
        return flashinfer("decode.get_batch_decode_module", *shape)
    backend = "fa3" if "_sm90" in match["rest"] else "fa2"
    return flashinfer("prefill.get_batch_prefill_module", backend, *shape, match["f16"] == "True")


def given(items: Iterable[Any]) -> list[Entry]:
    """Turn a user's list into entries: names of modules, or entries as jit.json shows them. Raises ValueError."""
    found = []
    for item in items:
        if isinstance(item, str) and item:
            found.append(entry_of(item))
        elif isinstance(item, dict) and item.get("kind") in ("flashinfer", "sglang") and {"call", "name"} & set(item):
            found.append({key: item[key] for key in ("kind", "call", "name", "args") if key in item})
        else:
            raise ValueError(f"{item!r} is neither a module's name nor an entry with kind and call or name")
    return found


def merge(*lists: Iterable[Entry]) -> list[Entry]:
    """Join lists, each entry once, in the order of the lists."""
    found: list[Entry] = []
    for entry in (entry for items in lists for entry in items):
        if entry not in found:
            found.append(entry)
    return found


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
