"""Shared doubles: a runner that answers from a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result


class ScriptedRunner:
    """Answers commands by the first rule whose words all occur in the command, and remembers every call."""

    def __init__(self) -> None:
        self.rules: list[tuple[tuple[str, ...], Callable[[Sequence[str]], Result]]] = []
        self.calls: list[list[str]] = []

    def on(self, *words: str, rc: int = 0, stdout: str = "", stderr: str = "") -> ScriptedRunner:
        self.rules.append((words, lambda argv: Result(rc, stdout, stderr)))
        return self

    def on_call(self, *words: str, answer: Callable[[Sequence[str]], Result]) -> ScriptedRunner:
        self.rules.append((words, answer))
        return self

    def run(self, argv, *, timeout=30.0, env=None, cwd=None) -> Result:
        self.calls.append(list(argv))
        for words, answer in self.rules:
            if all(word in argv for word in words):
                return answer(argv)
        return Result(127, "", f"{argv[0]}: not found")

    def commands(self, *words: str) -> list[list[str]]:
        return [call for call in self.calls if all(word in call for word in words)]


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()
