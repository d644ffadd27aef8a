# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Asking an installed engine for its option list, in a process of its own."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence

from ansible_collections.gpufleet.sglang.plugins.module_utils._options import (
    EngineOptions,
    OptionsFileError,
    option_from_dict,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import TIMED_OUT, Runner

TIMEOUT = 180.0

# Where engines keep their parser: (module, attribute, how). "fill": a function that adds the options to a parser;
# "capture": a function that builds a parser of its own and calls parse_args().
ENTRIES: tuple[tuple[str, str, str], ...] = (
    ("sglang.srt.server_args", "ServerArgs.add_cli_args", "fill"),
    ("sglang.srt.server_args", "prepare_server_args", "capture"),
    ("sglang.launch_server", "prepare_server_args", "capture"),
)

# Runs under the engine's interpreter. Importing an engine prints, starts threads and may crash, so the real
# stdout is set aside for the answer alone and everything else goes to stderr.
SCRIPT = r"""
import os, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path[:] = [p for p in sys.path if p not in ("", os.getcwd())]
import argparse, importlib, importlib.util, json

def describe(a):
    kind = getattr(a.type, "__name__", None) or (type(a.type).__name__ if a.type is not None else None)
    choices = None if a.choices is None else [str(c) for c in a.choices]
    if choices is not None and isinstance(a.choices, (set, frozenset)):
        choices.sort()
    error = getattr(a, "error_message", None)
    new = getattr(a, "new_flag", None)
    return {"opts": list(a.option_strings), "choices": choices, "nargs": a.nargs, "action": type(a).__name__,
            "default": repr(a.default)[:200], "type": kind,
            "message": error if isinstance(error, str) else ("use " + new if isinstance(new, str) else ""),
            "refused": isinstance(error, str)}

class Captured(Exception):
    pass

def capture(function):
    def stop(parser, *args, **kwargs):
        raise Captured(parser)
    keep = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = stop
    try:
        function([])
    except Captured as caught:
        return caught.args[0]
    finally:
        argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args = keep
    raise TypeError("it never called parse_args()")

tried, found = [], None
for module, attribute, how in json.loads(sys.argv[1]):
    parser = argparse.ArgumentParser(prog="sglang", conflict_handler="resolve")
    try:
        target = importlib.import_module(module)
        for part in attribute.split("."):
            target = getattr(target, part)
        if how == "fill":
            target(parser)
        else:
            parser = capture(target)
    except (ImportError, AttributeError, TypeError) as exc:
        tried.append("%s:%s: %s: %s" % (module, attribute, type(exc).__name__, exc))
        continue
    options = [describe(a) for a in parser._actions if a.option_strings]
    if len(options) > 1:
        found = {"entry": module + ":" + attribute, "options": options}
        break
    tried.append("%s:%s: no options there" % (module, attribute))

if found is None:
    sys.stderr.write("\n" + "\n".join("no-parser: " + line for line in tried) + "\n")
    sys.stderr.flush()
    os._exit(3)

def exists(name):
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False

found["launch_server"] = exists("sglang.launch_server")
script = os.path.join(os.path.dirname(sys.executable), "sglang")
found["serve"] = exists("sglang.cli.serve") and os.access(script, os.X_OK)
json.dump(found, answer)
answer.close()
os._exit(0)
"""


class OptionsReadError(Exception):
    """The engine's parser could not be asked; the message holds the cause and the remedy."""


def cached(path: str, version: str, venv: str, fingerprint: str) -> EngineOptions | None:
    """Return the cached list when it was read from exactly this engine, else None."""
    try:
        options = EngineOptions.load(path)
    except OptionsFileError:
        return None
    return options if (options.version, options.venv, options.fingerprint) == (version, venv, fingerprint) else None


def read_options(
    runner: Runner, python: str, *, version: str, venv: str, fingerprint: str, device: str = "cuda"
) -> EngineOptions:
    """Import the engine's parser with its own interpreter; raises OptionsReadError."""
    scratch = tempfile.mkdtemp(prefix="gpufleet-options-")
    # Importing the engine writes caches: they go where they are removed, not below the caller's home.
    env = {
        "HOME": scratch,
        "XDG_CACHE_HOME": scratch,
        "SGLANG_CACHE_DIR": scratch,
        "FLASHINFER_WORKSPACE_BASE": scratch,
        "TRITON_CACHE_DIR": scratch,
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if device == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        done = runner.run(
            [python, "-c", SCRIPT, json.dumps(ENTRIES)],
            timeout=TIMEOUT,
            env=env,
            cwd=scratch,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if done.rc != 0:
        raise OptionsReadError(explain(done.rc, done.stderr, version, python, device))
    try:
        data = json.loads(done.stdout)
        return EngineOptions(
            version=version,
            venv=venv,
            fingerprint=fingerprint,
            entry=data["entry"],
            launch_server=data["launch_server"],
            serve=data["serve"],
            options=tuple(option_from_dict(item) for item in data["options"]),
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise OptionsReadError(f"{python}: no option list in the answer of SGLang {version} ({exc})") from exc


def explain(rc: int, stderr: str, version: str, python: str, device: str) -> str:
    """Say why the parser could not be read: the last causal lines and what to do about it."""
    head = f"SGLang {version} is installed, but its option list can't be read with {python}"
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    tried = [line[len("no-parser: ") :] for line in lines if line.startswith("no-parser: ")]
    if rc == TIMED_OUT:
        return f"{head}: importing it took more than {TIMEOUT:.0f} s: is the disk of the venv a slow network mount?"
    last = "\n".join(f"  {line}" for line in (_once(tried) or _causes(lines)))
    return f"{head} (rc {rc}):\n{last}\n{_remedy(stderr, rc, device, bool(tried))}"


def _once(tried: Sequence[str]) -> list[str]:
    # When the import itself fails, every entry point says the same: once is enough.
    seen: dict[str, str] = {}
    for line in tried:
        seen.setdefault(line.split(": ", 1)[-1], line)
    return list(seen.values())


def _causes(lines: Sequence[str]) -> list[str]:
    # A traceback's cause is its last line; the frame above it says where.
    return list(lines[-3:]) or ["(no output)"]


def _remedy(text: str, rc: int, device: str, no_parser: bool) -> str:
    if "No module named 'vllm'" in text and device == "cuda":
        return "Remedy: no GPU is visible here; on a host without GPUs use device cpu."
    if "libcuda.so.1" in text:
        return (
            "Remedy: the NVIDIA driver (libcuda.so.1) isn't visible here: install it, or give the container the GPUs."
        )
    if "No module named" in text:
        return "Remedy: a package is missing from the lock or the requirements: add it and choose a new release name."
    if "ImportError" in text and "is required for" in text:
        return "Remedy: two packages don't fit each other: correct the lock and choose a new release name."
    if no_parser:
        return "Remedy: this version keeps its parser in a place not known here: use 0.5.10 to 0.5.23, or report it."
    if rc >= 128:
        return f"Remedy: the interpreter was ended by signal {rc - 128}: out of memory, or a wheel for another CPU."
    return "Remedy: run the command above by hand in the venv: `python -c 'import sglang.srt.server_args'`."
