"""Tiny real wheels, made by zipfile: a stand-in for the engine and packages to lock beside it."""

from __future__ import annotations

import hashlib
import zipfile

PARSER = """
import argparse

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str)
        parser.add_argument("--port", type=int, default=30000)
        parser.add_argument("--attention-backend", choices=["triton", "flashinfer"])
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--cuda-graph-max-bs-decode", type=int)
        parser.add_argument("--cuda-graph-max-bs-prefill", type=int)

def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(argv)
"""


def wheel(folder, name, version, files, tag="py3-none-any"):
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in files.items():
            archive.writestr(inner, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def engine(folder, version="0.5.23+t", parser=PARSER):
    files = {"sglang/__init__.py": "", "sglang/launch_server.py": "", "sglang/srt/__init__.py": ""}
    return wheel(folder, "sglang", version, {**files, "sglang/srt/server_args.py": parser})


def dependency(folder, version="1.0", count=1):
    return wheel(folder, "tinydep", version, {f"tinydep/m{n}.py": f"x = {n}\n" for n in range(count)})


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
