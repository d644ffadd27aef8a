"""A getter whose module does not compile."""

from flashinfer.jit.core import JitSpec


def get_page_module():
    return JitSpec("page").build_and_load()
