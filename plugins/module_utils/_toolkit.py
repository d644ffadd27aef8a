# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""CUDA toolkits on a host: where they are, what is in them, and what keeps kernels from being built with them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding, errors
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner

SCHEMA = 1
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SITE = "import json, sysconfig; print(json.dumps(sysconfig.get_paths()['purelib']))"
# Parts of a toolkit, each with the places it may lie in.
_PARTS: dict[str, tuple[str, ...]] = {
    "nvcc": ("bin/nvcc",),
    "ptxas": ("bin/ptxas",),
    "cicc": ("nvvm/bin/cicc",),
    "crt": ("include/crt/host_config.h",),
    "runtime": ("include/cuda_runtime.h",),
    "nv_target": ("include/nv/target", "include/cccl/nv/target"),
    "lib64": ("lib64",),
    "libcudart_so": ("lib64/libcudart.so",),
    "libcuda_stub": ("lib64/stubs/libcuda.so",),
}
_MISSING: dict[str, tuple[str, str]] = {
    "ptxas": ("has no bin/ptxas", "Install nvidia-cuda-nvcc again"),
    "cicc": ("has no nvvm/bin/cicc", "Install nvidia-nvvm of nvcc's version"),
    "crt": ("has no include/crt/host_config.h", "Install nvidia-cuda-crt of nvcc's version"),
    "runtime": ("has no include/cuda_runtime.h", "Install nvidia-cuda-runtime of nvcc's version"),
    "nv_target": ("has no nv/target", "Install nvidia-cuda-cccl of nvcc's version"),
    "lib64": (
        "has no lib64, where FlashInfer and tvm-ffi look for -lcudart",
        "Link lib64 to lib, and in it libcudart.so to libcudart.so.N",
    ),
    "libcudart_so": ("has no lib64/libcudart.so, which -lcudart needs", "Link it to libcudart.so.N beside it"),
    "libcuda_stub": (
        "has no lib64/stubs/libcuda.so, nor has the system a libcuda.so: -lcuda finds nothing",
        "Install a system toolkit, which has the stub, or link the driver's libcuda.so.1 to libcuda.so",
    ),
}
_CCCL_HEADERS = (
    "include/cccl/cuda/std/__cccl/version.h",
    "include/cuda/std/__cccl/version.h",
    "include/cccl/cub/version.cuh",
    "include/cub/version.cuh",
)
_LIBCUDA = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")


@dataclass(frozen=True)
class Toolkit:
    """One toolkit: origin is explicit, pip, environment, system or path; versions are texts as '13.0.88' or '13.0'."""

    root: str
    origin: str
    parts: dict[str, str | None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True when nothing that a build needs is known to be missing or of a wrong version."""
        return bool(self.parts.get("nvcc")) and not errors(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a module's result."""
        return {
            "root": self.root,
            "origin": self.origin,
            "complete": self.complete,
            "parts": self.parts,
            "versions": self.versions,
            "findings": [item.to_dict() for item in self.findings],
        }


@dataclass(frozen=True)
class Survey:
    """All toolkits of a host as one venv sees them."""

    python: str
    site_packages: str | None
    layout: str  # cu13: nvidia/cu13 | split: nvidia/cuda_nvcc ... | none
    packages: dict[str, str]
    toolkits: list[Toolkit]
    tools: dict[str, str | None]
    findings: list[Finding]

    @property
    def chosen(self) -> Toolkit | None:
        """The toolkit to use: the first complete one."""
        return next((item for item in self.toolkits if item.complete), None)

    def record(self) -> dict[str, Any]:
        """Return what toolkit.json holds."""
        chosen = self.chosen
        shown = chosen or next(iter(self.toolkits), None)
        return {
            "schema": SCHEMA,
            "cuda_home": chosen.root if chosen else None,
            "versions": shown.versions if shown else {},
            "findings": [item.to_dict() for item in self.findings],
            "repairs": [],
        }


def survey(
    runner: Runner, python: str, cuda_home: str | None, environment: Mapping[str, str], root: str = "/"
) -> Survey:
    """Look for toolkits: the one asked for, the venv's wheels, $CUDA_HOME, /usr/local/cuda, and nvcc on the PATH."""
    done = runner.run([python, "-I", "-c", _SITE], timeout=30.0)
    if done.rc != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"rc {done.rc}").splitlines()[-1]
        text = f"{python} does not run: {said}"
        return Survey(python, None, "none", {}, [], {}, [Finding("venv_missing", text, "Install the engine first")])
    site = str(json.loads(done.stdout))
    packages = nvidia_packages(site)
    layout = pip_layout(site)
    tools = _tools(python)
    candidates = _candidates(cuda_home, site, layout, environment, root)
    torch_cuda = packages.get("nvidia-cuda-runtime", "")
    toolkits = [examine(runner, path, origin, packages, torch_cuda, root) for path, origin in candidates]
    found = _tool_findings(tools)
    if toolkits:
        shown = next((item for item in toolkits if item.complete), toolkits[0])
        found.extend([*_compiler(runner, shown, tools), *shown.findings])
    else:
        found.append(_absent(layout))
    return Survey(python, site, layout, packages, toolkits, tools, list(dict.fromkeys(found)))


