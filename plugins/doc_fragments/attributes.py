# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Attributes that the collection's modules share."""

from __future__ import annotations


class ModuleDocFragment:
    """The documentation fragment gpufleet.sglang.attributes."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
  diff_mode:
    description: Returns details on what has changed (or would change in C(check_mode)) when in diff mode.
  platform:
    description: Target OS/families that can be operated against.
    support: full
    platforms: linux
"""
