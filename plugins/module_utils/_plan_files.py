# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The files around a plan: what it is made from, and where it is written."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._options import EngineOptions, OptionsFileError

MODE = 0o600


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


def read_text(path: Path) -> str:
    """Return a file's text, '' when there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def write_plan(path: Path, before: str, after: str, *, dry: bool) -> bool:
    """Write the plan in one step when its text or mode differ; returns whether they did."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mode = None
    if before == after and mode == MODE:
        return False
    if dry:
        return True
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return True
