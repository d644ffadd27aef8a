"""The table of flags against a real wheel, and its reader against sources of both kinds."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "scripts/tools/spellings.py"


@pytest.fixture(scope="module")
def tool():
    loader = importlib.machinery.SourceFileLoader("spellings_tool", str(TOOL))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def read(tool, text):
    found = {}
    tool.read_source(ast.parse(text), found)
    return found


def test_annotated_fields(tool):
    text = """
class Fields:
    plain_field: A[int, "help"] = 1
    renamed: A[int, Arg(help="h", cli_name="--other-name", aliases=["--alias"])] = 1
    hidden: A[bool, Arg(no_cli=True)] = False
    not_a_flag: int = 3
"""
    assert read(tool, text) == {"plain-field": "", "other-name": "", "alias": ""}


def test_registered_options(tool):
    text = """
parser.add_argument("--new", "--newer", type=int)
parser.add_argument("--old", action=DeprecatedAliasStoreAction, new_flag="--new", help="h")
parser.add_argument("--gone", action=DeprecatedAction, error_message="use  --new")
parser.add_argument("positional")
"""
    assert read(tool, text) == {"new": "", "newer": "", "old": "--new", "gone": "use --new"}


def test_the_committed_table_agrees_with_a_real_wheel():
    wheels = sorted((ROOT / ".cache/wheels").glob("sglang-[0-9]*.whl"))
    if not wheels:
        pytest.skip("no wheel of SGLang in .cache/wheels: scripts/wheelhouse fetches it")
    done = subprocess.run(
        [sys.executable, str(TOOL), "--wheels", str(wheels[0].parent), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.5.23" in done.stdout
