#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Look at the CUDA toolkits that a venv could compile kernels with."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cuda_toolkit_info
short_description: Look at the CUDA toolkits that a venv could compile kernels with
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Looks at the toolkit that pip laid out in a virtual environment, at E(CUDA_HOME), at /usr/local/cuda and at the nvcc
    on the PATH, and says which parts are missing, which versions do not fit each other, and what follows.
  - It reads files and asks programs for their version. It compiles nothing, so a toolkit that it calls complete is not
    proven to work. It repairs nothing.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: Changes nothing.
options:
  python:
    description: The virtual environment's interpreter.
    type: path
    required: true
  cuda_home:
    description: A toolkit to look at first.
    type: path
"""

EXAMPLES = r"""
- name: Look at the CUDA toolkit
  gpufleet.sglang.cuda_toolkit_info:
    python: /opt/sglang/releases/0.5.23/bin/python
  register: toolkit

- name: Show what is wrong
  ansible.builtin.debug:
    msg: "{{ toolkit.findings | map(attribute='message') }}"
"""

RETURN = r"""
cuda_home:
  description: The first toolkit with all the parts, in versions that fit each other; null when there is none.
  returned: always
  type: str
layout:
  description: How pip laid CUDA out. V(cu13) is one tree, V(split) one folder per package without a compiler.
  returned: always
  type: str
findings:
  description: What stands in the way of building kernels, each with C(code), C(severity), C(message) and C(remedy).
  returned: always
  type: list
  elements: dict
  sample:
    - code: nv_target_missing
      severity: error
      message: /opt/sglang/releases/0.5.23/lib/python3.12/site-packages/nvidia/cu13 has no nv/target
      remedy: Install nvidia-cuda-cccl of nvcc's version
toolkits:
  description: Every toolkit seen, with C(root), C(origin), C(complete), C(parts), C(versions) and its own C(findings).
  returned: always
  type: list
  elements: dict
packages:
  description: Versions of the packages in the virtual environment that matter here.
  returned: always
  type: dict
tools:
  description: Where ninja, gcc and g++ lie as the virtual environment sees them.
  returned: always
  type: dict
record:
  description: What toolkit.json is to hold.
  returned: always
  type: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit import survey


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={"python": {"type": "path", "required": True}, "cuda_home": {"type": "path"}},
        supports_check_mode=True,
    )
    seen = survey(SubprocessRunner(), module.params["python"], module.params["cuda_home"], os.environ)
    record = seen.record()
    module.exit_json(
        changed=False,
        cuda_home=record["cuda_home"],
        layout=seen.layout,
        findings=record["findings"],
        toolkits=[item.to_dict() for item in seen.toolkits],
        packages=seen.packages,
        tools=seen.tools,
        record=record,
    )


if __name__ == "__main__":
    main()
