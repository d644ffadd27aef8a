# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Remedies that act: the next value of one number, once per GPU, inside the inventory's limits, written down.

A remedy holds as long as the inventory asks for the value that failed: a changed inventory wins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
NAME = "remedies.json"
ENVIRONMENT = "MAX_JOBS"
# code: (setting, step; 0.5 = halve it, where to begin when the inventory leaves it to the engine)
STEPS: dict[str, tuple[str, float, float]] = {
    "gpu_oom": ("mem_fraction_static", -0.05, 0.85),
    "kv_pool_too_small": ("mem_fraction_static", 0.03, 0.85),
    "jit_compile_oom": (ENVIRONMENT, 0.5, 0),
}
CAPTURE = ("kv_pool", "graphs")  # phases in which a lower fraction is the remedy for gpu_oom
_ABOVE = re.compile(r"mem-fraction-static above (\d\.\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Remedy:
    """One value that was changed for one GPU; before is what the inventory asks for (None: the engine's default)."""

    gpu: int
    code: str
    setting: str
    before: float | None
    after: float
    evidence: str = ""
    uuid: str | None = None  # of the GPU, which inventories may name in place of its index

    def names(self, wanted: object) -> bool:
        """Say whether an inventory's name of a GPU means this one."""
        return names_gpu(wanted, self.gpu, self.uuid)

    def text(self) -> str:
        """Say it in one line."""
        wanted = "the engine's default" if self.before is None else f"{self.before:g}"
        return f"{self.setting} is {self.after:g} instead of {wanted} (remedy for {self.code})"


def choose(server: Mapping[str, Any], limits: Mapping[str, Any], current: float | None, cpus: int) -> Remedy | None:
    """Return the next value for a server that failed, None where none is safe or allowed."""
    found = server.get("diagnosis") or {}
    code = str(found.get("code"))
    if code not in STEPS or limits.get(code) is None:
        return None
    setting, step, begin = STEPS[code]
    limit = float(limits[code])
    evidence = str((found.get("evidence") or [""])[0])
    if code == "gpu_oom" and found.get("phase") not in CAPTURE:
        return None
    if setting == ENVIRONMENT:
        after = max(1.0, float(int((current or cpus) * step)))
        allowed = after >= limit and after < (current or cpus)
    else:
        after = round((current if current is not None else begin) + step, 3)
        wanted = _ABOVE.search(evidence)
        if step > 0 and wanted:
            after = max(after, round(float(wanted.group(1)) + 0.02, 3))
        allowed = (after <= limit if step > 0 else after >= limit) and 0 < after < 1
    if not allowed:
        return None
    return Remedy(int(server["gpu"]), code, setting, current, after, evidence[:300], server.get("uuid"))


def current_value(
    setting: str, own: Mapping[str, Any], settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> float | None:
    """Return what the inventory asks for: the GPU's own entry before the fleet's."""
    if setting == ENVIRONMENT:
        value = (own.get("environment") or {}).get(setting, environment.get(setting))
    else:
        value = own.get(setting, settings.get(setting))
    try:
        return None if value in (None, "") else float(value)
    except (TypeError, ValueError):
        return None


def read(config_dir: str) -> dict[int, Remedy]:
    """Return the remedies by GPU; a file that is not one counts as none."""
    try:
        data = json.loads(Path(config_dir, NAME).read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA:
            return {}
        return {int(gpu): Remedy(**item) for gpu, item in data["remedies"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def to_json(remedies: Mapping[int, Remedy]) -> str:
    """Return the text of the file."""
    rows = {str(gpu): asdict(remedies[gpu]) for gpu in sorted(remedies)}
    return json.dumps({"schema": SCHEMA, "remedies": rows}, indent=2, sort_keys=True) + "\n"


def valid(
    remedies: Mapping[int, Remedy],
    limits: Mapping[str, Any],
    instances: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    gpus: Sequence[object] = (),
) -> dict[int, Remedy]:
    """Return the remedies that still hold: allowed, of a GPU in use, and the inventory asks for the value that failed.

    gpus: the inventory's names of those in use, () for all.
    """
    held = {}
    for gpu, item in remedies.items():
        if gpus and not any(item.names(wanted) for wanted in gpus):
            continue
        own = own_entry(instances, gpu, item.uuid)
        if limits.get(item.code) is not None and current_value(item.setting, own, settings, environment) == item.before:
            held[gpu] = item
    return held


def names_gpu(wanted: object, gpu: int, uuid: str | None) -> bool:
    """Say whether an inventory's name of a GPU (index, UUID or its beginning) means this one."""
    text = str(wanted).strip().lower()
    return text == str(gpu) or (len(text) > len("GPU-") and bool(uuid) and str(uuid).lower().startswith(text))


def own_entry(instances: Sequence[Mapping[str, Any]], gpu: int, uuid: str | None = None) -> Mapping[str, Any]:
    """Return a GPU's entry of sglang_server_instances."""
    return next((item for item in instances if names_gpu(item.get("gpu"), gpu, uuid)), {})


def merged(instances: Sequence[Mapping[str, Any]], held: Mapping[int, Remedy]) -> list[dict[str, Any]]:
    """Return the inventory's entries with the remedies in them."""
    entries = [dict(item) for item in instances]
    for gpu, item in held.items():
        entry = next((one for one in entries if item.names(one.get("gpu"))), None)
        if entry is None:
            entry = {"gpu": str(gpu)}
            entries.append(entry)
        if item.setting == ENVIRONMENT:
            entry["environment"] = {**(entry.get("environment") or {}), item.setting: str(int(item.after))}
        else:
            entry[item.setting] = item.after
    return entries
