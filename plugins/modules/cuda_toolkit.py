#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Find, complete and prove the CUDA toolkit that a Python environment compiles kernels with."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cuda_toolkit
short_description: Find, complete and prove the CUDA toolkit that a Python environment compiles kernels with
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Looks at the toolkit that pip laid out in a virtual environment (C(nvidia/cu13)), at E(CUDA_HOME), below /usr/local,
    at conda's and Debian's, and says at once all that keeps kernels from being compiled, linked and loaded.
  - Completes the first usable one in a folder of its own, made of links (C(lib64), C(libcudart.so), a stub of the
    driver's library, one CCCL), and never changes a file of pip's. The folder's name holds a fingerprint of everything
    the links lead to, so that a build never mixes two toolkits.
  - Proves it by compiling a kernel for each architecture, linking it as FlashInfer links, and loading it. A proof holds
    as long as the toolkit, the host compiler and the architectures stay the same; a second run repeats nothing.
  - Writes C(toolkit.json), from which the servers get their E(CUDA_HOME).
  - A system toolkit that passes is left alone and used where it lies.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
    details: Nothing is compiled for a folder that does not exist yet. Of wheels that are still to be installed the
      links are shown that every such set has, and where the rest comes from.
  diff_mode:
    support: full
    details: Shows the folder link by link.
options:
  state:
    description:
      - V(present) makes and proves a CUDA_HOME.
      - V(absent) takes back all that was made in O(folder), all additions to wheels, and C(toolkit.json). It is refused
        while a server of O(config_dir) has one of the folders as its E(CUDA_HOME). What another configuration uses
        stays.
    type: str
    choices: [present, absent]
    default: present
  python:
    description: The environment's interpreter. Needed with O(state=present).
    type: path
  cuda_home:
    description:
      - The only toolkit to look at; empty for looking at all places.
      - One absolute folder; a relative one or a list is refused.
    type: str
    default: ''
  arch_list:
    description:
      - Architectures that kernels have to compile for, as V(9.0a), V(10.0f), V(12.0f).
      - Left out, those of the host's GPUs.
    type: list
    elements: str
    default: []
  folder:
    description: Where composed folders and private wheels lie. It, and every folder above it, belongs to the user that
      runs the module or to root, and nobody else can write to them.
    type: path
    default: /opt/sglang/cuda
  config_dir:
    description: Folder of C(toolkit.json), made when it is missing.
    type: path
    default: /etc/sglang
  repair:
    description:
      - V(compose) makes a folder of links outside the environment.
      - V(in_place) adds what is missing where pip put the toolkit, for tools that insist on that path. Only additions,
        each recorded in O(folder); O(state=absent), or V(compose) later, takes them back. Not in a release that
        M(gpufleet.sglang.sglang_release) made.
      - V(none) only looks, and uses what is proven to work as it is.
    type: str
    choices: [compose, in_place, none]
    default: compose
  skew:
    description:
      - What to do when nvcc, its headers, nvvm and the runtime are of different versions, or some are missing.
      - V(install) installs one set, of the version torch runs on, into O(folder); the environment stays as it is.
        A set that lost a file, or holds another one than its wheels brought, is installed again.
      - Damaged files of the environment's own wheels are parts that are missing; each is named with its wheel.
      - V(fail) says which command would repair the environment. It fails also where another toolkit of the host would
        do, and names that one; O(cuda_home) takes it. An environment that has no nvcc is no such case, and the host's
        is used.
    type: str
    choices: [install, fail]
    default: install
  cccl:
    description:
      - Whose CUDA C++ headers (nv/target, cuda/std, cub, thrust) to use; never two.
      - V(auto) takes the toolkit's own, else a private wheel of nvcc's version, else the ones that FlashInfer brings.
    type: str
    choices: [auto, toolkit, wheel, engine]
    default: auto
  probes:
    description:
      - What to prove. V(link) compiles, links and loads a kernel; V(headers) compiles cub and thrust.
    type: list
    elements: str
    choices: [link, headers]
    default: [link]
  prove_again:
    description: Run the probes even where their proof still holds.
    type: bool
    default: false
  required:
    description: Fail when no CUDA_HOME could be proven. Otherwise the reasons are shown as warnings.
    type: bool
    default: true
  environment:
    description: The servers' own environment; E(PATH), E(CC), E(CXX) and their like count for compiling.
    type: dict
    default: {}
  user:
    description: The servers' user, who has to reach the toolkit and write to O(cache_dirs); empty for not asking.
    type: str
    default: ''
  cache_dirs:
    description: Folders of the servers' kernel caches, for space, rights, and builds that pin another CUDA_HOME.
    type: list
    elements: path
    default: []
  wheel_dir:
    description: Folder on the host with wheels; private sets are installed from nothing else.
    type: path
  index_url:
    description: Package index for private sets; may hold a password.
    type: str
  extra_index_urls:
    description: Further package indexes.
    type: list
    elements: str
    default: []
seealso:
  - module: gpufleet.sglang.sglang_release
  - module: gpufleet.sglang.sglang_plan
"""

EXAMPLES = r"""
- name: Make the toolkit of an environment work for Blackwell, on a host without a GPU
  gpufleet.sglang.cuda_toolkit:
    python: /srv/venv/bin/python
    arch_list: [12.0f]
  register: toolkit

- name: Only say what is wrong
  gpufleet.sglang.cuda_toolkit:
    python: /srv/venv/bin/python
    repair: none
    required: false

- name: Take back all that was made
  gpufleet.sglang.cuda_toolkit:
    state: absent
"""

RETURN = r"""
cuda_home:
  description: The folder that was proven; null when there is none. In check mode the one that would be made.
  returned: always
  type: str
proven:
  description: Whether all probes passed, now or earlier with the same toolkit and compiler.
  returned: state is present
  type: bool
findings:
  description:
    - All that was found wrong, each with C(code), C(severity), C(message), C(remedy) and C(repaired).
  returned: always
  type: list
  elements: dict
  sample:
    - code: libcudart_so_missing
      severity: error
      message: "/srv/venv/lib/python3.12/site-packages/nvidia/cu13 has no libcudart.so without a number"
      remedy: Repaired in /opt/sglang/cuda/13.0.88-0123456789ab
      repaired: true
problems:
  description: The findings that still stand in the way.
  returned: state is present
  type: list
  elements: dict
repairs:
  description: What the CUDA_HOME has that the toolkit itself lacks, a line each.
  returned: state is present
  type: list
  elements: str
lines:
  description: Findings, repairs and where this leaves the servers, for people.
  returned: state is present
  type: list
  elements: str
versions:
  description: Versions of C(nvcc), C(ptxas), C(crt), C(nvvm), C(runtime), C(cccl) and of the CUDA that torch runs on.
  returned: state is present
  type: dict
toolkits:
  description: Every toolkit seen, with C(root), C(origin), C(layout), C(versions) and C(findings).
  returned: state is present
  type: list
  elements: dict
proofs:
  description: The probes that this run made, with C(probe), C(arch), C(ok), C(seconds) and C(driver) (driver or stub).
  returned: state is present
  type: list
  elements: dict
drift:
  description: Units that were rendered with another CUDA_HOME, each with C(unit) and C(cuda_home).
  returned: state is present
  type: list
  elements: dict
pruned:
  description: Folders that nobody needed any more and that were removed.
  returned: always
  type: list
  elements: str
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileError
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding, numbered
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_apply import ApplyError
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_build import Settings
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_finish import remove
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_host import Needs
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_outcome import DONE, PLANNED, UNPROVEN, Outcome
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_run import run
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_wheels import Origin

ARGUMENTS = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "python": {"type": "path"},
    "cuda_home": {"type": "str", "default": ""},
    "arch_list": {"type": "list", "elements": "str", "default": []},
    "folder": {"type": "path", "default": "/opt/sglang/cuda"},
    "config_dir": {"type": "path", "default": "/etc/sglang"},
    "repair": {"type": "str", "choices": ["compose", "in_place", "none"], "default": "compose"},
    "skew": {"type": "str", "choices": ["install", "fail"], "default": "install"},
    "cccl": {"type": "str", "choices": ["auto", "toolkit", "wheel", "engine"], "default": "auto"},
    "probes": {"type": "list", "elements": "str", "choices": ["link", "headers"], "default": ["link"]},
    "prove_again": {"type": "bool", "default": False},
    "required": {"type": "bool", "default": True},
    "environment": {"type": "dict", "default": {}},
    "user": {"type": "str", "default": ""},
    "cache_dirs": {"type": "list", "elements": "path", "default": []},
    "wheel_dir": {"type": "path"},
    "index_url": {"type": "str", "no_log": True},
    "extra_index_urls": {"type": "list", "elements": "str", "default": [], "no_log": True},
}


