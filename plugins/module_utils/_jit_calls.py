# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Which module a call of the engine's would build, and whether it is there. Run by the engine's own Python.

The calls are the ones that a server makes: only they know the module's name (which is not the public generator's in
FlashInfer 0.7), its folder and its build file. FlashInfer and SGLang are imported when they are asked for.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_elf import broken

NOT_FOR_THIS_GPU = "No supported CUDA architectures"  # flashinfer/compilation_context.py
READY, MISSING, STALE, BROKEN = "ready", "missing", "stale", "broken"
DTYPES = {  # as SGLang spells them in the names of its modules
    "bf16_t": "torch.bfloat16",
    "fp16_t": "torch.float16",
    "fp32_t": "torch.float32",
    "fp8_e4m3_t": "torch.float8_e4m3fn",
    "fp8_e5m2_t": "torch.float8_e5m2",
    "int32_t": "torch.int32",
    "int64_t": "torch.int64",
    "uint8_t": "torch.uint8",
}
SGLANG_NAME = re.compile(r"sgl_kernel_jit_(?P<words>.+?)(_[0-9a-f]{16})?(__arch_.*)?")
_TOKEN = re.compile("|".join([*sorted(DTYPES, key=len, reverse=True), "true", "false", r"-?\d+", r"[^_]+"]))


class UnknownCall(Exception):
    """No call of the engine's that is installed leads to this module; the message says what was looked for."""


class CompileForbidden(RuntimeError):
    """A module would have been compiled where only loading is allowed."""


class _Captured(BaseException):
    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec = spec


@dataclass
class Module:
    """One module as the engine names it."""

    kind: str
    name: str
    entry: Mapping[str, Any]
    spec: Any = None  # FlashInfer's JitSpec
    library: str = ""  # "" while SGLang's loader has not said it
    state: str = MISSING


def value(text: Any) -> Any:
    """Turn an entry's argument into what the call takes: torch.bfloat16 is a dtype."""
    if isinstance(text, str) and text.startswith("torch."):
        return getattr(importlib.import_module("torch"), text[len("torch.") :])
    return text


def function(package: str, call: str) -> Any:
    """Return the function that a dotted name below a package means."""
    path, _dot, name = call.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{package}.{path}" if path else package), name)
    except (ImportError, AttributeError) as exc:
        raise UnknownCall(f"{package}.{call}: {exc}") from exc


# FlashInfer


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    core = importlib.import_module("flashinfer.jit.core")
    classes, found = [core.JitSpec], []
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        if "build_and_load" in vars(kind):
            found.append((kind, kind.build_and_load))

    def capture(self: Any, *_args: Any, **_more: Any) -> Any:
        raise _Captured(self)

    for kind, _original in found:
        kind.build_and_load = capture
    try:
        yield
    finally:
        for kind, original in found:
            kind.build_and_load = original


def flashinfer_module(entry: Mapping[str, Any]) -> Module | None:
    """Make the call up to the point where it would build; None when this installation does not use the module."""
    call = entry.get("call")
    name = str(entry.get("name", ""))
    if not call:
        call = _generator(name)
    norm = call == "norm.get_norm_module"
    if norm and not getattr(importlib.import_module("flashinfer.norm"), "_USE_CUDA_NORM", True):
        return None  # CuTe DSL's norm is used instead
    with _capturing():
        try:
            spec = function("flashinfer", call)(*[value(item) for item in entry.get("args", ())])
        except _Captured as exc:
            spec = exc.spec
    if not hasattr(spec, "build_and_load"):
        raise UnknownCall(f"flashinfer.{call} builds no module")
    return Module("flashinfer", spec.name, entry, spec, str(spec.get_library_path()))


def _generator(name: str) -> str:
    """Return the generator without arguments that makes a module of this name."""
    root = Path(importlib.import_module("flashinfer").__path__[0])
    pattern = re.compile(rf"^def (gen_{re.escape(name)}(?:_module)?)\(\s*\)", re.MULTILINE)
    for path in sorted(root.glob("jit/**/*.py")) if re.fullmatch(r"\w+", name) else ():
        match = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
        if match:
            parts = path.relative_to(root).with_suffix("").parts
            return ".".join([*(parts[:-1] if parts[-1] == "__init__" else parts), match.group(1)])
    raise UnknownCall(f"flashinfer has no call that is known to build {name!r}")


