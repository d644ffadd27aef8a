# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Making a release, or verifying the one that is there."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _release_install as inst
from ansible_collections.gpufleet.sglang.plugins.module_utils._install_errors import explain
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import Release
from ansible_collections.gpufleet.sglang.plugins.module_utils._lock import Pin, differences, same_version
from ansible_collections.gpufleet.sglang.plugins.module_utils._options_read import (
    OptionsReadError,
    cached,
    read_options,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._python_probe import (
    Interpreter,
    find_interpreters,
    of_interest,
    probe,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._release import (
    INTERESTING,
    PART,
    RECORD,
    Folder,
    Record,
    ReleaseError,
    Spec,
    check_spec,
    expected_packages,
    fingerprint_of,
    inputs_of,
    look,
    packages_diff,
    refusal,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._wheels import bytes_of, wheel_problems

GIB = 1024**3
NEEDED = {"cuda": 14 * GIB, "cpu": 4 * GIB}  # unpacked venv and what the installer holds meanwhile
UNPACKED = 4.5  # a venv is this much larger than its wheels (measured: 0.53 GB of wheels, 2.3 GB)
BOOTSTRAP = ("pip", "setuptools", "wheel")  # part of the venv, not of the release
LOCK_TIMEOUT = 7200.0


@dataclass(frozen=True)
class Tools:
    """What touches the world."""

    runner: Runner
    log_runner: inst.LogRunner = field(default_factory=inst.SubprocessLogRunner)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    free_bytes: Callable[[str], int] = lambda path: shutil.disk_usage(path).free
    debian: bool = field(default_factory=lambda: Path("/etc/debian_version").exists())
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Outcome:
    """What the module returns."""

    release: Release
    expected_version: str
    packages: dict[str, str] = field(default_factory=dict)
    options_file: str = ""
    options_due: bool = False
    changed: bool = False
    installer: str = ""
    log: str = ""
    seconds: float = 0.0
    system_packages: list[str] = field(default_factory=list)  # to be installed first
    diff: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    interpreter: Interpreter | None = None  # the venv's, when there is one

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the warnings (Ansible has its own place for them)."""
        return asdict(replace(self, interpreter=None), dict_factory=_public)


def _public(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in items if key not in ("warnings", "interpreter")}


def ensure(spec: Spec, tools: Tools, *, check: bool) -> Outcome:
    """Make the release or verify it, then cache the engine's option list; raises ReleaseError with all problems."""
    pins = check_spec(spec)
    outcome = _existing(spec, pins, tools) if spec.existing else _own(spec, pins, tools, check=check)
    return _with_options(spec, outcome, tools, check=check)


def _existing(spec: Spec, pins: Sequence[Pin], tools: Tools) -> Outcome:
    if not Path(spec.python_path).exists():
        raise ReleaseError([f"venv {spec.folder}: there is no bin/python in it: it is no venv, or not there yet"])
    return _verified(spec, pins, tools, f"venv {spec.folder}")


def _verified(spec: Spec, pins: Sequence[Pin], tools: Tools, what: str) -> Outcome:
    """Check an installed venv by its own interpreter: it runs, has the engine, and has what the lock says."""
    found = probe(tools.runner, spec.python_path, packages=True)
    if isinstance(found, str):
        raise ReleaseError([f"{what}: its interpreter doesn't run: {found}. Remedy: a new release (another name)"])
    problems = [f"{what}: {line}" for line in differences(pins, found.packages)]
    version = found.packages.get("sglang", "")
    if not version and not pins:
        problems.append(f"{what}: sglang is not installed in it")
    elif version and spec.version and not same_version(spec.version, version) and not pins:
        problems.append(f"{what}: sglang {version} is installed, {spec.version} is wanted")
    if problems:
        remedy = "install these versions again with pip or uv and --no-deps, or choose a new release name"
        raise ReleaseError([*problems, f"Remedy: {remedy}"])
    release = Release(spec.release_name, spec.folder, spec.python_path, version)
    return Outcome(release, version, of_interest(found.packages, INTERESTING), interpreter=found)


def _own(spec: Spec, pins: Sequence[Pin], tools: Tools, *, check: bool) -> Outcome:
    done = _complete(spec, pins, look(spec.folder), tools)
    if done:
        return done
    installer = inst.choose_installer(spec, tools.runner, tools.environ)
    python, problems = _preflight(spec, pins, installer, tools)
    lacking = python is not None and installer.kind == "pip" and not (python.venv and python.ensurepip)
    packages = [inst.venv_package(python)] if python is not None and lacking and tools.debian else []
    if python is not None and lacking:
        package = packages[0] if packages else "that brings ensurepip"
        problems.append(f"{python.path} can't make venvs with pip in them: it needs the system package {package} first")
    expected = expected_packages(spec, pins)
    if check:
        return Outcome(
            Release(spec.release_name, spec.folder, spec.python_path, ""),
            expected["sglang"],
            of_interest(expected, INTERESTING),
            changed=True,
            installer=installer.kind,
            log=spec.log_path,
            system_packages=packages,
            diff=[packages_diff(spec, {}, expected)],
            warnings=problems,
        )
    if problems or python is None:
        raise ReleaseError(problems)
    with _locked(spec, tools) as lock:
        done = _complete(spec, pins, look(spec.folder), tools)  # another run may have made it meanwhile
        return done or _build(spec, pins, installer, python, lock, tools)


def _complete(spec: Spec, pins: Sequence[Pin], found: Folder, tools: Tools) -> Outcome | None:
    minor = ""
    if found.record is not None and spec.python:
        asked = probe(tools.runner, spec.python)
        minor = "" if isinstance(asked, str) else asked.minor
    problem = refusal(spec, pins, found, minor)
    if problem:
        raise ReleaseError([problem])
    if found.record is None:
        return None
    recorded = [Pin(name, version) for name, version in found.record.packages.items()]
    outcome = _verified(spec, recorded, tools, f"release {spec.release_name}: {spec.folder}")
    return replace(outcome, installer=found.record.installer, log=spec.log_path)


def _preflight(
    spec: Spec, pins: Sequence[Pin], installer: inst.Installer, tools: Tools
) -> tuple[Interpreter | None, list[str]]:
    problems = list(installer.problems)
    good, bad = find_interpreters(tools.runner, spec.python)
    if installer.kind == "pip":  # one that can make venvs, before one that first needs a system package for it
        good.sort(key=lambda found: not (found.venv and found.ensurepip))
    files: dict[str, int] = {}
    if spec.wheel_dir:
        try:
            with os.scandir(spec.wheel_dir) as entries:
                files = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except OSError as exc:
            problems.append(f"wheel_dir {spec.wheel_dir}: {exc.strerror}: copy or mount the wheel folder there")
    python = good[0] if good else None
    if not good:
        problems.append(f"no Python 3.11 or newer: {'; '.join(bad)}. Remedy: install one, or name it (python)")
    if files or (spec.wheel_dir and not problems):
        judged = [(p, wheel_problems(pins, list(files), p.target)) for p in good]
        fitting = next(((p, lines) for p, lines in judged if not lines), judged[0] if judged else None)
        if fitting is not None:
            python, lines = fitting
        else:
            lines = wheel_problems(pins, list(files), None)
        problems += [f"wheel_dir {spec.wheel_dir}: {line}" for line in lines]
    problems += _space(spec, pins, files, tools)
    return python, problems


def _space(spec: Spec, pins: Sequence[Pin], files: Mapping[str, int], tools: Tools) -> list[str]:
    needed = int(UNPACKED * bytes_of(pins, files)) if pins and files else NEEDED[spec.device]
    where = Path(spec.releases_dir)
    while not where.exists() and where != where.parent:
        where = where.parent
    free = tools.free_bytes(str(where))
    if free >= needed:
        return []
    figures = f"{free / GIB:.1f} GiB free at {where}, the release needs about {needed / GIB:.1f} GiB"
    return [f"{figures}. Remedy: free space, or put releases_dir on another file system"]


@contextlib.contextmanager
def _locked(spec: Spec, tools: Tools) -> Iterator[int]:
    """Hold the release's lock; the kernel frees it when the holder, installer included, is gone."""
    parent = Path(spec.releases_dir)
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)  # whatever the umask: the service's user has to get through
    lock = os.open(str(parent / f".{spec.release_name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = tools.clock() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if tools.clock() > deadline:
                    raise ReleaseError(
                        [f"{spec.folder}: another run is still installing it, see {spec.log_path}"]
                    ) from None
                tools.sleep(0.25)
        yield lock
    finally:
        os.close(lock)


def _build(
    spec: Spec, pins: Sequence[Pin], installer: inst.Installer, python: Interpreter, lock: int, tools: Tools
) -> Outcome:
    started = tools.clock()
    folder, log = Path(spec.folder), Path(spec.log_path)
    if folder.exists():  # empty, or an interrupted one of ours: refusal() has sorted out the rest
        shutil.rmtree(folder)
    folder.mkdir()
    folder.chmod(0o755)
    _write(folder / PART, f"made by gpufleet.sglang; complete when {RECORD} is here\n", 0o644)
    scratch = folder / ".tmp"
    scratch.mkdir(mode=0o700)
    _write(folder / inst.REQUIREMENTS, inst.requirements_text(spec, pins), 0o644)
    _write(log, "", 0o600)
    env = inst.install_environment(spec, installer, str(scratch))
    for what, argv in (
        (f"{spec.folder}: making the venv", inst.venv_command(python.path, spec.folder, installer)),
        (f"{spec.folder}: installing with {installer.kind}", inst.install_command(spec, pins, installer)),
    ):
        begin = log.stat().st_size
        rc = tools.log_runner.run(argv, log=str(log), env=env, timeout=inst.INSTALL_TIMEOUT, keep=[lock])
        if rc != 0:
            with log.open("rb") as output:
                output.seek(begin)
                text = output.read().decode("utf-8", errors="replace")
            raise ReleaseError([explain(what, rc, text, str(log))], str(log))
    shutil.rmtree(scratch, ignore_errors=True)
    (folder / ".lock").unlink(missing_ok=True)  # uv's own, which everybody may write
    verified = _verified(spec, pins, tools, spec.folder)
    found = verified.interpreter
    if found is None:
        raise ReleaseError([f"{spec.folder}: its interpreter wasn't asked"], str(log))
    inputs, pinned = inputs_of(spec, pins), {pin.name for pin in pins}
    record = Record(
        name=spec.release_name,
        fingerprint=fingerprint_of(inputs, found.minor),
        inputs=inputs,
        python=found.minor,
        packages={name: version for name, version in found.packages.items() if name not in BOOTSTRAP or name in pinned},
        installer=installer.kind,
        installed_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(tools.clock() - started, 1),
    )
    _sync(folder)  # the packages reach the disk before the record that calls them complete
    _write(folder / RECORD, record.to_json(), 0o644)
    (folder / PART).unlink()
    return replace(
        verified,
        changed=True,
        installer=installer.kind,
        log=str(log),
        seconds=record.seconds,
        diff=[packages_diff(spec, {}, record.packages)],
    )


def _with_options(spec: Spec, outcome: Outcome, tools: Tools, *, check: bool) -> Outcome:
    outcome = replace(outcome, options_file=spec.options_path)
    version = outcome.release.version
    found = outcome.interpreter
    if found is None:  # not installed yet: check mode
        return replace(outcome, diff=[*outcome.diff, _options_diff(spec, outcome.expected_version)])
    if cached(spec.options_path, version, spec.folder, found.fingerprint):
        return outcome
    if not spec.read_options:
        return replace(outcome, options_due=True)
    changed = replace(outcome, changed=True, diff=[*outcome.diff, _options_diff(spec, version)])
    if check:
        return changed
    try:
        options = read_options(
            tools.runner,
            spec.python_path,
            version=version,
            venv=spec.folder,
            fingerprint=found.fingerprint,
            device=spec.device,
        )
    except OptionsReadError as exc:
        raise ReleaseError([str(exc)], outcome.log) from exc
    folder = Path(spec.options_dir)
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    _write(Path(spec.options_path), options.to_json(), 0o644)
    return changed


def _options_diff(spec: Spec, version: str) -> dict[str, str]:
    header = {"before_header": spec.options_path, "after_header": spec.options_path}
    return {**header, "before": "", "after": f"the options of SGLang {version}, read from {spec.folder}\n"}


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file atomically and durably."""
    part = path.with_name(path.name + ".new")
    try:
        with part.open("w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as exc:  # a write's error does not say where
        part.unlink(missing_ok=True)
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
    descriptor = os.open(str(path.parent), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(str(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None).syncfs(descriptor) != 0:
            os.sync()
    finally:
        os.close(descriptor)
