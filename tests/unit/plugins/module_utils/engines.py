"""Option lists of real engines: 0.5.23 in full, 0.5.12.post1 and 0.5.16 in extracts of their parsers."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._options import EngineOptions, Option

FIXTURES = Path(__file__).parents[2] / "fixtures"


@functools.lru_cache
def engine(version: str) -> EngineOptions:
    raw = json.loads((FIXTURES / f"args-{version}.json").read_text())
    options = tuple(
        Option(
            opts=tuple(item["opts"]),
            choices=tuple(map(str, item["choices"])) if item["choices"] else None,
            nargs=item["nargs"],
            action=item["action"],
            default=item["default"],
        )
        for item in raw
    )
    return EngineOptions(version=version, venv="/v", fingerprint="", options=options)
