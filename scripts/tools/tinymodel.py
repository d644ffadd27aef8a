"""Write a tiny Qwen3 model with real safetensors: seconds to load, deterministic, and it answers in words.

No torch: numpy, safetensors and tokenizers do. The weights are random but for the output layer, which knows
only whole words, so that greedy and sampled answers are readable English nonsense.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WORDS = [
    "the",
    "a",
    "one",
    "and",
    "of",
    "in",
    "is",
    "to",
    "it",
    "hello",
    "world",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "system",
    "user",
    "assistant",
    "answer",
    "question",
    "server",
    "model",
    "token",
    "memory",
    "graph",
    "kernel",
    "card",
    "fan",
    "cable",
    "rack",
    "light",
    "number",
    "green",
    "blue",
    "red",
    "small",
    "large",
    "warm",
    "cold",
    "ready",
    "seven",
    "eight",
    "first",
    "last",
    "every",
    "never",
    "always",
    "here",
    "there",
    "good",
    "day",
    "night",
    "river",
    "mountain",
    "stone",
    "cloud",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 64, 128, 2, 4, 2, 16, 2048


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a byte-level BPE: specials, all bytes, and each word with its leading space, merged letter by letter."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        left = "\u0120"  # a space, as byte-level BPE spells it
        for letter in word:
            if left + letter not in vocab:
                merges.append((left, letter))
                vocab[left + letter] = len(vocab)
            left += letter
    return vocab, merges


def tokenizer() -> Tokenizer:
    """Build the tokenizer."""
    vocab, merges = vocabulary()
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tok


def weights(vocab: dict[str, int]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors Qwen3ForCausalLM expects, by name."""
    rng = np.random.RandomState(0)  # frozen by NumPy: the same numbers in every release

    def normal(*shape: int, scale: float = 0.1) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) * scale).astype(np.float16)

    def ones(size: int) -> np.ndarray[Any, Any]:
        return np.ones(size, np.float16)

    head = np.zeros((len(vocab), HIDDEN), np.float16)
    head[[vocab["\u0120" + word] for word in WORDS]] = normal(len(WORDS), HIDDEN, scale=1.0)
    tensors = {"model.embed_tokens.weight": normal(len(vocab), HIDDEN, scale=1.0), "lm_head.weight": head}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        tensors |= {
            at + "input_layernorm.weight": ones(HIDDEN),
            at + "post_attention_layernorm.weight": ones(HIDDEN),
            at + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            at + "self_attn.q_norm.weight": ones(HEAD_DIM),
            at + "self_attn.k_norm.weight": ones(HEAD_DIM),
            at + "mlp.gate_proj.weight": normal(INTER, HIDDEN),
            at + "mlp.up_proj.weight": normal(INTER, HIDDEN),
            at + "mlp.down_proj.weight": normal(HIDDEN, INTER),
        }
    tensors["model.norm.weight"] = ones(HIDDEN)
    return tensors


def config(size: int) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": size, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def write(folder: Path) -> None:
    """Write the model; config.json comes last, so that an interrupted run leaves no model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    tok = tokenizer()
    tok.save(str(folder / "tokenizer.json"))
    vocab = tok.get_vocab()
    save_file(weights(vocab), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # written 0600; the service user must read it
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[2],
            "pad_token": SPECIAL[0], "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
        "config.json": config(len(vocab)),
    }  # fmt: skip
    for name, data in files.items():
        (folder / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="scripts/tiny-model")
    parser.add_argument("dir", type=Path, help="folder to write (or to leave as it is, when this program wrote it)")
    args = parser.parse_args(argv)
    seal = args.dir / ".made-by"
    print_ = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if (args.dir / "config.json").exists() and seal.exists() and seal.read_text(encoding="utf-8") == print_:
        return 0
    write(args.dir)
    seal.write_text(print_, encoding="utf-8")
    size = sum(p.stat().st_size for p in args.dir.iterdir())
    print(f"tiny-model: {args.dir}, {size / 1e3:.0f} kB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
