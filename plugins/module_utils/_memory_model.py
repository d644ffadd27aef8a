# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What a model takes: bytes of its weights, of a token in the KV cache, of a state slot; from its own files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
_SKIPPED = ("mtp.", "model.mtp.", "optimizer.")  # there, but only loaded with speculative decoding, or never
_MLA = ("deepseek", "kimi", "longcat", "minicpm3", "glm_moe_dsa")
_SLIDING = (
    "Llama4", "GptOss", "Gemma4", "MiMoV2", "Step3p5", "Laguna", "Mellum",
)  # fmt: skip  # the engine keeps a second, smaller pool for their sliding layers
_GDN = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")


class ModelUnknown(Exception):
    """Nothing can be foretold for this model; the message says why."""


@dataclass(frozen=True)
class Footprint:
    """What a server of this model needs, in bytes."""

    weights: int
    kv_token: float  # of one token, over all layers that keep every token; a sliding layer's share is in it
    context: int  # tokens, as the model's files have it
    state_slot: int = 0  # of one state slot, all layers: hybrid models only
    multimodal: bool = False
    extra_buffer: bool = False  # the engine's extra_buffer strategies know this model
    notes: tuple[str, ...] = ()


def locate(model: str, environment: Mapping[str, str]) -> Path | None:
    """Return the folder a model lies in: its own, or the newest snapshot in the servers' Hugging Face cache."""
    if model.startswith("/"):
        return Path(model) if Path(model).is_dir() else None
    home = environment.get("HF_HUB_CACHE") or f"{environment.get('HF_HOME', '')}/hub"
    folder = Path(home) / f"models--{model.replace('/', '--')}"
    try:
        commit = (folder / "refs/main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def tensor_bytes(file: Path) -> dict[str, int]:
    """Return the bytes of a safetensors file's tensors by type: eight bytes of length, a JSON header, the data."""
    found: dict[str, int] = {}
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if not 2 <= length <= 200_000_000:
            raise ValueError(f"{file.name}: not a safetensors file")
        header = json.loads(data.read(length))
    for name, tensor in header.items():
        if name != "__metadata__" and not name.startswith(_SKIPPED):
            start, end = tensor["data_offsets"]
            found[tensor["dtype"]] = found.get(tensor["dtype"], 0) + end - start
    return found


def weights_bytes(folder: Path, element: int) -> int | None:
    """Return what the weights take once loaded (floats in the model's own width); None without safetensors."""
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        shards = [shard for shard in shards if shard.name in named]
    total = 0
    for shard in shards:
        for kind, size in tensor_bytes(shard).items():
            wide = kind in ("F64", "F32") and BYTES[kind] > element
            total += size * element // BYTES[kind] if wide else size
    return total if shards else None


def footprint(
    folder: Path,
    *,
    kv_dtype: str = "auto",
    load_format: str = "auto",
    quantization: str = "",
    ssm_dtype: str = "",
    sliding_ratio: float = 0.8,
) -> Footprint:
    """Read what a model needs from its folder; raises ModelUnknown."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = {**config, **(config.get("text_config") or {})}
        element = _element(config, text)
        stored = None if load_format == "dummy" else weights_bytes(folder, element)
        weights, notes = _weights(stored, config, text, element, quantization)
        kv = _kv_element(config, folder, kv_dtype, element)
        attention, linear = _layers(text)
        state = _state_slot(config, text, linear, ssm_dtype) if linear else 0
        return Footprint(
            weights,
            _kv_token(config, text, attention, kv, sliding_ratio),
            int(text.get("max_position_embeddings") or text.get("max_sequence_length") or 0),
            state,
            bool(config.get("vision_config") or config.get("audio_config")),
            bool(linear),
            tuple(notes),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as exc:
        raise ModelUnknown(f"{folder}: its files do not say what it needs ({type(exc).__name__}: {exc})") from exc


def _element(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    # float32 models are served in 16 bits unless dtype says otherwise
    name = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "")
    return 2 if name != "float64" else 8


def _kv_element(config: Mapping[str, Any], folder: Path, kv_dtype: str, element: int) -> float:
    if kv_dtype.startswith("fp8"):
        return 1.0
    if kv_dtype == "mxfp8":
        return 1.0 + 1 / 32
    if kv_dtype in ("bf16", "bfloat16"):
        return 2.0
    if kv_dtype != "auto":
        raise ModelUnknown(f"the size of a KV cache of type {kv_dtype} is not known here")
    plan = dict(config.get("quantization_config") or {})
    if (folder / "hf_quant_config.json").is_file():
        plan.update(json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8")).get("quantization") or {})
    return 1.0 if str(plan.get("kv_cache_quant_algo", "")).upper() == "FP8" else float(element)


def _weights(
    stored: int | None, config: Mapping[str, Any], text: Mapping[str, Any], element: int, quantization: str
) -> tuple[int, list[str]]:
    if stored is None:
        return _parameters(text) * element, ["weights are reckoned from config.json: there are no safetensors to read"]
    if quantization and not config.get("quantization_config"):
        bits = 4 if "4" in quantization else 8
        return stored * bits // (8 * element), [f"weights are an estimate: {quantization} is made while loading"]
    return stored, []


def _parameters(text: Mapping[str, Any]) -> int:
    """Reckon a transformer's parameters from its configuration."""
    hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
    heads = int(text["num_attention_heads"])
    size = int(text.get("head_dim") or hidden // heads)
    groups = int(text.get("num_key_value_heads") or heads)
    attention = hidden * size * (2 * heads + 2 * groups)
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    wide = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * hidden)
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    dense = int(text.get("intermediate_size") or 4 * hidden)
    mixer = 3 * hidden * (experts * wide + shared) if experts else 3 * hidden * dense
    tied = bool(text.get("tie_word_embeddings"))
    return layers * (attention + mixer) + int(text["vocab_size"]) * hidden * (1 if tied else 2)


def _layers(text: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many layers keep a KV cache, and how many a state instead."""
    count = int(text["num_hidden_layers"])
    pattern = text.get("hybrid_override_pattern")
    if text.get("model_type") == "nemotron_h" and pattern:
        return pattern.count("*"), pattern.count("M")
    if str(text.get("model_type")) in _GDN:
        kinds: Sequence[str] = text.get("layer_types") or text.get("layers_block_type") or ()
        every = int(text.get("full_attention_interval") or 4)
        full = sum("full" in kind for kind in kinds) if kinds else count // every
        return full, count - full
    if any(key in text for key in ("mamba_d_ssm", "linear_attn_config", "mamba_d_state", "ssm_state_size")) or (
        "linear_attention" in (text.get("layer_types") or ())
    ):
        raise ModelUnknown(f"the state of model type {text.get('model_type')} is not known here")
    return count, 0


def _state_slot(config: Mapping[str, Any], text: Mapping[str, Any], layers: int, ssm_dtype: str) -> int:
    """Return a state slot's bytes: the convolution's window in 16 bits and the state, float32 unless said."""
    kind = ssm_dtype or str(text.get("mamba_ssm_dtype") or config.get("mamba_ssm_dtype") or "float32")
    width = 4 if kind == "float32" else 2
    if text.get("model_type") == "nemotron_h":
        heads, size = int(text["mamba_num_heads"]), int(text["mamba_head_dim"])
        depth, groups, kernel = int(text["ssm_state_size"]), int(text["n_groups"]), int(text["conv_kernel"])
    else:
        heads, size = int(text["linear_num_value_heads"]), int(text["linear_value_head_dim"])
        depth, groups = int(text["linear_key_head_dim"]), int(text["linear_num_key_heads"])
        kernel = int(text["linear_conv_kernel_dim"])
    convolution = (heads * size + 2 * groups * depth) * (kernel - 1) * 2
    return layers * (convolution + heads * size * depth * width)


def _kv_token(
    config: Mapping[str, Any], text: Mapping[str, Any], layers: int, element: float, sliding_ratio: float
) -> float:
    kind = str(text.get("model_type") or config.get("model_type") or "")
    if text.get("kv_lora_rank") and kind.startswith(_MLA):
        size = (int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])) * element
        if text.get("index_head_dim"):
            size += int(text["index_head_dim"]) * (1 + 4 / 128)
        return layers * size
    heads = int(text.get("num_key_value_heads") or text["num_attention_heads"])
    size = int(text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"]))
    value = int(text.get("v_head_dim") or size)
    every = heads * (size + value) * element
    sliding = _sliding_layers(config, text)
    if not sliding:
        return layers * every
    inner = int(text.get("swa_head_dim") or size)
    few = int(text.get("swa_num_key_value_heads") or heads) * (inner + int(text.get("swa_v_head_dim") or inner))
    if sliding == layers:
        return layers * few * element
    return (layers - sliding) * every + sliding_ratio * sliding * few * element


def _sliding_layers(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    if not any(str(name).startswith(_SLIDING) for name in config.get("architectures") or ()):
        return 0
    if any(str(name).startswith("Llama4") for name in config["architectures"]):
        return int(text["num_hidden_layers"]) - int(text["num_hidden_layers"]) // 4
    return sum(kind == "sliding_attention" for kind in text.get("layer_types") or ()) or sum(
        text.get("hybrid_layer_pattern") or ()
    )


def mib(size: float) -> int:
    """Return bytes as whole MiB, rounded up."""
    return math.ceil(size / (1 << 20))
