#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Build the kernels that SGLang servers compile at their start, ahead of time and side by side."""

from __future__ import annotations

DOCUMENTATION = r"""
module: flashinfer_jit_warm
short_description: Build the kernels that SGLang servers compile at their start, ahead of time and side by side
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Builds FlashInfer's modules and SGLang's own kernels into the caches that the servers share, with the calls that a
    server makes, by the engine's own Python, as the servers' user and in the servers' environment. With FlashInfer's
    bulk builder, its public generators, or another spelling of E(CUDA_HOME), a server would compile everything again.
  - A process per module, as many as there are cores and memory for. In the end a fresh process loads every module with
    compiling forbidden, and no library may have changed by that. A library that was cut off is recognised before it is
    loaded, and built again.
  - The work is done in a transient unit, without systemd in a process of its own session. A lost connection does not
    end it; the next run joins it. Its journal has a line for each module.
  - Writes C(jit.json) beside C(toolkit.json), with the report and with what servers compiled themselves, by model and
    release.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
    details: Says which modules would be built. FlashInfer itself writes its generated sources and its log.
  diff_mode:
    support: none
options:
  state:
    description:
      - V(present) builds and proves.
      - V(learned) compares the caches with what they held after the last V(present), and adds to C(jit.json) what
        servers compiled since.
      - V(pruned) removes the kernels that were built for releases which are not in O(releases_dir) any more, and for no
        other; what was published for them; and what their servers taught.
      - V(reported) only tells how large the caches are, and what the last run came to.
    type: str
    choices: [present, learned, pruned, reported]
    default: present
  python:
    description: The engine's interpreter. Needed with O(state=present).
    type: path
  model:
    description: Folder with the model; its C(config.json) tells which kernels are needed.
    type: str
    default: ''
  release:
    description: Name under which what servers compile is remembered.
    type: str
    default: ''
  argv:
    description: The server's command line; its backends, dtypes and tensor parallelism count.
    type: list
    elements: str
    default: []
  more_argv:
    description: Command lines of the other servers, where their backends or dtypes differ.
    type: list
    elements: list
    default: []
  environment:
    description: The server's whole environment. Without it no cache is known.
    type: dict
    default: {}
  modules:
    description:
      - Modules by the names they have in a cache, as V(norm) or V(silu_and_mul), or entries as C(jit.json) shows them,
        with C(kind) (V(flashinfer) or V(sglang)), C(call) and C(args).
    type: list
    elements: raw
    default: []
  derive:
    description: Whether to build what follows from the model and O(argv).
    type: bool
    default: true
  learned:
    description: Whether to build what servers of this model had to compile themselves.
    type: bool
    default: true
  arch_list:
    description:
      - Architectures, as V(9.0a) or V(12.0f); left out, those in C(toolkit.json), else the host's GPUs'.
      - With several, everything is built for each.
    type: list
    elements: str
    default: []
  user:
    description: The servers' user; empty for the one that runs the module.
    type: str
    default: ''
  cache_dir:
    description: The folder that all caches lie in.
    type: path
    default: /var/cache/sglang
  config_dir:
    description: Folder of C(jit.json) and C(toolkit.json).
    type: path
    default: /etc/sglang
  workers:
    description: How many modules are built at once; 0 for as many as cores and memory (O(worker_memory_mib)) allow.
    type: int
    default: 0
  worker_memory_mib:
    description: Memory that one compiler may need.
    type: int
    default: 1126
  module_timeout:
    description: Seconds that building one module may take before it is killed and reported; 0 for without a limit.
    type: int
    default: 1800
  publish_dir:
    description:
      - Folder for a copy of FlashInfer's modules in the layout of its ahead-of-time loading; empty for none.
      - Units that have it in E(PYTHONPATH) load from there without a lock and without a compiler. SGLang's own kernels
        are not copied. They are loaded from their cache, where SGLang looks them up by what nvcc and c++ say of their
        versions, so these stay installed. With E(SGLANG_CRASH_ON_JIT_COMPILE) one that is missing is an error at once.
      - It holds the set of this very call. With a smaller set (another model, fewer O(modules)) the others are gone
        from it, and a server that still runs and asks for one of them only then ends with C(MissingJITCacheError).
      - With O(state=pruned), the folder that holds one such folder for each release.
    type: str
    default: ''
  releases_dir:
    description: With O(state=pruned), folder of the releases. O(release) is kept too, wherever it is.
    type: path
    default: /opt/sglang/releases
  start_early:
    description:
      - Unit of a server that is started while the last modules are being built; empty for none.
      - The module returns with RV(pending) as soon as every module that is left has a builder that holds FlashInfer's
        own lock of it. A server that needs one waits at that lock and then loads. SGLang's own are done by then.
      - While that unit runs it waits for the end all the same, so that what serves is not stopped early.
    type: str
    default: ''
  pending:
    description: What an earlier call returned as RV(pending); waits for the end of that warm-up.
    type: dict
    default: {}
  strict:
    description: With O(state=learned), whether to fail when a server compiled something.
    type: bool
    default: false
  required:
    description: Whether to fail when a module cannot be built. Otherwise the reasons are warnings.
    type: bool
    default: true
  slice_seconds:
    description:
      - Internal. The action plugin asks for slices of this length and goes on with O(watch_state).
      - Without it a single call waits as long as it takes.
    type: float
  watch_state:
    description: Internal. What a slice returned as RV(watch_state).
    type: dict
seealso:
  - module: gpufleet.sglang.cuda_toolkit
  - module: gpufleet.sglang.sglang_plan
"""

