# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Parts of a toolkit in a prefix of our own, where the environment's do not fit; the environment stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._install_errors import explain
from ansible_collections.gpufleet.sglang.plugins.module_utils._release import Spec
from ansible_collections.gpufleet.sglang.plugins.module_utils._release_install import (
    Installer,
    find_uv,
    install_environment,
    pip_configuration,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_apply import WHEELS, remove_tree, swap, sync
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_audit import Seals, flaw
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_folder import foreign
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import installed_infos

RECORD = WHEELS
TIMEOUT = 3600.0
SIZE = 400  # MiB that a set with a compiler takes on the disk while it is installed


class WheelError(Exception):
    """The wheels could not be installed; the message has the installer's own words and the remedy."""


@dataclass(frozen=True)
class Origin:
    """Where wheels come from."""

    wheel_dir: str = ""
    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Private:
    """A private set of wheels: what was asked for, its folder, and its toolkit's tree."""

    requirement: str
    folder: str
    flaw: str = ""  # what is wrong with the one that is there

    @property
    def tree(self) -> str:
        """The toolkit in it."""
        return next((str(path) for path in sorted(Path(self.folder, "nvidia").glob("cu1[3-9]"))), "")

    @property
    def complete(self) -> bool:
        """True when it was installed to its end, and is still whole."""
        return _installed(self.folder) and bool(self.tree) and not self.flaw

    def findings(self, done: str) -> list[Finding]:
        """Say what was wrong with the one that is there, and what is done about it."""
        return [Finding("wheels_damaged", f"{self.requirement}: {self.flaw}", done, WARNING)] if self.flaw else []


def private_set(folder: str, parts: Sequence[str], specifier: str, seals: Seals) -> Private:
    """Name the set of parts in one version; the same question has the same folder, so nothing is installed twice."""
    requirement = f"cuda-toolkit[{','.join(parts)}]{specifier}"
    version = re.sub(r"[^0-9.]", "", specifier).strip(".") or "any"
    digest = hashlib.sha256(requirement.encode()).hexdigest()[:8]
    private = Private(requirement, f"{folder}/wheels/{version}-{digest}")
    return replace(private, flaw=_flaw(private, seals)) if _installed(private.folder) else private


def _installed(folder: str) -> bool:
    return os.path.isfile(f"{folder}/{RECORD}")


def _flaw(private: Private, seals: Seals) -> str:
    """Say why a set is to be installed again: a part of it lost, changed, exchanged, or given to others."""
    above = [private.folder, f"{private.folder}/{RECORD}", f"{private.folder}/nvidia", private.tree]
    try:
        found = next((f"{path} is a link" for path in above if os.path.islink(path)), "")
        found = found or next((said for path in above for said in [foreign(path)] if said), "")
        with open(f"{private.folder}/{RECORD}", encoding="utf-8") as file:
            packages = json.load(file).get("packages", [])
        lost = [name for name in packages if not os.path.isfile(f"{private.folder}/{name}.dist-info/RECORD")]
        found = found or next((f"{private.folder}/{name}.dist-info/RECORD is missing" for name in lost), "")
        return found or flaw(installed_infos(private.folder), private.tree, seals)
    except (OSError, ValueError, AttributeError, TypeError) as exc:
        return f"{private.folder} cannot be read ({exc})"


def install(runner: Runner, private: Private, python: str, origin: Origin) -> None:
    """Install a set beside its place, then rename it; raises WheelError. The caller holds the folder's lock."""
    new = f"{private.folder}.new"
    wheels = os.path.dirname(private.folder)
    os.makedirs(wheels, exist_ok=True)
    os.chmod(wheels, 0o755)
    remove_tree(new)
    os.mkdir(new)
    os.chmod(new, 0o755)
    try:
        argv, env = command(runner, private.requirement, new, python, origin)
        # umask: the servers' user has to read it
        done = runner.run(["/bin/sh", "-c", 'umask 022; exec "$@"', "sh", *argv], timeout=TIMEOUT, env=env, cwd="/")
        if done.rc != 0:
            what = f"installing {private.requirement} into {private.folder}"
            said = explain(what, done.rc, f"{done.stdout}\n{done.stderr}", "none is kept")
            said = said.replace("\n  log: none is kept", "")
            raise WheelError(said.replace("put releases_dir", f"put cuda_toolkit_fix_dir (a set takes {SIZE} MiB)"))
        done_tree = Private(private.requirement, new).tree
        if not done_tree:
            raise WheelError(f"{private.requirement} brought no nvidia/cu13 folder. Remedy: choose another version")
        remove_tree(f"{new}/.tmp")
        packages = sorted(path.name[: -len(".dist-info")] for path in Path(new).glob("*.dist-info"))
        with open(f"{new}/{RECORD}", "w", encoding="utf-8") as file:
            json.dump({"requirement": private.requirement, "packages": packages}, file, indent=2)
            file.write("\n")
        os.chmod(f"{new}/{RECORD}", 0o644)
        sync(new)
        swap(new, private.folder)  # of an incomplete or damaged one, which servers may compile with until then
    except OSError as exc:
        raise WheelError(
            f"{exc.filename or new}: {exc.strerror}. Remedy: free {SIZE} MiB, or set cuda_toolkit_fix_dir"
        ) from exc
    finally:
        remove_tree(new)


def command(
    runner: Runner, requirement: str, target: str, python: str, origin: Origin
) -> tuple[list[str], dict[str, str]]:
    """Return the command that installs into a folder, and its environment: the venv's pip, uv, or a host's pip."""
    scratch = f"{target}/.tmp"
    os.makedirs(scratch, exist_ok=True)
    spec = Spec(wheel_dir=origin.wheel_dir, index_url=origin.index_url, extra_index_urls=origin.extra_index_urls)
    offline = ["--no-index", "--find-links", origin.wheel_dir] if origin.wheel_dir else []
    uv = ""
    pip = next((path for path in _pythons(python) if runner.run([path, "-I", "-m", "pip", "--version"]).rc == 0), "")
    if not pip or (pip != python and not pip_configuration(os.environ)):
        uv = find_uv(runner)
    if uv:
        argv = [uv, "pip", "install", "--no-progress", "--python", python, "--target", target, "--only-binary", ":all:"]
        argv += ["--index-strategy", "unsafe-best-match", *(["--offline"] if offline else []), *offline]
        return [*argv, requirement], install_environment(spec, Installer("uv", uv), scratch)
    if not pip:
        raise WheelError(f"neither pip nor uv runs on this host. Remedy: {python} -m ensurepip, or install uv")
    argv = [pip, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    argv += ["--no-compile", "--only-binary", ":all:", "--target", target, *offline]
    return [*argv, requirement], install_environment(spec, Installer("pip"), scratch)


def _pythons(python: str) -> list[str]:
    return list(dict.fromkeys((python, sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")))
