# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The plan of a CUDA_HOME made of links: which name leads where, and a fingerprint of it all. Nothing is written."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_elf import soname
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import (
    HEADERS,
    LIBRARIES,
    PROGRAMS,
    Layout,
    layout_of,
    machine_folder,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_look import cccl_version
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import Owned, read

SCHEMA = 2
STUB = "lib/stubs/libcuda.so"
COPIED = {f"bin/{name}" for name in ("nvcc", "ptxas", "cudafe++", "fatbinary", "nvlink")} | {"nvvm/bin/cicc"}
EXPECTED = (  # of every set of wheels with a compiler
    *(f"bin/{name}" for name in ("cudafe++", "fatbinary", "nvcc", "nvcc.profile", "nvlink", "ptxas")),
    *(f"include/{name}" for name in ("crt/host_config.h", "cuda.h", "cuda_fp16.h", "cuda_runtime.h")),
    *("lib/libcudadevrt.a", "lib/libcudart_static.a", "nvvm/bin/cicc", "nvvm/libdevice/libdevice.10.bc"),
)
CCCL_PARTS = ("cuda", "nv", "cub", "thrust")
DRIVER = (
    "usr/lib/{multiarch}/libcuda.so.1",
    "usr/lib64/libcuda.so.1",
    "usr/lib/wsl/lib/libcuda.so.1",
    "usr/local/nvidia/lib64/libcuda.so.1",
    "usr/lib/libcuda.so.1",
)
PROFILE = """TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH += $(TOP)/lib:
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" "-I$(TOP)/include/cccl" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib/stubs" "-L$(TOP)/lib"
CUDAFE_FLAGS +=
PTXAS_FLAGS +=
"""
_VERSIONED = re.compile(r"(lib[\w.+-]+?\.so)\.(\d+)")


@dataclass(frozen=True)
class Entry:
    """One name in a composed tree: a link (target absolute, or relative within the tree), a copy, the stub, a text."""

    path: str
    kind: str  # link | copy | stub | text (target is the text)
    target: str
    identity: str = ""  # of the content behind it: another content is another fingerprint

    def line(self) -> str:
        """Return it as people read it in a diff."""
        if self.kind == "stub":
            return f"{self.path} (generated from {self.target})"
        if self.kind == "text":
            return f"{self.path} (written here)"
        return f"{self.path} -> {self.target}" + (" (copy)" if self.kind == "copy" else "")


@dataclass(frozen=True)
class Source:
    """A toolkit to take files from: its folders, which wheel owns which file, and which wheels to leave out."""

    layout: Layout
    owned: Mapping[str, Owned] = field(default_factory=dict)
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Cccl:
    """The one CCCL of a tree: where cuda/, nv/, cub/ and thrust/ lie; origin is toolkit, wheel or engine."""

    origin: str
    folders: Mapping[str, str]
    version: str = ""


def compose(sources: Sequence[Source], cccl: Cccl | None, driver: str = "", *, whole: bool = False) -> list[Entry]:
    """Return the tree's entries; an earlier source wins over a later one; whole: CCCL's folders as one link each."""
    found: dict[str, Entry] = {}
    for source in sources:
        for folder in source.layout.bins:
            _farm(found, source, folder, "bin")
        for folder in source.layout.includes:
            _farm(found, source, folder, "include")
        for folder in source.layout.libs:
            _farm(found, source, folder, "lib")
    found.update({entry.path: entry for entry in next((item for s in sources for item in [_nvvm(s)] if item), [])})
    if sources[0].layout.shared:  # a distribution's profile names its own places
        found["bin/nvcc.profile"] = Entry("bin/nvcc.profile", "text", PROFILE)
    for entry in _cccl_entries(cccl, sources, whole):
        found[entry.path] = entry
    for path, entry in list(found.items()):
        match = (
            _VERSIONED.fullmatch(os.path.basename(path)) if path.startswith("lib/") and path.count("/") == 1 else None
        )
        if match and ".alt." not in path and f"lib/{match.group(1)}" not in found:
            found[f"lib/{match.group(1)}"] = Entry(f"lib/{match.group(1)}", "link", os.path.basename(entry.path))
    found.setdefault("lib64", Entry("lib64", "link", "lib"))
    found.update({entry.path: entry for entry in _stubs(sources, found, driver)})
    for name in ("include", "lib", "lib64"):  # nvcc.profile of NVIDIA's installer and of conda looks there
        path = f"targets/{machine_folder()}/{name}"
        found[path] = Entry(path, "link", f"../../{name}")
    return [found[path] for path in sorted(found)]


def fingerprint(entries: Iterable[Entry]) -> str:
    """Return a digest of names, targets and contents."""
    text = "\n".join(f"{e.path}\0{e.kind}\0{e.target}\0{e.identity}" for e in entries)
    return hashlib.sha256(f"{SCHEMA}\n{text}".encode()).hexdigest()[:12]


def manifest(entries: Iterable[Entry]) -> str:
    """Return the tree as text, a line per entry."""
    return "".join(f"{entry.line()}\n" for entry in entries)


def own_cccl(sources: Sequence[Source]) -> Cccl | None:
    """Return the first CCCL that lies in a toolkit itself."""
    for source in sources:
        for base in source.layout.includes:
            for folder in (f"{base}/cccl", base):
                if source.layout.has(f"{folder}/nv/target") and source.layout.has(f"{folder}/cuda/std"):
                    parts = {name: f"{folder}/{name}" for name in CCCL_PARTS if os.path.isdir(f"{folder}/{name}")}
                    return Cccl("toolkit", parts, cccl_version(folder))
    return None


def engine_cccl(folder: str) -> Cccl | None:
    """Return the CCCL that FlashInfer brings (flashinfer/data/cccl)."""
    if not folder:
        return None
    places = {"cuda": "libcudacxx/include", "nv": "libcudacxx/include", "cub": "cub", "thrust": "thrust"}
    parts = {name: f"{folder}/{place}/{name}" for name, place in places.items()}
    return Cccl("engine", parts, cccl_version(f"{folder}/libcudacxx/include"))


def wheel_cccl(tree: str) -> Cccl | None:
    """Return the CCCL of a private wheel's tree (…/nvidia/cu13)."""
    folder = f"{tree}/include/cccl"
    if not os.path.exists(f"{folder}/nv/target"):
        return None
    return Cccl("wheel", {name: f"{folder}/{name}" for name in CCCL_PARTS}, cccl_version(folder))


def driver_library(base: str = "/", multiarch: str = "x86_64-linux-gnu") -> str:
    """Return the driver's libcuda.so.1 when it is a real one (containers bind an empty file there while they build)."""
    for place in DRIVER:
        path = str(Path(base, place.format(multiarch=multiarch)))
        if soname(path) == "libcuda.so.1":
            return path
    return ""


def _farm(found: dict[str, Entry], source: Source, folder: str, to: str) -> None:
    layout = source.layout
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    pattern = {"bin": PROGRAMS, "lib": LIBRARIES, "include": HEADERS}[to] if layout.shared else None
    for name in names:
        if pattern and not pattern.fullmatch(name):
            continue
        if (to == "include" and name in ("cccl", *CCCL_PARTS)) or (to == "lib" and name in ("stubs", "python3")):
            continue
        for entry in _links(source, f"{folder}/{name}", f"{to}/{name}"):
            found.setdefault(entry.path, entry)


def _links(source: Source, top: str, to: str) -> Iterator[Entry]:
    """Yield a link for a file, or for every file below a folder: never one for a folder."""
    if not os.path.isdir(top):
        if os.path.exists(top) and top not in source.layout.hidden and not _left_out(source, top):
            yield _link(source, top, to)
        return
    for base, folders, files in os.walk(top, followlinks=True, onerror=_stop):
        folders[:] = sorted(f for f in folders if not _loops(f"{base}/{f}", top))
        place = os.path.relpath(base, top)
        for name in sorted(files):
            path = f"{base}/{name}"
            if os.path.exists(path) and path not in source.layout.hidden and not _left_out(source, path):
                yield _link(source, path, f"{to}/{name}" if place == "." else f"{to}/{place}/{name}")


def _link(source: Source, target: str, path: str) -> Entry:
    copied = path in COPIED and not os.access(target, os.X_OK)
    mark = _mark(source, target)
    return Entry(path, "copy", target, mark) if copied else Entry(path, "link", _aim(source, target), mark)


def _stop(error: OSError) -> None:
    raise error  # a folder that cannot be read is no empty one


def _loops(folder: str, top: str) -> bool:
    """Tell a link to a folder that leads out of its own tree, or back up in it."""
    if not os.path.islink(folder):
        return False
    real, base = os.path.realpath(folder), os.path.realpath(top)
    return not f"{real}/".startswith(f"{base}/") or f"{os.path.realpath(os.path.dirname(folder))}/".startswith(
        f"{real}/"
    )


def _aim(source: Source, target: str) -> str:
    """Return where a link leads: in a system toolkit past its own links (libcudart.so.13 -> libcudart.so.13.0.96)."""
    return target if source.layout.kind == "pip" or not os.path.islink(target) else os.path.realpath(target)


def _left_out(source: Source, target: str) -> bool:
    """Tell whether a file belongs to a wheel that is to be left out."""
    owner = source.owned.get(os.path.relpath(target, source.layout.root)) if source.without else None
    return owner is not None and owner.dist in source.without


def _nvvm(source: Source) -> list[Entry]:
    for folder in source.layout.nvvms:
        if os.path.exists(f"{folder}/bin/cicc") and not _left_out(source, f"{folder}/bin/cicc"):
            if source.layout.kind != "debian":
                return list(_links(source, folder, "nvvm"))
            parts = {"nvvm/bin/cicc": f"{folder}/bin/cicc", "nvvm/libdevice": f"{folder}/libdevice"}  # beside nvcc
            return [
                entry for name, path in parts.items() if os.path.exists(path) for entry in _links(source, path, name)
            ]
    return []


def _cccl_entries(cccl: Cccl | None, sources: Sequence[Source], whole: bool) -> list[Entry]:
    """Lay out the one CCCL: link by link, or (whole) a link per folder, so that it cannot mix with another one."""
    if cccl is None:
        return []
    entries = []
    for name, folder in sorted(cccl.folders.items()):
        owner = next((s for s in sources if folder.startswith(f"{s.layout.root}/")), None)
        if whole:
            entries.append(Entry(f"include/cccl/{name}", "link", folder, folder_identity(folder)))
        else:
            layout = owner.layout if owner else layout_of(folder, "cccl")
            source = Source(layout, owner.owned if owner else {})
            entries += _links(source, folder, f"include/cccl/{name}")
    entries.append(Entry("include/nv", "link", "cccl/nv"))
    profile = read(next((p for s in sources for p in [s.layout.find("bins", "nvcc.profile")] if p), ""))
    if (
        "cccl" not in profile and not sources[0].layout.shared
    ):  # a toolkit of CUDA 12: its nvcc looks for them in include
        entries += [Entry(f"include/{name}", "link", f"cccl/{name}") for name in cccl.folders if name != "nv"]
    return entries


def _stubs(sources: Sequence[Source], found: Mapping[str, Entry], driver: str) -> list[Entry]:
    entries: dict[str, Entry] = {}
    for source in sources:
        for folder in source.layout.libs:
            if not os.path.isdir(f"{folder}/stubs"):
                continue
            for name in sorted(os.listdir(f"{folder}/stubs")):
                path, target = f"lib/stubs/{name}", f"{folder}/stubs/{name}"
                usable = name != "libcuda.so" or soname(target) == "libcuda.so.1"
                if name.endswith(".so") and usable and source.layout.has(target):
                    entries.setdefault(path, Entry(path, "link", target, _mark(source, target)))
    if STUB not in entries and driver:
        entries[STUB] = Entry(STUB, "link", driver)
    elif STUB not in entries and "include/cuda.h" in found:
        header = found["include/cuda.h"]
        entries[STUB] = Entry(STUB, "stub", header.target, header.identity)
    return list(entries.values())


def _mark(source: Source, path: str) -> str:
    """Return what tells one content of a file from another: the wheel's own hash where it still fits."""
    return _file_identity(source.owned.get(os.path.relpath(path, source.layout.root)), path)


def _file_identity(owned: Owned | None, path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return "missing"
    if owned and owned.sha and owned.size in (None, status.st_size):
        return owned.sha
    return f"{status.st_size}:{status.st_mtime_ns}"


def folder_identity(path: str) -> str:
    """Return a digest of a folder's names, sizes and times."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            digest.update(
                f"{os.path.relpath(folder, path)}/{name} {_file_identity(None, f'{folder}/{name}')}\n".encode()
            )
    return digest.hexdigest()[:16]
