# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What a check found: one shape for problems and warnings of every stage before a server starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ERROR = "error"
WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or worth knowing.

    code is stable (for machines), message says what and where with its evidence, remedy what to do;
    gpu is the index it is about, None when it is about the whole host.
    """

    code: str
    message: str
    remedy: str = ""
    severity: str = ERROR
    gpu: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a module's result."""
        data: dict[str, Any] = {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "remedy": self.remedy,
        }
        if self.gpu is not None:
            data["gpu"] = self.gpu
        return data

    def text(self) -> str:
        """Return message and remedy as one sentence pair."""
        return " ".join(_sentence(part) for part in (self.message, self.remedy) if part)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return those that stand in the way."""
    return [item for item in findings if item.severity == ERROR]


def warnings(findings: Iterable[Finding]) -> list[Finding]:
    """Return those that do not."""
    return [item for item in findings if item.severity != ERROR]


def numbered(heading: str, findings: Sequence[Finding]) -> str:
    """Return one message that lists all findings: '<heading>:', then '1. ...', '2. ...' on lines of their own."""
    lines = [f"{number}. {item.text()}" for number, item in enumerate(findings, start=1)]
    return "\n".join([f"{heading}:", *lines])


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
