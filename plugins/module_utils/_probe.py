# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Asking a server: is it ready, does it answer a real request, what is it.

Plain sockets through http.client: no proxy of the environment is ever used, and every request has one
deadline for all of it, however slowly the bytes drip.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._answers import Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe_checks import chat, expected, samples

READY_TIMEOUT = 5.0
HEALTH_TIMEOUT = 25.0  # /health sends a request of its own and gives up after 20 s
INFO_TIMEOUT = 5.0
MAX_BODY = 8 << 20
MAX_TEXT = 200
SAID = 160  # characters of an error body that are shown


class ProbeError(Exception):
    """A request got no usable answer; the message says which and how."""


class WrongAnswer(ProbeError):
    """There is an answer, complete and in time, and no model gives such a one."""


@dataclass(frozen=True)
class ProbeOptions:
    """What to ask, and how long to wait for the whole answer."""

    prompt: str = "The capital of France is"
    max_tokens: int = 16
    timeout: float = 30.0
    api_key: str = ""
    expect: str = ""  # regular expression that the greedy answer must match
    chat_tokens: int = 0  # 0: no chat is asked
    sample: bool = True  # ask at temperature 1 too


@dataclass(frozen=True)
class ProbeResult:
    """What a server answered. ok is True only when tokens came back; starting when it said: not yet."""

    ok: bool = False
    starting: bool = False
    reason: str = ""
    model: str | None = None
    version: str | None = None
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    first_token_seconds: float | None = None
    decode_tokens_per_second: float | None = None
    completion_tokens: int | None = None
    text: str | None = None
    wrong: dict[str, str] | None = None  # code, detail, evidence: it answers, but not as a model does

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the next slice."""
        return asdict(self)


class _Request:
    """One request with one deadline. Used as a context manager; the connection never outlives it."""

    def __init__(self, host: str, port: int, method: str, path: str, timeout: float, **more: Any) -> None:
        self.what = f"{method} {path}"
        self.timeout = timeout
        self.expired = False
        self.connection = http.client.HTTPConnection(host, port, timeout=timeout)
        self.alarm = threading.Timer(timeout, self._expire)
        self.alarm.daemon = True
        self.method, self.path = method, path
        self.body: bytes | None = more.get("body")
        self.headers: dict[str, str] = more.get("headers") or {}

    def _expire(self) -> None:
        # a socket's own time-out starts again with every byte; this one does not
        self.expired = True
        sock = self.connection.sock or self.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> http.client.HTTPResponse:
        self.sock: socket.socket | None = None
        self.alarm.start()
        try:
            self.connection.connect()
            self.sock = self.connection.sock  # http.client forgets it once the response is to be read to its end
            self.connection.request(self.method, self.path, self.body, {"Connection": "close", **self.headers})
            self.response = self.connection.getresponse()
        except (OSError, http.client.HTTPException) as exc:
            self.alarm.cancel()
            self.connection.close()
            if self.expired or isinstance(exc, TimeoutError):
                raise ProbeError(f"{self.what}: no answer within {self.timeout:g} s") from exc
            raise ProbeError(f"{self.what}: {_said(exc)}") from exc
        return self.response

    def __exit__(self, *_exc: object) -> None:
        self.alarm.cancel()
        self.response.close()
        self.connection.close()

    def chunks(self) -> Iterator[bytes]:
        """Yield the body as it comes, at most MAX_BODY of it; raises ProbeError past the deadline."""
        total = 0
        late = f"{self.what}: the answer was not complete within {self.timeout:g} s"
        try:
            while total < MAX_BODY:
                data = self.response.read1(65536)
                if self.expired:
                    raise ProbeError(late)
                if not data:
                    return
                total += len(data)
                yield data
        except (OSError, http.client.HTTPException, ValueError) as exc:
            if self.expired or isinstance(exc, TimeoutError):
                raise ProbeError(late) from exc
            raise ProbeError(f"{self.what}: the answer broke off: {_said(exc)}") from exc

    def lines(self) -> Iterator[bytes]:
        """Yield the body's lines as they come."""
        rest = b""
        for data in self.chunks():
            *whole, rest = (rest + data).split(b"\n")
            yield from whole
        if rest:
            yield rest


