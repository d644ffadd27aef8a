# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What is in a CUDA toolkit, and what keeps kernels from being compiled, linked and loaded with it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding, errors
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_audit import Audit
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_audit import findings as damaged
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_elf import soname
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import Layout
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import COMPONENTS, Owned, Python, read

# part -> (group of folders, names, distribution, what its lack does)
PARTS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "nvcc_profile": ("bins", ("nvcc.profile",), "nvcc", "without it nvcc does not find cudafe++ and cicc"),
    "cudafe": ("bins", ("cudafe++",), "nvcc", "nvcc stops with `cudafe++: not found`"),
    "ptxas": ("bins", ("ptxas",), "nvcc", "nvcc stops with `ptxas: not found`"),
    "fatbinary": ("bins", ("fatbinary",), "nvcc", "nvcc stops with `fatbinary: not found`"),
    "cicc": ("nvvms", ("bin/cicc",), "nvvm", "nvcc stops with `nvvm/bin/cicc: not found`"),
    "libdevice": (
        "nvvms",
        ("libdevice/libdevice.10.bc", "libdevice.10.bc"),
        "nvvm",
        "mathematical functions do not build",
    ),
    "crt": ("includes", ("crt/host_config.h",), "crt", "`crt/host_config.h: No such file or directory`"),
    "runtime": ("includes", ("cuda_runtime.h",), "cudart", "`cuda_runtime.h: No such file or directory`"),
    "cuda_h": ("includes", ("cuda.h",), "cudart", "`cuda.h: No such file or directory`"),
    "libcudart": ("libs", ("libcudart.so.13", "libcudart.so.12", "libcudart.so"), "cudart", "`cannot find -lcudart`"),
    "libcudadevrt": ("libs", ("libcudadevrt.a",), "cudart", "nvcc as a linker stops with `cannot find -lcudadevrt`"),
}
INSTALLABLE = {f"{part}_missing" for part in PARTS} | {f"skew_{name}" for name in ("crt", "nvvm", "runtime", "cccl")}
INSTALLABLE |= {"wheel_damaged"}
COMPOSABLE = {
    "lib64_missing",
    "libcudart_so_missing",
    "libcuda_stub_missing",
    "libcuda_stub_soname",
    "nvcc_not_executable",
}
COMPOSING = "A composed CUDA_HOME (repair: compose) has it right"
CCCL_FAULTS = {"nv_target_missing", "cccl_mixed", "cccl_damaged"}
_CCCL = ("cuda/std/__cccl/version.h", "cub/version.cuh")


@dataclass(frozen=True)
class Toolkit:
    """One toolkit: its folders, versions (as 13.0.88 or 13.0) and what is wrong with it."""

    layout: Layout
    versions: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    owned: dict[str, Owned] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """Its folder."""
        return self.layout.root

    def codes(self) -> set[str]:
        """Return the codes of what stands in the way."""
        return {item.code for item in errors(self.findings)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a module's result."""
        return {
            "root": self.root,
            "origin": self.layout.origin,
            "layout": self.layout.kind,
            "versions": self.versions,
            "findings": [item.to_dict() for item in self.findings],
        }


def examine(runner: Runner, layout: Layout, python: Python, wheels: Audit | None = None) -> Toolkit:
    """Look at one toolkit: its parts, their versions, and whether they fit; nothing is compiled."""
    nvcc = layout.find("bins", "nvcc")
    files = wheels.owned if wheels else {}
    closed = [path for group in (layout.bins, layout.includes, layout.libs, layout.nvvms) for path in group]
    closed = [path for path in closed if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK)]
    if closed:
        text = f"{' and '.join(closed)} cannot be read by the user that runs this"
        return Toolkit(layout, {}, [Finding("not_readable", text, f"chmod a+rX {' '.join(closed)}")], files)
    if not nvcc:
        name = f"{layout.root} has no bin/nvcc"
        if layout.kind == "pip":
            finding = Finding(
                "nvcc_missing", name, f"Install it: {install_line(python, ('nvcc', 'crt', 'nvvm', 'cccl'))}"
            )
        else:
            finding = Finding("nvcc_missing", name, "It is no CUDA toolkit: correct the path, or install one there")
        return Toolkit(layout, {}, [finding], files)
    versions = find_versions(runner, layout, python, nvcc)
    findings = [*_missing(layout, python, nvcc), *_links(layout), *_cccl(layout, files, python)]
    findings += skew(layout, versions, python)
    findings += damaged(layout.root, wheels.damages, shlex.quote(python.path), python.packages) if wheels else []
    if "nvcc" not in versions:
        text, remedy = f"{nvcc} does not run or does not tell its version", "Install nvidia-cuda-nvcc again"
        findings.append(Finding("nvcc_broken", text, remedy))
    return Toolkit(layout, versions, findings, files)


