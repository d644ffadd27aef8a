# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Lock files: exact pins, and what an environment differs from them by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PIN = re.compile(
    r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?P<extras>\[[^\]]*\])?\s*===?\s*(?P<version>[A-Za-z0-9.!+_-]+)"
    r"\s*(?:;\s*(?P<marker>[^#]*?))?\s*$"
)
_HASH = re.compile(r"\s+--hash[= ](\S+)")
_VERSION = re.compile(
    r"^v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>alpha|beta|preview|pre|rc|a|b|c)[-_.]?(?P<pre_n>\d*))?"
    r"(?:-(?P<post_i>\d+)|[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post_n>\d*))?"
    r"(?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_n>\d*))?$"
)
_PRE = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}


class LockError(Exception):
    """The lock's text is not one; `problems` lists every bad line."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class Pin:
    """One package of a lock."""

    name: str  # normalised
    version: str
    marker: str = ""  # environment marker: such a pin may be absent
    hashes: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        """The pin as one line of a requirements file."""
        marker = f" ; {self.marker}" if self.marker else ""
        return f"{self.name}=={self.version}{marker}" + "".join(f" --hash={h}" for h in self.hashes)


def normalize_name(name: str) -> str:
    """Spell a distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def normalize_version(version: str) -> str:
    """Spell a version in its canonical form (PEP 440), without trailing zeros; anything else only in lower case."""
    text = version.strip().lower()
    public, _sep, local = text.partition("+")
    match = _VERSION.match(public)
    if match is None:
        return text
    part = match.groupdict()
    release = [str(int(number)) for number in part["release"].split(".")]
    while len(release) > 1 and release[-1] == "0":
        release.pop()
    out = f"{int(part['epoch'])}!" if part["epoch"] and int(part["epoch"]) else ""
    out += ".".join(release)
    if part["pre"]:
        out += _PRE.get(part["pre"], part["pre"]) + str(int(part["pre_n"] or 0))
    if part["post_i"] or part["post"]:
        out += f".post{int(part['post_i'] or part['post_n'] or 0)}"
    if part["dev"]:
        out += f".dev{int(part['dev_n'] or 0)}"
    return f"{out}+{re.sub(r'[-_.]', '.', local)}" if local else out


def same_version(wanted: str, found: str) -> bool:
    """True when `found` satisfies `==wanted`: a local part (+cpu) counts only where it is asked for."""
    left, right = normalize_version(wanted), normalize_version(found)
    return left == right or ("+" not in left and left == right.partition("+")[0])


def parse_lock(text: str) -> list[Pin]:
    """Read a lock (pip-compile, uv pip compile, pip freeze); raises LockError with every line that is no exact pin."""
    pins: list[Pin] = []
    problems: list[str] = []
    for number, line in _logical_lines(text):
        hashes = tuple(_HASH.findall(line))
        match = _PIN.match(_HASH.sub("", line).strip())
        if match is None:
            problems.append(f"line {number}: {_why_not(line)}")
            continue
        marker = (match["marker"] or "").strip()
        pins.append(Pin(normalize_name(match["name"]), match["version"], marker, hashes))
    problems.extend(_contradictions(pins))
    if not problems and not pins:
        problems.append("it holds no package")
    if problems:
        raise LockError(problems)
    return sorted(pins, key=lambda pin: (pin.name, pin.version, pin.marker))


def _logical_lines(text: str) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = "" if raw.lstrip().startswith("#") else re.split(r"\s+#", raw, maxsplit=1)[0].rstrip()
        if not pending:
            start = number
        pending = f"{pending} {line.lstrip()}".strip() if pending else line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip()
            continue
        if pending:
            lines.append((start, pending))
        pending = ""
    if pending:
        lines.append((start, pending))
    return lines


def _why_not(line: str) -> str:
    shown = re.sub(r"//[^/@\s]*@", "//***@", line)
    if re.match(r"^(-i|-f|--(extra-)?index-url|--find-links|--no-index|--trusted-host)\b", line):
        return (
            f"{shown!r}: where packages come from is set by index_url, extra_index_urls or wheel_dir, not by the lock"
        )
    if line.startswith("-"):
        return f"{shown!r}: a lock holds pins only, no installer options"
    if " @ " in line or "://" in line:
        return f"{shown!r}: a direct address is no pin: put the wheel into the wheel folder and pin name==version"
    return f"{shown!r}: not an exact pin (name==version)"


def _contradictions(pins: Sequence[Pin]) -> list[str]:
    seen: dict[tuple[str, str], str] = {}
    problems = []
    for pin in pins:
        before = seen.setdefault((pin.name, pin.marker), pin.version)
        if not same_version(before, pin.version) and not same_version(pin.version, before):
            problems.append(f"{pin.name} is pinned twice: {before} and {pin.version}")
    return problems


def lock_version(pins: Sequence[Pin], name: str) -> str:
    """Return the pinned version of a package, "" when the lock doesn't hold it."""
    return next((pin.version for pin in pins if pin.name == name), "")


def differences(pins: Sequence[Pin], installed: Mapping[str, str]) -> list[str]:
    """Say what is missing or of another version, one line each; packages beyond the lock don't count."""
    wanted: dict[str, list[Pin]] = {}
    for pin in pins:
        wanted.setdefault(pin.name, []).append(pin)
    lines = []
    for name, choices in sorted(wanted.items()):
        found = installed.get(name)
        versions = " or ".join(pin.version for pin in choices)
        if found is None:
            if not all(pin.marker for pin in choices):
                lines.append(f"{name}: {versions} is pinned, not installed")
        elif not any(same_version(pin.version, found) for pin in choices):
            lines.append(f"{name}: {versions} is pinned, {found} is installed")
    return lines
