# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Is it a model: what lies in a model's folder, and what is wrong with it."""

from __future__ import annotations

import json
import pwd
import re
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner

FOLDER = "folder"
HUB = "hub"
URL = "url"
RELATIVE = "relative"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin", "tokenizer.bin")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tiktoken.model",
    "vocab.json",
    "tekken.json",
)
_LFS = b"version https://git-lfs.github.com/spec/"


def kind_of(model: str) -> str:
    """Say what a model name is: an absolute folder, a hub id, a URL or a relative path."""
    if model.startswith("/"):
        return FOLDER
    if re.match(r"[a-z0-9]+://", model):
        return URL
    return HUB if _HUB_ID.fullmatch(model) else RELATIVE


def inspect(model: str) -> dict[str, Any]:
    """Look at a model's folder; reads names, the JSON files and the first bytes of the weights, nothing more."""
    kind = kind_of(model)
    facts: dict[str, Any] = {"path": model, "kind": kind}
    if kind != FOLDER:
        return facts
    folder = Path(model)
    try:
        facts["state"] = "folder" if folder.is_dir() else "file" if folder.exists() else "missing"
        if facts["state"] == "file":
            facts["gguf"] = folder.suffix == ".gguf"
        if facts["state"] != "folder":
            return facts
        names = {item.name: item for item in folder.iterdir()}
    except OSError as exc:
        return {**facts, "state": "unreadable", "error": exc.strerror}
    weights = sorted(name for name in names if name.endswith(_WEIGHTS) and name not in _NOT_WEIGHTS)
    facts["config"] = _json_state(names.get("config.json"))
    facts["mistral_config"] = _json_state(names.get("params.json")) == "ok"
    facts["tokenizer"] = any(name in names for name in _TOKENIZER)
    facts["weights"] = len(weights)
    facts["pointers"] = [name for name in weights if _is_pointer(names[name])]
    facts["unreadable"] = [name for name in weights if not _readable(names[name])]
    facts["missing_shards"] = _missing_shards(names)
    return facts


def unreadable_by(runner: Runner, user: str, model: str) -> list[Finding]:
    """Say when the service user cannot read the model's folder; nothing while there is no such user."""
    config = f"{model}/config.json"
    if kind_of(model) != FOLDER or not Path(config).is_file():
        return []
    try:
        pwd.getpwnam(user)
    except KeyError:
        return []
    if runner.run(["runuser", "-u", user, "--", "test", "-r", config]).rc != 1:
        return []
    text = f"sglang_server_model {model}: the service user {user} cannot read {config}"
    return [Finding("model_unreadable", text, "Open the folders above it for that user (chmod o+x), or move the model")]


def problems(facts: dict[str, Any], load_formats: set[str], offline: bool) -> list[Finding]:
    """Judge what inspect() saw; load_formats are those of all the servers, '' for the engine's default."""
    path, kind = facts["path"], facts["kind"]
    if kind == RELATIVE:
        text = f"sglang_server_model is {path!r}: neither an absolute folder on the host nor a hub id"
        return [Finding("model_relative", text, "Give the whole path, as /models/name")]
    if kind == HUB and offline:
        text = f"sglang_server_model {path} is a hub id and HF_HUB_OFFLINE is set"
        return [
            Finding(
                "model_offline",
                text,
                "It starts only from a filled cache: give a folder, or unset HF_HUB_OFFLINE",
                WARNING,
            )
        ]
    if kind != FOLDER:
        return []
    state = facts["state"]
    if state == "file" and facts["gguf"]:
        return []
    if state != "folder":
        texts = {
            "missing": "does not exist on the host",
            "file": "is a file, not a folder",
            "unreadable": f"cannot be read: {facts.get('error')}",
        }
        return [
            Finding(
                "model_missing",
                f"the model's folder {path} {texts[state]}",
                "Copy the model there, or correct sglang_server_model",
            )
        ]
    return [*_config_problems(facts, load_formats), *_weight_problems(facts, load_formats)]


def _config_problems(facts: dict[str, Any], load_formats: set[str]) -> list[Finding]:
    path = facts["path"]
    found = []
    if facts["config"] != "ok" and not (load_formats == {"mistral"} and facts["mistral_config"]):
        what = (
            "has no config.json"
            if facts["config"] == "missing"
            else f"has a config.json that does not parse: {facts['config']}"
        )
        found.append(
            Finding(
                "model_config",
                f"the model's folder {path} {what}",
                "It is not a model, or its copy is incomplete: copy it again",
            )
        )
    if not facts["tokenizer"]:
        text = f"the model's folder {path} has no tokenizer file"
        found.append(
            Finding(
                "model_tokenizer", text, "Copy it again, or set tokenizer-path in sglang_server_extra_args", WARNING
            )
        )
    return found


def _weight_problems(facts: dict[str, Any], load_formats: set[str]) -> list[Finding]:
    path = facts["path"]
    if load_formats == {"dummy"}:
        return []
    if not facts["weights"]:
        text = f"the model's folder {path} holds no weights (*.safetensors, *.bin, *.pt, *.gguf)"
        return [Finding("model_weights", text, "Copy the whole model; load_format dummy is the one that needs none")]
    found = []
    if facts["pointers"]:
        text = f"the model's folder {path} holds Git LFS pointers instead of weights: {_list(facts['pointers'])}"
        found.append(Finding("model_pointers", text, "Run git lfs pull there, or download the model again"))
    if facts["unreadable"]:
        text = f"weights of {path} cannot be opened: {_list(facts['unreadable'])}"
        found.append(Finding("model_unreadable", text, "A dangling link or a file without permission: repair it"))
    if facts["missing_shards"]:
        text = f"the model's folder {path} lacks weights that its index names: {_list(facts['missing_shards'])}"
        found.append(Finding("model_shards", text, "The copy is incomplete: copy the missing files"))
    return found


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _json_state(path: Path | None) -> str:
    if path is None:
        return "missing"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        return str(exc.strerror)
    except ValueError as exc:
        return str(exc)
    return "ok" if isinstance(data, dict) else "not an object"


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:
        return False


def _readable(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False


def _missing_shards(names: dict[str, Path]) -> list[str]:
    missing: set[str] = set()
    for index in (path for name, path in names.items() if name.endswith(".safetensors.index.json")):
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            missing.update(str(shard) for shard in shards if str(shard) not in names)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            missing.add(f"(unreadable index {index.name})")
    return sorted(missing)