def install_line(python: Python, parts: tuple[str, ...] = ("nvcc", "crt", "nvvm", "cccl")) -> str:
    """Return the command that installs parts of the version that fits torch."""
    return f'{shlex.quote(python.path)} -m pip install "cuda-toolkit[{",".join(parts)}]{python.wanted}"'


def find_versions(runner: Runner, layout: Layout, python: Python, nvcc: str) -> dict[str, str]:
    """Return the versions of the parts."""
    found: dict[str, str] = {}
    program = nvcc if os.access(nvcc, os.X_OK) else ""
    ptxas = layout.find("bins", "ptxas") or ""
    for name, path in (("nvcc", program), ("ptxas", ptxas)):
        if path and os.access(path, os.X_OK):
            match = re.search(r"V(\d+\.\d+\.\d+)", runner.run([path, "--version"], timeout=30.0).stdout)
            if match:
                found[name] = match.group(1)
    if layout.kind == "pip":
        for name, dist in COMPONENTS.items():
            if dist in python.packages and name not in ("cccl", "cudart") and (name != "nvcc" or "nvcc" not in found):
                found[name] = python.packages[dist]
    else:
        match = re.search(r"__NVVM|release (\d+\.\d+)", read(f"{layout.root}/nvvm/version.txt"))
        if match and match.group(1):
            found["nvvm"] = match.group(1)
    header = read(layout.find("includes", "cuda_runtime_api.h") or "")
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header)
    if match:
        found["runtime"] = f"{int(match.group(1)) // 1000}.{int(match.group(1)) % 1000 // 10}"
    if python.torch:
        found["torch_cuda"] = python.torch
    cccl = next(
        (v for v in (cccl_version(f"{base}{sub}") for base in layout.includes for sub in ("/cccl", "")) if v), ""
    )
    if cccl:
        found["cccl"] = cccl
    return found


def cccl_version(folder: str) -> str:
    """Return the version of the CCCL in a folder that holds cuda/, cub/ ...; "" when there is none."""
    for header in _CCCL:
        match = re.search(r"#define\s+(CCCL|CUB)_VERSION\s+(\d+)", read(f"{folder}/{header}"))
        if match:
            number, unit = int(match.group(2)), 1000 if match.group(1) == "CCCL" else 100
            return f"{number // (unit * 1000)}.{number // unit % 1000}.{number % unit}"
    return ""


def _missing(layout: Layout, python: Python, nvcc: str) -> list[Finding]:
    found = []
    if not os.access(nvcc, os.X_OK):
        found.append(Finding("nvcc_not_executable", f"{nvcc} is not executable", COMPOSING))
    for part, (group, names, component, effect) in PARTS.items():
        if layout.find(group, *names):
            continue
        text = f"{layout.root} has no {names[0]}: {effect}"
        if layout.kind == "pip":
            remedy = f"Install {COMPONENTS[component]} again, of nvcc's version: {install_line(python, (component,))}"
        else:
            remedy = "Install the toolkit again"
        severity = WARNING if part in ("libdevice", "libcudadevrt") else "error"
        found.append(Finding(f"{part}_missing", text, remedy, severity))
    return found


def _links(layout: Layout) -> list[Finding]:
    """Look for what FlashInfer's `-L$CUDA_HOME/lib64 -L$CUDA_HOME/lib64/stubs -lcudart -lcuda` needs."""
    root, found = layout.root, []
    if not layout.has(f"{root}/lib64"):
        text = f"{root} has no lib64, where FlashInfer and tvm-ffi look for libraries: `cannot find -lcudart`"
        found.append(Finding("lib64_missing", text, COMPOSING))
    if not any(layout.has(f"{folder}/libcudart.so") for folder in (f"{root}/lib64", *layout.libs)):
        text = f"{root} has no libcudart.so without a number: `cannot find -lcudart`"
        found.append(Finding("libcudart_so_missing", text, COMPOSING))
    stub = next((path for path in (f"{f}/stubs/libcuda.so" for f in layout.libs) if layout.has(path)), "")
    if not stub:
        text = f"{root} has no lib64/stubs/libcuda.so: `cannot find -lcuda`"
        found.append(Finding("libcuda_stub_missing", text, COMPOSING))
    elif soname(stub) not in ("libcuda.so.1", None):
        text = (
            f"{stub} calls itself {soname(stub) or 'nothing'}, not libcuda.so.1: what is linked with it does not load"
        )
        found.append(Finding("libcuda_stub_soname", text, COMPOSING))
    return found


