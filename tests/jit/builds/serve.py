"""Load modules with a server's own calls (or, asked for, build them as people first try); the last line is JSON.

argv: how (getter, bulk), then names: silu_and_mul, page, rope, ...
"""

import json
import sys
import time

import flashinfer
import flashinfer.activation
import flashinfer.jit
import flashinfer.page
import flashinfer.rope

GETTERS = {
    "silu_and_mul": lambda: flashinfer.activation.get_act_and_mul_module("silu"),
    "gelu_and_mul": lambda: flashinfer.activation.get_act_and_mul_module("gelu"),
    "page": lambda: flashinfer.page.get_page_module(),
    "rope": lambda: flashinfer.rope.get_rope_module(),
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
