# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Write plugins/module_utils/_spellings.py: which flags which SGLang release knows, read off its wheel.

    python scripts/tools/spellings.py [--wheels DIR] [--check] [VERSION...]

The wheels are fetched with pip from the configured index (packages themselves only, no dependencies) into
DIR, and their argument tables are parsed, not imported. --check compares the committed table with the
wheels at hand in DIR and fetches none.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "plugins/module_utils/_spellings.py"
VERSIONS = ["0.5.10", "0.5.11", "0.5.12.post1", *(f"0.5.{minor}" for minor in range(13, 24))]
SOURCES = re.compile(r"sglang/srt/(server_args\.py|arg_groups/(fields/)?\w+\.py)")

Known = dict[str, str]  # flag -> "" or, where it is deprecated, what the engine says to use instead


def number(version: str) -> tuple[int, ...]:
    """Return a version as a sortable tuple."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def read_wheel(path: Path) -> Known:
    """Return every flag of the server's command line in one wheel."""
    found: Known = {}
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        for name in sorted(names):
            if SOURCES.fullmatch(name):
                read_source(ast.parse(wheel.read(name)), found)
        entries = "".join(wheel.read(name).decode() for name in names if name.endswith("dist-info/entry_points.txt"))
    if "sglang/launch_server.py" in names:
        found["(python -m sglang.launch_server)"] = ""
    if "sglang/cli/serve.py" in names and re.search(r"^sglang\s*=", entries, re.M):
        found["(sglang serve)"] = ""
    return found


def read_source(tree: ast.Module, found: Known) -> None:
    """Add the flags of one file: add_argument() calls, and annotated fields A[type, help or Arg(...)]."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flags = [text for text in map(literal, node.args) if isinstance(text, str) and text.startswith("--")]
            instead = replacement(node)
            for flag in flags:
                found[flag[2:]] = instead
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    for flag in field_flags(item.target.id, item.annotation):
                        found.setdefault(flag, "")


def field_flags(name: str, annotation: ast.expr) -> list[str]:
    """Return the flags that an annotated field becomes."""
    if not (isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", "") == "A"):
        return []
    if not isinstance(annotation.slice, ast.Tuple):
        return []
    flag, more = name.replace("_", "-"), []
    for item in annotation.slice.elts[1:]:
        if isinstance(item, ast.Call) and getattr(item.func, "id", "") == "Arg":
            given = {word.arg: literal(word.value) for word in item.keywords}
            if given.get("no_cli"):
                return []
            flag = str(given.get("cli_name") or flag)
            more = [str(alias) for alias in given.get("aliases") or []]
    return [text.lstrip("-") for text in [flag, *more]]


def replacement(call: ast.Call) -> str:
    """Return what a deprecated flag's registration names instead, "" for a flag that is not deprecated."""
    given = {word.arg: word.value for word in call.keywords}
    action = ast.unparse(given["action"]) if "action" in given else ""
    if "Deprecated" not in action and "deprecated" not in action:
        return ""
    for word in ("new_flag", "error_message", "help"):
        text = literal(given[word]) if word in given else None
        if isinstance(text, str) and text:
            return " ".join(text.split())
    return "deprecated"


def literal(node: ast.expr) -> Any:
    """Return a literal's value, None for anything else."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def settings() -> list[str]:
    """Return the flags that the collection's stable settings may become."""
    sys.path.insert(0, str(ROOT / ".collections"))
    from ansible_collections.gpufleet.sglang.plugins.module_utils._flags import SETTINGS

    return sorted({flag for setting in SETTINGS.values() for flag in setting.flags})


def build(known: dict[str, Known]) -> str:
    """Return the text of the table."""
    versions = sorted(known, key=number)
    every = sorted({flag for flags in known.values() for flag in flags})
    gone = [flag for flag in every if flag not in known[versions[-1]]]
    retiring = [flag for flag in every if any(known[version].get(flag) for version in versions)]
    wanted = sorted({*gone, *retiring, *settings(), *(flag for flag in every if flag.startswith("("))})
    rows = []
    for flag in wanted:
        there = [version for version in versions if flag in known[version]]
        if not there or there != versions[versions.index(there[0]) : versions.index(there[-1]) + 1]:
            continue  # not a flag of these releases, or one that went and came again
        old = [version for version in there if known[version][flag]]
        instead = known[old[-1]][flag] if old else ""
        rows.append(f"    {quoted(flag)}: ({quoted(there[0])}, {quoted(there[-1])}, {quoted(old[0] if old else '')},")
        rows[-1] += f" {quoted(shorten(flag, instead))}),"
    head = f'''# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Flags by SGLang release. Written by scripts/tools/spellings.py from the wheels: do not edit."""

# fmt: off
from __future__ import annotations

VERSIONS = (
{"".join(f"    {quoted(version)},{chr(10)}" for version in versions)})

# flag: (first release, last release, deprecated since or "", what it names instead or "")
# The flags of the stable settings, and all that were deprecated or removed on the way.
FLAGS: dict[str, tuple[str, str, str, str]] = {{
'''
    return head + "\n".join(rows) + "\n}\n"


def quoted(text: str) -> str:
    """Return a string literal with double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def shorten(flag: str, text: str) -> str:
    """Return the replacement itself: the text, or the last other flag that a sentence names."""
    if text.startswith("--") and len(text) < 60:
        return text
    named = [word for word in re.findall(r"--[\w-]+", text) if word != f"--{flag}"]
    return named[-1].rstrip("-") if named else ""


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of the wheels; default: a temporary one")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.wheels or Path(scratch)
        known = {}
        for version in args.versions:
            at_hand = sorted(folder.glob(f"sglang-{version}-*.whl"))
            if not at_hand and not args.check:
                fetch = ["pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
                subprocess.run([sys.executable, "-m", *fetch, "-d", str(folder), f"sglang=={version}"], check=True)
                at_hand = sorted(folder.glob(f"sglang-{version}-*.whl"))
            if at_hand:
                known[version] = read_wheel(at_hand[0])
    if not args.check:
        TABLE.write_text(build(known), encoding="utf-8")
        return 0
    wrong = differences(known)
    print("\n".join(wrong) or f"the table agrees with {', '.join(known) or 'no wheel: none is at hand'}")
    return 1 if wrong or not known else 0


def differences(known: dict[str, Known]) -> list[str]:
    """Return where the committed table and these wheels disagree."""
    from ansible_collections.gpufleet.sglang.plugins.module_utils._spelling import deprecated, knows
    from ansible_collections.gpufleet.sglang.plugins.module_utils._spellings import FLAGS

    wrong = []
    for version, flags in known.items():
        for flag in FLAGS:
            if knows(flag, version) != (flag in flags):
                wrong.append(f"{version}: {flag} is {'' if flag in flags else 'not '}in the wheel")
            elif flag in flags and bool(deprecated(flag, version)) != bool(flags[flag]):
                wrong.append(f"{version}: {flag} is {'' if flags[flag] else 'not '}deprecated in the wheel")
    return wrong


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / ".collections"))
    sys.exit(main())