def nvidia_packages(site: str) -> dict[str, str]:
    """Return the versions of NVIDIA's wheels, flashinfer, tvm-ffi and torch in a site-packages, by package name."""
    found = {}
    for folder in sorted(Path(site).glob("*.dist-info")):
        name, _dash, version = folder.name[: -len(".dist-info")].rpartition("-")
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name.startswith(("nvidia-", "cuda-toolkit", "flashinfer")) or name in ("torch", "apache-tvm-ffi", "ninja"):
            found[name] = version
    return found


def pip_layout(site: str) -> str:
    """Say how pip laid CUDA out: one tree from CUDA 13 on, one folder per package before."""
    if (Path(site) / "nvidia" / "cu13").is_dir():
        return "cu13"
    return "split" if (Path(site) / "nvidia" / "cuda_runtime").is_dir() else "none"


def examine(
    runner: Runner, path: str, origin: str, packages: Mapping[str, str], torch_cuda: str, root: str = "/"
) -> Toolkit:
    """Look at one toolkit: its parts, their versions, and whether they fit each other and torch."""
    parts: dict[str, str | None] = {}
    for part, places in _PARTS.items():
        parts[part] = next((f"{path}/{place}" for place in places if Path(f"{path}/{place}").exists()), None)
    if parts["libcuda_stub"] is None:
        system = (Path(root) / folder / "libcuda.so" for folder in _LIBCUDA)
        parts["libcuda_stub"] = next((str(item) for item in system if item.exists()), None)
    versions = _versions(runner, path, origin, parts, packages)
    findings = [*_part_findings(path, parts), *_skew(path, versions, torch_cuda)]
    if parts["nvcc"] and "nvcc" not in versions:
        text = f"{path}/bin/nvcc does not run"
        findings.append(Finding("nvcc_broken", text, "Make it executable, or install nvidia-cuda-nvcc again"))
    return Toolkit(path, origin, parts, versions, findings)


def _candidates(
    cuda_home: str | None, site: str, layout: str, environment: Mapping[str, str], root: str
) -> list[tuple[str, str]]:
    places = [(cuda_home or "", "explicit"), (f"{site}/nvidia/cu13" if layout == "cu13" else "", "pip")]
    places += [(environment.get("CUDA_HOME", ""), "environment"), (str(Path(root) / "usr/local/cuda"), "system")]
    nvcc = shutil.which("nvcc", path=environment.get("PATH", SYSTEM_PATH))
    if nvcc:
        places.append((str(Path(os.path.realpath(nvcc)).parent.parent), "path"))
    found: dict[str, tuple[str, str]] = {}
    for path, origin in places:
        if path and (origin == "explicit" or Path(f"{path}/bin/nvcc").exists()):
            found.setdefault(os.path.realpath(path), (path.rstrip("/"), origin))
    return list(found.values())


