"""Run at interpreter start by the .pth file beside it: gives torchvision the operators its CUDA library would declare.

PyPI's torchvision is linked against CUDA and cannot load that library beside a CPU build of torch; the
import then fails for want of two operator schemas. They are declared just before torchvision is imported
for the first time, so that an interpreter that never imports it pays nothing.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; acts once, when torchvision is looked for."""

    def find_spec(self, fullname, path=None, target=None):
        """Declare the schemas and step out of the way."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            from torch import library

            for name in ("nms", "qnms"):
                library.define(f"torchvision::{name}", _SCHEMA)


sys.meta_path.insert(0, _BeforeTorchvision())
