# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Taking a server out of service before it is restarted: a mark that clients read, a hook, and patience.

SGLang itself still accepts requests while it drains, so whoever sends them must be told beforehand.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ansible_collections.gpufleet.sglang.plugins.module_utils._hostlock import sign_of_life
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Instance
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner

if TYPE_CHECKING:
    from ansible_collections.gpufleet.sglang.plugins.module_utils._units import Server

# What /v1/loads counts: none of it moves in an engine that stands still
MOVING = ("num_used_tokens", "total_prefill_uncached_tokens", "decode_moments", "num_running_reqs")
FOLDER = "/run/gpufleet-sglang/draining"  # one file per server that wants no new requests, named by its port


class DrainError(Exception):
    """The hook that takes servers out of service failed; the message has its words."""


def mark(instance: Instance, since: str, folder: str = FOLDER) -> bool:
    """Say that a server wants no new requests; returns whether that is new."""
    path = Path(folder, str(instance.port))
    if path.exists():
        return False
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    for place in (path.parent, path.parent.parent):
        place.chmod(0o755)
    text = json.dumps({"gpu": instance.gpu, "unit": instance.unit, "port": instance.port, "since": since}) + "\n"
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.chmod(0o644)
    part.replace(path)
    return True


def unmark(port: int, folder: str = FOLDER) -> bool:
    """Say that a server wants requests again; returns whether it was marked."""
    try:
        os.unlink(Path(folder, str(port)))
    except OSError:
        return False
    return True


def marked(folder: str = FOLDER) -> list[int]:
    """Return the ports of the servers that are marked."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdigit())
    except OSError:
        return []


def hook(runner: Runner, command: Sequence[str], what: str, instance: Instance) -> None:
    """Run the user's command (a load balancer's client) with drain or open, and the server's port."""
    if not command:
        return
    environment = {"SGLANG_GPU": str(instance.gpu), "SGLANG_PORT": str(instance.port), "SGLANG_UNIT": instance.unit}
    done = runner.run([*command, what, str(instance.port)], timeout=60.0, env=environment)
    if done.rc != 0:
        said = (done.stderr or done.stdout).strip()
        raise DrainError(f"{instance.unit}: {' '.join(command)} {what} {instance.port} failed (rc {done.rc}): {said}")


def requests_in(payload: Any) -> int | None:
    """Return how many requests /v1/loads tells of; None when it doesn't say."""
    names = ("num_running_reqs", "num_waiting_reqs")
    found = _loads(payload)
    return sum(int(item.get(name) or 0) for item in found for name in names) if found else None


def sign_in(payload: Any) -> str:
    """Return what in /v1/loads changes while an engine works on requests; '' when it doesn't say."""
    found = _loads(payload)
    return json.dumps([[item.get(name) for name in MOVING] for item in found]) if found else ""


def _loads(payload: Any) -> list[dict[str, Any]]:
    loads = payload.get("loads") if isinstance(payload, dict) else None
    items = loads if isinstance(loads, list) else []
    return [item for item in items if isinstance(item, dict) and "num_running_reqs" in item]


def load_of(instance: Instance, timeout: float = 3.0) -> Any:
    """Ask a server for its load; None when it does not tell (an old engine, or none that answers)."""
    connection = http.client.HTTPConnection(instance.probe_host, instance.port, timeout=timeout)
    try:
        connection.request("GET", "/v1/loads")
        answer = connection.getresponse()
        return json.loads(answer.read(1 << 20)) if answer.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def wait_idle(
    instances: Sequence[Instance],
    begun: float,
    grace: float,
    limit: float,
    end: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    ask: Callable[[Instance], Any] = load_of,
) -> tuple[bool, dict[str, Any]]:
    """Wait until no server has a request, until limit after begun, or until end (of this slice).

    grace: seconds after begun in which a client that looked before the mark may still send. A server that does not
    tell counts as idle: the engine's own stop waits for what it has. Returns whether waiting is over, and the loads.
    """
    while True:
        loads = {item.unit: ask(item) for item in instances}
        now = clock()
        idle = now - begun >= grace and not any(map(requests_in, loads.values()))
        if idle or now - begun >= limit:
            return True, loads
        if now >= end:
            return False, loads
        sleep(0.3)


def take_out_or_in(
    runner: Runner, params: Mapping[str, Any], servers: Sequence[Server], check_mode: bool
) -> dict[str, Any]:
    """Do what the module's states drained and open ask for; returns its result."""
    instances = [server.instance for server in servers if server.instance is not None]
    if check_mode:
        return {"changed": False, "drained": True, "requests": {}}
    if params["state"] == "open":
        for item in instances:
            if item.port in marked():
                hook(runner, params["drain_command"], "open", item)
                unmark(item.port)
        return {"changed": False}
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for item in instances:
        if mark(item, since):
            hook(runner, params["drain_command"], "drain", item)
    sign_of_life()
    now = time.monotonic()
    done, loads = wait_idle(
        instances,
        now - params["begun"],
        params["drain_grace"],
        params["drain_timeout"],
        now + params["slice_seconds"],
        time.monotonic,
        time.sleep,
    )
    counts = {unit: requests_in(load) for unit, load in loads.items()}
    signs = {unit: sign_in(loads[unit]) for unit, count in counts.items() if count}
    return {"changed": False, "drained": done, "requests": counts, "signs": signs}
