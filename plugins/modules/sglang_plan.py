#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Plan the servers of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_plan
short_description: Plan the SGLang servers of a host
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Turns what the inventory asks for and what the host is like into one list of servers, one per GPU, each with its
    unit, port, command line and environment, and writes it to a file that every later stage reads.
  - Settings have names that stay the same; the module maps them to the flags of the installed engine, and checks every
    flag against the engine's own option list before anything restarts.
  - Fails with all problems at once, and then writes nothing.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
  - gpufleet.sglang.host
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
options:
  name:
    description: Name of the host in messages and in the plan.
    type: str
    required: true
  path:
    description: File the plan is written to, with mode 0600. Its folder is made when it is missing.
    type: path
    default: /etc/sglang/plan.json
  instances:
    description:
      - What differs per GPU. Each entry names its C(gpu) and may have C(port), C(host), C(served_model_name),
        C(environment), C(extra_args) and any of O(settings).
    type: list
    elements: dict
    default: []
  model:
    description: Absolute path of a model's folder on the host, or a hub id.
    type: str
    required: true
  served_model_name:
    description: Name the model is offered under; empty for the engine's default.
    type: str
    default: ''
  canary:
    description: GPU that is started first, by index or UUID; empty for the first of O(gpus).
    type: str
    default: ''
  settings:
    description:
      - Settings of all servers in names that do not change with the engine's version; null leaves one to the engine.
      - Known are C(attention_backend), C(sampling_backend), C(mem_fraction_static), C(max_running_requests),
        C(max_total_tokens), C(chunked_prefill_size), C(context_length), C(kv_cache_dtype), C(dtype), C(quantization),
        C(load_format), C(mamba_strategy), C(reasoning_parser), C(tool_call_parser), C(metrics), C(sleep_on_idle),
        C(decode_graph_max_batch), C(decode_graphs), C(prefill_graphs), C(trust_remote_code), C(log_level),
        C(watchdog_timeout) and C(random_seed).
    type: dict
    default: {}
  extra_args:
    description:
      - Further flags of the engine, without dashes. V(true) gives the bare flag, a list several values, null or
        V(false) leaves the flag out (or gives its C(--no-) form where it has one).
    type: dict
    default: {}
  environment:
    description:
      - Further environment variables. They win over the plan's own.
      - In O(instances) a null value takes a variable of the fleet away from one GPU.
    type: dict
    default: {}
  release:
    description: Name of the engine's release.
    type: str
    required: true
  version:
    description:
      - Version of the engine that is to be installed. As long as O(options_file) is not there, settings are spelled as
        this version spells them.
    type: str
    default: ''
  venv:
    description: The release's virtual environment.
    type: path
    required: true
  remedies:
    description:
      - Codes whose recorded remedies are applied, with their limits; see M(gpufleet.sglang.sglang_remedy).
      - A remedy is applied only while the value it replaces is still the one that is asked for, and forgotten after.
    type: dict
    default: {}
  options_file:
    description: The engine's option list. Without it flags are not checked, and the result says so.
    type: path
  toolkit_file:
    description: What the toolkit stage found; its C(cuda_home) goes into the servers' environment.
    type: path
  config_dir:
    description: Folder of the servers' environment files.
    type: path
    default: /etc/sglang
  state_dir:
    description: HOME of the servers.
    type: path
    default: /var/lib/sglang
  cache_dir:
    description: Folder of the kernel caches, which the servers share.
    type: path
    default: /var/cache/sglang
  kernels_dir:
    description:
      - Folder of published kernels (M(gpufleet.sglang.flashinfer_jit_warm)). The servers load from it and compile
        nothing. Empty where they may compile.
    type: str
    default: ''
  unit_dir:
    description: Folder of the units.
    type: path
    default: /etc/systemd/system
  user:
    description: User that the servers run as; when it is there already, the model must be readable for it.
    type: str
    default: sglang
  facts:
    description:
      - C(gpus) and C(listeners) as RV(gpufleet.sglang.sglang_host_info#module:facts) has them.
      - Left out, the module looks itself.
    type: dict
seealso:
  - module: gpufleet.sglang.sglang_host_info
"""

EXAMPLES = r"""
- name: Plan one server per GPU
  gpufleet.sglang.sglang_plan:
    name: "{{ inventory_hostname }}"
    model: /srv/models/Qwen3.6-27B
    release: 0.5.23
    venv: /opt/sglang/releases/0.5.23
    options_file: /etc/sglang/options-0.5.23.json
    toolkit_file: /etc/sglang/toolkit.json
    settings:
      mem_fraction_static: 0.85
      mamba_strategy: no_buffer
    instances:
      - gpu: 3
        port: 31000
        mem_fraction_static: 0.7
  register: planned
"""

RETURN = r"""
plan:
  description: The plan, as it is in O(path).
  returned: success
  type: dict
flags_checked:
  description: Whether the engine's option list was there to check the flags against.
  returned: always
  type: bool
removed_units:
  description:
    - Units that an earlier rollout rendered (C(GPU.json) in O(config_dir)) and the plan no longer has. The rollout
      stops and removes them.
  returned: success
  type: list
  elements: str
gone:
  description: GPUs that have a server, are asked for and are not there any more. The others are planned.
  returned: success
  type: list
  elements: str
lines:
  description: One line per server, for people.
  returned: success
  type: list
  elements: str
  sample:
    - "GPU 0 (NVIDIA RTX PRO 6000, GPU-5e1f...): sglang@0.service on 127.0.0.1:30000, canary"
memory:
  description:
    - What each server will have, reckoned as the engine does it - C(total_mib), C(free_mib) (its own running server
      counts as free), C(holders) of the rest, C(weights_mib), C(kv_token_bytes), C(fraction) and whether it was set or
      is the engine's own, C(budget_mib), C(left_mib) and C(reserve_mib) for graphs and activations, C(kv_tokens),
      C(max_running_requests), what binds either, C(state_slots) and C(slots_per_request) of hybrid models.
    - A GPU is left out when the model's files are not there, or do not say what it needs.
  returned: always
  type: list
  elements: dict
memory_lines:
  description: The same as a table for people.
  returned: always
  type: list
  elements: str
remedies:
  description: The remedies that this plan holds, a line for each - where it differs from what was asked for.
  returned: always
  type: list
  elements: str
problems:
  description: Everything that stands in the way, each with C(code), C(severity), C(message), C(remedy) and C(gpu).
  returned: always
  type: list
  elements: dict
findings:
  description: What is worth knowing but does not stand in the way, in the same form; shown as warnings too.
  returned: always
  type: list
  elements: dict
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _memory_plan, _model, _remedies
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import (
    FileError,
    FileSpec,
    file_changes,
    write_files,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding, errors, numbered, warnings
from ansible_collections.gpufleet.sglang.plugins.module_utils._gone import missed
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import gpu_from_dict
from ansible_collections.gpufleet.sglang.plugins.module_utils._host import Host
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import read_applied
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan import (
    PlanFacts,
    PlanSettings,
    build_plan,
    describe,
    removed_units,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan_files import (
    PlanInputError,
    cuda_home,
    engine_options,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._ports import Listener, listeners
from ansible_collections.gpufleet.sglang.plugins.module_utils._preflight import look_at_gpus
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner

_NOT_SETTINGS = ("remedies", "path", "user", "options_file", "toolkit_file", "facts", "timeout")


def argument_spec() -> dict[str, Any]:
    """Return the module's options."""
    return {
        "name": {"type": "str", "required": True},
        "path": {"type": "path", "default": "/etc/sglang/plan.json"},
        "device": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
        "gpus": {"type": "list", "elements": "str", "default": []},
        "instances": {"type": "list", "elements": "dict", "default": []},
        "base_port": {"type": "int", "default": 30000},
        "host": {"type": "str", "default": "127.0.0.1"},
        "model": {"type": "str", "required": True},
        "served_model_name": {"type": "str", "default": ""},
        "canary": {"type": "str", "default": ""},
        "settings": {"type": "dict", "default": {}},
        "extra_args": {"type": "dict", "default": {}},
        "environment": {"type": "dict", "default": {}},
        "release": {"type": "str", "required": True},
        "version": {"type": "str", "default": ""},
        "venv": {"type": "path", "required": True},
        "remedies": {"type": "dict", "default": {}},
        "options_file": {"type": "path"},
        "toolkit_file": {"type": "path"},
        "config_dir": {"type": "path", "default": "/etc/sglang"},
        "state_dir": {"type": "path", "default": "/var/lib/sglang"},
        "cache_dir": {"type": "path", "default": "/var/cache/sglang"},
        "kernels_dir": {"type": "str", "default": ""},
        "unit_dir": {"type": "path", "default": "/etc/systemd/system"},
        "user": {"type": "str", "default": "sglang"},
        "facts": {"type": "dict"},
        "timeout": {"type": "int", "default": 30},
    }


def look(params: dict[str, Any]) -> PlanFacts:
    """Gather what the plan needs to know of the host, unless it was handed in."""
    home, found = cuda_home(params["toolkit_file"])
    model = _model.inspect(params["model"])
    given = params["facts"]
    if given is not None:
        gpus = [gpu_from_dict(item) for item in given.get("gpus") or []]
        sockets = [Listener(**item) for item in given.get("listeners") or []]
        return PlanFacts(gpus, True, (), found, sockets, model, home)
    seen = look_at_gpus(
        Host(SubprocessRunner()),
        params["device"],
        float(params["timeout"]),
        config_dir=params["config_dir"],
        wanted=params["gpus"],
    )
    return PlanFacts(seen.gpus, seen.known, seen.gone, [*found, *seen.findings], listeners(), model, home)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params = dict(module.params)
    recorded = _remedies.read(params["config_dir"])
    held = _remedies.valid(
        recorded,
        params["remedies"],
        params["instances"],
        params["settings"],
        params["environment"],
        params["gpus"],
    )
    params["instances"] = _remedies.merged(params["instances"], held)
    settings = PlanSettings(**{key: value for key, value in params.items() if key not in _NOT_SETTINGS})
    try:
        options = engine_options(params["options_file"])
        facts = look(params)
    except (PlanInputError, TypeError) as exc:
        module.fail_json(msg=f"{params['name']}: {exc}", problems=[], findings=[], flags_checked=False)
    plan, problems, notes = build_plan(settings, facts, options)
    if params["options_file"] and options is None and not module.check_mode:
        text = f"release {params['release']} is not installed: {params['options_file']} is missing"
        problems.append(Finding("release_missing", text, "Run the whole deploy, or --tags engine first"))
    problems += _model.unreadable_by(SubprocessRunner(), params["user"], params["model"])
    if params["device"] == "cpu":
        rooms = _memory_plan.cpu_rooms(plan.instances)
    else:
        rooms = _memory_plan.gpu_rooms(facts.gpus, plan.instances)
    memory, found, unknown = _memory_plan.foresee(plan, rooms, plan.release.version or params["version"])
    problems += errors(found)
    notes += warnings(found)
    for note in notes:
        module.warn(f"{params['name']}: {note.text()}")
    drift = [f"GPU {gpu}: {item.text()}" for gpu, item in held.items()]
    for line in drift:
        module.warn(f"{params['name']}: {line}; {params['config_dir']}/{_remedies.NAME} records it")
    result: dict[str, Any] = {
        "remedies": drift,
        "problems": [item.to_dict() for item in problems],
        "findings": [item.to_dict() for item in notes],
        "flags_checked": options is not None,
        "memory": [item.to_dict() for item in memory],
        "memory_lines": [*_memory_plan.table(memory, params["device"]), *unknown],
    }
    if problems:
        what = f"{params['name']}: no plan, {len(problems)} problem{'s' if len(problems) > 1 else ''}"
        module.fail_json(msg=numbered(what, problems), **result)

    specs = [FileSpec(params["path"], plan.to_json(), 0o600)]
    if held != recorded:  # what the inventory has overtaken is drift no longer
        specs.append(FileSpec(str(Path(params["config_dir"], _remedies.NAME)), _remedies.to_json(held), 0o644))
    try:
        changes = file_changes(specs)
        if changes and not module.check_mode:
            write_files(specs)
    except FileError as exc:
        module.fail_json(msg=f"{params['name']}: the plan was not written: {exc}", **result)
    applied = read_applied(params["config_dir"]).values()
    module.exit_json(
        changed=bool(changes),
        diff=[change.diff for change in changes],
        plan=plan.to_dict(),
        removed_units=removed_units(plan, applied, params["gpus"], facts.gone),
        gone=[item.finding().text() for item in missed(params["gpus"], facts.gone)],
        lines=[*describe(plan, facts.gpus), *drift],
        **result,
    )


if __name__ == "__main__":
    main()
