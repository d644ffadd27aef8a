"""Load modules with a server's own calls (or, asked for, build them as people first try); the last line is JSON.

argv: how (getter, bulk), then names: silu_and_mul, page, decode, ...
"""

import json
import sys
import time

import flashinfer
import flashinfer.activation
import flashinfer.cascade
import flashinfer.decode
import flashinfer.jit
import flashinfer.norm
import flashinfer.page
import flashinfer.prefill
import flashinfer.rope
import flashinfer.sampling
import torch

BF16 = torch.bfloat16
SHAPE = (BF16, BF16, BF16, torch.int32, 128, 128, 0, False, False)  # of a model with head_dim 128
GETTERS = {
    "cascade": flashinfer.cascade.get_cascade_module,
    "norm": flashinfer.norm.get_norm_module,
    "sampling": flashinfer.sampling.get_sampling_module,
    "decode": lambda: flashinfer.decode.get_batch_decode_module(*SHAPE),
    "prefill": lambda: flashinfer.prefill.get_batch_prefill_module("fa2", *SHAPE, False),
    "silu_and_mul": lambda: flashinfer.activation.get_act_and_mul_module("silu"),
    "gelu_and_mul": lambda: flashinfer.activation.get_act_and_mul_module("gelu"),
    "page": flashinfer.page.get_page_module,
    "rope": flashinfer.rope.get_rope_module,
}
how, names = sys.argv[1], sys.argv[2:]
seconds = {}
if how == "bulk":
    from flashinfer.jit.activation import gen_act_and_mul_module

    flashinfer.jit.build_jit_specs([gen_act_and_mul_module(name.partition("_")[0]) for name in names])
else:
    for name in names:
        began = time.monotonic()
        GETTERS[name]()
        seconds[name] = round(time.monotonic() - began, 2)
print(json.dumps(seconds))
