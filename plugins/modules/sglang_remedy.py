#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose and record the next value for servers that failed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_remedy
short_description: Choose the next value for SGLang servers that failed for want of memory
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - For V(gpu_oom) while graphs are captured, V(kv_pool_too_small) and V(jit_compile_oom) there is one number whose
    next value is a safe thing to try. This module chooses it for each server that failed with one of these codes,
    once per GPU and never beyond O(limits), and writes it into C(remedies.json) in O(config_dir).
  - M(gpufleet.sglang.sglang_plan) applies what is written there while the inventory asks for the value that failed.
options:
  servers:
    description: What M(gpufleet.sglang.sglang_health) returned.
    type: list
    elements: dict
    required: true
  limits:
    description:
      - How far each remedy may go, by code. A code that is not named is left alone.
      - V(gpu_oom) lowers C(mem_fraction_static) by 0.05 down to this, V(kv_pool_too_small) raises it by 0.03 up
        to this, V(jit_compile_oom) halves C(MAX_JOBS) down to this.
    type: dict
    default: {}
  instances:
    description: The inventory's entries for single servers.
    type: list
    elements: dict
    default: []
  settings:
    description: The inventory's settings for all servers.
    type: dict
    default: {}
  environment:
    description: The inventory's environment for all servers.
    type: dict
    default: {}
  config_dir:
    description: Folder of C(remedies.json).
    type: path
    default: /etc/sglang
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  platform:
    platforms: linux
seealso:
  - module: gpufleet.sglang.sglang_health
  - module: gpufleet.sglang.sglang_plan
"""

EXAMPLES = r"""
- name: Try a smaller fraction where graph capture ran out of memory
  gpufleet.sglang.sglang_remedy:
    servers: "{{ health.servers }}"
    limits:
      gpu_oom: 0.75
    settings:
      mem_fraction_static: 0.85
"""

RETURN = r"""
applied:
  description: The remedies chosen now.
  returned: always
  type: list
  elements: dict
  contains:
    gpu:
      description: Index of the GPU.
      type: int
    unit:
      description: Unit of its server.
      type: str
    code:
      description: Why.
      type: str
    setting:
      description: What is changed.
      type: str
    before:
      description: The inventory's value; null for the engine's default.
      type: float
    after:
      description: The value to try.
      type: float
    text:
      description: All of it in one line.
      type: str
"""

import os
from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils import _remedies
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileError, FileSpec, write_files

ARGUMENTS = {
    "servers": {"type": "list", "elements": "dict", "required": True},
    "limits": {"type": "dict", "default": {}},
    "instances": {"type": "list", "elements": "dict", "default": []},
    "settings": {"type": "dict", "default": {}},
    "environment": {"type": "dict", "default": {}},
    "config_dir": {"type": "path", "default": "/etc/sglang"},
}


def main() -> None:
    """Choose, write, tell."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    before = _remedies.read(params["config_dir"])
    known = _remedies.valid(before, params["limits"], params["instances"], params["settings"], params["environment"])
    chosen = {}
    for server in params["servers"]:
        gpu = int(server["gpu"])
        code = (server.get("diagnosis") or {}).get("code")
        if server.get("state") == "ready" or gpu in known or code not in _remedies.STEPS:
            continue
        setting = _remedies.STEPS[code][0]
        own = _remedies.own_entry(params["instances"], gpu, server.get("uuid"))
        current = _remedies.current_value(setting, own, params["settings"], params["environment"])
        found = _remedies.choose(server, params["limits"], current, os.cpu_count() or 1)
        if found:
            chosen[gpu] = (found, str(server.get("unit")))
    after = {**known, **{gpu: item for gpu, (item, _unit) in chosen.items()}}
    old = _remedies.to_json(before) if before else ""
    new = _remedies.to_json(after) if after else ""
    path = str(Path(params["config_dir"], _remedies.NAME))
    changed = bool(chosen)
    if changed and not module.check_mode:
        try:
            write_files([FileSpec(path, new, 0o644)])
        except FileError as exc:
            module.fail_json(msg=f"no remedy was recorded: {exc}", applied=[])
    module.exit_json(
        changed=changed,
        diff={"before": old, "after": new if changed else old, "before_header": path, "after_header": path},
        applied=[{**asdict(item), "unit": unit, "text": item.text()} for item, unit in chosen.values()],
    )


if __name__ == "__main__":
    main()
