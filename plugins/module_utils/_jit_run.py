# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""One warm-up from the set to the report, in slices; and the gate that compares the caches after the canary."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_publish as publishing
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_sets as sets
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_state as kept
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_job import Job, Look
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_host import archs_of
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_state import load as load_toolkit

POLL = 0.5
# Set for units that serve without a compiler; building needs one.
SERVING = ("FLASHINFER_DISABLE_JIT", "SGLANG_CRASH_ON_JIT_COMPILE", "PYTHONPATH")
CACHES = {
    "flashinfer": ".cache/flashinfer",
    "autotune": "flashinfer",
    "sglang": "jit",
    "tvm-ffi": "tvm-ffi",
    "triton": "triton",
    "inductor": "inductor",
    "tilelang": "tilelang",
    "deep_gemm": "deep_gemm",
    "cute": "cute_aot",
    "driver": "nv",
}
COUNTS = ("already", "compiled", "failed", "would_compile", "unknown", "unused")


class Jobs(Protocol):
    """What is asked of a job."""

    def request(self) -> Mapping[str, Any]: ...
    def start(self, request: Mapping[str, Any], python: str, environment: Mapping[str, str]) -> bool: ...
    def look(self, seen: int = 0) -> Look: ...
    def last_words(self) -> str: ...


@dataclass(frozen=True)
class Settings:
    """What the user wants."""

    python: str
    model: str
    release: str = ""
    argv: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    modules: Sequence[Any] = ()
    derive: bool = True
    learned: bool = True
    archs: Sequence[str] = ()
    user: str = ""
    cache_dir: str = "/var/cache/sglang"
    config_dir: str = "/etc/sglang"
    workers: int = 0
    memory_mib: int = 1126
    publish_dir: str = ""

    @property
    def building(self) -> dict[str, str]:
        """The servers' environment, without what forbids compiling."""
        found = {key: value for key, value in self.environment.items() if key not in SERVING}
        path = [part for part in self.environment.get("PYTHONPATH", "").split(":") if part and part != self.publish_dir]
        if path:
            found["PYTHONPATH"] = ":".join(path)
        return found


@dataclass
class Outcome:
    """What a run, or a slice of one, came to."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    progress: list[str] = field(default_factory=list)
    watch: dict[str, Any] | None = None  # not done yet
    published: bool = False
    learned: list[str] = field(default_factory=list)

    def names(self, state: str) -> list[str]:
        """Return the modules in a state."""
        return [row["name"] for row in self.rows if row["state"] == state]

    @property
    def changed(self) -> bool:
        """Whether something was built or published, or in check mode would be."""
        return bool(self.names("compiled") or self.names("would_compile") or self.published)

    def counts(self) -> dict[str, int]:
        """Return how many modules are in each state."""
        return {state: len(self.names(state)) for state in COUNTS}


def capability_of(settings: Settings, runner: Runner) -> tuple[str, str, list[Finding]]:
    """Return compute capability and architecture (12.0, 12.0f): as given, as the toolkit was proven, or the GPUs'."""
    toolkit = load_toolkit(settings.config_dir)
    given = list(settings.archs) or [str(item) for item in toolkit.get("arch_list") or []]
    nvcc = str((toolkit.get("versions") or {}).get("nvcc", ""))
    archs, problems = archs_of(runner, given, nvcc)
    if problems:
        return "", "", problems
    return archs[0].rstrip("af"), archs[0], []


def wanted(settings: Settings, state: Mapping[str, Any], capability: str) -> tuple[list[sets.Entry], list[str]]:
    """Return the set: what is given, else what was learned, then what is derived."""
    lines: list[str] = []
    given = sets.given(settings.modules)
    learned = kept.manifest(state, settings.model, settings.release) if settings.learned else []
    derived: list[sets.Entry] = []
    if settings.derive:
        config = _config(settings.model)
        if config is None:
            lines.append(f"{settings.model} has no config.json here: nothing is derived, the canary teaches the set")
        else:
            derived, lines = sets.derive(sets.Asked(config, capability, sets.flags_of(settings.argv)))
    counted = [f"{len(items)} {name}" for items, name in ((given, "given"), (learned, "learned"), (derived, "derived"))]
    return sets.merge(given, learned, derived), [f"set: {', '.join(counted)}", *lines]


