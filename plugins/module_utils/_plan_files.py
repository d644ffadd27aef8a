# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The files that a plan is made from."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._options import EngineOptions, OptionsFileError


class PlanInputError(Exception):
    """A file the plan is made from cannot be used; the message names it and the remedy."""


def engine_options(path: str | None) -> EngineOptions | None:
    """Read the engine's option list; None when there is none yet."""
    if not path or not Path(path).exists():
        return None
    try:
        return EngineOptions.load(path)
    except OptionsFileError as exc:
        raise PlanInputError(str(exc)) from exc


def cuda_home(path: str | None) -> tuple[str | None, list[Finding]]:
    """Return the CUDA_HOME that the toolkit stage wrote down; a file that cannot be read is a warning."""
    if not path:
        return None, []
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        home = data.get("cuda_home")
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, AttributeError) as exc:
        text = f"{path} cannot be read ({exc}): the servers get no CUDA_HOME"
        return None, [Finding("toolkit_file", text, "Run the deploy with --tags toolkit to write it anew", WARNING)]
    return (str(home), []) if home else (None, [])