def flashinfer_state(spec: Any) -> str:
    """Say whether a server would load this module without compiling anything; changes nothing."""
    library = Path(spec.get_library_path())
    if getattr(spec, "is_aot", False):
        return BROKEN if broken(str(library)) else READY
    if not library.exists():
        return MISSING
    if broken(str(library)):
        return BROKEN
    if not hasattr(spec, "write_ninja"):  # another tool chain than ninja's
        return READY
    core: Any = importlib.import_module("flashinfer.jit.core")
    original, wanted = core.write_if_different, []
    core.write_if_different = lambda path, content: wanted.append((Path(path), content))
    try:
        spec.write_ninja()
    finally:
        core.write_if_different = original
    if any(not path.exists() or path.read_text() != content for path, content in wanted):
        return STALE
    argv = ["ninja", "-n", "-C", str(spec.build_dir.resolve()), "-f", str(spec.ninja_path.resolve())]
    # the engine's Python runs this, where there is no Ansible and no run_command
    done = subprocess.run(argv, capture_output=True, text=True, check=False)  # pylint: disable=ansible-bad-function
    return READY if done.returncode == 0 and "no work to do" in done.stdout else STALE


def flashinfer_build(module: Module, held: Callable[[], None]) -> None:
    """Build one module as build_and_load() does and under its lock, without loading it; says when it has the lock."""
    spec, library = module.spec, Path(module.library)
    if not hasattr(spec, "write_ninja"):
        spec.build_and_load()
        return
    core: Any = importlib.import_module("flashinfer.jit.core")
    with core.FileLock(spec.lock_path, thread_local=False):
        held()
        if library.exists() and broken(str(library)):
            library.unlink()  # ninja never looks into it, and each load would die of SIGBUS
        if spec.ninja_path.exists():  # FlashInfer <= 0.6.10 keeps a build file that names another CUDA_HOME or venv
            spec.write_ninja()
        spec.build(False, need_lock=False)
        if broken(str(library)):
            library.unlink(missing_ok=True)  # the disk was full while it was linked
            spec.build(False, need_lock=False)


# SGLang's own


