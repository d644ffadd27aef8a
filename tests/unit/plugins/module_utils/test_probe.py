# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe import Probe, ProbeOptions

SERVER_INFO = {
    "served_model_name": "m",
    "version": "0.5.23",
    "max_total_num_tokens": 8192,
    "max_running_requests": None,
    "internal_states": [{"effective_max_running_requests_per_dp": 64}],
}


def sse(*events):
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)


def token(count, finish=None, text="x"):
    return {"text": text * count, "meta_info": {"completion_tokens": count, "finish_reason": finish}}


LENGTH = {"type": "length", "length": 3}
GOOD = sse(token(1), token(2), token(3, LENGTH), b"[DONE]")


class Engine(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, **answers):
        self.answers = {
            "/ready": (200, b""),
            "/generate": (200, GOOD),
            "/model_info": (200, b'{"model_path": "/m"}'),
            "/server_info": (200, json.dumps(SERVER_INFO).encode()),
            **{"/" + key: value for key, value in answers.items()},
        }
        self.asked = []
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, request, client_address):
        pass  # clients that hang up are what some of the cases are about


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.asked.append((self.command, self.path, self.headers.get("authorization")))
        answer = self.server.answers.get(self.path, (404, b"not found"))
        if callable(answer):
            answer(self)
            return
        status, body = answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


@contextmanager
def engine(**answers):
    server = Engine(**answers)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def probe(port, **options):
    return Probe("127.0.0.1", port, ProbeOptions(**{"timeout": 1.0, **options})).run()


def hang(handler):
    time.sleep(8)


def drip_header(handler):
    for _n in range(90):
        handler.connection.sendall(b"H")
        time.sleep(0.1)


def drip_body(handler):
    handler.send_response(200)
    handler.end_headers()
    for _n in range(90):
        handler.wfile.write(b":\n")
        time.sleep(0.1)


def slow_tokens(handler):
    handler.send_response(200)
    handler.end_headers()
    for count in (1, 2, 3):
        time.sleep(0.1)
        handler.wfile.write(sse(token(count, LENGTH if count == 3 else None)))


def test_ready(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # would refuse
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with engine(generate=slow_tokens) as (server, port):
        result = probe(port, api_key="k")
    assert result.ok and not result.reason
    assert (result.model, result.version, result.kv_tokens, result.max_running_requests) == ("m", "0.5.23", 8192, 64)
    assert (result.completion_tokens, result.text) == (3, "xxx")
    assert 0.08 < result.first_token_seconds < 5
    assert 1 < result.decode_tokens_per_second < 12
    assert [path for _method, path, _key in server.asked] == [
        "/ready",
        "/generate",
        "/generate",
        "/model_info",
        "/server_info",
    ]
    assert {key for _method, _path, key in server.asked} == {"Bearer k"}


def test_older_engine_without_ready_and_new_names():
    old = {"health": (200, b""), "ready": (404, b""), "server_info": (404, b""), "model_info": (404, b"")}
    with engine(
        **old,
        get_model_info=(200, b'{"model_path": "/m"}'),
        get_server_info=(200, b'{"max_total_num_tokens": 5, "max_running_requests": 7}'),
    ) as (_server, port):
        result = probe(port)
    assert (result.ok, result.model, result.kv_tokens, result.max_running_requests) == (True, "/m", 5, 7)


@pytest.mark.parametrize(
    ("answers", "starting", "reason"),
    [
        ({"ready": (503, b"")}, True, "GET /ready answered 503"),
        ({"ready": (404, b""), "health": (503, b"")}, True, "GET /health answered 503"),
        ({"ready": (404, b"")}, False, "GET /health answered 404"),
        ({"ready": (401, b"")}, False, "GET /ready answered 401"),
        ({"generate": (401, b'{"error":"Unauthorized"}')}, False, "POST /generate answered 401: Unauthorized"),
        ({"generate": (400, b'{"error":{"message":"bad"}}')}, False, "POST /generate answered 400: bad"),
        ({"generate": (500, b"")}, False, "POST /generate answered 500: no body"),
        ({"generate": (200, b"")}, False, "POST /generate answered 200 but no tokens came back"),
        ({"generate": (200, b"<html>hello</html>")}, False, "POST /generate answered 200 but no tokens came back"),
        ({"generate": (200, sse(b"[DONE]"))}, False, "POST /generate answered 200 but no tokens came back"),
        ({"generate": (200, sse(token(0, LENGTH)))}, False, "POST /generate answered 200 but no tokens came back"),
        ({"generate": (200, sse(token(1)))}, False, "POST /generate broke off after 1 tokens"),
        ({"generate": (200, sse(b"{garbage"))}, False, "POST /generate answered something else: {garbage"),
        ({"generate": (200, sse({"error": {"message": "oom"}}))}, False, "POST /generate answered an error: oom"),
        (
            {"generate": (200, sse(token(1, {"type": "abort", "message": "why"})))},
            False,
            "POST /generate ended with abort: why",
        ),
        ({"generate": hang}, False, "POST /generate: no answer within 1 s"),
        ({"generate": drip_header}, False, "POST /generate: no answer within 1 s"),
        ({"generate": drip_body}, False, "POST /generate: the answer was not complete within 1 s"),
    ],
)
def test_not_ready(answers, starting, reason):
    begun = time.monotonic()
    with engine(**answers) as (_server, port):
        result = probe(port)
    assert (result.ok, result.starting, result.reason) == (False, starting, reason)
    assert time.monotonic() - begun < 7


@pytest.mark.parametrize("info", [(200, b"[1]"), (200, b"nonsense"), (500, b"")])
def test_information_is_optional(info):
    with engine(model_info=info, server_info=info) as (_server, port):
        result = probe(port)
    assert (result.ok, result.model, result.kv_tokens) == (True, None, None)


def test_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = probe(port)
    assert (result.ok, result.starting, result.reason) == (False, True, "GET /ready: Connection refused")


def test_not_http():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            client, _address = server.accept()
            client.recv(1000)
            client.sendall(b"SSH-2.0-OpenSSH\r\n")
            client.close()

        threading.Thread(target=answer, daemon=True).start()
        result = probe(server.getsockname()[1])
    assert not result.ok and result.reason.startswith("GET /ready: ")