def settings_of(params: dict[str, Any]) -> Settings:
    """Build the settings from the module's arguments."""
    environment = {str(key): str(value) for key, value in params["environment"].items() if value is not None}
    return Settings(
        python=params["python"],
        folder=params["folder"],
        config_dir=params["config_dir"],
        cuda_home=params["cuda_home"].strip(),
        archs=tuple(params["arch_list"]),
        repair=params["repair"],
        skew=params["skew"],
        cccl=params["cccl"],
        probes=tuple(params["probes"]),
        prove_again=params["prove_again"],
        needs=Needs(environment, params["user"], tuple(params["cache_dirs"])),
        origin=Origin(params["wheel_dir"] or "", params["index_url"] or "", tuple(params["extra_index_urls"])),
    )


def result_of(out: Outcome) -> dict[str, Any]:
    """Turn an outcome into the module's result."""
    return {
        "changed": out.changed,
        "cuda_home": out.cuda_home,
        "proven": out.proven,
        "findings": out.listed(),
        "problems": [item.to_dict() for item in out.problems],
        "repairs": out.repairs,
        "lines": lines_of(out),
        "versions": out.versions,
        "toolkits": [item.to_dict() for item in out.toolkits],
        "proofs": [
            {"probe": item.probe, "arch": item.arch, "ok": item.ok, "seconds": item.seconds, "driver": item.driver}
            for item in out.proofs
        ],
        "drift": [item.to_dict() for item in out.drift],
        "pruned": out.pruned,
        "diff": out.diff,
    }


