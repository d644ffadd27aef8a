# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Builds a set of kernels and proves it. Run by the engine's own Python, as the servers' user, in their environment.

One import of torch and FlashInfer, then a child process for each module that is to be built; in the end a fresh
process loads every module with compiling forbidden, and no library may have changed by that.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_bound as bound
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_calls as calls
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_checks as checks
from ansible_collections.gpufleet.sglang.plugins.module_utils import _jit_shares as shares
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._jit_children import Children, run
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_errors import recognise

LOCK = ".gpufleet-jit.lock"
RESULT, PROGRESS = "result.json", "progress.jsonl"
KILLED = ("signal 9", "Killed", "terminated by signal")
FIRST_ERROR = ("error", "fatal", "cannot find", "not found", "No such file", "No space", "denied", "Killed")


def first_error(text: str) -> str:
    """Return the first line that says what went wrong, not the compiler's command."""
    for line in text.splitlines():
        if any(word in line for word in FIRST_ERROR) and "-isystem" not in line and not line.startswith("FAILED: "):
            return line.strip()[:300]
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return said[-1][:300] if said else "no output"


def why(text: str) -> dict[str, str]:
    """Turn a failed build's output into its first real error, a stable code and a remedy."""
    known = recognise(text)
    found = known[0] if known else Finding("build_failed", "", "See the journal of the warm-up")
    if bound.OPTION in text:
        found = Finding("compiler_hung", "", f"See what held it up; on a machine that slow, raise {bound.OPTION}")
    return {"error": first_error(text), "code": found.code, "remedy": found.remedy}


