# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Servers that are waited for and do not move: neither a token nor a request less since so long."""

from __future__ import annotations

from collections.abc import Mapping


class Stalls:
    """Remembers since when the sign of life of each unit is the same."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.since: dict[str, tuple[str, float]] = {}

    def still(self, signs: Mapping[str, str | None], now: float) -> list[str]:
        """Return the units whose sign has been the same for too long; a unit without a sign (None) is at work."""
        self.since = {
            unit: self.since[unit] if unit in self.since and self.since[unit][0] == sign else (sign, now)
            for unit, sign in signs.items()
            if sign is not None
        }
        return [unit for unit, (_sign, since) in self.since.items() if now - since >= self.limit]