def lines_of(out: Outcome) -> list[str]:
    """Say it for people: every finding with what was done about it, what was made, and what follows."""
    lines = []
    word, verb = {
        DONE: ("repaired", "made"),
        PLANNED: ("to be repaired", "to be made"),
        UNPROVEN: ("not used yet", "not used yet"),
    }[out.stage]
    for item in dict.fromkeys(out.findings):
        if item.code in out.repaired:
            lines.append(f"{word}: {item.message}")
        else:
            lines.append(f"{'OPEN' if item.severity == 'error' else 'note'}: {item.text()}")
    lines += [f"{verb}: {text}" for text in out.repairs]
    if not out.proven:
        kept = f"; the servers keep {out.cuda_home}" if out.cuda_home else ""
        return [*lines, f"no CUDA_HOME is proven{kept}: kernels that are compiled at run time may fail"]
    return [*lines, f"CUDA_HOME {out.cuda_home}"]


def refusal(out: Outcome, problems: list[Finding]) -> str:
    """Say why there is none, and which other toolkit would do."""
    other = "".join(f"\n{item.text()}" for item in out.findings if item.code == "toolkit_other")
    return numbered(f"{os.uname().nodename}: no CUDA toolkit that works", problems) + other


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec=ARGUMENTS, required_if=[("state", "present", ["python"])], supports_check_mode=True
    )
    if not module.params["config_dir"].startswith("/"):  # it would lie below wherever this happens to run
        module.fail_json(msg=f"config_dir {module.params['config_dir']!r}: an absolute path is needed")
    os.umask(0o022)  # what is made here is for the servers' user to read, and for nobody else to write
    if module.params["state"] == "absent":
        try:
            gone = remove(module.params["folder"], module.params["config_dir"], check=module.check_mode)
        except (ApplyError, FileError, OSError) as exc:
            module.fail_json(msg=f"{os.uname().nodename}: the toolkit is not taken back: {exc}")
        for item in gone.findings:
            module.warn(item.text())
        found = gone.listed()
        module.exit_json(changed=gone.changed, cuda_home=None, findings=found, pruned=gone.pruned, diff=gone.diff)
    out = run(settings_of(module.params), SubprocessRunner(), os.environ, check=module.check_mode)
    result = result_of(out)
    problems = out.problems
    if not out.proven and not problems:
        problems = [Finding("not_proven", "no CUDA_HOME could be proven", "See the findings")]
    not_yet = module.check_mode and [item.code for item in problems] == ["venv_missing"]
    if problems and module.params["required"] and not not_yet:
        module.fail_json(msg=refusal(out, problems), **result)
    for item in problems:
        module.warn(item.text())
    module.exit_json(**result)


if __name__ == "__main__":
    main()