EXAMPLES = r"""
- name: Build what the servers of a plan will ask for
  gpufleet.sglang.flashinfer_jit_warm:
    python: "{{ plan.release.python }}"
    model: "{{ plan.model }}"
    release: "{{ plan.release.name }}"
    argv: "{{ plan.instances[0].argv }}"
    environment: "{{ plan.instances[0].environment }}"
    user: sglang

- name: Build two modules of FlashInfer, on a machine without a GPU
  gpufleet.sglang.flashinfer_jit_warm:
    python: /srv/venv/bin/python
    modules: [norm, silu_and_mul]
    derive: false
    arch_list: [12.0f]
    environment:
      PATH: /srv/venv/bin:/usr/bin:/bin
      CUDA_HOME: /opt/sglang/cuda/13.2.86-0123456789ab
      FLASHINFER_WORKSPACE_BASE: /var/cache/sglang

- name: Fail when a server had to compile
  gpufleet.sglang.flashinfer_jit_warm:
    state: learned
    model: "{{ plan.model }}"
    release: "{{ plan.release.name }}"
    environment: "{{ plan.instances[0].environment }}"
    strict: true
"""

RETURN = r"""
modules:
  description:
    - Every module with C(name), C(kind), C(state) (already, compiled, failed, would_compile, unknown, unused),
      C(seconds), and where it failed C(error), its first real error line, C(code) and C(remedy).
  returned: state is present
  type: list
  elements: dict
counts:
  description: How many modules are in each state.
  returned: state is present
  type: dict
learned:
  description: Modules that a server compiled itself.
  returned: state is learned
  type: list
  elements: str
releases:
  description: Releases that are gone, and whose kernels were removed.
  returned: state is pruned
  type: list
  elements: str
removed:
  description: What was removed.
  returned: state is pruned
  type: list
  elements: str
problems:
  description: What stands in the way, each with C(code), C(message) and C(remedy).
  returned: state is present
  type: list
  elements: dict
caches:
  description: The caches that a start fills, each with C(name), C(path), C(files) and C(mib).
  returned: state is reported
  type: list
  elements: dict
report:
  description: What the last run came to, as C(jit.json) has it.
  returned: state is reported
  type: dict
pending:
  description: The warm-up goes on, and the server may be started; to be handed to the call that waits for its end.
  returned: when O(start_early) is set and modules are still being built
  type: dict
progress:
  description: What the worker said, a line for each module; the action plugin prints it.
  returned: by the module itself
  type: list
  elements: str
watch_state:
  description: Internal. To be handed to the next slice.
  returned: when O(slice_seconds) is set and the work goes on
  type: dict
lines:
  description: The same for people.
  returned: always
  type: list
  elements: str
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileError
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import numbered
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_job import JobError
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_prune import prune
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_run import (
    Outcome,
    Settings,
    learn,
    report_lines,
    run,
    sizes,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_state import load
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner

ARGUMENTS = {
    "state": {"type": "str", "choices": ["present", "learned", "pruned", "reported"], "default": "present"},
    "python": {"type": "path"},
    "model": {"type": "str", "default": ""},
    "release": {"type": "str", "default": ""},
    "argv": {"type": "list", "elements": "str", "default": []},
    "more_argv": {"type": "list", "elements": "list", "default": []},
    "environment": {"type": "dict", "default": {}},
    "modules": {"type": "list", "elements": "raw", "default": []},
    "derive": {"type": "bool", "default": True},
    "learned": {"type": "bool", "default": True},
    "arch_list": {"type": "list", "elements": "str", "default": []},
    "user": {"type": "str", "default": ""},
    "cache_dir": {"type": "path", "default": "/var/cache/sglang"},
    "config_dir": {"type": "path", "default": "/etc/sglang"},
    "workers": {"type": "int", "default": 0},
    "worker_memory_mib": {"type": "int", "default": 1126},
    "module_timeout": {"type": "int", "default": 1800},
    "publish_dir": {"type": "str", "default": ""},
    "releases_dir": {"type": "path", "default": "/opt/sglang/releases"},
    "start_early": {"type": "str", "default": ""},
    "pending": {"type": "dict", "default": {}},
    "strict": {"type": "bool", "default": False},
    "required": {"type": "bool", "default": True},
    "slice_seconds": {"type": "float"},
    "watch_state": {"type": "dict"},
}


def settings_of(params: dict[str, Any]) -> Settings:
    """Build the settings from the module's arguments."""
    return Settings(
        python=params["python"] or "",
        model=params["model"],
        release=params["release"],
        argv=params["argv"],
        more_argv=[[str(word) for word in argv] for argv in params["more_argv"]],
        environment={str(key): str(value) for key, value in params["environment"].items() if value is not None},
        modules=params["modules"],
        derive=params["derive"],
        learned=params["learned"],
        archs=params["arch_list"],
        user=params["user"],
        cache_dir=params["cache_dir"].rstrip("/"),
        config_dir=params["config_dir"].rstrip("/"),
        workers=params["workers"],
        memory_mib=params["worker_memory_mib"],
        module_timeout=params["module_timeout"],
        publish_dir=params["publish_dir"].rstrip("/"),
        start_early=params["start_early"],
    )


