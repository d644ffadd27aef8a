# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A connection lost for a moment costs a few seconds, not the deploy: the work goes on on the host meanwhile."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable

from ansible.errors import AnsibleConnectionFailure

TRIES = 3
PAUSE = 3.0  # s before it is tried again


def over_losses(call: Callable[[], dict[str, Any]], connection: Any, say: Callable[[str], object]) -> dict[str, Any]:
    """Run a module by call(), up to TRIES times while the connection is lost; say() gets a line for each loss.

    Raises AnsibleConnectionFailure when it is still lost at the last try. Whatever call() does must be safe to repeat.
    """
    for attempt in range(1, TRIES):
        try:
            return call()
        except AnsibleConnectionFailure as exc:
            say(f"connection lost, trying again ({attempt} of {TRIES - 1}): {exc}")
            time.sleep(PAUSE)
            with contextlib.suppress(Exception):  # a plugin without reset, or nothing to reset
                connection.reset()
    return call()
