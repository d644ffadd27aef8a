"""A container with systemd on the GPU machine, the playbooks run in it, and the servers looked at from outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit import ENGINE, INBOX, KIT, MODELS

HERE = Path(__file__).resolve().parent
CODE = HERE.parent.parent
COMPILERS = {"nvcc", "cicc", "ptxas", "cudafe++", "ninja", "nvlink"}  # gcc alone: Triton's launchers, not a module
CACHE = "/var/cache/sglang"
SHARED = ("/opt/sglang", CACHE)  # by the containers of one GPU: CUDA_HOMEs, kernels
ACCOUNTS = ("passwd", "group", "shadow", "gshadow")
_KERNELS = (".so", ".cubin")


@dataclass
class Played:
    """One run of a playbook."""

    rc: int
    seconds: float
    changed: int
    stages: dict[str, float]
    tasks: list[tuple[float, str]] = field(default_factory=list)  # seconds from the start, name
    text: str = ""

    def at(self, words: str) -> float | None:
        """Return when the first task whose name has these words began."""
        return next((round(when, 1) for when, name in self.tasks if words in name), None)

    def to_dict(self) -> dict[str, Any]:
        """Return what the report keeps."""
        first = self.at("Remember what has answered")
        ended = self.tasks[-1][1] if self.tasks else ""
        data = {"rc": self.rc, "seconds": self.seconds, "changed": self.changed, "stages": self.stages}
        return {**data, "first_verified": first, "last_task": ended}


@dataclass
class Box:
    """One container: a host of the inventory."""

    name: str
    port: int = 30000

    @property
    def root(self) -> Path:
        """Where its root lies on the machine."""
        return Path(f"/mnt/{self.name}/root")

    def run(self, *argv: str, timeout: float = 120.0, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        words = [f"/mnt/{self.name}/run", *argv]
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)
        if check and done.returncode != 0:
            raise RuntimeError(f"{self.name}: {' '.join(argv)[:200]}: rc {done.returncode}: {done.stderr[-500:]}")
        return done

    def boot(self, like: Box | None = None) -> str:
        """Boot it, with the accounts and caches of another; returns systemd's state. A second call only asks."""
        if Path(f"/mnt/{self.name}/run").exists():
            return self.run("systemctl", "is-system-running").stdout.strip()
        folders = [str(KIT), str(ENGINE), str(MODELS), "/opt/proof"]
        folders += [f"{like.root}{folder}:{folder}" for folder in SHARED] if like else []
        # The overlay shows the machine's root file system alone, not what is mounted on it
        places = (sys.prefix, sys.base_prefix, os.environ.get("CUDA_HOME", ""))
        folders += [place for place in places if place and os.stat(place).st_dev != os.stat("/").st_dev]
        argv = ["bash", str(HERE / "boot-systemd"), self.name, str(INBOX / "systemd.tar.xz"), *folders]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{self.name} did not boot: {done.stderr[-1500:]}")
        for name in ACCOUNTS if like else ():
            shutil.copy(f"{like.root}/etc/{name}", f"{self.root}/etc/{name}")
        return done.stdout.split()[-1]

    def hide(self, folder: str) -> None:
        """Put an empty folder over one, so that the container is a host without it."""
        if self.run("mountpoint", "-q", folder).returncode != 0:
            self.run("mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "none", folder, check=True)

    def property(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "-p", name, "--value", unit).stdout.strip()

    def journal(self, unit: str) -> str:
        """Return what the last start of a unit said."""
        last = self.property(unit, "InvocationID")
        words = [f"_SYSTEMD_INVOCATION_ID={last}"] if last else ["-u", unit]
        return self.run("journalctl", "-o", "cat", "--no-pager", *words).stdout

    def play(
        self,
        playbook: str,
        variables: Mapping[str, Any],
        log: Path,
        *words: str,
        timeout: float = 1200.0,
        play: Mapping[str, Any] | None = None,
    ) -> Played:
        """Run one of the project's playbooks (or a play of the caller's) inside, against the container itself."""
        log.parent.mkdir(parents=True, exist_ok=True)
        host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ansible_become": False}
        inventory = {"all": {"children": {"sglang_servers": {"hosts": {self.name: {**host, **variables}}}}}}
        place = log.with_suffix(".inventory.yml")
        place.write_text(json.dumps(inventory, indent=1), encoding="utf-8")  # JSON is YAML
        place.chmod(0o644)
        stages = log.with_suffix(".stages.json")
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/root", "LC_ALL": "C.UTF-8",
            "PYTHONPATH": str(KIT / "ansible"), "PYTHONUNBUFFERED": "1", "GPUFLEET_STAGES": str(stages),
            "ANSIBLE_CONFIG": str(CODE / "ansible.cfg"), "ANSIBLE_CALLBACKS_ENABLED": "stages",
            "ANSIBLE_CALLBACK_PLUGINS": str(CODE / "scripts/tools/callbacks"), "ANSIBLE_NOCOLOR": "1",
        }  # fmt: skip
        argv = [f"/mnt/{self.name}/run", "env", "-i", *(f"{key}={value}" for key, value in environment.items())]
        argv += ["bash", "-c", f'cd {CODE} && exec "$@"', "play", sys.executable, "-m", "ansible", "playbook"]
        own = log.with_suffix(".play.yml")
        if play:
            own.write_text(json.dumps([play], indent=1), encoding="utf-8")
        argv += ["-i", str(place), str(own) if play else f"playbooks/{playbook}.yml", *words]
        started, tasks, lines = time.monotonic(), [], []
        with log.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            timer = threading.Timer(timeout, process.kill)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                now = time.monotonic() - started
                out.write(f"{now:7.1f} {line}")
                out.flush()
                lines.append(line)
                task = re.match(r"(?:TASK|RUNNING HANDLER) \[(.*)\]", line)
                if task:
                    tasks.append((now, task.group(1)))
            rc = process.wait()
            timer.cancel()
        text = "".join(lines)
        changed = re.findall(r"changed=(\d+)", text)
        seconds = json.loads(stages.read_text(encoding="utf-8")) if stages.exists() else {}
        return Played(
            rc, round(time.monotonic() - started, 1), int(changed[-1]) if changed else -1, seconds, tasks, text
        )


