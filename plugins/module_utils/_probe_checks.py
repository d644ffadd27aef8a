# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What an answering server is asked beside the first question: answers whose properties are known whatever the model.

Two samples at temperature 1 with their log probabilities, in one request: catches NaN, a sampler that gives one
token or the same sample again (greedy alone passes some broken backends). A known answer, where the inventory
names one: catches garbage of real weights. A chat, where a reasoning parser is set: catches content that ends up
in reasoning_content. None of it alarms on a model with random weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from ansible_collections.gpufleet.sglang.plugins.module_utils._answers import (
    Answer,
    Finding,
    judge_answers,
    same_sample,
)

SAMPLES = 2
TOKENS = 10
UNSUPPORTED = (400, 404, 405, 422, 501)


class Asker(Protocol):
    """Posts a JSON document; returns status and body."""

    def post(self, path: str, document: Mapping[str, Any], timeout: float) -> tuple[int, bytes]:
        """See Probe.post()."""


def expected(text: str | None, pattern: str) -> Finding | None:
    """Check the greedy answer against what the inventory expects of it."""
    if not pattern or re.search(pattern, text or "", re.IGNORECASE):
        return None
    return Finding("output_wrong", "output_garbage", f"the answer {text!r:.100} does not match {pattern!r}")


def samples(asker: Asker, prompt: str, timeout: float) -> Finding | None:
    """Ask for samples at temperature 1 and judge them; an engine that does not know the request is let go."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 1.0}
    status, body = asker.post(
        "/generate",
        {"text": [prompt] * SAMPLES, "sampling_params": sampling, "return_logprob": True, "stream": False},
        timeout,
    )
    if status in UNSUPPORTED:
        return None
    if status != 200:
        return Finding("output_wrong", "sampling_failed", f"at temperature 1 POST /generate answers {status}")
    try:
        told = json.loads(body)
    except ValueError:
        return None
    answers = [sample(item) for item in told if isinstance(item, dict)] if isinstance(told, list) else []
    return judge_answers(answers) or same_sample(answers)


def sample(data: Mapping[str, Any]) -> Answer:
    """Read one answer of /generate."""
    meta = data.get("meta_info") or {}
    rows = [row for row in meta.get("output_token_logprobs") or [] if isinstance(row, list) and len(row) >= 2]
    logprobs = tuple(row[0] if isinstance(row[0], (int, float)) else None for row in rows)
    tokens = tuple(row[1] for row in rows if isinstance(row[1], int))
    text = data.get("text")
    return Answer(text=text if isinstance(text, str) else None, temperature=1.0, tokens=tokens, logprobs=logprobs)


def chat(asker: Asker, model: str, tokens: int, timeout: float) -> Finding | None:
    """Ask a question of a chat and judge where the answer went."""
    document = {
        "model": model or "default",
        "messages": [{"role": "user", "content": "Say hello in one short sentence."}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    status, body = asker.post("/v1/chat/completions", document, timeout)
    if status != 200:
        return None
    try:
        choice = json.loads(body)["choices"][0]
        message = choice["message"]
        used = json.loads(body).get("usage") or {}
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    if choice.get("finish_reason") != "stop" or message.get("tool_calls"):
        return None  # cut off: it may still have been thinking
    return judge_answers(
        [
            Answer(
                text=message.get("content"),
                reasoning=message.get("reasoning_content"),
                finish="stop",
                chat=True,
                completion_tokens=used.get("completion_tokens"),
            )
        ]
    )
