"""Names that SGLang imports from its CUDA kernels: they exist, and say what they are when called."""

from __future__ import annotations

from typing import Any, Callable


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version: this is the stand-in for tests and demos")

    return absent
