"""A getter as a server calls it."""

from flashinfer.jit.core import JitSpec

_USE_CUDA_NORM = True


def get_norm_module():
    return JitSpec("norm").build_and_load()
