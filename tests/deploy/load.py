"""A client as a router is: it sends requests to several servers, none that is draining, and tries once more elsewhere.

Runs on the managed host (the servers listen on loopback) with nothing but Python's standard library:
python3 load.py SECONDS PORT PORT PORT, or until its standard input ends. Prints one JSON object with its counts.
"""

from __future__ import annotations

import collections
import http.client
import json
import os
import random
import sys
import threading
import time

DRAINING = "/run/gpufleet-sglang/draining"
TOKENS = int(os.environ.get("LOAD_TOKENS", "8"))
THREADS = int(os.environ.get("LOAD_THREADS", "4"))
LIMIT = float(os.environ.get("LOAD_LIMIT", "120"))  # s for one request

counts: collections.Counter[str] = collections.Counter()
by_port: collections.Counter[int] = collections.Counter()
failures: list[str] = []
lock = threading.Lock()
stop = threading.Event()


def draining() -> set[int]:
    """Ports of the servers that want no new requests."""
    try:
        return {int(name) for name in os.listdir(DRAINING) if name.isdigit()}
    except FileNotFoundError:
        return set()


def ask(port: int) -> str:
    """Send one request; returns "" when it was answered with all its tokens, else why not."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    body = {"text": f"hello {random.random()}", "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True}}
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            return f"status {answer.status}"
        got = json.loads(said)["meta_info"]["completion_tokens"]
        return "" if got == TOKENS else f"{got} of {TOKENS} tokens"
    except (OSError, http.client.HTTPException, ValueError, KeyError) as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        connection.close()


def one(ports: list[int]) -> None:
    """One request: a server that is not draining, and once more on another one that is not."""
    out = draining()
    first = random.choice([port for port in ports if port not in out] or ports)
    why = ask(first)
    retried_to = None
    if why:
        others = [port for port in ports if port != first and port not in draining()]
        if others:
            retried_to = random.choice(others)
            again = ask(retried_to)
        else:
            again = "no other server that is not draining"
    with lock:
        counts["requests"] += 1
        counts["sent_to_draining"] += first in out
        by_port[first] += 1
        if not why:
            return
        counts["retries"] += retried_to is not None
        then = f"; then {retried_to}: {again}" if again else ""
        failures.append(f"{time.strftime('%H:%M:%S')} {first}: {why}{then}")
        counts["failed"] += bool(again)


def work(ports: list[int]) -> None:
    """Ask without a pause."""
    while not stop.is_set():
        one(ports)


def main() -> None:
    """Run for so many seconds, or until standard input ends."""
    seconds, ports = float(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    threads = [threading.Thread(target=work, args=(ports,)) for _each in range(THREADS)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    if seconds:
        time.sleep(seconds)
    else:
        sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    names = ("requests", "failed", "retries", "sent_to_draining")
    result = {**{name: counts[name] for name in names}, "by_port": by_port, "tries_that_failed": failures[:50]}
    print(json.dumps({**result, "seconds": round(time.monotonic() - begun, 1)}))


if __name__ == "__main__":
    main()
