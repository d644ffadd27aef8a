"""Drive the playbooks as a user does, and look at the host from outside: systemctl, journal, HTTP.

A molecule scenario's verify step runs these tests; FLEET_INVENTORY (paths, colon between them) and
FLEET_HOST say against what.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)")


@dataclass
class Run:
    """An ansible-playbook run: exit status, and every line with the time (epoch, s) it was printed."""

    process: subprocess.Popen
    lines: list[tuple[float, str]] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    rc: int = -1
    seconds: float = 0.0

    @property
    def output(self) -> str:
        return "\n".join(text for _when, text in self.lines)

    @property
    def changed(self) -> int:
        found = [RECAP.match(text) for _when, text in self.lines]
        return sum(int(match.group(3)) for match in found if match)

    def when(self, pattern: str) -> float:
        """Return when the first line that matches was printed."""
        for when, text in self.lines:
            if re.search(pattern, text):
                return when
        raise AssertionError(f"no line matches {pattern!r} in:\n{self.output}")

    def wait_for(self, pattern: str, seconds: float = 120) -> None:
        """Wait until a line matches."""
        end = time.time() + seconds
        while time.time() < end:
            if any(re.search(pattern, text) for _when, text in list(self.lines)):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.kill()
        raise AssertionError(f"{pattern!r} was not printed:\n{self.output}")

    def kill(self) -> None:
        """SIGKILL the playbook and everything below it: Ansible's workers have sessions of their own."""
        family, found = [], [self.process.pid]
        while found:
            family += found
            listed = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", ",".join(map(str, found))], capture_output=True, text=True, check=False
            )
            found = [int(pid) for pid in listed.stdout.split()]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def changed_tasks(self) -> list[str]:
        """Return the tasks that reported a change, in order."""
        task, found = "", []
        for _when, text in self.lines:
            if text.startswith("TASK ["):
                task = text[6 : text.rindex("]")]
            elif text.startswith("changed: [") and (not found or found[-1] != task):
                found.append(task)
        return found


