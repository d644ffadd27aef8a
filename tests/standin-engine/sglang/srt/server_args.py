"""The command line of SGLang 0.5.23, all 531 options of it, built from the list read off the real parser."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def human_readable_int(text: str) -> int:
    """4096, 4k, 1M."""
    scale = {"k": 1000, "m": 1000**2, "g": 1000**3}.get(text[-1:].lower())
    return int(float(text[:-1]) * scale) if scale else int(text)


TYPES: dict[str, Any] = {
    "int": int, "float": float, "loads": json.loads, "json_list_type": json.loads,
    "human_readable_int": human_readable_int,
}  # fmt: skip


class ServerArgs:
    """Only what tools use to read the option list."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add every option."""
        for option in json.loads((Path(__file__).parent / "options.json").read_text(encoding="utf-8")):
            kwargs: dict[str, Any] = {"dest": option["dest"], "default": option["default"]}
            if option.get("required"):
                kwargs["required"] = True
            if option["action"] == "BooleanOptionalAction":
                parser.add_argument(option["opts"][0], action=argparse.BooleanOptionalAction, **kwargs)
                continue
            if option["action"] in ("_StoreTrueAction", "DeprecatedStoreTrueAction"):
                kwargs["action"] = "store_true"
            else:
                kwargs.update({key: option[key] for key in ("nargs", "choices") if key in option})
                if "type" in option:
                    kwargs["type"] = TYPES.get(option["type"], str)
                if option.get("nargs") == "?" and "const" in option:
                    kwargs["const"] = option["const"]
            parser.add_argument(*option["opts"], **kwargs)


def prepare_server_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse as the engine does: errors are argparse's, on stderr, with exit status 2."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(list(argv))
