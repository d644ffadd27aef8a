"""Which FlashInfer modules SGLang's attention backend asks for: its wrappers are planned on the CPU, nothing is built.

argv: head_dim, query heads, KV heads, dtype of the KV cache, compute capability. The last line is JSON.
"""

import contextlib
import json
import sys

import torch

head_dim, heads, kv_heads, kv, capability = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    int(sys.argv[3]),
    sys.argv[4],
    sys.argv[5],
)
dtype, kv_dtype = torch.bfloat16, getattr(torch, kv)
major, minor = (int(part) for part in capability.split("."))
# what the wrappers ask of a GPU
torch.cuda.get_device_capability = lambda *_args: (major, minor)
empty, device = torch.empty, torch.device("cpu")
torch.empty = lambda *args, **more: empty(*args, **{**more, "pin_memory": False, "device": device})

import flashinfer  # noqa: E402
from flashinfer.jit import core  # noqa: E402

asked = []


class Built(Exception):
    pass


def build_and_load(self):
    asked.append(self.name)
    raise Built


for kind in [core.JitSpec, *core.JitSpec.__subclasses__()]:
    if "build_and_load" in vars(kind):
        kind.build_and_load = build_and_load
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("flashinfer"):
        for name, answer in (
            ("is_sm90a_supported", (major, minor) == (9, 0)),
            ("get_compute_capability", (major, minor)),
        ):
            if hasattr(module, name):
                setattr(module, name, lambda *_args, answer=answer: answer)

space = torch.zeros(64 << 20, dtype=torch.uint8)
one = torch.tensor([0, 1], dtype=torch.int32)
last = torch.tensor([1], dtype=torch.int32)


def plan(wrapper, *args, **more):
    with contextlib.suppress(Built):
        wrapper.begin_forward(*args, **more)


# as in srt/layers/attention/flashinfer_backend.py
tensor_cores = kv.startswith("float8") or heads // kv_heads >= 4
paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa2")
plan(paged, one, one, one[:1], last, heads, kv_heads, head_dim, 1, q_data_type=dtype, kv_data_type=kv_dtype)
ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend="auto")
plan(ragged, one, one, heads, kv_heads, head_dim, q_data_type=dtype)
decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", backend="fa2", use_tensor_cores=tensor_cores)
plan(decode, one, one[:1], last, heads, kv_heads, head_dim, 1, data_type=kv_dtype, q_data_type=dtype)
print(json.dumps(sorted(set(asked))))
