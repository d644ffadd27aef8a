#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Look at a host before servers are deployed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_host_info
short_description: Look at a host that is to run SGLang servers
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Looks at GPUs, the driver, device nodes, listening ports, disks, memory, compilers, systemd and Python, and says
    what stands in the way of one server per GPU. Finds all problems at once.
  - A program or mount that hangs is a problem in the result; the module itself does not hang.
  - In a container it tells a node that was not passed in from one that the device cgroup forbids and from one whose
    number has changed, and names the line for C(/etc/pve/lxc/VMID.conf) or the command on the host that repairs it.
  - GPUs and ports that the collection's own unit for the same GPU holds are no problem.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
  - gpufleet.sglang.host
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: Changes nothing.
options:
  instances:
    description: What differs per GPU; only C(gpu), C(port) and C(host) matter here.
    type: list
    elements: dict
    default: []
  config_dir:
    description:
      - Folder of the servers' files, which say what GPU each server was last given.
      - A GPU that has a server and is gone is a warning that names it.
    type: path
    default: /etc/sglang
  ports:
    description: Further ports that must be free or held by one of the servers.
    type: list
    elements: int
    default: []
  paths:
    description: Places that need free space.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: The place; it need not exist yet.
        type: path
        required: true
      min_free_mib:
        description: Free space that must be there, in MiB.
        type: int
        default: 0
      unless:
        description: A file whose existence says that the space is not needed any more.
        type: path
  vmid:
    description: Id of the LXC container on Proxmox that this host is; only names its configuration in the remedies.
    type: str
    default: ''
"""

EXAMPLES = r"""
- name: Look at the host
  gpufleet.sglang.sglang_host_info:
    gpus: [0, 1]
    base_port: 30000
    paths:
      - path: /opt/sglang/releases
        min_free_mib: 20000
  register: host

- name: Stop with everything that is wrong
  ansible.builtin.fail:
    msg: "{{ host.msg }}"
  when: not host.ok
"""

RETURN = r"""
ok:
  description: Whether no problem has the severity C(error).
  returned: always
  type: bool
msg:
  description: One text that names all problems of severity C(error), or says that there are none.
  returned: always
  type: str
problems:
  description: Everything found, each with C(code), C(severity), C(message), C(remedy) and, for one GPU, C(gpu).
  returned: always
  type: list
  elements: dict
  sample:
    - code: port_taken
      severity: error
      message: port 30003 of GPU 3 is taken by pid 812 (nginx, nginx.service) on 0.0.0.0
      remedy: Stop that process, or give the GPU another port in sglang_server_instances
      gpu: 3
facts:
  description: What was seen.
  returned: always
  type: dict
  contains:
    gpus_checked:
      description: Whether the driver was asked; V(false) on device cpu.
      returned: always
      type: bool
    gpus:
      description: The GPUs with their memory in MiB and the processes on them.
      returned: always
      type: list
      elements: dict
    listeners:
      description: Listening TCP sockets with pid, command and unit.
      returned: always
      type: list
      elements: dict
    driver:
      description: Versions of kernel module, nvidia-smi, libcuda and libnvidia-ml.
      returned: on device cuda
      type: dict
    device_nodes:
      description: The device nodes and whether they open.
      returned: on device cuda
      type: list
      elements: dict
    container:
      description: What kind of container this is, how its devices are restricted, and the numbers of NVIDIA's drivers.
      returned: on device cuda
      type: dict
    gpu_health:
      description: ECC, remapped rows and compute mode by UUID, as far as the GPU and its driver tell.
      returned: on device cuda
      type: dict
    kernel_log_read:
      description: Whether the kernel log could be read, which is where Xids are.
      returned: on device cuda
      type: bool
    disks:
      description: Free space of O(paths), in MiB.
      returned: always
      type: list
      elements: dict
    memory:
      description: RAM and the tightest cgroup limit, in MiB.
      returned: always
      type: dict
    shared_memory_mib:
      description: Size of /dev/shm.
      returned: always
      type: int
    cpu_count:
      description: CPUs this host may use.
      returned: always
      type: int
    tools:
      description: Where gcc, g++, ninja and nvcc lie on the PATH.
      returned: always
      type: dict
    systemd:
      description: Whether systemd is PID 1, and its version.
      returned: always
      type: dict
    pythons:
      description: Interpreters on the PATH that could make a venv, and the version each reports when run.
      returned: always
      type: list
      elements: dict
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import errors, numbered
from ansible_collections.gpufleet.sglang.plugins.module_utils._host import Host
from ansible_collections.gpufleet.sglang.plugins.module_utils._preflight import Wanted, collect
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def argument_spec() -> dict[str, Any]:
    """Return the module's options."""
    return {
        "device": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
        "gpus": {"type": "list", "elements": "str", "default": []},
        "instances": {"type": "list", "elements": "dict", "default": []},
        "base_port": {"type": "int", "default": 30000},
        "host": {"type": "str", "default": "127.0.0.1"},
        "config_dir": {"type": "path", "default": "/etc/sglang"},
        "ports": {"type": "list", "elements": "int", "default": []},
        "paths": {
            "type": "list",
            "elements": "dict",
            "default": [],
            "options": {
                "path": {"type": "path", "required": True},
                "min_free_mib": {"type": "int", "default": 0},
                "unless": {"type": "path"},
            },
        },
        "vmid": {"type": "str", "default": ""},
        "timeout": {"type": "int", "default": 30},
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params = dict(module.params)
    timeout = params.pop("timeout")
    host = Host(SubprocessRunner(), search_path=f"{os.environ.get('PATH', '')}:{SEARCH_PATH}")
    facts, found = collect(host, Wanted(**params), float(timeout))
    wrong = errors(found)
    what = "1 problem stands in the way" if len(wrong) == 1 else f"{len(wrong)} problems stand in the way"
    module.exit_json(
        changed=False,
        facts={**facts, "cpu_count": len(os.sched_getaffinity(0))},
        problems=[item.to_dict() for item in found],
        ok=not wrong,
        msg=numbered(what, wrong) if wrong else "nothing stands in the way",
    )


if __name__ == "__main__":
    main()