def _cccl(layout: Layout, owned: Mapping[str, Owned], python: Python) -> list[Finding]:
    if not layout.find("includes", "cccl/nv/target", "nv/target"):
        text = f"{layout.root} has no nv/target (CCCL): tvm-ffi, FlashInfer <= 0.6.9: `nv/target: No such file`"
        return [Finding("nv_target_missing", text, f"{COMPOSING}, or: {install_line(python, ('cccl',))}")]
    reasons = []
    for base in layout.includes:
        inner, outer = cccl_version(f"{base}/cccl"), cccl_version(base)
        if inner and outer and inner != outer:
            reasons.append(f"{base} holds CCCL {outer} and {base}/cccl {inner}")
        for folder in (f"{base}/cccl", base):
            cub = re.search(r"#define\s+CUB_VERSION\s+(\d+)", read(f"{folder}/cub/version.cuh"))
            cccl = re.search(r"#define\s+CCCL_VERSION\s+(\d+)", read(f"{folder}/cuda/std/__cccl/version.h"))
            if cub and cccl and int(cub.group(1)) // 100 != int(cccl.group(1)) // 1000:
                reasons.append(f"{folder} holds cub {cub.group(1)} with CCCL {cccl.group(1)}")
    extra = strangers(layout, owned)
    if extra:
        reasons.append(f"{layout.root}/include holds {len(extra)} headers that no wheel brought, as {extra[0]}")
    if not reasons:
        return []
    text = f"several CCCL lie over each other: {'; '.join(reasons)}"
    return [Finding("cccl_mixed", text, f"{COMPOSING}; or remove them and: {install_line(python, ('cccl',))}")]


def strangers(layout: Layout, owned: Mapping[str, Owned]) -> list[str]:
    """Return headers in a pip tree's CCCL folders that belong to no wheel (copied there by hand)."""
    if layout.kind != "pip" or not any(name.startswith("include/cccl/") for name in owned):
        return []
    found = []
    for top in ("include/cccl", "include/cuda", "include/nv", "include/cub", "include/thrust"):
        for folder, _folders, files in os.walk(f"{layout.root}/{top}"):
            base = os.path.relpath(folder, layout.root)
            found += [f"{base}/{name}" for name in files if f"{base}/{name}" not in owned]
    return sorted(found)


def skew(layout: Layout, versions: Mapping[str, str], python: Python) -> list[Finding]:
    """Compare the versions of the parts with each other and with torch's CUDA."""
    found = []
    line = (
        f"Install one version: {install_line(python)}" if layout.kind == "pip" else "Install the toolkit again, whole"
    )
    nvcc = minor(versions.get("nvcc", ""))
    names = (
        ("runtime", "the runtime's headers", "CUDA compiler and CUDA toolkit headers are incompatible"),
        ("crt", "the compiler's headers (crt)", "CUDA compiler and CUDA toolkit headers are incompatible"),
        ("nvvm", "nvvm (cicc)", "ptxas: Unsupported .version"),
    )
    for name, what, effect in names:
        other = minor(versions.get(name, ""))
        if nvcc and other and nvcc != other:
            text = f"{layout.root}: nvcc is {versions['nvcc']}, {what} {versions[name]}: `{effect}`"
            found.append(Finding(f"skew_{name}", text, line))
    torch = minor(python.cuda)
    major = torch[0] if torch else 12 if python.split else None  # only CUDA 12's wheels have a folder per package
    runs = "torch runs on" if python.torch else "the environment's runtime wheels are of"
    if nvcc and major and nvcc[0] != major:
        text = f"{layout.root}: nvcc is {versions['nvcc']}, and {runs} CUDA {python.cuda or major}"
        found.append(Finding("skew_torch", text, f"Use a toolkit of CUDA {major}, best {python.cuda or '12.9'}"))
    elif nvcc and torch and nvcc != torch and not found:
        text = f"{layout.root}: nvcc is {versions['nvcc']}, and {runs} CUDA {torch[0]}.{torch[1]}"
        found.append(Finding("skew_torch_minor", text, f"Best is the same version: {install_line(python)}", WARNING))
    return found


def minor(version: str) -> tuple[int, int] | None:
    """Return major and minor of a version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else None
