"""Models for the proof: configurations and a tokenizer, no weights (the servers start with --load-format dummy)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 2048
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
DENSE: dict[str, Any] = {
    **COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
    "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128,
}  # fmt: skip
# About 92 GB of bf16: 64 layers of 0.72e9 parameters
BIG: dict[str, Any] = {
    **DENSE, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
# Gated DeltaNet in three layers of four, as Qwen3-Next has it, with dense MLPs only
HYBRID: dict[str, Any] = {
    **COMMON, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 1024,
    "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "mlp_only_layers": list(range(8)), "decoder_sparse_step": 1, "num_experts": 0, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "norm_topk_prob": True,
}  # fmt: skip
MODELS = {"dense": DENSE, "big": BIG, "hybrid": HYBRID}


def byte_letters() -> list[str]:
    """Return the 256 letters that byte-level BPE writes bytes with, in the order of the bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """Return tokenizer.json: bytes, and words in the other places, so that every id a server draws is a text."""
    tokens = [*SPECIAL, *byte_letters()]
    tokens += [f"\u0120w{number}" for number in range(VOCABULARY - len(tokens))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, text in enumerate(SPECIAL)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []},
    }  # fmt: skip


def write_all(folder: Path) -> None:
    """Write every model below folder."""
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0], "model_max_length": 8192, "chat_template": TEMPLATE,
    }  # fmt: skip
    for name, config in MODELS.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for file, data in (("config", config), ("tokenizer", tokenizer()), ("tokenizer_config", about)):
            (place / f"{file}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
