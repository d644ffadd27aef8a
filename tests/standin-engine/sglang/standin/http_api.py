"""The HTTP side: the engine's paths, bodies and states."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang import __version__
from sglang.standin.replay import say

if TYPE_CHECKING:
    from sglang.standin.engine import Engine

BODIES = Path(__file__).parent / "http"
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "answers", "word", "by", "word")
OPEN_PATHS = ("/health", "/ready", "/metrics")
CONTEXT = 2048


def body(name: str) -> Any:
    """Return a recorded JSON body."""
    return json.loads((BODIES / f"{name}.json").read_text(encoding="utf-8"))


class Server(ThreadingHTTPServer):
    """A socket bound when it is made, like uvicorn's."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        if ":" in engine.args.host:
            self.address_family = socket.AF_INET6
        super().__init__((engine.args.host, engine.args.port), Handler)

    def server_bind(self) -> None:
        """Bind without the name look-up that http.server makes."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.engine.args.host, self.engine.args.port

    def say_prefill(self, tokens: int) -> None:
        """Log a batch as the scheduler does."""
        kind = "cpu" if self.engine.args.device == "cpu" else "cuda"
        say(
            f"Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, token usage: 0.00, #running-req: 0, "
            f"#queue-req: 0, #pending-token: 0, {kind} graph: False, input throughput (token/s): 24.26"
        )


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    @property
    def engine(self) -> Engine:
        """The server's state."""
        return self.server.engine

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """http.server's own log is replaced by uvicorn's access line."""

    def send(self, status: int, payload: Any = None, kind: str = "application/json") -> None:
        """Answer with JSON, bytes or nothing, and log it as uvicorn does."""
        data = payload if isinstance(payload, bytes) else b"" if payload is None else json.dumps(payload).encode()
        self.start(status)
        self.send_header("content-length", str(len(data)))
        if data:
            self.send_header("content-type", kind)
        self.send_header("vary", "Origin")
        self.end_headers()
        self.wfile.write(data)

    def start(self, status: int) -> None:
        """Status line and the access log."""
        self.send_response_only(status)
        self.send_header("date", self.date_time_string())
        self.send_header("server", "uvicorn")
        if self.engine.args.log_level_http not in ("warning", "error", "critical"):
            reason = self.responses[status][0]
            peer = f"{self.client_address[0]}:{self.client_address[1]}"
            say(f'INFO:     {peer} - "{self.command} {self.path} HTTP/1.1" {status} {reason}')

    def allowed(self) -> bool:
        """Check the API key, from which health, readiness and metrics are free."""
        key = self.engine.args.api_key
        if not key or self.path.startswith(OPEN_PATHS) or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.send(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        """Everything that only looks."""
        if not self.allowed():
            return
        path = self.path.partition("?")[0]
        engine = self.engine
        model = engine.args.served_model_name or engine.args.model_path
        if path in ("/health", "/health_generate"):
            self.health(path)
        elif path in ("/ready", "/ping"):
            self.send(200 if engine.state == "Up" and not engine.draining else 503)
        elif path == "/v1/models":
            answer = body("v1_models")
            answer["data"][0].update(id=model, root=model, created=int(time.time()), max_model_len=self.context())
            self.send(200, answer)
        elif path.startswith("/v1/models/"):
            name = path[len("/v1/models/") :]
            error = {"message": f"The model '{name}' does not exist", "type": "invalid_request_error", "param": "model"}
            self.send(404, {"error": {**error, "code": "model_not_found"}})
        elif path in ("/model_info", "/get_model_info"):
            args = engine.args
            self.send(200, body("model_info") | {
                "model_path": args.model_path, "served_model_name": model, "load_format": args.load_format,
                "tokenizer_path": args.tokenizer_path or args.model_path, "reasoning_parser": args.reasoning_parser,
                "tool_call_parser": args.tool_call_parser, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
            })  # fmt: skip
        elif path in ("/server_info", "/get_server_info"):
            self.hang_while(lambda: engine.dead or engine.state == "Starting")
            extra = {"version": __version__, "max_total_num_tokens": engine.kv_tokens}
            extra["max_req_input_len"] = self.context() - 6
            options = {key: value for key, value in vars(engine.args).items() if key != "config"}
            self.send(200, {**options, **body("server_info"), **extra, "served_model_name": model})
        elif path == "/v1/loads":
            self.hang_while(lambda: engine.dead)
            self.send(200, self.loads())
        elif path == "/metrics" and engine.args.enable_metrics:
            self.send(200, self.metrics(model).encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/":
            self.send(200, "SGLang is running")
        elif path in POST_PATHS:
            self.send(405, {"detail": "Method Not Allowed"})
        else:
            self.send(404, {"detail": "Not Found"})

    def context(self) -> int:
        """Tokens a request may have."""
        return int(self.engine.args.context_length or CONTEXT)

    def hang_while(self, stuck: Any, limit: float = float("inf")) -> bool:
        """Wait as a request to a hung scheduler does; True when the limit passed first."""
        stop = time.monotonic() + limit
        while stuck():
            if time.monotonic() >= stop:
                return True
            time.sleep(0.05)
        return False

    def health(self, path: str) -> None:
        """A one-token request, polled once a second; a failure marks the server UnHealthy, a success Up."""
        engine = self.engine
        if engine.draining:
            say("Health check request received during shutdown. Returning 503.")
        if engine.draining or engine.state == "Starting":
            self.send(503)
        elif path == "/health" and os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION") == "false":
            self.send(200)
        elif self.hang_while(lambda: engine.dead, float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))):
            engine.state = "UnHealthy"
            self.send(503)
        else:
            self.server.say_prefill(1)
            time.sleep(1.0)
            engine.state = "Up"
            self.send(200)

    def loads(self) -> Any:
        """Current load."""
        answer = body("v1_loads")
        with self.engine.lock:
            running = len(self.engine.in_flight)
            if self.engine.moving:
                answer["loads"][0]["decode_moments"] = [time.time()] * 6
        answer["version"] = __version__
        answer["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%S.000000+00:00", time.gmtime())
        answer["loads"][0].update(
            timestamp=time.time(), num_running_reqs=running, max_total_num_tokens=self.engine.kv_tokens,
            max_running_requests=self.engine.max_running,
        )  # fmt: skip
        return answer

    def metrics(self, model: str) -> str:
        """Recorded metrics with this server's name, pool and load."""
        with self.engine.lock:
            running = len(self.engine.in_flight)
        now = {"sglang:num_running_reqs{": running, "sglang:max_total_num_tokens{": self.engine.kv_tokens}
        out = []
        for line in (BODIES / "metrics.txt").read_text(encoding="utf-8").splitlines():
            for start, value in now.items():
                if line.startswith(start):
                    line = f"{line.rpartition(' ')[0]} {float(value)}"
            out.append(line.replace("/srv/m-llama", model))
        return "\n".join(out) + "\n"

    def do_POST(self) -> None:
        """Generate."""
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        if not self.allowed():
            return
        path = self.path.partition("?")[0]
        if path not in POST_PATHS:
            self.send(404, {"detail": "Not Found"})
            return
        try:
            request = json.loads(data)
            prompt = POST_PATHS[path](request)
        except (ValueError, KeyError, TypeError, AttributeError):
            self.send(400, {"error": {"message": "Either text, input_ids or input_embeds should be provided."}})
            return
        rid = uuid.uuid4().hex
        with self.engine.lock:
            self.engine.in_flight.add(rid)
        try:
            self.answer(path, request, prompt, rid)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with self.engine.lock:
                self.engine.in_flight.discard(rid)
                self.engine.moving.discard(rid)

    def answer(self, path: str, request: dict[str, Any], prompt: int, rid: str) -> None:
        """Produce tokens at a steady rate, streamed or at once."""
        engine = self.engine
        self.hang_while(lambda: engine.dead)
        self.server.say_prefill(prompt)
        self.hang_while(lambda: "stall" in engine.faults)
        with engine.lock:
            engine.moving.add(rid)
            if "leak" in engine.faults:  # so many MiB with each request
                engine.leaked.append(b"x" * int(engine.faults["leak"] * (1 << 20)))
        if "garbage" in engine.faults:
            self.send(200, b"\x00\x01 not what you asked for \xff")
            return
        sampling = request.get("sampling_params") or {}
        wanted = sampling.get("max_new_tokens") if path == "/generate" else None
        wanted = wanted or request.get("max_completion_tokens") or request.get("max_tokens") or 128
        count = 0 if "empty-answer" in engine.faults else min(int(wanted), self.context())
        rate = engine.faults.get("tokens-per-second") or float(os.environ.get("STANDIN_TOKENS_PER_SECOND", "200"))
        make = {"/generate": self.generate, "/v1/chat/completions": self.chat}.get(path, self.completion)
        if path == "/generate" and isinstance(request.get("text"), list):
            time.sleep(count / rate)
            self.send(200, [self.sample(request, rid, count) for _text in request["text"]])
            return
        if not request.get("stream"):
            time.sleep(count / rate)
            self.send(200, make(request, rid, prompt, count, True, False))
            return
        self.start(200)
        for key, value in (("content-type", "text/event-stream; charset=utf-8"), ("vary", "Origin")):
            self.send_header(key, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.events(make, request, rid, prompt, count, rate):
            self.chunk(f"data: {event}\n\n".encode())
        self.wfile.write(b"0\r\n\r\n")

    def sample(self, request: Any, rid: str, count: int) -> dict[str, Any]:
        """One of several answers of /generate, with log probabilities of tokens drawn at random."""
        answer = dict(self.generate(request, rid, 5, count, True, False))
        draw = random.Random(1 if "same-samples" in self.engine.faults else None)
        ids = [draw.randrange(300, 50000) for _token in range(count)]
        value = None if "nan-logits" in self.engine.faults else -6.5
        answer["output_ids"] = ids
        answer["meta_info"]["output_token_logprobs"] = [[value, token, None] for token in ids]
        return answer

    def events(self, make: Any, request: Any, rid: str, prompt: int, count: int, rate: float) -> Iterator[str]:
        """Yield one event a token (a role first and usage last for chat), then [DONE]."""
        is_chat = make == self.chat
        if is_chat:
            yield json.dumps(make(request, rid, prompt, -1, False, True))
        for done in range(1, count + 1):
            time.sleep(1 / rate)
            yield json.dumps(make(request, rid, prompt, done, done == count and not is_chat, True))
        if is_chat or not count:
            yield json.dumps(make(request, rid, prompt, 0, True, True))
        if make != self.generate and (request.get("stream_options") or {}).get("include_usage"):
            last = make(request, rid, prompt, count, True, False)
            kind = {"chat.completion": "chat.completion.chunk"}.get(last["object"], last["object"])
            keep = {key: last[key] for key in ("id", "created", "model", "usage")}
            yield json.dumps({**keep, "object": kind, "choices": []})
        yield "[DONE]"

    def chunk(self, data: bytes) -> None:
        """One chunk of a streamed body."""
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def generate(self, _request: Any, rid: str, prompt: int, count: int, last: bool, stream: bool) -> Any:
        """A body of /generate: text so far."""
        answer = copy.deepcopy(body("generate"))
        ids = [300 + i % len(WORDS) for i in range(count)]
        answer.update(text=text(0, count), output_ids=ids)
        now = time.time()
        meta = answer["meta_info"]
        meta.update(
            id=rid, prompt_tokens=prompt, completion_tokens=count, cached_tokens=0, forward_entry_time=now,
            prefill_finished_time=now, finish_reason={"type": "length", "length": count} if last else None,
        )  # fmt: skip
        meta["weight_versions"] = [{"version": "default", "start": 0, "end": count}]
        if stream and not last:
            only_last = "e2e_latency decode_throughput first_token_latency request_finished_ts weight_versions"
            for key in only_last.split(" "):
                meta.pop(key, None)
        return answer

    def chat(self, request: Any, rid: str, prompt: int, count: int, last: bool, stream: bool) -> Any:
        """A body of /v1/chat/completions, or one delta of it (count -1: the role, last: the end)."""
        finish = "length" if last else None
        if not stream:
            answer = copy.deepcopy(body("chat"))
            answer.update(head(request, rid), usage=usage(prompt, count))
            said = {"content": text(0, count)}
            if "swallowed" in self.engine.faults:  # a reasoning parser that never sees the end of the thinking
                said = {"content": None, "reasoning_content": text(0, count)}
                answer["choices"][0]["finish_reason"] = "stop"
            answer["choices"][0]["message"].update(said)
            answer["metadata"]["weight_versions"][0]["end"] = count
            return answer
        delta: dict[str, Any] = {"reasoning_content": None}
        if count == -1:
            delta.update(role="assistant", content="")
        elif not last:
            delta["content"] = text(count - 1, count)
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        return {**head(request, rid), "object": "chat.completion.chunk", "choices": [choice]}

    def completion(self, request: Any, rid: str, prompt: int, count: int, last: bool, stream: bool) -> Any:
        """A body of /v1/completions, or one piece of it."""
        answer = copy.deepcopy(body("completions"))
        answer.update(head(request, rid), usage=usage(prompt, count))
        start = max(count - 1, 0) if stream else 0
        answer["choices"][0].update(text=text(start, count), finish_reason="length" if last else None)
        if stream:
            del answer["usage"], answer["metadata"]
        else:
            answer["metadata"]["weight_versions"][0]["end"] = count
        return answer


def text(start: int, stop: int) -> str:
    """The words a server says, token by token."""
    return "".join(f" {WORDS[i % len(WORDS)]}" for i in range(start, stop))


def head(request: Any, rid: str) -> dict[str, Any]:
    """What every OpenAI body starts with."""
    return {"id": rid, "created": int(time.time()), "model": request.get("model", "default")}


def usage(prompt: int, count: int) -> dict[str, Any]:
    """Token counts as the OpenAI bodies have them."""
    return body("chat")["usage"] | {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def _words(value: Any) -> int:
    return len(value) if isinstance(value, list) else max(1, len(str(value).split()))


POST_PATHS = {
    "/generate": lambda r: _words(r["text"] if r.get("text") is not None else r["input_ids"]),
    "/v1/chat/completions": lambda r: sum(_words(m["content"]) + 4 for m in r["messages"]),
    "/v1/completions": lambda r: _words(r["prompt"]),
}