class Fleet:
    """One managed host."""

    def __init__(self, inventory: str, host: str) -> None:
        self.inventory_args = [arg for path in inventory.split(":") for arg in ("-i", path)]
        self.host = host
        wanted = ("ansible_host", "ansible_ssh_private_key_file", "sglang_server_version")
        # ansible-inventory would give the templates, not their values
        expression = "{{ {" + ", ".join(f"'{name}': {name} | default('')" for name in wanted) + "} | to_json }}"
        told = subprocess.run(
            [self.bin("ansible"), *self.inventory_args, host, "-m", "ansible.builtin.debug", "-a", f"msg={expression}"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        ).stdout
        message = json.loads(told[told.index("{") :])["msg"]
        self.variables: dict[str, str] = message if isinstance(message, dict) else json.loads(message)
        self.address = self.variables["ansible_host"]
        self.ssh_args = [
            "ssh",
            "-i",
            self.variables["ansible_ssh_private_key_file"],
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "LogLevel=ERROR",
            "-o",
            "ControlMaster=auto",
            "-o",
            f"ControlPath=/tmp/fleet-test-{os.getpid()}-%h",
            "-o",
            "ControlPersist=30",
            f"root@{self.address}",
        ]

    @staticmethod
    def bin(name: str) -> str:
        return str(Path(sys.executable).parent / name)

    # -- the playbooks ----------------------------------------------------------------------

    def launch(self, playbook: str, *args: str, extra: dict | None = None, env: dict | None = None, **kw) -> Run:
        """Start a playbook; its lines are collected as they come."""
        argv = [kw.get("program") or self.bin("ansible-playbook"), *self.inventory_args]
        argv.append(playbook if playbook.endswith(".yml") or playbook.count(".") > 1 else f"playbooks/{playbook}.yml")
        argv += list(args)
        if extra:
            argv += ["-e", json.dumps(extra)]
        process = subprocess.Popen(
            argv,
            cwd=kw.get("cwd") or ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={
                **os.environ,
                "ANSIBLE_FORCE_COLOR": "0",
                "ANSIBLE_NOCOLOR": "1",
                "PYTHONUNBUFFERED": "1",
                **(env or {}),
            },
        )
        run = Run(process)

        def read() -> None:
            for line in process.stdout:
                run.lines.append((time.time(), line.rstrip("\n")))

        threading.Thread(target=read, daemon=True).start()
        return run

    def play(self, playbook: str, *args: str, extra: dict | None = None, rc: int | None = 0, timeout=600, **kw) -> Run:
        """Run a playbook to its end and check its exit status (None: do not)."""
        run = self.launch(playbook, *args, extra=extra, **kw)
        try:
            run.rc = run.process.wait(timeout)
        except subprocess.TimeoutExpired:
            run.kill()
            raise AssertionError(f"{playbook} did not end in {timeout} s:\n{run.output}") from None
        run.seconds = time.time() - run.started
        time.sleep(0.1)  # the last lines
        if rc is not None:
            assert run.rc == rc, f"{playbook} ended with {run.rc}, expected {rc}:\n{run.output}"
        return run

    # -- the host, from outside ---------------------------------------------------------------

    def sh(self, command: str, rc: int | None = 0, timeout: float = 60) -> str:
        """Run a shell command on the host; returns its standard output."""
        done = subprocess.run([*self.ssh_args, command], capture_output=True, text=True, timeout=timeout, check=False)
        if rc is not None:
            assert done.returncode == rc, f"{command}: rc {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def units(self, gpus) -> dict[int, dict[str, str]]:
        """Return systemctl show of each GPU's unit."""
        names = " ".join(f"sglang@{gpu}.service" for gpu in gpus)
        wanted = (
            "Id,ActiveState,SubState,UnitFileState,MainPID,NRestarts,InvocationID,Result,ExecMainStatus,"
            "ExecMainStartTimestampMonotonic,ControlGroup,LoadState"
        )
        text = self.sh(f"systemctl show --no-pager -p {wanted} {names}")
        blocks = [
            dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in text.split("\n\n")
        ]
        return {int(block["Id"].split("@")[1].split(".")[0]): block for block in blocks if block}

    def pids(self, gpus) -> dict[int, int]:
        return {gpu: int(unit["MainPID"]) for gpu, unit in self.units(gpus).items()}

    def journal(self, unit: str, *args: str) -> list[dict]:
        """Return the journal of a unit as systemd stores it."""
        text = self.sh(f"journalctl -o json --no-pager -u {unit} {' '.join(args)}")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def facts(self) -> str:
        """Return all facts that Ansible gathers, as text."""
        argv = [self.bin("ansible"), *self.inventory_args, self.host, "-m", "ansible.builtin.setup"]
        return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    def http(self, port: int, path: str, data: dict | None = None, seconds: int = 30) -> tuple[int, str]:
        """Ask a server from its own host (servers listen on loopback); returns status and body."""
        body = f" -H 'Content-Type: application/json' --data-binary '{json.dumps(data)}'" if data is not None else ""
        command = f"curl -s -m {seconds} -w '\\n%{{http_code}}' http://127.0.0.1:{port}{path}{body}"
        text = self.sh(command, rc=None, timeout=seconds + 15)
        answer, _sep, status = text.rpartition("\n")
        return int(status or 0), answer

    def answers(self, port: int) -> int:
        """Return how many tokens a real request brings back."""
        status, body = self.http(
            port, "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        )
        return json.loads(body)["meta_info"]["completion_tokens"] if status == 200 else 0

    def wait(self, condition, seconds: float = 60, what: str = "condition"):
        """Wait until condition() is true; returns its value."""
        end = time.time() + seconds
        while True:
            value = condition()
            if value:
                return value
            assert time.time() < end, f"{what}: not within {seconds} s"
            time.sleep(0.5)
