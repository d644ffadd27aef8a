# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""A warm-up that outlives the connection: a transient unit, or without systemd a process of its own session."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import (
    _finding,
    _jit_bound,
    _jit_calls,
    _jit_checks,
    _jit_children,
    _jit_shares,
    _jit_worker,
    _toolkit_elf,
    _toolkit_errors,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileSpec, write_files
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import SystemdError, show

SHIPPED = (
    _finding,
    _jit_bound,
    _jit_calls,
    _jit_checks,
    _jit_children,
    _jit_shares,
    _jit_worker,
    _toolkit_elf,
    _toolkit_errors,
)
PACKAGE = "ansible_collections/gpufleet/sglang/plugins/module_utils"
CODE = (
    "import sys; sys.path.insert(0, {folder!r}); "
    "from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_worker import main; "
    "sys.exit(main(sys.argv[1:]))"
)
ENDING = 30.0  # s from its result to its end, at the most
LARGEST = 8 << 20  # bytes of a result that are read
# A warm-up is no server: it gives way to those that run.
# OOMPolicy: when memory ends one compiler dies, and the run goes on with fewer.
PROPERTIES = ("Nice=10", "UMask=0077", "OOMPolicy=continue", "CollectMode=inactive-or-failed")


class JobError(Exception):
    """The warm-up could not be started; the message names the cause."""


@dataclass(frozen=True)
class Look:
    """What a look at a job shows."""

    alive: bool
    lines: tuple[str, ...] = ()
    result: Mapping[str, Any] | None = None
    early: bool = False  # a server may start: it would only wait for what is being built


