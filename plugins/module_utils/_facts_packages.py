# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Are the engine's pins met? Read from the metadata in the venv, without running its Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path

WATCHED = re.compile(r"^(?:torch|sglang|flashinfer|sgl|transformers|tokenizers|xgrammar|apache-tvm-ffi|triton|nvidia-)")
_REQUIRE = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?(?P<spec>[^;)]*)\)?\s*(?:;(?P<marker>.*))?$")
_CLAUSE = re.compile(r"(?P<op>===?|~=|!=|<=|>=|<|>)\s*(?P<version>[\w.+!*-]+)")
FLASHINFER = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")


def canonical(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(venv: Path) -> tuple[dict[str, str], list[str]]:
    """Return versions by name, and what sglang requires."""
    versions: dict[str, str] = {}
    requires: list[str] = []
    for folder in sorted(venv.glob("lib*/python3*/site-packages/*.dist-info")):
        name, _sep, version = folder.name[: -len(".dist-info")].partition("-")
        versions.setdefault(canonical(name), version)
        if canonical(name) == "sglang":
            try:
                text = (folder / "METADATA").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            requires = HeaderParser().parsestr(text).get_all("Requires-Dist") or []
    return versions, requires


def unmet_pins(venv: Path) -> list[str]:
    """Return a line for each watched package whose version the engine does not accept."""
    versions, requires = installed(venv)
    found = []
    for text in requires:
        hit = _REQUIRE.match(text.strip())
        if not hit or "extra" in (hit["marker"] or ""):
            continue
        name = canonical(hit["name"])
        have = versions.get(name)
        if have is None or not WATCHED.match(name) or accepts(hit["spec"], have):
            continue
        found.append(f"{name} is {have}, the engine wants {hit['spec'].strip()}")
    return found + parts_differ(versions)


def parts_differ(versions: Mapping[str, str]) -> list[str]:
    """The parts of FlashInfer must be of one version (a local part like +cu130 does not count)."""
    have = {name: versions[name].split("+")[0] for name in FLASHINFER if name in versions}
    base = {value.split(".post")[0] for value in have.values()}
    return [f"flashinfer's packages differ: {have}"] if len(base) > 1 else []


def accepts(spec: str, version: str) -> bool:
    """Say whether a version meets a requirement: only exact pins and plain bounds are judged."""
    have = _numbers(version)
    for clause in _CLAUSE.finditer(spec):
        want, op = clause["version"], clause["op"]
        if op in ("==", "==="):
            plain = version if "+" in want else version.split("+")[0]
            if want.endswith(".*"):
                if not plain.startswith(want[:-1]):
                    return False
            elif plain != want and _numbers(plain) != _numbers(want):
                return False
        elif (op == ">=" and have < _numbers(want)) or (op == "<" and have >= _numbers(want)):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(word) for word in re.findall(r"\d+", version.split("+")[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