def _versions(
    runner: Runner, path: str, origin: str, parts: Mapping[str, str | None], packages: Mapping[str, str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("nvcc", "ptxas"):
        program = parts[name]
        match = (
            re.search(r"V(\d+\.\d+\.\d+)", runner.run([program, "--version"], timeout=30.0).stdout) if program else None
        )
        if match:
            found[name] = match.group(1)
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", _read(f"{path}/include/cuda_runtime_api.h"))
    if match:
        found["runtime"] = f"{int(match.group(1)) // 1000}.{int(match.group(1)) % 1000 // 10}"
    for header in _CCCL_HEADERS:
        match = re.search(r"#define\s+(CCCL|CUB)_VERSION\s+(\d+)", _read(f"{path}/{header}"))
        if match:
            number, unit = int(match.group(2)), 1000 if match.group(1) == "CCCL" else 100
            found["cccl"] = f"{number // (unit * 1000)}.{number // unit % 1000}.{number % unit}"
            break
    wheels = {"crt": "nvidia-cuda-crt", "nvvm": "nvidia-nvvm"}
    for name, wheel in wheels.items():
        if origin == "pip" and wheel in packages:
            found[name] = packages[wheel]
    return found


def _part_findings(path: str, parts: Mapping[str, str | None]) -> list[Finding]:
    if not parts["nvcc"]:
        return [Finding("nvcc_missing", f"{path} has no bin/nvcc", "It is no CUDA toolkit: correct the path")]
    found = []
    for part, (text, remedy) in _MISSING.items():
        if not parts[part] and not (part == "libcudart_so" and not parts["lib64"]):
            found.append(Finding(f"{part}_missing", f"{path} {text}", remedy))
    return found


def _skew(path: str, versions: Mapping[str, str], torch_cuda: str) -> list[Finding]:
    found = []
    nvcc = _minor(versions.get("nvcc", ""))
    for name, what in (("runtime", "the runtime's headers"), ("crt", "the compiler's headers (crt)")):
        other = _minor(versions.get(name, ""))
        if nvcc and other and nvcc != other:
            text = f"{path}: nvcc is {versions['nvcc']}, {what} are {versions[name]}"
            remedy = "CUDA refuses the mix: install one version of nvcc, crt, nvvm and runtime"
            found.append(Finding(f"skew_{name}", text, remedy))
    ptxas, nvvm = _minor(versions.get("ptxas", "")), _minor(versions.get("nvvm", ""))
    if ptxas and nvvm and nvvm > ptxas:
        text = f"{path}: nvvm {versions['nvvm']} writes code that ptxas {versions['ptxas']} does not read"
        found.append(Finding("skew_nvvm", text, "Install nvidia-nvvm of nvcc's version"))
    torch = _minor(torch_cuda)
    if nvcc and torch and nvcc[0] != torch[0]:
        text = f"{path}: nvcc is {versions['nvcc']}, and torch runs on CUDA {torch[0]}.{torch[1]}"
        found.append(Finding("skew_torch", text, f"Use a toolkit of CUDA {torch[0]}"))
    return found


def _tools(python: str) -> dict[str, str | None]:
    path = f"{Path(python).parent}:{SYSTEM_PATH}"
    return {name: shutil.which(name, path=path) for name in ("ninja", "gcc", "g++")}


def _tool_findings(tools: Mapping[str, str | None]) -> list[Finding]:
    found = []
    if not tools["ninja"]:
        text = "ninja is neither in the venv nor on the PATH: kernels that are compiled at run time need it"
        found.append(Finding("ninja_missing", text, "Install ninja into the venv"))
    missing = [name for name in ("gcc", "g++") if not tools[name]]
    if missing:
        text = f"{' and '.join(missing)} not on the PATH: nvcc needs a host compiler"
        found.append(Finding("gcc_missing", text, "Install gcc and g++"))
    return found


def _compiler(runner: Runner, toolkit: Toolkit, tools: Mapping[str, str | None]) -> list[Finding]:
    """Compare the host's gcc with the newest that the toolkit accepts."""
    limit = re.search(r"__GNUC__\s*>\s*(\d+)", _read(f"{toolkit.root}/include/crt/host_config.h"))
    gxx = tools["g++"]
    if not limit or not gxx:
        return []
    version = runner.run([gxx, "-dumpversion"], timeout=10.0).stdout.strip().split(".")[0]
    if not version.isdigit() or int(version) <= int(limit.group(1)):
        return []
    text = f"{gxx} is version {version}, and the toolkit in {toolkit.root} takes none newer than {limit.group(1)}"
    return [
        Finding("gcc_too_new", text, f"Install g++-{limit.group(1)} and set CC and CXX in sglang_server_environment")
    ]


def _absent(layout: str) -> Finding:
    if layout == "split":
        text = "the venv's CUDA 12 wheels hold no compiler (they have ptxas, but neither nvcc nor cicc)"
        return Finding("toolkit_absent", text, "Install a CUDA 12.8 or 12.9 toolkit on the host")
    text = "there is no nvcc: not in the venv, not in $CUDA_HOME, not in /usr/local/cuda, not on the PATH"
    return Finding("toolkit_absent", text, "Install nvidia-cuda-nvcc and nvidia-cuda-cccl of torch's CUDA version")


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
