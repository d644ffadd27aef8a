#!/usr/bin/python3
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A server that logs and answers like SGLang, as far as sglang_health looks. usage: standin.py PORT FAULT"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, FAULT = int(sys.argv[1]), sys.argv[2]
READY = threading.Event()
INFO = {
    "/model_info": {"model_path": "/srv/model"},
    "/server_info": {"version": "0.0.1", "max_total_num_tokens": 4096, "served_model_name": "tiny"},
}


def log(text):
    """Print a line as the engine does."""
    print(time.strftime("[%Y-%m-%d %H:%M:%S] ") + text, flush=True)


class Handler(BaseHTTPRequestHandler):
    """What is asked, and no more."""

    def log_message(self, *_args):
        """Say nothing."""

    def do_GET(self):
        """/ready and the two documents."""
        if self.path == "/ready":
            self.reply(200 if READY.is_set() else 503, b"")
        elif self.path in INFO:
            self.reply(200, json.dumps(INFO[self.path]).encode())
        else:
            self.reply(404, b"")

    def do_POST(self):
        """/generate as an event stream."""
        self.rfile.read(int(self.headers["Content-Length"]))
        if FAULT == "empty":
            self.reply(200, b"data: [DONE]\n\n")
            return
        self.send_response(200)
        self.end_headers()
        for count in range(1, 5):
            finish = {"type": "length", "length": 4} if count == 4 else None
            event = {"text": "ok " * count, "meta_info": {"completion_tokens": count, "finish_reason": finish}}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            time.sleep(0.02)

    def reply(self, status, body):
        """Send one answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if FAULT == "exit2":
    print("usage: sglang serve [-h] [--model-path MODEL_PATH]\nsglang serve: error: unrecognized arguments: --nope")
    sys.exit(2)
log("server_args={'api_key': None}")
time.sleep(0.5)
log("Load weight begin. avail mem=20.58 GB")
time.sleep(0.5)
if FAULT == "die":
    print('Traceback (most recent call last):\n  File "/x/loader.py", line 5, in load\n    raise RuntimeError(')
    print("RuntimeError: Cannot find any model weights with `/srv/model`\n", flush=True)
    log("Received sigquit from a child process. It usually means the child failed.")
    sys.exit(1)
log("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size: 0.00 GB, V size: 0.00 GB")
log("max_total_num_tokens=4096, chunked_prefill_size=4096, max_running_requests=8, context_len=2048")
try:
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
except OSError:
    log(f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {PORT}): address already in use")
    log("The server is fired up and ready to roll!")
    time.sleep(60)  # the engine hangs for 122 s
    sys.exit(1)
threading.Thread(target=server.serve_forever, daemon=True).start()
log(f"INFO:     Uvicorn running on http://127.0.0.1:{PORT} (Press CTRL+C to quit)")
time.sleep(1)
READY.set()
log("The server is fired up and ready to roll!")
threading.Event().wait()