def sglang_call(entry: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return the function and its arguments."""
    named: dict[str, Any] = {}
    call, args = entry.get("call"), [value(item) for item in entry.get("args", ())]
    if not call:
        call, args, named = _by_name(str(entry.get("name", "")))
    found = function("sglang", call)
    found = functools.partial(found, **named) if named else found
    # A parameter that a newer release has added means "choose yourself" when it is 0 (num_threads of kvcache).
    needed = [item for item in inspect.signature(found).parameters.values() if item.default is item.empty]
    positional = [item for item in needed if item.kind is not item.KEYWORD_ONLY]
    return found, args + [0] * (len(positional) - len(args))


def _by_name(name: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Find the function whose load_jit() makes a module of this name, by reading the engine's source."""
    match = SGLANG_NAME.fullmatch(name)
    root = Path(importlib.import_module("sglang").__path__[0])
    for path in sorted(root.glob("kernels/ops/**/*.py")) if match else ():
        text = path.read_text(encoding="utf-8", errors="replace")
        if "load_jit(" not in text:
            continue
        for node in ast.parse(text).body:
            found = _arguments(node, match["words"]) if isinstance(node, ast.FunctionDef) and match else None
            if found is not None:
                dotted = ".".join(path.relative_to(root).with_suffix("").parts)
                args, named = found
                return f"{dotted}.{node.name}", [value(item) for item in args], named  # type: ignore[attr-defined]
    raise UnknownCall(f"sglang has no function that is known to make {name!r}")


def _arguments(node: ast.FunctionDef, words: str) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments with which a function makes a module of this name, None when it makes another one.

    Understood is the usual form: args = make_cpp_args(a, b, is_arch_support_pdl()); load_jit("marker", *args, ...),
    where a parameter may choose between two markers.
    """
    markers: dict[str, dict[str, str]] = {}
    names = []
    for item in ast.walk(node):
        if not isinstance(item, ast.Call) or not isinstance(item.func, ast.Name):
            continue
        if item.func.id == "load_jit" and item.args:
            markers.update(_markers(item.args[0]))
        if item.func.id == "make_cpp_args":
            names = [part.id if isinstance(part, ast.Name) else "" for part in item.args]
    marker = next((item for item in markers if words == item or words.startswith(f"{item}_")), None)
    parameters = [item.arg for item in node.args.args]
    if marker is None:
        return None
    tokens = _TOKEN.findall(words[len(marker) :])
    if len(tokens) != len(names):
        return None
    said = {**dict(zip(names, tokens)), **markers[marker]}
    required = parameters[: len(parameters) - len(node.args.defaults)]
    if not set(required) <= set(said):
        return None
    found = [_token(said[item]) for item in parameters if item in said]
    return found, {item.arg: _token(said[item.arg]) for item in node.args.kwonlyargs if item.arg in said}


def _markers(first: ast.expr) -> dict[str, dict[str, str]]:
    """Return the markers that load_jit's first argument may be, each with what the choosing parameter then is."""
    if isinstance(first, ast.Constant):
        return {str(first.value): {}}
    if isinstance(first, ast.IfExp) and isinstance(first.test, ast.Name):
        chosen = {"true": first.body, "false": first.orelse}
        return {
            str(item.value): {first.test.id: text} for text, item in chosen.items() if isinstance(item, ast.Constant)
        }
    return {}


def _token(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else DTYPES.get(text, text)


@contextlib.contextmanager
def watching(loaded: list[str], *, repair: bool, compile_allowed: bool) -> Iterator[None]:
    """Note every library that is loaded, refuse one that is not whole (repair deletes it), and forbid compiling."""
    ffi = importlib.import_module("tvm_ffi")
    patched: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Any) -> None:
        patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    original = ffi.load_module

    def load(path: Any, *args: Any, **more: Any) -> Any:
        why = broken(str(path)) if os.path.exists(path) else ""
        if why:
            if repair:
                os.unlink(path)
            raise OSError(f"{path}: {why}")
        found = original(path, *args, **more)
        loaded.append(str(path))
        return found

    def forbidden(name: str, *_args: Any, **_more: Any) -> Any:
        raise CompileForbidden(f"{name} is not in the cache")

    replace(ffi, "load_module", load)
    flag = "SGLANG_CRASH_ON_JIT_COMPILE"
    before = os.environ.get(flag)
    os.environ[flag] = "0" if compile_allowed else "1"
    if not compile_allowed:
        with contextlib.suppress(ImportError):
            cpp = importlib.import_module("tvm_ffi.cpp")
            replace(cpp, "load", forbidden)
            replace(cpp, "load_inline", forbidden)
    try:
        yield
    finally:
        for owner, name, old in reversed(patched):
            setattr(owner, name, old)
        os.environ.pop(flag, None) if before is None else os.environ.__setitem__(flag, before)


def sglang_label(called: Any, args: Sequence[Any]) -> str:
    """Name a call of SGLang's for people, before its library is known."""
    words = [getattr(called, "func", called).__name__.strip("_").replace("jit_", "").replace("_module", "")]
    named = [f"{key}={item}" for key, item in getattr(called, "keywords", {}).items()]
    return "_".join([*words, *(str(item).replace("torch.", "") for item in args), *named])


def sglang_module(entry: Mapping[str, Any], *, repair: bool = False) -> Module:
    """Make the call with compiling forbidden: it loads what is in the cache, or says that it is not there."""
    loaded: list[str] = []
    called, args = sglang_call(entry)
    module = Module("sglang", sglang_label(called, args), entry)
    with watching(loaded, repair=repair, compile_allowed=False):
        try:
            called(*args)
        except Exception as exc:
            module.state = BROKEN if "cut off" in str(exc) or "no shared library" in str(exc) else MISSING
            return module
    module.state = READY
    if loaded:
        module.library = loaded[-1]
        module.name = Path(loaded[-1]).stem
    return module


def sglang_build(module: Module) -> None:
    """Make the call with compiling allowed."""
    loaded: list[str] = []
    called, args = sglang_call(module.entry)
    with watching(loaded, repair=True, compile_allowed=True):
        called(*args)


def imports(entries: Sequence[Mapping[str, Any]]) -> None:
    """Import all that the entries' calls need, and load none of their modules: that is seconds of the loading."""
    for entry in entries:
        with contextlib.suppress(Exception):  # it is named where the states are asked
            flashinfer_module(entry) if entry["kind"] == "flashinfer" else sglang_call(entry)


def resolve(entries: Sequence[Mapping[str, Any]], *, repair: bool) -> tuple[list[Module], list[dict[str, str]]]:
    """Return the modules behind the entries, each once, with their states, and the entries that lead to none."""
    modules: dict[str, Module] = {}
    odd = []
    have_ninja = shutil.which("ninja") is not None
    for entry in entries:
        try:
            if entry["kind"] == "flashinfer":
                module = flashinfer_module(entry)
                if module is None:
                    odd.append({"name": _called(entry), "state": "unused", "why": "CuTe DSL is used instead"})
                    continue
                if module.name not in modules:
                    module.state = flashinfer_state(module.spec) if have_ninja else _without_ninja(module)
            else:
                module = sglang_module(entry, repair=repair)
        except UnknownCall as exc:
            odd.append({"name": _called(entry), "state": "unknown", "why": str(exc)})
            continue
        except Exception as exc:
            if isinstance(exc, OSError) and exc.errno:
                raise  # the disk or the cache, hence all of them
            state = "unused" if NOT_FOR_THIS_GPU in str(exc) else "failed"
            odd.append({"name": _called(entry), "kind": entry["kind"], "state": state, "why": f"{exc}" or repr(exc)})
            continue
        modules.setdefault(module.name, module)
    return list(modules.values()), odd


def _called(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name") or entry.get("call"))


def _without_ninja(module: Module) -> str:
    if getattr(module.spec, "is_aot", False):
        return BROKEN if broken(module.library) else READY
    return BROKEN if os.path.exists(module.library) and broken(module.library) else MISSING
