"""Build and load a kernel through tvm-ffi, as SGLang's own JIT does; the last line says how it went."""

import os
import sys
import time

import tvm_ffi.cpp

SOURCE = r"""
#include <cuda_bf16.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
__global__ void one(__nv_bfloat16* out) { out[threadIdx.x] = __float2bfloat16(1.f); }
void fill(tvm::ffi::TensorView out) { one<<<1, 32>>>(static_cast<__nv_bfloat16*>(out.data_ptr())); }
"""
started = time.monotonic()
try:
    tvm_ffi.cpp.load_inline("probe", cuda_sources=SOURCE, functions=["fill"], build_directory=sys.argv[1])
    print(f"PASS tvm-ffi {time.monotonic() - started:.1f} s")
except Exception as exc:
    print(exc)
    print("FAIL tvm-ffi")
    sys.stdout.flush()
    os._exit(1)
