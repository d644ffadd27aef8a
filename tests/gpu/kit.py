"""The kit on the GPU machine: parts that arrive one by one, and the engine's virtual environment made of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

KIT = Path("/opt/kit")
INBOX = KIT / "in"
ENGINE = Path("/opt/engine")
MODELS = Path("/srv/models")


class KitError(Exception):
    """A part did not arrive or does not unpack."""


def site_of(engine: Path = ENGINE) -> Path:
    """Return the site-packages folder of the engine's environment."""
    return engine / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def base_site() -> Path:
    """Return the machine's own site-packages, where torch is."""
    return Path(sysconfig.get_path("purelib"))


def run(*argv: str | Path, timeout: float = 600.0) -> str:
    """Run a command; its output."""
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise KitError(f"{' '.join(str(word) for word in argv)[:200]}: rc {done.returncode}: {done.stderr[-600:]}")
    return done.stdout


def arrived(archive: str) -> list[Path] | None:
    """Return the pieces of an archive, None while one is missing or still being copied."""
    manifest = json.loads((INBOX / "manifest.json").read_text(encoding="utf-8"))
    pieces = [INBOX / str(piece["name"]) for piece in manifest[archive]]
    sizes = [int(piece["size"]) for piece in manifest[archive]]
    whole = all(path.exists() and path.stat().st_size == size for path, size in zip(pieces, sizes))
    return pieces if whole else None


def take(archive: str, target: Path, say: Callable[[str], None], patience: float = 1500.0) -> None:
    """Wait for an archive's pieces and unpack them into target; a second call does nothing."""
    done = KIT / f".{archive}.done"
    if done.exists():
        return
    deadline = time.monotonic() + patience
    while (pieces := arrived(archive)) is None:
        if time.monotonic() > deadline:
            raise KitError(f"{archive}: not all of its parts came within {patience:.0f} s")
        time.sleep(0.5)
    started = time.monotonic()
    target.mkdir(parents=True, exist_ok=True)
    packed = "xz -dc" if ".xz" in archive else "cat"
    names = " ".join(str(path) for path in pieces)
    run("bash", "-o", "pipefail", "-c", f"cat {names} | {packed} | tar -C {target} -xf - --no-same-owner")
    for path in pieces:
        path.unlink()
    done.touch()
    say(f"{archive} unpacked in {time.monotonic() - started:.1f} s")


def take_small() -> None:
    """Unpack what came with the first part."""
    for name, target in (("ansible", KIT / "ansible"), ("models", MODELS)):
        if not target.exists() or not any(target.iterdir()):
            target.mkdir(parents=True, exist_ok=True)
            run("tar", "-C", target, "-xJf", INBOX / f"{name}.tar.xz", "--no-same-owner")


def make_venv(say: Callable[[str], None]) -> None:
    """Make the engine's environment: SGLang's files, and the machine's torch behind them."""
    if (ENGINE / ".venv-done").exists():
        return
    started = time.monotonic()
    run(sys.executable, "-m", "venv", "--without-pip", ENGINE)
    take("site.tar.xz", site_of(), say)
    (site_of() / "machine.pth").write_text(f"{base_site()}\n", encoding="utf-8")
    for tool in ("ninja",):  # FlashInfer and tvm-ffi start it by its bare name
        found = shutil.which(tool)
        if found and not (ENGINE / "bin" / tool).exists():
            os.symlink(found, ENGINE / "bin" / tool)
    (ENGINE / ".venv-done").touch()
    say(f"environment in {time.monotonic() - started:.1f} s")


def add_toolkit(say: Callable[[str], None]) -> None:
    """Unpack CUDA's wheels into the environment as pip does: into one nvidia/cu13, beside what torch brought."""
    if (ENGINE / ".toolkit-done").exists():
        return
    take("toolkit.tar", KIT / "toolkit", say)
    started = time.monotonic()
    tree, theirs = site_of() / "nvidia/cu13", base_site() / "nvidia/cu13"
    tree.parent.mkdir(parents=True, exist_ok=True)
    if theirs.is_dir() and not tree.exists():
        try:
            run("cp", "-al", theirs, tree)
        except KitError:  # another file system
            shutil.rmtree(tree, ignore_errors=True)
            run("cp", "-as", theirs, tree)
    for wheel in sorted((KIT / "toolkit").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                place = site_of() / info.filename
                if info.is_dir():
                    continue
                place.parent.mkdir(parents=True, exist_ok=True)
                place.unlink(missing_ok=True)  # a hard link to torch's file stays as it is there
                place.write_bytes(archive.read(info))
                if (info.external_attr >> 16) & 0o111:
                    place.chmod(0o755)
    (ENGINE / ".toolkit-done").touch()
    say(f"pip's toolkit in the environment in {time.monotonic() - started:.1f} s")


def add_repair(say: Callable[[str], None]) -> Path:
    """Return the folder of wheels that a host with a registry would download."""
    take("repair.tar", KIT / "repair", say)
    return KIT / "repair"
