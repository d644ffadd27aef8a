# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What a run of the toolkit's stages found, made and proved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding, errors
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_look import Toolkit
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_probe import Proof
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_state import Drift

# What became of a finding that composing (or adding in place) mends.
DONE = "Repaired in {}"
PLANNED = "Nothing was changed yet (check mode): to be repaired in {}"
UNPROVEN = "{} has it right, but is not used: it was not proven"


@dataclass
class Outcome:
    """What a run found, made and proved."""

    cuda_home: str | None = None
    proven: bool = False
    changed: bool = False
    findings: list[Finding] = field(default_factory=list)
    repaired: set[str] = field(default_factory=set)  # codes of what the CUDA_HOME has right
    stage: str = DONE  # of those repairs
    repairs: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    toolkits: list[Toolkit] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    drift: list[Drift] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    diff: list[dict[str, str]] = field(default_factory=list)
    mendable: set[str] = field(default_factory=set)  # codes of what composing, or a private set, would mend
    tree: str = ""  # where the repairs were made, or are to be
    flashinfer: str = ""

    @property
    def problems(self) -> list[Finding]:
        """What still stands in the way."""
        return [item for item in errors(self.findings) if item.code not in self.repaired]

    def listed(self) -> list[dict[str, Any]]:
        """Return the findings as data, each with whether it was repaired, and what really happened to it."""
        found = []
        for item in dict.fromkeys(self.findings):
            mended = item.code in self.repaired
            data = {**item.to_dict(), "repaired": mended and self.stage == DONE}
            if mended and item.code != "ninja_pinned":
                data["remedy"] = self.stage.format(self.tree)
            found.append(data)
        return found
