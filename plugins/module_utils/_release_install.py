# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Installing packages into a release's venv with pip or uv: which one, how, and what its failure means."""

from __future__ import annotations

import configparser
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ansible_collections.gpufleet.sglang.plugins.module_utils._lock import Pin
from ansible_collections.gpufleet.sglang.plugins.module_utils._python_probe import Interpreter
from ansible_collections.gpufleet.sglang.plugins.module_utils._release import Spec
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import NOT_FOUND, TIMED_OUT, Runner

INSTALL_TIMEOUT = 7200.0
REQUIREMENTS = "gpufleet-requirements.txt"
UV_PLACES = ("~/.local/bin/uv", "/usr/local/bin/uv", "~/.cargo/bin/uv")
PIP_FILES = ("/etc/xdg/pip/pip.conf", "/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
PIP_KEYS = ("index-url", "extra-index-url", "find-links", "no-index", "constraint", "proxy")


class LogRunner(Protocol):
    """Runs a long command whose output goes to a file."""

    def run(self, argv: Sequence[str], *, log: str, env: Mapping[str, str], timeout: float, keep: Sequence[int]) -> int:
        """Run argv, append its output to log, keep the given file descriptors open in it; returns the exit status."""


class SubprocessLogRunner:
    """The real thing.

    The command dies with this process (a killed run leaves no installer behind that still writes into the folder), and
    holds the release's lock as long as it lives, should it survive all the same.
    """

    def run(self, argv: Sequence[str], *, log: str, env: Mapping[str, str], timeout: float, keep: Sequence[int]) -> int:
        """Run argv with umask 022, whatever this process's is: the service's user must be able to read the venv."""
        full = {**os.environ, "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", **env}
        with Path(log).open("ab") as out:
            out.write(("$ " + " ".join(argv) + "\n").encode())
            out.flush()
            try:
                child = subprocess.Popen(  # pylint: disable=ansible-bad-function
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=full,
                    cwd="/",
                    pass_fds=tuple(keep),
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
            except OSError as exc:
                out.write(f"{argv[0]}: {exc.strerror}\n".encode())
                return NOT_FOUND
            try:
                rc = child.wait(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                out.write(f"{argv[0]} did not finish within {timeout:g} s\n".encode())
                return TIMED_OUT
        return rc if rc >= 0 else 128 - rc


def _die_with_parent() -> Callable[[], None]:
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        os.umask(0o022)
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return prepare


@dataclass(frozen=True)
class Installer:
    """pip or uv, and why."""

    kind: str  # pip | uv
    path: str = ""  # of uv
    reason: str = ""
    problems: tuple[str, ...] = field(default=())


def choose_installer(spec: Spec, runner: Runner, environ: Mapping[str, str]) -> Installer:
    """Choose uv where it runs, pip otherwise; never uv where pip's configuration says where packages come from."""
    if spec.installer == "pip":
        return Installer("pip", reason="asked for")
    path = find_uv(runner)
    if spec.installer == "uv":
        missing = () if path else ("installer uv: no uv that runs on PATH, in ~/.local/bin or /usr/local/bin",)
        return Installer("uv", path, "asked for", missing)
    if not path:
        return Installer("pip", reason="no uv here")
    configured = pip_configuration(environ)
    told = spec.wheel_dir or spec.index_url or any(environ.get(key) for key in ("UV_INDEX_URL", "UV_DEFAULT_INDEX"))
    if configured and not told:
        return Installer("pip", reason=f"{configured}, which uv doesn't read")
    return Installer("uv", path, "found")


def find_uv(runner: Runner) -> str:
    """Return a uv that runs, "" when there is none."""
    places = [shutil.which("uv") or "", *(str(Path(place).expanduser()) for place in UV_PLACES)]
    for place in places:
        if place and runner.run([place, "--version"], timeout=20.0).rc == 0:
            return place
    return ""


def pip_configuration(environ: Mapping[str, str], files: Sequence[str] | None = None) -> str:
    """Return where pip's configuration says which packages are found, in words; "" when it doesn't."""
    for key in PIP_KEYS:
        name = "PIP_" + key.upper().replace("-", "_")
        if environ.get(name):
            return f"{name} is set"
    own = [environ["PIP_CONFIG_FILE"]] if environ.get("PIP_CONFIG_FILE") else []
    for place in [*own, *(PIP_FILES if files is None else files)]:
        path = Path(place).expanduser()
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue
        for section in ("global", "install"):
            key = next((key for key in PIP_KEYS if parser.has_option(section, key)), "")
            if key:
                return f"{path} sets {key}"
    return ""


def venv_command(python: str, folder: str, installer: Installer) -> list[str]:
    """Return the command that makes the venv; uv needs no pip in it."""
    return [python, "-m", "venv", *(["--without-pip"] if installer.kind == "uv" else []), folder]


def requirements_text(spec: Spec, pins: Sequence[Pin]) -> str:
    """Return the requirements file: the lock's pins, or the version and what the user adds."""
    lines = [pin.requirement for pin in pins] if pins else [f"sglang=={spec.version}", *spec.requirements]
    return "\n".join(lines) + "\n"


def install_command(spec: Spec, pins: Sequence[Pin], installer: Installer) -> list[str]:
    """Return the command that installs the requirements file; addresses are in the environment, not here."""
    if installer.kind == "uv":
        argv = [installer.path, "pip", "install", "--python", spec.python_path, "--compile-bytecode", "--no-progress"]
        argv += ["--index-strategy", "unsafe-best-match"]  # as pip: the best version of all indexes
        argv += ["--offline", "--no-index", "--find-links", spec.wheel_dir] if spec.wheel_dir else []
    else:
        argv = [spec.python_path, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        argv += ["--progress-bar", "off"]
        argv += ["--no-index", "--find-links", spec.wheel_dir] if spec.wheel_dir else []
    argv += ["--no-deps"] if pins else []
    argv += ["--require-hashes"] if any(pin.hashes for pin in pins) else []
    return [*argv, "-r", f"{spec.folder}/{REQUIREMENTS}"]


def install_environment(spec: Spec, installer: Installer, scratch: str) -> dict[str, str]:
    """Return the environment to add: index addresses (they may hold passwords) and a scratch folder."""
    env = {"TMPDIR": scratch}
    if installer.kind == "pip" and spec.wheel_dir:  # that folder and nothing else, whatever pip's configuration adds
        env.update(PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="", PIP_CONSTRAINT="")
    if installer.kind == "uv":
        env["UV_PYTHON_DOWNLOADS"] = "never"
        if spec.index_url:
            env["UV_DEFAULT_INDEX"] = spec.index_url
        if spec.extra_index_urls:
            env["UV_INDEX"] = " ".join(spec.extra_index_urls)
    else:
        if spec.index_url:
            env["PIP_INDEX_URL"] = spec.index_url
        if spec.extra_index_urls:
            env["PIP_EXTRA_INDEX_URL"] = " ".join(spec.extra_index_urls)
    return env


def venv_package(interpreter: Interpreter) -> str:
    """Say which package of Debian and its family brings ensurepip."""
    name = Path(interpreter.path).name
    return "python3-venv" if name == "python3" else f"python{interpreter.minor}-venv"