def result_of(out: Outcome) -> dict[str, Any]:
    """Turn an outcome into the module's result."""
    result: dict[str, Any] = {
        "changed": out.changed,
        "modules": [{key: value for key, value in row.items() if key != "entry"} for row in out.rows],
        "counts": out.counts(),
        "problems": [item.to_dict() for item in out.problems],
        "lines": out.lines,
        "progress": out.progress,
    }
    if out.watch is not None:
        result["pending" if out.pending else "watch_state"] = out.watch
    return result


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec=ARGUMENTS, required_if=[("state", "present", ["python"])], supports_check_mode=True
    )
    params, host = module.params, os.uname().nodename
    settings = settings_of(params)
    if params["state"] == "reported":
        caches, report = sizes(settings.cache_dir), load(settings.config_dir).get("report")
        module.exit_json(changed=False, caches=caches, report=report, lines=report_lines(caches, report))
    try:
        if params["state"] == "pruned":
            where = {key: params[key].rstrip("/") for key in ("cache_dir", "config_dir", "releases_dir", "release")}
            gone = prune({**where, "kernels_dir": params["publish_dir"].rstrip("/")}, check=module.check_mode)
            changed = bool(gone.releases)
            module.exit_json(changed=changed, releases=gone.releases, removed=gone.paths, lines=gone.lines)
        if params["state"] == "learned":
            out = learn(settings, check=module.check_mode)
            failed = params["strict"] and bool(out.learned)
            text = f"{host}: {out.lines[-1]}. It is learned: run the deploy again, and the warm-up builds it first"
            (module.fail_json if failed else module.exit_json)(
                changed=bool(out.learned), learned=out.learned, lines=out.lines, msg=text if failed else out.lines[-1]
            )
        out = run(
            settings,
            SubprocessRunner(),
            check=module.check_mode,
            seconds=params["slice_seconds"],
            watch=params["watch_state"] or params["pending"],
        )
    except (JobError, FileError, OSError, ValueError) as exc:
        module.fail_json(msg=f"{host}: {exc}")
    if out.problems and params["required"]:
        module.fail_json(msg=numbered(f"{host}: kernels could not be built", out.problems), **result_of(out))
    for item in out.problems:
        module.warn(item.text())
    module.exit_json(**result_of(out))


if __name__ == "__main__":
    main()