class Probe:
    """Asks one server; clock is replaced by tests."""

    def __init__(
        self, host: str, port: int, options: ProbeOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.host, self.port, self.options, self.clock = host, port, options, clock

    def run(self) -> ProbeResult:
        """Ask for readiness, then for tokens, then for what the server is; never raises."""
        try:
            not_ready = self.not_ready()
            if not_ready:
                return ProbeResult(starting=" 503" in not_ready, reason=not_ready)
            answer = self.generate()
            wrong = self.wrong(answer)
            if wrong:
                return ProbeResult(reason=wrong.evidence, wrong=asdict(wrong))
        except WrongAnswer as exc:
            return ProbeResult(reason=str(exc), wrong=asdict(Finding("output_wrong", "output_garbage", str(exc))))
        except ProbeError as exc:
            return ProbeResult(reason=str(exc), starting="Connection refused" in str(exc))
        return ProbeResult(ok=True, **answer, **self.info())

    def wrong(self, answer: Mapping[str, Any]) -> Finding | None:
        """Return what is wrong with a server that answers; see _probe_checks."""
        options = self.options
        found = expected(answer.get("text"), options.expect)
        if not found and options.sample:
            found = samples(self, options.prompt, options.timeout)
        if not found and options.chat_tokens:
            found = chat(self, "", options.chat_tokens, options.timeout)
        return found

    def post(self, path: str, document: Mapping[str, Any], timeout: float) -> tuple[int, bytes]:
        """Return status and body; raises ProbeError when there is no complete answer in time."""
        request = self.request("POST", path, timeout, json.dumps(document).encode())
        with request as response:
            return response.status, b"".join(request.chunks())

    def not_ready(self) -> str:
        """Return '' when /ready (or /health, where there is no /ready) answers 200, else what it said."""
        status, _body = self.get("/ready", READY_TIMEOUT)
        path = "/ready"
        if status == 404:  # before 0.5.20
            path = "/health"
            status, _body = self.get(path, max(HEALTH_TIMEOUT, self.options.timeout))
        return "" if status == 200 else f"GET {path} answered {status}"

    def generate(self) -> dict[str, Any]:
        """Send a real request as a stream; raises ProbeError unless tokens came and the end was not an error."""
        options = self.options
        body = json.dumps(
            {
                "text": options.prompt,
                "sampling_params": {"max_new_tokens": options.max_tokens, "temperature": 0, "ignore_eos": True},
                "stream": True,
            }
        ).encode()
        begun = self.clock()
        times: list[tuple[float, int]] = []
        last: dict[str, Any] = {}
        request = self.request("POST", "/generate", options.timeout, body)
        with request as response:
            if response.status != 200:
                raise ProbeError(f"POST /generate answered {response.status}: {_body_text(b''.join(request.chunks()))}")
            for line in request.lines():
                event = _event(line)
                if event is None:
                    continue
                if "error" in event:
                    raise ProbeError(f"POST /generate answered an error: {_said(event['error'])}")
                last = event
                count = _int(_meta(event).get("completion_tokens")) or 0
                if count > (times[-1][1] if times else 0):
                    times.append((self.clock(), count))
        finish = _meta(last).get("finish_reason")
        kind = finish.get("type") if isinstance(finish, dict) else finish
        if kind in ("abort", "error"):
            why = finish.get("message", "") if isinstance(finish, dict) else ""
            raise ProbeError(f"POST /generate ended with {kind}: {_said(why)}")
        if times and kind is None:
            raise ProbeError(f"POST /generate broke off after {times[-1][1]} tokens")
        if not times:
            raise WrongAnswer("POST /generate answered 200 but no tokens came back")
        (first, at_first), (end, count) = times[0], times[-1]
        rate = (count - at_first) / (end - first) if count > at_first and end > first else None
        text = last.get("text")
        return {
            "first_token_seconds": round(first - begun, 3),
            "decode_tokens_per_second": round(rate, 1) if rate else None,
            "completion_tokens": count,
            "text": text[:MAX_TEXT] if isinstance(text, str) else None,
        }

    def info(self) -> dict[str, Any]:
        """Return what the server says it is; whatever cannot be had is None."""
        model = self.document("/model_info", "/get_model_info")
        server = self.document("/server_info", "/get_server_info")
        states = server.get("internal_states")
        inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        name = server.get("served_model_name") or model.get("served_model_name") or model.get("model_path")
        running = inner.get("effective_max_running_requests_per_dp") or server.get("max_running_requests")
        version = server.get("version")
        return {
            "model": name if isinstance(name, str) else None,
            "version": version if isinstance(version, str) else None,
            "kv_tokens": _int(server.get("max_total_num_tokens")),
            "max_running_requests": _int(running),
        }

    def document(self, *paths: str) -> dict[str, Any]:
        """Return the first of these documents that the server has, {} when there is none."""
        for path in paths:
            try:
                status, body = self.get(path, INFO_TIMEOUT)
                data = json.loads(body) if status == 200 else None
            except (ProbeError, ValueError):
                continue
            if isinstance(data, dict):
                return data
        return {}

    def get(self, path: str, timeout: float) -> tuple[int, bytes]:
        """Return status and body; raises ProbeError when there is no complete answer in time."""
        request = self.request("GET", path, timeout)
        with request as response:
            return response.status, b"".join(request.chunks())

    def request(self, method: str, path: str, timeout: float, body: bytes | None = None) -> _Request:
        """Prepare a request with this server's headers."""
        headers = {"Content-Type": "application/json"} if body else {}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        return _Request(self.host, self.port, method, path, timeout, body=body, headers=headers)


def _event(line: bytes) -> dict[str, Any] | None:
    """Read one line of an event stream: data that is an object, else None."""
    if not line.startswith(b"data:"):
        return None
    payload = line[5:].strip()
    if payload == b"[DONE]":
        return None
    try:
        data = json.loads(payload)
    except ValueError:
        raise WrongAnswer(f"POST /generate answered something else: {_body_text(payload)}") from None
    return data if isinstance(data, dict) else None


def _meta(event: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = event.get("meta_info")
    return meta if isinstance(meta, dict) else {}


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _said(what: object) -> str:
    if isinstance(what, dict):
        what = what.get("message", what)
    text = getattr(what, "strerror", None) or str(what) or type(what).__name__
    return " ".join(text.split())[:SAID]


def _body_text(body: bytes) -> str:
    try:
        data = json.loads(body)
    except ValueError:
        data = body.decode("utf-8", "replace")
    if isinstance(data, dict) and "error" in data:
        data = data["error"]
    return _said(data) if data else "no body"
