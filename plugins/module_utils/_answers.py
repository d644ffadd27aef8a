# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Properties that an answer has whatever the model: text that is text, tokens that differ, numbers that are numbers.

None of them asks whether an answer is right: a model with random weights passes them all, a broken kernel does not.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

REPEATED = 0.9  # share of one token in an answer at temperature 1: no distribution that is one gives that
LIKELY = -0.5  # mean log probability above which a repetition is the model's own
UNLIKELY = -20.0  # log probability of a whole sample: two equal ones are no chance
MIN_TOKENS = 8
REPLACED = 0.3  # share of U+FFFD in a text


@dataclass(frozen=True)
class Answer:
    """One answer. Fields that were not asked for are None."""

    text: str | None = None  # of /generate, or the content of a chat
    reasoning: str | None = None
    finish: str = ""  # stop | length | ...
    chat: bool = False
    temperature: float = 0.0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    completion_tokens: int | None = None
    same_for_other_seed: bool | None = None
    reads_wrong: bool = False  # a person, or a known answer, says so


@dataclass(frozen=True)
class Finding:
    """What is wrong with an answer."""

    code: str
    detail: str
    evidence: str


def judge_answers(answers: Sequence[Answer]) -> Finding | None:
    """Return the first thing that is wrong, None when all answers could be a model's."""
    for answer in answers:
        found = _numbers(answer) or _empty(answer) or _garbage(answer)
        if found:
            return found
    return None


def same_sample(answers: Sequence[Answer]) -> Finding | None:
    """Find two equal samples at temperature 1 where that is next to impossible: a sampler that does not sample."""
    for at, first in enumerate(answers):
        known = [value for value in first.logprobs if value is not None]
        if len(first.tokens) < MIN_TOKENS or sum(known) > UNLIKELY:
            continue
        if any(first.tokens == other.tokens for other in answers[at + 1 :]):
            return Finding("output_wrong", "output_garbage", "two samples at temperature 1 are equal, token by token")
    return None


def _numbers(answer: Answer) -> Finding | None:
    bad = [value for value in answer.logprobs if value is not None and not math.isfinite(value)]
    if bad or (answer.logprobs and all(value is None for value in answer.logprobs)):
        return Finding("output_wrong", "output_nan", f"log probabilities of the answer are {bad[0] if bad else 'null'}")
    if any(value is not None and value > 0.01 for value in answer.logprobs):
        return Finding("output_wrong", "output_nan", "log probabilities of the answer are above 0")
    if answer.same_for_other_seed and answer.temperature > 0:
        return Finding("output_wrong", "output_nan", f"two seeds give the same answer: {_show(answer.text)}")
    return None


def _empty(answer: Answer) -> Finding | None:
    if answer.chat and not (answer.text or "").strip():
        if (answer.reasoning or "").strip():
            return Finding(
                "content_empty", "reasoning_swallows_content", "the content is empty, all went to reasoning_content"
            )
        if answer.finish in ("", "stop") and (answer.completion_tokens is None or answer.completion_tokens > 1):
            return Finding("content_empty", "reasoning_swallows_content", "the content of the answer is empty")
    return None


def _garbage(answer: Answer) -> Finding | None:
    text = answer.text or ""
    if answer.reads_wrong:
        return Finding("output_wrong", "output_garbage", f"the answer is garbage: {_show(text)}")
    if answer.temperature > 0 and len(answer.tokens) >= MIN_TOKENS:
        token, count = Counter(answer.tokens).most_common(1)[0]
        sure = [value for value in answer.logprobs if value is not None]
        likely = bool(sure) and sum(sure) / len(sure) > LIKELY  # a model may be that sure of itself
        if count / len(answer.tokens) >= REPEATED and not likely:
            return Finding(
                "output_wrong",
                "output_garbage",
                f"token {token} {count} times of {len(answer.tokens)} at temperature 1",
            )
    if answer.tokens or answer.temperature > 0:  # a tokenizer cuts characters: the text alone proves little
        return None
    return text_garbage(text)


def text_garbage(text: str) -> Finding | None:
    """Judge a text of which nothing else is known (a chat's, a report's)."""
    if not text:
        return None
    replaced = text.count("\ufffd") / len(text)
    if replaced >= REPLACED:
        return Finding("output_wrong", "output_garbage", f"{replaced:.0%} of the answer are replacement characters")
    words = re.findall(r"\w+|[^\w\s]", text)
    runs = re.search(r"(\S)\1{11,}|((?:\S{1,12}\s?))\2{4,}", text)
    if runs:
        return Finding("output_wrong", "output_garbage", f"one piece again and again: {_show(text)}")
    if len(words) >= MIN_TOKENS and Counter(words).most_common(1)[0][1] / len(words) >= REPEATED:
        return Finding("output_wrong", "output_garbage", f"one word again and again: {_show(text)}")
    scripts = {unicodedata.name(char, "?").split(" ")[0] for char in text if char.isalpha()}
    if len(scripts) >= 4:
        return Finding("output_wrong", "output_garbage", f"{len(scripts)} scripts in one answer: {_show(text)}")
    return None


def _show(text: str | None) -> str:
    return repr((text or "")[:60])
