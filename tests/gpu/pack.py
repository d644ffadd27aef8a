#!/usr/bin/env python3
"""Put what the GPU proof needs into parts that fit one transfer each (58 MB), on a machine with package registries.

pack.py OUT [--code GIT_REF] makes OUT/p1, p2, ...: p1 holds the small things (systemd, ansible-core, models, this
project's code, the manifest), the others pieces of three archives: site (SGLang and what it needs beside torch),
toolkit (the CUDA wheels that a plain `pip install` puts beside torch 2.11: nvcc 13.5 on headers of 13.0) and repair
(the set that fits torch's CUDA, which a host with a registry would download).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import models

HERE = Path(__file__).resolve().parent
PART = 58_000_000
ANSIBLE = ("ansible-core", "resolvelib", "cryptography", "cffi", "pycparser")
TOOLKIT = (
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-nvvm==13.5.37",
    "nvidia-cuda-cccl==13.3.5.0.6",
    "nvidia-cuda-runtime==13.0.96",
)
REPAIR = (
    "cuda-toolkit==13.0.2",
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
)
# What an H200 with --attention-backend flashinfer never loads: FA3, FlashMLA, sm_100's kernels, CUTLASS's DSL
UNUSED = (
    "flash_ops", "flashmla_ops", "/sm100/", "/tests/", "cutlass/test/", "cutlass/examples/", "cutlass/tools/profiler/",
    "cutlass/docs/", "cutlass/media/", "mistral_common/data/",
)  # fmt: skip
DISPLAY = "class HTML(str):\n    pass\n\n\ndef display(*a, **k):\n    pass\n\n\ndef clear_output(*a, **k):\n    pass\n"
SYSTEMD = (
    "systemd libsystemd-shared libsystemd0 systemd-sysv dbus dbus-bin dbus-daemon dbus-system-bus-common "
    "dbus-session-bus-common libdbus-1-3 libapparmor1 libaudit1 libcap2 libcrypt1 libcryptsetup12 libfdisk1 "
    "libgcrypt20 libgpg-error0 libip4tc2 libkmod2 libseccomp2 libselinux1 libmount1 libblkid1 libpam0g libpam-modules "
    "libpam-runtime libdevmapper1.02.1 libargon2-1 libjson-c5 libacl1 libexpat1 libcap-ng0 libnss-systemd iproute2 "
    "procps libproc2-0 libelf1 libbpf1 libmnl0 libtirpc3 libxtables12"
)


def say(text: str) -> None:
    """Tell what is being done."""
    print(f"pack: {text}", file=sys.stderr, flush=True)


def download(folder: Path, *what: str) -> None:
    """Fetch wheels for the GPU machine's Python 3.12; what is there stays."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    argv = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
    ]
    argv += ["--implementation", "cp", *(word for name in platforms for word in ("--platform", name))]
    subprocess.run([*argv, "-d", str(folder), *what], check=True, stderr=subprocess.DEVNULL)


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel, less what is never loaded there."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = info.filename
            if not info.is_dir() and not name.endswith(".a") and not any(part in name for part in UNUSED):
                archive.extract(info, folder)


def make_site(work: Path) -> Path:
    """Return the folder with SGLang, and beside it the one with Ansible."""
    site = work / "site"
    if (work / "site.done").exists():
        return site
    download(work / "whl", "-r", str(HERE / "requirements.txt"))
    for wheel in sorted((work / "whl").glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-").lower()
        if name in ANSIBLE:
            unpack(wheel, work / "ansible")
        if name not in ("ansible-core", "resolvelib"):
            unpack(wheel, site)
    stub = site / "IPython"  # sglang imports IPython.display at the top; a server never shows anything with it
    stub.mkdir(exist_ok=True)
    (stub / "__init__.py").write_text("", encoding="utf-8")
    (stub / "display.py").write_text(DISPLAY, encoding="utf-8")
    (work / "site.done").touch()
    return site


def make_systemd(work: Path, archive: Path) -> None:
    """Pack systemd and what it links to, from Debian's packages; files that the machine has are never replaced."""
    debs, tree = work / "deb", work / "systemd"
    shutil.rmtree(tree, ignore_errors=True)
    debs.mkdir(exist_ok=True)
    subprocess.run(["apt-get", "download", "-q", *SYSTEMD.split()], cwd=debs, check=True, stdout=subprocess.DEVNULL)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(deb), str(tree)], check=True)
    subprocess.run(["tar", "-C", str(tree), "-cJf", str(archive), "."], check=True)


def make_archive(folder: Path, archive: Path) -> None:
    """Pack a folder; wheels are compressed already."""
    how = "-cf" if archive.suffix == ".tar" else "-cJf"
    subprocess.run(
        ["tar", "-C", str(folder), how, str(archive), "."],
        check=True,
        env={"XZ_OPT": "-3 -T0", "PATH": "/usr/bin:/bin"},
    )


def cut(archives: list[Path], out: Path, first: int) -> dict[str, list[dict[str, object]]]:
    """Cut archives into pieces that fill p1 (behind its small files), p2, ...; return the manifest."""
    manifest: dict[str, list[dict[str, object]]] = {}
    number, room = 1, PART - first
    for archive in archives:
        pieces = manifest.setdefault(archive.name, [])
        with archive.open("rb") as file:
            while data := file.read(room):
                part = out / f"p{number}"
                part.mkdir(exist_ok=True)
                name = f"{archive.name}.{len(pieces):02d}"
                (part / name).write_bytes(data)
                pieces.append({"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
                room -= len(data)
                if room <= 0:
                    number, room = number + 1, PART
    return manifest


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--code", default="HEAD", help="the revision of this project to prove (default: HEAD)")
    parser.add_argument("--code-only", action="store_true", help="only put another revision into p1")
    parser.add_argument("--work", type=Path, help="folder for downloads, kept between runs")
    args = parser.parse_args()
    out, work = args.out.resolve(), (args.work or args.out.parent / "gpukit-work").resolve()
    first = out / "p1"
    for folder in (out, work, first, work / "toolkit", work / "repair"):
        folder.mkdir(parents=True, exist_ok=True)
    top = HERE.parent.parent  # from a folder below, git archive packs that folder alone
    subprocess.run(
        ["git", "archive", "--format=tar.gz", "-o", str(first / "code.tar.gz"), args.code], cwd=top, check=True
    )
    if args.code_only:
        return 0
    say("SGLang")
    site = make_site(work)
    say("the toolkit, as pip ships it, and the set that fits")
    download(work / "toolkit", *TOOLKIT)
    download(work / "repair", *REPAIR)
    say("systemd")
    if not (first / "systemd.tar.xz").exists():
        make_systemd(work, first / "systemd.tar.xz")
    make_archive(work / "ansible", first / "ansible.tar.xz")
    models.write_all(work / "models")
    make_archive(work / "models", first / "models.tar.xz")
    say("archives")
    archives = [work / "site.tar.xz", work / "toolkit.tar", work / "repair.tar"]
    for archive, folder in zip(archives, (site, work / "toolkit", work / "repair")):
        if not archive.exists():
            make_archive(folder, archive)
    for old in out.glob("p*/*.[0-9][0-9]"):
        old.unlink()
    small = sum(path.stat().st_size for path in first.iterdir() if path.name != "manifest.json")
    manifest = cut(archives, out, small + 100_000)
    (first / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for part in sorted(out.glob("p*")):
        size = sum(path.stat().st_size for path in part.iterdir())
        say(f"{part.name}: {size / 1e6:.1f} MB: {', '.join(sorted(path.name for path in part.iterdir()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
