"""Make tiny wheels: a stand-in for the engine that has a parser, and a package to lock beside it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

PARSER = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model")
        parser.add_argument("--port", type=int, default=30000)
        parser.add_argument("--attention-backend", choices=["triton", "flashinfer"])
"""


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write one wheel."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for inner, text in files.items():
            archive.writestr(inner, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def main() -> None:
    """Fill the folder named by the first argument."""
    folder = Path(sys.argv[1])
    package = {"sglang/__init__.py": "", "sglang/launch_server.py": "", "sglang/srt/__init__.py": ""}
    wheel(folder, "sglang", "0.5.23+t", {**package, "sglang/srt/server_args.py": PARSER})
    wheel(folder, "tinydep", "1.0", {"tinydep.py": "x = 1\n"})
    wheel(folder, "tinydep", "1.1", {"tinydep.py": "x = 2\n"})


main()
