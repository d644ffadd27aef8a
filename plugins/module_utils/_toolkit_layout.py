# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Where a CUDA toolkit keeps its parts: as pip, NVIDIA's installer, conda and Debian lay it out."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import Python, read

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RECORD = "gpufleet-toolkit.json"  # in a tree that we composed
DEBIAN = "usr/lib/nvidia-cuda-toolkit"
# What a toolkit consists of where it shares its folders with other programs (conda, Debian).
PROGRAMS = re.compile(
    r"(nvcc(\.profile)?|ptxas|cudafe\+\+|fatbinary|nvlink|bin2c|cicc|__nvcc_device_query|cuobjdump|nvdisasm|cu\+\+filt"
    r"|nvprune|crt)"
)
LIBRARIES = re.compile(
    r"lib(cudart|cudadevrt|nvvm|nvrtc|nvJitLink|nvjitlink|nvptxcompiler|nvfatbin|cublas|curand|cufft|cusolver|cusparse"
    r"|cupti|culibos|nvToolsExt|cufile|cuda\.so).*"
)
HEADERS = re.compile(  # never a system header such as math.h: C++ wraps it, and includes the next one
    r"(cuda\w*|cu(blas|rand|fft|solver|sparse|Complex|pti|file)\w*|nv(rtc|vm|[Jj]it[Ll]ink|PTXCompiler|[Ff]atbin|tx3)\w*"
    r"|crt|cooperative_groups|mma|sm_\d+_\w+|math_(constants|functions)|device_\w+|host_(config|defines)"
    r"|vector_(types|functions)|(surface|texture)_(indirect_functions|types)|driver_(types|functions)|channel_descriptor"
    r"|builtin_types|common_functions|library_types|fatbinary_section)(\.h|\.hpp)?"
)


@dataclass(frozen=True)
class Layout:
    """A toolkit's folders; kind is pip, nvidia, conda or debian, origin says where it was found."""

    root: str
    kind: str
    origin: str
    bins: tuple[str, ...]
    includes: tuple[str, ...]
    libs: tuple[str, ...]
    nvvms: tuple[str, ...]
    shared: bool = False  # the folders hold other programs' files too
    hidden: frozenset[str] = frozenset()  # what we added ourselves, in place: not the toolkit's own

    def find(self, group: str, *names: str) -> str | None:
        """Return the first of the names that is there, in bins, includes, libs or nvvms."""
        folders: tuple[str, ...] = getattr(self, group)
        for name in names:
            for folder in folders:
                if self.has(f"{folder}/{name}"):
                    return f"{folder}/{name}"
        return None

    def has(self, path: str) -> bool:
        """Tell whether a path is there, and not by our own doing."""
        mine = any(path == item or path.startswith(f"{item}/") for item in self.hidden)
        return not mine and os.path.exists(path)


def machine_folder() -> str:
    """Return the name below targets/ of this machine's libraries."""
    machine = platform.machine()
    return "sbsa-linux" if machine in ("aarch64", "arm64") else f"{machine}-linux"


def multiarch() -> str:
    """Return Debian's name of this machine's library folder."""
    return f"{platform.machine()}-linux-gnu"


def layout_of(path: str, origin: str, base: str = "/") -> Layout:
    """Say how a toolkit is laid out; path need not be one."""
    root = path.rstrip("/") or "/"
    target = f"{root}/targets/{machine_folder()}"
    if root == str(Path(base) / "usr") and Path(base, DEBIAN, "bin").is_dir():
        tools, lib = str(Path(base, DEBIAN)), f"{root}/lib/{multiarch()}"
        return Layout(root, "debian", origin, (f"{tools}/bin",), (f"{root}/include",), (lib,), (tools,), True)
    if Path(root, "conda-meta").is_dir():
        return Layout(
            root,
            "conda",
            origin,
            (f"{root}/bin",),
            (f"{target}/include", f"{root}/include"),
            (f"{target}/lib", f"{root}/lib"),
            (f"{root}/nvvm",),
            True,
        )
    if re.search(r"/nvidia/cu\d\d$", root):
        return Layout(root, "pip", origin, (f"{root}/bin",), (f"{root}/include",), (f"{root}/lib",), (f"{root}/nvvm",))
    libs = (f"{root}/lib64", f"{target}/lib", f"{root}/lib")
    return Layout(
        root, "nvidia", origin, (f"{root}/bin",), (f"{root}/include", f"{target}/include"), libs, (f"{root}/nvvm",)
    )