class Job:
    """The one warm-up of a cache; its files lie where only its owner can swap them."""

    def __init__(self, runner: Runner, cache_dir: str, user: str = "") -> None:
        self.runner = runner
        self.user = user if os.geteuid() == 0 else ""
        digest = hashlib.sha256(cache_dir.encode()).hexdigest()[:10]
        self.unit = f"gpufleet-jit-{digest}.service"
        base = "/run" if os.geteuid() == 0 else tempfile.gettempdir()
        self.folder = Path(base, f"gpufleet-jit-{os.geteuid()}-{digest}")
        self.out = self.folder / "out"
        self.systemd = os.geteuid() == 0 and os.path.isdir("/run/systemd/system")

    def prepare(self) -> None:
        """Make the folders and put the worker's code there."""
        self.folder.mkdir(mode=0o755, exist_ok=True)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise JobError(f"{self.folder} is not a folder of ours alone: remove it")
        names = {module: module.__name__.rpartition(".")[2] for module in SHIPPED}
        write_files([FileSpec(f"{self.folder}/{PACKAGE}/{name}.py", _source(module)) for module, name in names.items()])
        for base, folders, _files in os.walk(self.folder):  # whatever the umask is: another user reads the code
            folders[:] = [name for name in folders if base != str(self.folder) or name != self.out.name]
            os.chmod(base, 0o755)
        self.out.mkdir(mode=0o755, exist_ok=True)
        if self.user:
            account = pwd.getpwnam(self.user)
            os.chown(self.out, account.pw_uid, account.pw_gid)

    def start(self, request: Mapping[str, Any], python: str, environment: Mapping[str, str]) -> bool:
        """Start it, unless one is at work; what an earlier one left is cleared away. Raises JobError."""
        self.prepare()
        with (self.folder / "start.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.alive() and not self._ending():
                return False
            self._start(request, python, environment)
        return True

    def _ending(self) -> bool:
        """Wait for one that has written its result and is about to end: its result is no answer to a new question."""
        end = time.monotonic() + ENDING
        while self.look().result is not None and time.monotonic() < end:
            if not self.alive():
                return True
            time.sleep(0.05)
        return False

    def _start(self, request: Mapping[str, Any], python: str, environment: Mapping[str, str]) -> None:
        for path in self.out.iterdir():
            path.unlink()
        argv = ["-c", CODE.format(folder=str(self.folder)), f"{self.folder}/request.json"]
        whole = {**request, "out": str(self.out), "argv": argv}
        write_files([FileSpec(f"{self.folder}/request.json", json.dumps(whole))])
        command = [python, *argv]
        if self.systemd:
            self._start_unit(command, environment)
        else:
            self._start_process(command, environment)

    def _start_unit(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.runner.run(["systemctl", "reset-failed", self.unit])
        words = ["systemd-run", f"--unit={self.unit}", "--quiet", "--no-ask-password"]
        words += ["--description=Kernels for the SGLang servers, built ahead of time"]
        words += [f"--property={item}" for item in PROPERTIES]
        words += [f"--property=User={self.user}"] if self.user else []
        words += [f"--setenv={name}={value}" for name, value in environment.items()]
        done = self.runner.run([*words, "--", *command], timeout=60.0)
        if done.rc != 0:
            raise JobError(f"systemd-run: {(done.stderr or done.stdout).strip()}")

    def _start_process(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        more: dict[str, Any] = {}
        if self.user:
            account = pwd.getpwnam(self.user)
            more = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        with (self.folder / "log").open("wb") as log:
            try:
                process = subprocess.Popen(  # pylint: disable=ansible-bad-function
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    cwd="/",
                    start_new_session=True,
                    **more,
                )
            except OSError as exc:
                raise JobError(f"{command[0]} cannot be run by {self.user or 'this user'}: {exc.strerror}") from exc
        (self.folder / "pid").write_text(f"{process.pid} {_started(process.pid)}", encoding="utf-8")

    def request(self) -> Mapping[str, Any]:
        """Return what the last one was asked for."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.folder / "request.json").read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
        return {}

    def alive(self) -> bool:
        """Tell whether one is at work."""
        if self.systemd:
            try:
                return show(self.runner, [self.unit])[self.unit].running
            except SystemdError:
                return False
        try:
            pid, started = (self.folder / "pid").read_text(encoding="utf-8").split()
        except (OSError, ValueError):
            return False
        with contextlib.suppress(ChildProcessError, ValueError):
            os.waitpid(int(pid), os.WNOHANG)  # ours: a dead one is not to look alive
        return _started(int(pid)) == started

    def look(self, seen: int = 0) -> Look:
        """Return the lines after the first ones, and the result once it is there."""
        alive = self.alive()  # before the result: one that ends in between has written it
        lines, early = [], False
        for at, text in enumerate(_read(self.out / _jit_worker.PROGRESS).splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                said = json.loads(text)
                early = early or said.get("early") is True
                lines += [str(said["text"])] if at >= seen else []
        result = None
        with contextlib.suppress(ValueError):
            found = json.loads(_read(self.out / _jit_worker.RESULT) or "null")
            if isinstance(found, dict) and found.get("id") == self.request().get("id"):
                result = found
        return Look(alive, tuple(lines), result, early)

    def last_words(self) -> str:
        """Return the end of what it said, for one that died without a result."""
        if self.systemd:
            done = self.runner.run(["journalctl", "-u", self.unit, "-n", "20", "-o", "cat", "--no-pager"])
            return done.stdout.strip()
        return _read(self.folder / "log")[-2000:].strip()


def _source(module: Any) -> str:
    text = module.__loader__.get_source(module.__name__)
    return str(text)


def _started(pid: int) -> str:
    """Return when a process started, in ticks: a pid alone may be another one's by now; "" when it is gone."""
    text = _read(Path(f"/proc/{pid}/stat"))
    fields = text.rpartition(")")[2].split()
    return "" if not fields or fields[0] == "Z" else fields[19]


def _read(path: Path) -> str:
    """Read a file that another user wrote: no links, no endless ones."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            return file.read(LARGEST).decode("utf-8", errors="replace")
    except OSError:
        return ""