def ask(port: int, path: str, data: Mapping[str, Any] | None = None, timeout: float = 10.0) -> Any:
    """Ask a server; None when it does not answer with 200."""
    body = json.dumps(data).encode() if data is not None else None
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            said = reply.read().decode(errors="replace")
            return json.loads(said) if said.strip()[:1] in ("{", "[") else said
    except (OSError, ValueError, urllib.error.URLError):
        return None


def answers(port: int) -> bool:
    """Tell whether a server has answered a question with tokens."""
    question = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    reply = ask(port, "/generate", question, timeout=60.0)
    return isinstance(reply, dict) and int(reply.get("meta_info", {}).get("completion_tokens", 0)) > 0


def wait_for_answer(port: int, alive: Callable[[], bool], timeout: float = 480.0) -> float | None:
    """Wait until a server has answered; returns the seconds, None when it died or did not."""
    started = time.monotonic()
    while time.monotonic() - started < timeout:
        if ask(port, "/health", timeout=5.0) is not None and answers(port):
            return round(time.monotonic() - started, 1)
        if not alive():
            return None
        time.sleep(0.25)
    return None


def kernels(since: float, folder: Path) -> list[str]:
    """Return the compiled modules in a cache that are newer than a moment of the wall clock."""
    found = []
    for path in folder.rglob("*"):
        try:
            if path.suffix in _KERNELS and "triton" not in path.parts and path.stat().st_mtime > since:
                found.append(str(path.relative_to(folder)))
        except OSError:
            continue
    return sorted(found)


class Compilers(threading.Thread):
    """Watch which units run compilers: by the processes in their cgroups, five times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: dict[str, set[str]] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        """Look until told to end."""
        while not self.ended.wait(0.2):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    name = (process / "comm").read_text(encoding="utf-8").strip()
                    if name in COMPILERS:
                        cgroup = (process / "cgroup").read_text(encoding="utf-8").strip().rpartition("/")[2]
                        self.seen.setdefault(cgroup, set()).add(name)
                except OSError:
                    continue

    def servers(self) -> dict[str, list[str]]:
        """Return the compilers that servers ran, by unit."""
        return {unit: sorted(names) for unit, names in self.seen.items() if unit.startswith("sglang@")}
