"""Build and load FlashInfer's page module as a server does; the last line says how it went."""

import os
import sys
import time

started = time.monotonic()
try:
    import flashinfer
    from flashinfer.jit.page import gen_page_module

    gen_page_module().build_and_load()
    print(f"PASS flashinfer {flashinfer.__version__} page {time.monotonic() - started:.1f} s")
except Exception as exc:
    print(exc)
    print("FAIL flashinfer page")
    sys.stdout.flush()
    os._exit(1)