def check_cuda_home(value: str) -> str:
    """Return what is wrong with a CUDA_HOME, "" when nothing is."""
    if not value.startswith("/"):
        return "it is relative: which toolkit it means depends on where a program is started"
    if ":" in value:
        return "it holds a colon: CUDA_HOME is one folder, not a list"
    if re.search(r"[\s\"'$\\;&|<>()`*?]", value) or not value.isprintable():
        return "it holds blanks or characters that a shell or ninja would read differently"
    return ""


def candidates(
    python: Python, cuda_home: str, environment: Mapping[str, str], base: str = "/"
) -> tuple[list[Layout], list[Finding]]:
    """Return the toolkits to look at, best first, and what is wrong with the places that name them.

    One that was asked for is the only one. A tree that we composed is a result, not a source.
    """
    if cuda_home:
        problem = check_cuda_home(cuda_home)
        if problem:
            return [], [Finding("cuda_home_bad", f"cuda_home {cuda_home}: {problem}", "Give one absolute folder")]
        return [layout_of(os.path.realpath(cuda_home), "explicit", base)], []  # it may lead elsewhere tomorrow
    findings = []
    places = [(python.tree, "pip")]
    told = environment.get("CUDA_HOME", "") or environment.get("CUDA_PATH", "")
    problem = check_cuda_home(told) if told else ""
    if problem:
        text = f"CUDA_HOME={told} in the environment: {problem}"
        findings.append(Finding("cuda_home_bad", text, "Correct or unset it; the servers get their own", WARNING))
    elif told:
        places.append((told, "environment"))
        if not layout_of(told, "environment", base).find("bins", "nvcc"):
            text = f"CUDA_HOME={told} in the environment has no bin/nvcc: `{told}/bin/nvcc: not found`"
            findings.append(Finding("cuda_home_gone", text, "Unset it; the servers get their own", WARNING))
    local = Path(base, "usr/local")
    versions = sorted(local.glob("cuda-[0-9]*"), key=lambda item: _numbers(item.name), reverse=True)
    places += [(str(local / "cuda"), "system"), *((str(item), "system") for item in versions)]
    places += [(item, "conda") for item in (python.prefix, environment.get("CONDA_PREFIX", "")) if item]
    found_nvcc = shutil.which("nvcc", path=environment.get("PATH", SYSTEM_PATH))
    if found_nvcc:
        real = os.path.realpath(found_nvcc)
        places.append((str(Path(real).parent.parent), "path"))
        if _is_script(real) and not str(Path(real).parent).startswith(str(Path(base, "usr/bin"))):
            text = f"{found_nvcc} on the PATH is a script: without CUDA_HOME the engine takes the folder above it"
            findings.append(Finding("nvcc_wrapper", text, "Nothing: the servers get a CUDA_HOME", WARNING))
    places.append((str(Path(base, "usr")), "system"))
    seen: dict[str, Layout] = {}
    for path, origin in places:
        if not path or Path(path, RECORD).exists():
            continue
        layout = layout_of(path, origin, base)
        nvcc = layout.find("bins", "nvcc")
        if (nvcc and not _is_script(nvcc)) or origin == "pip":
            real = os.path.realpath(path)  # not /usr/local/cuda, which another toolkit may be behind tomorrow
            seen.setdefault(real, layout if origin == "pip" else layout_of(real, origin, base))
    return list(seen.values()), findings


def _numbers(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name)]


def _is_script(path: str) -> bool:
    """Tell a wrapper from a compiler: NVIDIA's conda and Debian packages and admins put shell scripts on the PATH."""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!" and b"release" not in file.read(400)
    except OSError:
        return False


def gcc_limit(layout: Layout) -> int | None:
    """Return the newest gcc that the toolkit takes."""
    match = re.search(r"__GNUC__\s*>\s*(\d+)", read(layout.find("includes", "crt/host_config.h") or ""))
    return int(match.group(1)) if match else None
