# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation only: the action plugin of the same name does it all, on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_report
short_description: Show the servers of many hosts as one table, or write them as JSON
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Takes what M(gpufleet.sglang.sglang_health) returned on each host, prints a table with a line per GPU, and
    optionally writes the same as JSON to a file on the controller.
  - A host without any figures becomes a row that says so. Missing data is never a failure.
  - Runs on the controller and needs no connection; use it with C(run_once=true).
options:
  results:
    description: Name of the variable in which each host has registered the result of M(gpufleet.sglang.sglang_health).
    type: str
    default: sglang_health
  hosts:
    description:
      - The hosts to show. By default all hosts of the play, also those that dropped out of it.
      - A host that dropped out without a result is shown as C(unknown), one whose result says so as C(unreachable).
    type: list
    elements: str
  servers:
    description: Show these servers of the current host, and no variable of any host.
    type: list
    elements: dict
  table:
    description: Print the table.
    type: bool
    default: true
  width:
    description: Columns that the table may take.
    type: int
    default: 120
  json_file:
    description:
      - File on the controller to write the rows to; not in check mode.
      - Its folder must exist.
    type: path
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
    details: Prints, but writes no file.
  diff_mode:
    support: none
    details: Nothing is changed on any host.
  platform:
    platforms: linux
seealso:
  - module: gpufleet.sglang.sglang_health
"""

EXAMPLES = r"""
- name: Look at all servers
  gpufleet.sglang.sglang_health:
  register: sglang_health
  ignore_unreachable: true

- name: Show them
  gpufleet.sglang.sglang_report:
    json_file: /tmp/fleet.json
  run_once: true
"""

RETURN = r"""
rows:
  description:
    - One dictionary per GPU, sorted by host and GPU, with the keys of RV(gpufleet.sglang.sglang_health#module:servers);
      what is not known is null.
    - A host that knows no GPU has one row whose C(gpu) is null and whose C(state) is C(unreachable), C(absent)
      or C(unknown).
  returned: always
  type: list
  elements: dict
table:
  description: The lines of the table.
  returned: always
  type: list
  elements: str
summary:
  description: How many servers are in which state, in one line.
  returned: always
  type: str
  sample: 7 of 8 ready (1 failed)
"""