def run(
    settings: Settings,
    runner: Runner,
    *,
    check: bool = False,
    seconds: float | None = None,
    watch: Mapping[str, Any] | None = None,
    job: Jobs | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Start or join the warm-up, and wait for its end or the slice's. Raises JobError."""
    job = job or Job(runner, settings.cache_dir, settings.user)
    watch = dict(watch or {})
    end = None if seconds is None else clock() + seconds
    state = kept.load(settings.config_dir)
    if not watch and not check:
        state = _catch_up(settings, state)
    capability, arch, problems = capability_of(settings, runner)
    if problems:
        return Outcome(problems=problems)
    entries, lines = wanted(settings, state, capability)
    if not entries:
        return Outcome(lines=[*lines, "nothing to build"])
    request = _request(settings, entries, capability, arch, check)
    out = Outcome(lines=lines)
    while True:
        if not watch.get("joined"):
            if job.start(request, settings.python, settings.building):
                watch = {"joined": True, "seen": 0, "starts": int(watch.get("starts", 0)) + 1}
            elif job.request().get("id") == request["id"]:
                out.progress.append("joined the warm-up that is at work already")
                watch = {"joined": True, "seen": 0, "starts": 1}
            elif not watch.get("told"):
                out.progress.append("another warm-up is at work in this cache: waiting for it")
                watch = {"told": True}
        if watch.get("joined"):
            seen = job.look(int(watch["seen"]))
            out.progress += seen.lines
            watch["seen"] = int(watch["seen"]) + len(seen.lines)
            if seen.result is not None:
                return _finish(settings, out, seen.result, check)
            if not seen.alive:
                if int(watch["starts"]) > 1:
                    return Outcome(progress=out.progress, problems=[_died(job.last_words())], lines=lines)
                out.progress.append("the warm-up died without a word: started once more")
                watch = {"starts": watch["starts"]}
                continue
        if end is not None and clock() >= end:
            out.watch = watch
            return out
        sleep(POLL)


def learn(settings: Settings, *, check: bool = False) -> Outcome:
    """Compare the caches with what they held after the warm-up: what servers compiled goes into the manifest."""
    state = kept.load(settings.config_dir)
    out = Outcome()
    if "snapshot" not in state or _key(settings) != state.get("of"):
        out.lines.append("no warm-up for this model and release was recorded: nothing to compare with")
        return out
    now = kept.snapshot(settings.environment)
    out.learned = kept.compiled(state["snapshot"], now)
    if out.learned and not check:
        state = kept.teach(state, settings.model, settings.release, out.learned)
        kept.save(settings.config_dir, {**state, "snapshot": now})
    if out.learned:
        out.lines.append(f"{len(out.learned)} modules were compiled by a server: {', '.join(out.learned)}")
    else:
        out.lines.append("no server compiled anything")
    return out


def _catch_up(settings: Settings, state: dict[str, Any]) -> dict[str, Any]:
    """Learn what servers compiled since the last look, at their first odd request perhaps."""
    if "snapshot" not in state or _key(settings) != state.get("of"):
        return state
    now = kept.snapshot(settings.environment)
    names = kept.compiled(state["snapshot"], now)
    if names:
        state = {**kept.teach(state, settings.model, settings.release, names), "snapshot": now}
        kept.save(settings.config_dir, state)
    return state


def _key(settings: Settings) -> str:
    return f"{settings.release} {settings.model}"


def _request(
    settings: Settings, entries: Sequence[sets.Entry], capability: str, arch: str, check: bool
) -> dict[str, Any]:
    request = {
        "entries": list(entries),
        "mode": "check" if check else "build",
        "capability": capability,
        "arch": arch,
        "cache_dirs": list(dict.fromkeys([settings.cache_dir, *_caches(settings.environment)])),
        "workers": settings.workers,
        "memory_per_worker": settings.memory_mib << 20,
    }
    text = json.dumps([request, dict(settings.building), settings.python], sort_keys=True)
    return {**request, "id": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _caches(environment: Mapping[str, str]) -> list[str]:
    names = ("FLASHINFER_WORKSPACE_BASE", "SGLANG_JIT_CACHE_DIR", "TVM_FFI_CACHE_DIR")
    return [environment[name] for name in names if name in environment]


def _config(model: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _died(words: str) -> Finding:
    last = words.splitlines()[-1] if words else "no output"
    text = f"the warm-up died twice without a result; its last words: {last}"
    return Finding("warm_up_died", text, "See its journal")


def _finish(settings: Settings, out: Outcome, result: Mapping[str, Any], check: bool) -> Outcome:
    """Turn the worker's result into the outcome, publish, and write jit.json."""
    out.rows = [dict(row) for row in result.get("rows", [])]
    out.problems = [Finding(item["code"], item["message"], item["remedy"]) for item in result.get("problems", [])]
    for row in out.rows:
        if row["state"] == "failed" and not result.get("problems"):
            said = f"{row['name']} could not be built: {row.get('error', '')}"
            out.problems.append(Finding(str(row.get("code", "build_failed")), said, str(row.get("remedy", ""))))
        elif row["state"] == "unknown":
            text = f"no call is known that builds {row['name']}: the first server that needs it compiles it"
            out.lines.append(Finding("module_unknown", text, severity=WARNING).text())
    if out.rows:
        out.lines.append(summary(out))
    libraries = result.get("libraries") or {}
    if settings.publish_dir and not out.problems and libraries:
        mine = publishing.of_flashinfer(libraries)
        out.published = publishing.publish(
            settings.publish_dir, str(result["flashinfer"]), str(result["arch"]), mine, check=check
        )
        out.lines.append(
            f"{len(mine)} FlashInfer modules {'published' if out.published else 'are published'} in "
            f"{settings.publish_dir}"
        )
    if not check:
        _record(settings, out, result)
    return out


def _record(settings: Settings, out: Outcome, result: Mapping[str, Any]) -> None:
    state = kept.load(settings.config_dir)
    rows = [{key: value for key, value in row.items() if key != "seconds" or value} for row in out.rows]
    report = {**out.counts(), "total": len(out.rows), "modules": rows, "arch": result.get("arch", "")}
    report["problems"] = [item.to_dict() for item in out.problems]
    if not out.changed and not out.problems and state.get("report"):
        report = state["report"]  # nothing new: the seconds of the run that built them stay
    kept.save(
        settings.config_dir,
        {
            **state,
            "of": _key(settings),
            "release": settings.release,
            "model": settings.model,
            "cuda_home": settings.environment.get("CUDA_HOME", ""),
            "published": settings.publish_dir,
            "report": report,
            "snapshot": kept.snapshot(settings.environment),
        },
    )


def summary(out: Outcome) -> str:
    """Say in a line how it went."""
    counts = {name: count for name, count in out.counts().items() if count}
    total = len(out.rows) - len(out.names("unused")) - len(out.names("unknown"))
    seconds = sum(float(row.get("seconds", 0)) for row in out.rows)
    took = f" in {seconds:.0f} s of work" if seconds else ""
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    return f"{total} modules: {said}{took}"


def sizes(cache_dir: str) -> list[dict[str, Any]]:
    """Return the caches that a start fills, each with its size; the plan puts all of them below one folder."""
    found = []
    for name, folder in CACHES.items():
        files = [path for path in Path(cache_dir, folder).rglob("*") if path.is_file() and not path.is_symlink()]
        if files:
            total = sum(path.stat().st_size for path in files)
            mib = round(total / (1 << 20), 1)
            found.append({"name": name, "path": f"{cache_dir}/{folder}", "files": len(files), "mib": mib})
    return found


def report_lines(caches: Sequence[Mapping[str, Any]], report: Mapping[str, Any] | None) -> list[str]:
    """Say what the caches hold and what the last warm-up came to."""
    lines = [f"{item['name']}: {item['mib']} MiB in {item['files']} files ({item['path']})" for item in caches]
    if report:
        said = ", ".join(f"{report[name]} {name.replace('_', ' ')}" for name in COUNTS if report.get(name))
        lines.append(f"last warm-up: {said}")
    return lines
