# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Which of the toolkits that were found to use, what it has to be completed with, and why none will do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding, errors
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_host import arch_findings
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_look import (
    CCCL_FAULTS,
    COMPOSABLE,
    INSTALLABLE,
    Toolkit,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import Python

FROM_WHEELS = INSTALLABLE | {"nvcc_missing", "nvcc_broken", "nvcc_not_executable"} | COMPOSABLE | CCCL_FAULTS
OLD_WHEELS = (
    "Install a CUDA 12.8 or 12.9 toolkit on the host (NVIDIA's packages, or conda) for a torch of CUDA 12"
    ", or use a torch of CUDA 13, whose wheels bring a compiler"
)


@dataclass(frozen=True)
class Choice:
    """The toolkit to use; private says that its compiler and headers come from a set of wheels of our own."""

    toolkit: Toolkit | None = None
    private: bool = False
    findings: list[Finding] = field(default_factory=list)


def choose(
    toolkits: Sequence[Toolkit], python: Python, archs: Sequence[str], *, install: bool, in_place: bool
) -> Choice:
    """Choose: the first that composing repairs, else the environment's own with a private set, if that is allowed.

    Where no set may be installed, parts of different versions in the environment stop the run, whatever else the host
    has: who asks for that wants to hear of it. An environment without nvcc is no such thing.
    """
    faults = {id(item): _faults(item, archs) for item in toolkits}
    pip = next((item for item in toolkits if item.layout.kind == "pip"), None)
    if not install and pip and any(code.startswith("skew_") for code in _codes(faults[id(pip)])):
        return Choice(None, False, [*_refusal([pip], python, faults, install), *_others(toolkits, faults, pip)])
    completable = bool(install and pip and python.wanted and not in_place and _codes(faults[id(pip)]) <= FROM_WHEELS)
    for item in toolkits:
        if in_place and item.layout.kind != "pip":
            continue
        exact = item.layout.kind == "pip" or item.layout.origin == "explicit" or not completable
        if _codes(faults[id(item)]) <= COMPOSABLE | CCCL_FAULTS and (exact or not _other_minor(item)):
            return Choice(item, False, [*_passed_over(toolkits, item, faults), *faults[id(item)]])
    if pip and completable:
        return Choice(pip, True, faults[id(pip)])
    return Choice(None, False, _refusal(toolkits, python, faults, install))


def _faults(toolkit: Toolkit, archs: Sequence[str]) -> list[Finding]:
    return [*toolkit.findings, *arch_findings(archs, toolkit.versions.get("nvcc", ""), toolkit.root)]


def _codes(findings: Sequence[Finding]) -> set[str]:
    return {item.code for item in errors(findings)}


def _passed_over(toolkits: Sequence[Toolkit], chosen: Toolkit, faults: dict[int, list[Finding]]) -> list[Finding]:
    """Return why better placed toolkits are not used: worth knowing, no longer in the way."""
    found: list[Finding] = []
    for item in toolkits:
        if item is chosen:
            break
        wrong = [fault for fault in errors(faults[id(item)]) if fault.code not in COMPOSABLE | CCCL_FAULTS]
        found += [replace(fault, message=f"not used: {fault.message}", severity=WARNING) for fault in wrong]
    return found


def _others(toolkits: Sequence[Toolkit], faults: dict[int, list[Finding]], pip: Toolkit) -> list[Finding]:
    """Name the toolkits that would do in place of the environment's own."""
    found = []
    for item in toolkits:
        if item is not pip and _codes(faults[id(item)]) <= COMPOSABLE | CCCL_FAULTS:
            text = f"{item.root} (nvcc {item.versions.get('nvcc', '?')}) would do, and is not used: skew is `fail`"
            remedy = f"To use it set cuda_toolkit_fix_cuda_home={item.root}, or cuda_toolkit_fix_skew=install"
            found.append(Finding("toolkit_other", text, remedy, WARNING))
    return found


def _other_minor(toolkit: Toolkit) -> bool:
    return any(item.code == "skew_torch_minor" for item in toolkit.findings)


def _refusal(
    toolkits: Sequence[Toolkit], python: Python, faults: dict[int, list[Finding]], install: bool
) -> list[Finding]:
    found: list[Finding] = []
    pip = any(item.layout.kind == "pip" for item in toolkits)
    if python.split:
        text = (
            f"{python.prefix}: CUDA 12's wheels (nvidia/cuda_nvcc, nvidia/cuda_runtime) hold ptxas, libnvvm and"
            " headers, but neither nvcc nor cicc: nothing can be compiled with them"
        )
        found.append(Finding("wheels_cu12", text, OLD_WHEELS))
    for item in toolkits:
        for fault in faults[id(item)]:  # all at once; what composing repairs is in nobody's way
            easy = fault.code in COMPOSABLE | CCCL_FAULTS
            found.append(replace(fault, severity=WARNING) if easy else fault)
    if not toolkits and not found:
        text = "there is no nvcc: not in the venv, not in $CUDA_HOME, not below /usr/local, not on the PATH"
        version = python.wanted or "==13.0.*"
        install_it = f"{shlex.quote(python.path)} -m pip install"
        remedy = f'Install one: {install_it} "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]{version}"'
        found.append(Finding("toolkit_absent", text, remedy))
    if install and pip and not python.wanted and not python.split:
        text = "which CUDA torch runs on is not known, so no matching set of wheels can be named"
        found.append(Finding("torch_cuda_unknown", text, "Install torch first, or a cuda-toolkit of its version"))
    return found
