# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Set the engines' own memory figures beside the plan's."""

from __future__ import annotations

DOCUMENTATION = r"""
name: memory_beside
author:
  - gpufleet.sglang contributors (@gpufleet)
version_added: 0.1.0
short_description: Compare a memory plan with what the servers say
description:
  - Sets the KV tokens and concurrent requests that running servers report beside those that
    M(gpufleet.sglang.sglang_plan) foretold.
options:
  _input:
    description: RV(gpufleet.sglang.sglang_plan#module:memory).
    type: list
    elements: dict
    required: true
  servers:
    description: RV(gpufleet.sglang.sglang_health#module:servers).
    type: list
    elements: dict
    required: true
  limit:
    description: Percent that the two may differ before it is a finding.
    type: float
    default: 10
"""

EXAMPLES = r"""
- name: Show how good the plan was
  ansible.builtin.debug:
    msg: "{{ (planned.memory | gpufleet.sglang.memory_beside(health.servers, 10)).lines }}"
"""

RETURN = r"""
_value:
  description: C(rows) for machines, C(lines) for people, and C(findings), one text for each gap above O(limit).
  type: dict
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._memory_plan import beside


def memory_beside(
    forecasts: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]], limit: float = 10
) -> dict[str, Any]:
    """Compare forecasts with servers."""
    return beside(forecasts, servers, float(limit))


class FilterModule:
    """The filter."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return it under its name."""
        return {"memory_beside": memory_beside}
