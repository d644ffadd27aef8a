# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What a release of SGLang calls a flag, from the table that scripts/tools/spellings.py reads off the wheels.

An installed engine is asked itself; the table speaks for a release that is not installed yet, and knows what
an older or newer release called something.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ansible_collections.gpufleet.sglang.plugins.module_utils._spellings import FLAGS, VERSIONS

MODULE_ENTRY = "(python -m sglang.launch_server)"
SERVE_ENTRY = "(sglang serve)"


def number(version: str) -> tuple[int, ...]:
    """Return a version as a sortable tuple: 0.5.12.post1 follows 0.5.12; a local part (+cu128) does not count."""
    return tuple(int(part) for part in re.findall(r"\d+", str(version).split("+")[0]))


def covered(version: str) -> bool:
    """Say whether the table speaks for this version: a release between the oldest and the newest in it."""
    return bool(re.fullmatch(r"\d+\.\d+\.\d+(\.?post\d+)?(\+\S+)?", str(version))) and (
        number(VERSIONS[0]) <= number(version) <= number(f"{VERSIONS[-1]}.post99")
    )


def knows(flag: str, version: str) -> bool | None:
    """Say whether a release knows a flag; None where the table does not speak."""
    row = FLAGS.get(flag)
    if row is None or not covered(version):
        return None
    first, last = number(row[0]), number(row[1])
    # a post-release of the newest release in the table knows what that one does
    return first <= number(version) and (row[1] == VERSIONS[-1] or number(version) <= last)


def deprecated(flag: str, version: str) -> str:
    """Return what a release says to use instead of a flag, "" where it is not deprecated there."""
    row = FLAGS.get(flag)
    if row is None or not row[2] or not knows(flag, version) or number(version) < number(row[2]):
        return ""
    return row[3] or "nothing"


def spelling(flags: Sequence[str], version: str) -> str | None:
    """Return which of a setting's flags (newest first) a release has: the first that it knows and does not deprecate.

    Where all are deprecated, the first one it knows; None where it knows none or the table does not speak.
    """
    known = [flag for flag in flags if knows(flag, version)]
    return next((flag for flag in known if not deprecated(flag, version)), known[0] if known else None)


def history(flag: str, version: str) -> str:
    """Say when a flag that this release lacks came or went, "" where the table does not know it."""
    row = FLAGS.get(flag)
    if row is None or knows(flag, version) is not False:
        return ""
    first, last, _since, instead = row
    if number(version) < number(first):
        return f"it came with {first}"
    return f"it went after {last}" + (f", which names instead: {instead}" if instead else "")
