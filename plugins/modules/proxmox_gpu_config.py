#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Pass NVIDIA GPUs into an LXC container on Proxmox."""

from __future__ import annotations

DOCUMENTATION = r"""
module: proxmox_gpu_config
short_description: Pass NVIDIA GPUs into an LXC container on Proxmox
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Completes the configuration of a container, on the Proxmox host, with what its GPUs need. Device numbers come from
    the kernel, never from a list.
  - Adds lines to the container's own section only. Snapshots, which follow it in the same file, and lines that are
    there stay; what is there in another spelling counts.
  - Restarts nothing; the lines hold from the container's next start.
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
options:
  path:
    description: The container's configuration, as V(/etc/pve/lxc/200.conf).
    type: path
    required: true
  gpus:
    description:
      - Numbers of the GPUs to pass in, as in C(/dev/nvidia3). An empty list means all that the host has.
      - It is the number of the device node, which need not be the index in C(nvidia-smi).
    type: list
    elements: int
    default: []
  style:
    description:
      - V(lxc) writes C(lxc.cgroup2.devices.allow) and C(lxc.mount.entry), which every Proxmox knows; the container
        starts also when a node is missing. C(nvidia-uvm) may have another number after a boot; run this again then.
      - V(dev) writes C(devN) lines, which Proxmox 8.1 and newer know and look up at each start; while a node is missing
        the container does not start.
    type: str
    choices: [lxc, dev]
    default: lxc
  backup_dir:
    description: Folder for the configuration as it was; an empty string keeps none.
    type: str
    default: /var/backups/gpufleet
  devices_file:
    description:
      - Where the numbers of the drivers are read. Another file than the kernel's is for preparing a configuration.
    type: path
    default: /proc/devices
"""

EXAMPLES = r"""
- name: Pass every GPU into container 200
  gpufleet.sglang.proxmox_gpu_config:
    path: /etc/pve/lxc/200.conf
"""

RETURN = r"""
added:
  description: The lines that were added, or would be.
  returned: always
  type: list
  elements: str
  sample: ['lxc.cgroup2.devices.allow: c 195:* rwm']
notes:
  description: What in the configuration is worth a look, such as rules for numbers that no driver has.
  returned: always
  type: list
  elements: str
backup:
  description: Where the configuration as it was is kept; empty when nothing was changed.
  returned: always
  type: str
"""

import platform

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpu_container_apply import ConfError, Spec, ensure


def main() -> None:
    """Run the module."""
    arguments = {
        "path": {"type": "path", "required": True},
        "gpus": {"type": "list", "elements": "int", "default": []},
        "style": {"type": "str", "choices": ["lxc", "dev"], "default": "lxc"},
        "backup_dir": {"type": "str", "default": "/var/backups/gpufleet"},
        "devices_file": {"type": "path", "default": "/proc/devices"},
    }
    module = AnsibleModule(argument_spec=arguments, supports_check_mode=True)
    try:
        result = ensure(Spec(**module.params), check=module.check_mode)
    except ConfError as exc:
        module.fail_json(msg=f"{platform.node()}: {exc}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
