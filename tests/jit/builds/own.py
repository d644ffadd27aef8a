"""Load kernels of SGLang's own with the calls of a server; the last line says which libraries were loaded."""

import json
import sys

import torch

major, minor = (int(part) for part in sys.argv[1].split("."))
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda *_args: (major, minor)

import tvm_ffi  # noqa: E402
from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module  # noqa: E402
from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache  # noqa: E402
from sglang.kernels.ops.layernorm.norm import can_use_fused_inplace_qknorm  # noqa: E402

loaded, load = [], tvm_ffi.load_module
tvm_ffi.load_module = lambda path, *args, **more: (loaded.append(path), load(path, *args, **more))[1]
_jit_clamp_position_module(torch.int64)
assert can_use_store_cache(512)
assert can_use_fused_inplace_qknorm(128, torch.bfloat16)
print(json.dumps(loaded))
