"""Build and load a module of FlashInfer as a server does; the last line says how it went."""

import importlib
import os
import sys
import time

name = sys.argv[1]  # page, norm
started = time.monotonic()
try:
    import flashinfer

    getattr(importlib.import_module(f"flashinfer.jit.{name}"), f"gen_{name}_module")().build_and_load()
    print(f"PASS flashinfer {flashinfer.__version__} {name} {time.monotonic() - started:.1f} s")
except Exception as exc:
    print(exc)
    print(f"FAIL flashinfer {name}")
    sys.stdout.flush()
    os._exit(1)