def fingerprint(path: str) -> list[Any]:
    """Return what tells that a library is still the same file with the same content."""
    status = os.stat(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    return [status.st_size, status.st_mtime_ns, status.st_ino, digest]


def journal(text: str) -> None:
    """Write a line where the unit's journal, or the log file, takes it: this is no module, its output is read."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Worker:
    """One run over one set."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request = request
        self.out = Path(request["out"])
        self.label = str(request.get("label", ""))  # of a part for another architecture
        self.parts: list[dict[str, Any]] = []
        self.limit = float(request.get("module_timeout", 0))
        self.rows: list[dict[str, Any]] = []
        self.built: dict[str, list[Any]] = {}  # fingerprints by module
        self.early = False  # it was said that a server may start
        self.prover: subprocess.Popen[str] | None = None

    def say(self, text: str, **more: Any) -> None:
        """Tell the journal, and whoever waits."""
        if self.label:
            text, more = f"{self.label}: {text}", {}
        journal(text)
        with (self.out / PROGRESS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"text": text, **more}) + "\n")

    def finish(self, **result: Any) -> None:
        """Write the result, with the parts', beside its place and rename it."""
        whole = {"id": self.request["id"], "rows": self.rows, **result}
        for told in self.parts:
            whole["rows"] = whole["rows"] + told["rows"]
            known = list(whole.get("problems", ()))
            whole["problems"] = known + [item for item in told.get("problems", ()) if item not in known]
            whole["libraries"] = {**whole.get("libraries", {}), **told.get("libraries", {})}
        part = self.file(f"{RESULT}.part")
        part.write_text(json.dumps(whole), encoding="utf-8")
        part.replace(self.file(RESULT))

    def file(self, name: str) -> Path:
        """Return a file of this run's own."""
        return self.out / (f"{self.label}-{name}" if self.label else name)

    # another architecture

    def part(self, other: Mapping[str, Any]) -> None:
        """Do the same for another architecture, in a process of its own: FlashInfer takes one when it is imported."""
        label = str(other["arch"])
        path = self.out / f"{label}-request.json"
        *code, _request = self.request["argv"]
        whole = {**self.request, **other, "others": [], "label": label, "argv": [*code, str(path)]}
        path.write_text(json.dumps(whole), encoding="utf-8")
        # run by the engine's Python, where there is no Ansible and no run_command
        subprocess.run([sys.executable, *whole["argv"]], check=False)  # pylint: disable=ansible-bad-function
        try:
            told = json.loads((self.out / f"{label}-{RESULT}").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            text = f"the warm-up for {label} died without a result"
            told = {"rows": [], "problems": [Finding("warm_up_died", text, "See its journal").to_dict()]}
        for row in told["rows"]:
            row["name"] += f" ({label})"
        told["libraries"] = {f"{name} ({label})": item for name, item in told.get("libraries", {}).items()}
        self.parts.append(told)

    def prepare(self) -> None:
        """Import once, as a server does: SGLang sets FlashInfer's architectures itself, whatever the unit says."""
        capability = self.request["capability"]
        major, minor = (int(part) for part in capability.split("."))
        if importlib.util.find_spec("sglang"):  # srt/utils/common.py, set_cuda_arch(): 12.0a even where 12.0f would do
            os.environ["FLASHINFER_CUDA_ARCH_LIST"] = f"{capability}{'a' if major >= 9 else ''}"
        elif self.label:  # what the unit says is for the first architecture
            os.environ["FLASHINFER_CUDA_ARCH_LIST"] = self.request["arch"]
        else:
            os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", self.request["arch"])
        torch: Any = importlib.import_module("torch")
        if not torch.cuda.is_available():  # building on a machine without the GPU
            torch.cuda.current_device = lambda: 0
            torch.cuda.get_device_capability = lambda *_args: (major, minor)
        if any(entry["kind"] == "flashinfer" for entry in self.request["entries"]):
            importlib.import_module("flashinfer")

    # building

    def run(self) -> None:
        """Examine, build, prove."""
        with self.locked():
            began = time.monotonic()
            self.prepare()
            building = self.request["mode"] == "build"
            modules, odd = calls.resolve(self.request["entries"], repair=building)
            self.rows += [{**row, **why(row["why"])} if row["state"] == "failed" else row for row in odd]
            todo = [item for item in modules if item.state != calls.READY]
            ready = [item for item in modules if item.state == calls.READY]
            self.rows += [_row(item, "already") for item in ready]
            self.say(f"{len(modules)} modules, {len(ready)} built already ({time.monotonic() - began:.1f} s)")
            if not building:
                self.rows += [{**_row(item, "would_compile"), "why": item.state} for item in todo]
                self.finish()
                return
            if todo:
                lacks = checks.tools()
                if lacks:
                    self.rows += [{**_row(item, "failed"), **_fault(lacks[0])} for item in todo]
                    self.finish(problems=[item.to_dict() for item in lacks])
                    return
                self.build(sorted(todo, key=shares.weight, reverse=True))
            self.prove(fresh=bool(todo))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let one warm-up at a time work in a cache; the lock dies with its holder."""
        with open(f"{self.request['cache_dirs'][0]}/{LOCK}", "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say("another warm-up is at work in this cache: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def build(self, todo: Sequence[calls.Module]) -> None:
        """Build modules side by side; those that were killed once more, with half the workers."""
        memory = shares.available_memory()
        per, cores = int(self.request["memory_per_worker"]), len(os.sched_getaffinity(0))
        workers, jobs = shares.workers_for(len(todo), cores, memory, per, int(self.request["workers"]))
        self.say(f"building {len(todo)} modules, {workers} at a time ({cores} cores, {memory >> 30} GiB free)")
        killed = self.build_batch(todo, workers, jobs, 0)
        if killed:
            workers, jobs = max(1, workers // 2), max(1, jobs // 2)
            self.say(f"{len(killed)} were killed, as by the kernel when memory ends: once more, {workers} at a time")
            self.build_batch(killed, workers, jobs, len(todo) - len(killed), last=True)

    def build_batch(
        self, todo: Sequence[calls.Module], workers: int, jobs: int, done: int, *, last: bool = False
    ) -> list[calls.Module]:
        """Fork a child per module; returns those that were killed."""
        queue, total = list(todo), len(todo) + done
        children = Children()
        killed: list[calls.Module] = []
        while queue or children.running:
            while queue and len(children.running) < workers:
                module = queue.pop(0)
                work = functools.partial(bound.within, self.limit, _build, module)
                children.start(module, work, jobs, shares.niceness(module))
            self.announce(queue, children, calm=not killed and not last)
            ended = children.wait()
            if ended is None:
                continue
            module, text, seconds = ended.item, ended.text, ended.seconds
            died = os.WIFSIGNALED(ended.status)
            if (died or any(word in text for word in KILLED)) and not last:
                killed.append(module)
                continue
            done += 1
            if ended.status == 0:
                if os.path.exists(module.library):
                    self.built[module.name] = fingerprint(module.library)
                again = {"again": True} if last else {}
                self.rows.append({**_row(module, "compiled"), "seconds": seconds, **again})
                self.say(f"module {done} of {total}: {module.name} built in {seconds} s", done=done, total=total)
                continue
            text = text or f"the build was killed by signal {os.WTERMSIG(ended.status) if died else '?'}"
            cause = why(text)
            if any(word in text for word in (*KILLED, "killed by signal")):
                cause.update(code="compiler_killed", remedy="Free memory, or lower sglang_server_jit_workers")
            self.rows.append({**_row(module, "failed"), "seconds": seconds, **cause})
            self.say(f"module {done} of {total}: {module.name} FAILED: {cause['error']}", done=done, total=total)
            journal(text)
        return killed

    def announce(self, queue: Sequence[calls.Module], children: Children, *, calm: bool) -> None:
        """Say once that a server may start: each module that is left has a builder that holds the module's own lock.

        FlashInfer's getter takes the same lock before it looks what there is to do, so it waits, and then loads.
        SGLang's own kernels have no such lock; they are there by then.
        """
        left = list(children.running.values())
        whole = calm and not any(row["state"] == "failed" for row in self.rows)
        if self.early or queue or not left or not whole or not all(child.held for child in left):
            return
        self.early = True
        self.say(f"not built yet: {len(left)}; a server that needs one of them waits for it from now on", early=True)
        self.start_prover()

    # proving

    def start_prover(self) -> subprocess.Popen[str]:
        """Start the fresh process; it imports, which takes seconds, and loads nothing before its input ends."""
        argv = [sys.executable, *self.request["argv"], "prove"]
        pipe = subprocess.PIPE
        self.prover = subprocess.Popen(  # pylint: disable=ansible-bad-function
            argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        return self.prover

    def prove(self, *, fresh: bool) -> None:
        """Load every module where none was loaded before, with compiling forbidden, and look that no file changed."""
        failed = {row["name"] for row in self.rows if row["state"] == "failed"}
        names = [row["name"] for row in self.rows if row["state"] in ("already", "compiled")]
        proof_file = self.file("proof.json")
        with contextlib.suppress(FileNotFoundError):
            proof_file.unlink()
        if fresh:
            prover = self.prover or self.start_prover()
            said, _nothing = prover.communicate()
            rc = prover.returncode
        else:
            pid = os.fork()
            if pid == 0:
                run(self.load_all, 1, os.open(os.devnull, os.O_WRONLY))
            rc, said = os.waitpid(pid, 0)[1], ""
        try:
            proof = json.loads(proof_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            proof = {"loaded": {}, "bad": {}, "loading": ""}
        bad = dict(proof["bad"])
        if rc != 0:
            bad.setdefault(proof.get("loading") or "the loading process", f"died (status {rc}): {first_error(said)}")
        missing = [] if rc else [name for name in proof.get("missing", []) if name not in failed]
        bad.update(dict.fromkeys(missing, "a server would compile it again"))
        for name, (_path, *now) in proof["loaded"].items():
            if self.built.get(name, now) != now:
                bad.setdefault(name, "it was compiled once more, by a server perhaps, after it had been built here")
        for name, text in bad.items():
            row = next((item for item in self.rows if item["name"] == name), None)
            fault = {"state": "failed", "error": text, "code": "not_proven", "remedy": "Run it again; see the journal"}
            self.rows.append({"name": name, "kind": "", **fault}) if row is None else row.update(fault)
        self.say(f"{len(names) - len(bad)} modules loaded by a fresh process without compiling")
        self.finish(
            libraries=proof["loaded"],
            arch=os.environ["FLASHINFER_CUDA_ARCH_LIST"],
            flashinfer=getattr(sys.modules.get("flashinfer"), "__version__", ""),
        )

    def load_all(self) -> None:
        """In the fresh process: make every call, note what was loaded and what changed by it."""
        proof: dict[str, Any] = {"loaded": {}, "bad": {}, "missing": [], "loading": ""}

        def note(name: str) -> None:
            proof["loading"] = name
            self.file("proof.json").write_text(json.dumps(proof), encoding="utf-8")

        modules, _odd = calls.resolve(self.request["entries"], repair=False)
        for module in modules:
            note(module.name)
            if module.state != calls.READY:
                proof["missing"].append(module.name)
                continue
            if not module.library:
                continue
            try:
                before = fingerprint(module.library)
                loaded: list[str] = []
                with calls.watching(loaded, repair=False, compile_allowed=False):
                    if module.spec is not None:
                        module.spec.build_and_load()
                    else:
                        importlib.import_module("tvm_ffi").load_module(module.library)
                if fingerprint(module.library) != before:
                    proof["bad"][module.name] = "loading it compiled it again"
                proof["loaded"][module.name] = [module.library, *fingerprint(module.library)]
            except Exception as exc:
                proof["bad"][module.name] = first_error(str(exc))
        note("")


def _row(module: calls.Module, state: str) -> dict[str, Any]:
    return {"name": module.name, "kind": module.kind, "state": state, "entry": dict(module.entry)}


def _fault(finding: Finding) -> dict[str, str]:
    return {"error": finding.message, "code": finding.code, "remedy": finding.remedy}


def _build(module: calls.Module, held: Callable[[], None]) -> None:
    """Build a module, in a process of its own."""
    if module.spec is None:
        calls.sglang_build(module)
        return
    if shares.weight(module) >= shares.LONG:
        flags = [os.environ.get("NVCC_APPEND_FLAGS", ""), shares.split_compile()]
        os.environ["NVCC_APPEND_FLAGS"] = " ".join(flags).strip()
    _wait_for_orphans(str(module.spec.build_dir) if hasattr(module.spec, "build_dir") else "")
    calls.flashinfer_build(module, held)


def _wait_for_orphans(folder: str, limit: float = 300.0) -> None:
    """Wait for compilers that a killed run left behind: they still write to the files that we would write."""
    end = time.monotonic() + limit
    while folder and time.monotonic() < end and any(_cwd(path) == folder for path in Path("/proc").glob("[0-9]*")):
        time.sleep(0.2)


def _cwd(process: Path) -> str:
    try:
        return os.readlink(process / "cwd")
    except OSError:
        return ""


def main(argv: Sequence[str]) -> int:
    """Read the request; an exception becomes a result that names its cause."""
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    worker = Worker(request)
    if argv[1:] == ["prove"]:
        worker.prepare()
        calls.imports(request["entries"])
        sys.stdin.read()
        worker.load_all()
        return 0
    obstacles = checks.obstacles(request["cache_dirs"])
    if obstacles:
        worker.finish(problems=[item.to_dict() for item in obstacles])
        return 1
    try:
        for other in request.get("others", ()):
            worker.part(other)
        worker.run()
    except Exception as exc:
        journal(traceback.format_exc())
        known = recognise(f"{exc}") or [Finding("warm_up_failed", f"{type(exc).__name__}: {first_error(str(exc))}")]
        with contextlib.suppress(OSError):
            worker.finish(problems=[item.to_dict() for item in known[:1]])
        return 1
    return 0
