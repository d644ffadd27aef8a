"""The console script `sglang`."""

from __future__ import annotations

import argparse
import sys

from sglang import __version__


def main() -> None:
    """`sglang serve ...` and `sglang version`."""
    parser = argparse.ArgumentParser(prog="sglang")
    commands = parser.add_subparsers(dest="subcommand", required=True)
    commands.add_parser("serve", help="Launch an SGLang server.", add_help=False)
    commands.add_parser("version", help="Show the version information.")
    args, rest = parser.parse_known_args()
    if args.subcommand == "version":
        print(f"sglang version: {__version__}")
        return
    from sglang.standin.engine import run

    sys.exit(run(rest))
