# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Options by which modules are told which servers a host is to have."""

from __future__ import annotations


class ModuleDocFragment:
    """The documentation fragment gpufleet.sglang.host."""

    DOCUMENTATION = r"""
options:
  device:
    description: What the servers run on. With V(cpu) GPUs are not looked at, and the result says so.
    type: str
    choices: [cuda, cpu]
    default: cuda
  gpus:
    description:
      - GPUs that are to be used, by index or UUID. An empty list means all the host has.
      - With O(device=cpu), the numbers of the servers; at least one.
    type: list
    elements: str
    default: []
  base_port:
    description: The server of GPU N listens on this port plus N.
    type: int
    default: 30000
  host:
    description: Address the servers bind.
    type: str
    default: 127.0.0.1
  timeout:
    description: Seconds that each question to the driver may take.
    type: int
    default: 30
"""
