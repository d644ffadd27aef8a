# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""An engine's log as events: exceptions with their frames, what compilers, linkers, systemd and the kernel say.

Fed line by line; what is kept is bounded, so that a journal of any size can be read.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ansible_collections.gpufleet.sglang.plugins.module_utils._phases import LogDigest

HEAD = 200  # events kept from the beginning of the log
TAIL = 200  # and from its end
ALIKE = 8  # events kept that differ in their numbers only: a flood of one error is one error
MAX_TEXT = 1200
MAX_FRAMES = 12
MESSAGE_LINES = 12  # of an exception's message
LAST_LINES = 40

# Colours, links and titles for a terminal, and whatever else is no text.
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)|[\x00-\x08\x0b-\x1f\x7f]")
# What programs put before a message: SGLang, vLLM's worker prefix, logging levels, syslog, the kernel's clock.
_PREFIX = re.compile(
    r"""(?:
      \[\d{4}-\d\d-\d\d[ T][\d:.,]+(?P<rank>(?:\ [A-Z]+\d+)*)\]\ ?
    | \[\s*\d+\.\d{3,}\]\ ?
    | \((?:EngineCore|Worker|APIServer|VllmWorker|EngineCore_\d+|VllmWorkerProcess|RayWorkerWrapper)[^)]*\)\ ?
    | (?:[A-Z][a-z]{2}\ +\d+\ )\d\d:\d\d:\d\d\ \S+\ (?=\S)
    | (?:INFO|ERROR|WARNING|CRITICAL|DEBUG)\ \d\d-\d\d\ \d\d:\d\d:\d\d(?:\.\d+)?\ (?:\[[^\]]*\]\ ?)?
    | [A-Za-z][\w.@-]*\[\d+\]:\ (?:\.\.\.\ )?
    | \[[A-Z]+\d+(?:\ [A-Z]+\d+)*\]\ (?=[A-Z(])
    | \[rank\d+\]:(?:\[[WEI][^\]]*\])?\ ?
    )""",
    re.VERBOSE,
)
_FRAME = re.compile(r'^\s*(?:\|\s*)*File "(?P<file>[^"]+)",.{0,24}? in (?P<name>.+)$')
_EXCEPTION = re.compile(
    r"^(?:(?:\s*\|)+\s*)?(?P<name>(?:[A-Za-z_][\w-]*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout|Refused"
    r"|NotFound\w*|IsEnabled|Died|Full|URL|Mismatch|Aborted))(?P<rest>:.*|\(.*|)$"
)
_INLINE = re.compile(
    r"(?<![\w'\".])(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|IsEnabled))(?P<rest>[:(] ?.+| \.\.\. .+)$"
)
# Below the frames of a traceback, whatever its name.
_LAST_OF_TRACEBACK = re.compile(r"^(?:(?:\s*\|)+\s*)?(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?P<rest>: .*|)$")
_NUMBERED = re.compile(r"\b\w*?\d\w*")
_HANDLED = "During handling of the above exception"
_QUIET_EXCEPTION = re.compile(r"(?:^|\.)(?:KeyboardInterrupt|SystemExit|CancelledError|BrokenPipeError|GeneratorExit)$")
# What Python's faulthandler says of a process that a signal ends: the words, then the frames, innermost first.
_FATAL = re.compile(r"Fatal Python error: .*")
_THREAD = re.compile(r"^(?P<current>Current t|T)hread 0x\w+.*most recent call first")
# A process that ended by a signal of its own, not by one its parent sends to all (SIGQUIT, SIGTERM).
BY_SIGNAL = re.compile(
    r"\bexit ?code:? ?-(?!3\b|15\b)\d+\b|Fatal Python error: (?:Bus error|Segmentation|Illegal|Abort)|\bSIGBUS\b", re.I
)
# Help that goes with every CUDA error, and says nothing of this one.
_AVAILABLE = re.compile(r"avail mem=(\d+(?:\.\d+)?) GB")
_CUDA_HELP = re.compile(
    r"^Search for `cuda|^CUDA kernel errors might be asynchronously|^For debugging consider passing CUDA_LAUNCH"
    r"|^Compile with `TORCH_USE_CUDA_DSA`"
)
WRAPPER = re.compile(
    r"Received sigquit from a child|SIGQUIT received|SIGTERM received|Subprocess \S+ \(pid=\d+\) crashed"
    r"|Rank \d+ scheduler (?:died|is dead)|Scheduler hit an exception|TpModelWorkerClient hit an exception"
    r"|Initialization failed\. (?:Please see the error|warmup error)|Capture .*cuda graph failed"
    r"|Possible solutions:|EngineCore (?:failed|encountered)|Engine core (?:proc|initialization) .*(?:died|failed)"
    r"|Worker proc \S+ died|failed to be inspected|WorkerProc (?:failed|initialization failed)"
    r"|kill_process_tree|Sleeping \d+ seconds before crash|^\S*: line \d+: +\d+ Killed|^Killed$"
    r"|returned non-zero exit status|CalledProcessError|Exception in run_tp_server|Process \S+ terminated abruptly"
    r"|Ptx assembly aborted|ld returned \d+ exit status|compilation terminated|build stopped: subcommand failed"
    r"|Could not load any common_ops library|Ninja build failed\. Ninja output:|During handling of the above"
    r"|direct cause of the following",
    re.IGNORECASE,
)
# Lines that hold alarming words in healthy servers too.
NOISE = re.compile(
    r"^server_args=|server_args=ServerArgs|Ignore import error when loading|Fail to set RLIMIT_NOFILE"
    r"|nanobind: leaked|post-warmup freeze_gc failed|Pyspy failed|All pyspy dump|CUDA (?:user-triggered )?coredump"
    r"|Health check request received during shutdown|Cannot detect CUDA architecture|Invalid HTTP request received"
    r"|Waiting [\d.]+ seconds for CUDA coredumps|No live scheduler processes|Gracefully exiting|^\s*\[-{1,2}\w"
    r"|to silence this warning|^usage: |^INFO: +\S+:\d+ - \"(?:GET|POST) /\S* HTTP/\d\.\d\" (?:200|503)"
    r"|^Finalize AR fusion unavailable|^FA3 ?skipped|^\s+warnings\.warn\(",
    re.IGNORECASE,
)
TRAFFIC = re.compile(
    r"(?:\[\d{4}-\d\d-\d\d [\d:.,]+(?: [A-Z]+\d+)*\] )?"
    r"(?:(?:Prefill|Decode) batch|INFO: +\S+:\d+ - \"(?:GET|POST) /\S* HTTP/\d\.\d\" 200)"
)
_HINT = re.compile(
    r"error|fatal|fail|except|cannot|can't|could|unable|no such|not found|denied|refused|memory|space|undefined"
    r"|unsupported|invalid|illegal|abort|oom|errno|terminat|killed|signal|closed|xid|nvrm|timed? ?out|missing|require"
    r"|support|mismatch|match|too old|not set|corrupt|stale|lock|cubin|compil|building|jit|already|unbalanced|exceed"
    r"|larger|not enough|fetching|unknown|not |nan\b|blocked|watchdog|nccl|init |begin|sub-optimal|ignoring|limit"
    r"|artifact|denied|shared|too many|warning|shm|result|size|status|code=|hang|reset|lost|avc|bus|in use"
    r"|version|http|nvcc|busy|file_baton|overflow|gpu|nvidia|no space|uvm|cache|kernel"
    r"|device|exit|dead|crash|died|find|broken|load",
    re.IGNORECASE,
)
_COMPILER = re.compile(
    r"(?<![^\s:()])[^\s:()]+(?:\(\d+\)|:\d+(?::\d+)?): (?:catastrophic |fatal |internal compiler )?error"
    r"|^<command-line>: fatal error|^(?:c\+\+|g\+\+|gcc|cc1plus|cc)\S*: (?:fatal |internal compiler )?error",
    re.IGNORECASE,
)
_LINKER = re.compile(r"(?:^|/)(?:ld|ld\.\w+|collect2)(?:\.\w+)? ?: |cannot find -l", re.IGNORECASE)
_NVCC = re.compile(r"\bnvcc (?:fatal|error|warning) *:|^(?:ptxas|cicc|cudafe\+\+|nvlink)\b.*(?:fatal|error|died)")
_SHELL = re.compile(r"^(?:/?\S*(?:sh|bash|env)): (?:(?:line )?\d+: )?\S+: (?:command )?not found|No such file")
_NINJA = re.compile(r"^FAILED: |^ninja: |ninja exited with status")
_KERNEL = re.compile(r"\bNVRM\b|\bXid\b|oom[-_]kill|Out of memory: Killed|blocked for more than|\bavc: |type=AVC")
_SYSTEMD = re.compile(r"^\S+\.service: |^systemd\[\d+\]: ")
_ARGPARSE = re.compile(r"^\S.*: error: (?:argument|unrecognized|the following|ambiguous|invalid)")


@dataclass
class Event:
    """Something the log says happened; kind is one of exception, frame, compiler, linker, nvcc, ... or log."""

    kind: str
    text: str
    line: int
    frames: tuple[str, ...] = ()  # file:function, innermost last
    rank: str = ""
    wrapped: bool = False  # after the first wrapper: a consequence more often than a cause
    handled: bool = False  # another exception came while it was handled

    @property
    def where(self) -> str:
        """The frames as one text."""
        return "\n".join(self.frames)


@dataclass
class Log:
    """The events of one start, and how far it came."""

    head: list[Event] = field(default_factory=list)
    tail: deque[Event] = field(default_factory=lambda: deque(maxlen=TAIL))
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    before_wrapper: list[str] = field(default_factory=list)  # the last lines above the first wrapper
    ignored: list[str] = field(default_factory=list)  # models whose code the engine could not import, and why
    phase: str = "none"
    count: int = 0
    last_line: str = ""
    started: bool = True  # False: the beginning of the log was not read
    ended: bool = False  # a wrapper, or systemd, said that it is over
    stopping: bool = False  # it was asked to stop: what comes then is no failure
    free_gib: float | None = None  # of its GPU, as the engine said first

    @property
    def events(self) -> list[Event]:
        """All events that were kept, in order."""
        return [*self.head, *self.tail]


class Reader:
    """Turns lines into a Log."""

    def __init__(self) -> None:
        self.log = Log()
        self.digest = LogDigest()
        self._frames: list[str] = []
        self._open: Event | None = None  # an exception whose message may go on
        self._last: Event | None = None  # the newest exception with a traceback
        self._left = 0
        self._fatal: Event | None = None  # a fatal error whose frames may follow
        self._current = False  # ... and these are of the thread it happened in
        self._quoted: Event | None = None  # a compiler's error, whose source line may follow
        self._seen: set[str] = set()
        self._alike: Counter[str] = Counter()
        self._phase_lines = 0

    def feed_all(self, lines: Iterable[str]) -> Log:
        """Read all lines."""
        for line in lines:
            self.feed(line)
        return self.finish()

    def feed(self, raw: str) -> None:
        """Read one line."""
        text = raw.rstrip().rsplit("\r", 1)[-1]  # what is left of a line that was written over
        if not text.isprintable():
            text = _TERMINAL.sub("", text)
        text = text[:MAX_TEXT]
        log = self.log
        log.count += 1
        if TRAFFIC.match(text):
            self._close()
            return
        line, rank = _strip(text)
        self.digest.feed(text)
        if self.digest.phase != log.phase:
            log.phase = self.digest.phase
            if log.phase == "ready":
                self._forget()
        if not line.strip():
            return
        log.last_line = line
        log.last.append(line[:MAX_TEXT])
        if line.startswith("Ignore import error when loading") and len(log.ignored) < HEAD:
            log.ignored.append(line[:MAX_TEXT])
        if log.free_gib is None and "avail mem=" in line:
            said = _AVAILABLE.search(line)
            log.free_gib = float(said[1]) if said else None
        if not log.ended and WRAPPER.search(line):
            self._wrapper(line)
        # where every line has a prefix, those of one message are told by their indent
        self._line(line, rank, stamped=line is not text and not line[:1].isspace())

    def finish(self) -> Log:
        """Return what was read."""
        self._close()
        return self.log

    def _wrapper(self, line: str) -> None:
        log = self.log
        if line.startswith("SIGTERM received"):
            log.stopping = True
        # a traceback that follows the same line is the cause itself
        elif "Traceback" not in line and not line.startswith(("Scheduler hit", "Possible", "Ninja build")):
            log.before_wrapper = list(log.last)[:-1]
            log.ended = not re.search(
                r"returned non-zero|compilation terminated|ld returned|above exc|direct cause", line
            )

    def _forget(self) -> None:
        """Drop what was said before the server became ready: it did no harm."""
        self._close()
        self.log.head, self._seen, self._alike = [], set(), Counter()
        self.log.tail.clear()
        self.log.ended = False

    def _line(self, line: str, rank: str, stamped: bool) -> None:
        if _CUDA_HELP.search(line) or self._of_fatal(line, rank):
            return
        if "Traceback (most recent call last)" in line:
            self._close()
            self._frames = ["noise:"] if NOISE.search(line.split("Traceback", 1)[0]) else []
            return
        frame = _FRAME.match(line)
        if frame:
            if self._open:
                self._close()
                self._frames = []
            self._frames = [*self._frames, f"{frame['file']}:{frame['name']}"][-MAX_FRAMES:]
            if "file_baton" in frame["file"]:
                self._add(Event("frame", line.strip(), self.log.count, rank=rank))
            return
        quoted, self._quoted = self._quoted, None
        if quoted and line[:1].isspace():
            quoted.text = f"{quoted.text} {line.strip()}"[:MAX_TEXT]
            return
        if self._frames and line[:1].isspace() and not _EXCEPTION.match(line.strip()):
            return  # source text
        if _HANDLED in line and self._last:
            self._close()
            self._last.handled = True
            return
        found = _EXCEPTION.match(line)
        if not found and self._frames and not stamped:
            found = _LAST_OF_TRACEBACK.match(line)
        if found and not NOISE.search(line):
            self._close()
            self._exception(found, line, rank)
            return
        if self._open and self._left > 0 and not stamped and not _SYSTEMD.match(line):
            self._left -= 1
            if len(self._open.text) < MAX_TEXT and not WRAPPER.search(line):
                self._open.text = f"{self._open.text} {line.strip()}"[:MAX_TEXT]
        else:
            self._close()
        if not line[:1].isspace():
            self._frames = []
        self._plain(line.strip(), rank)

    def _of_fatal(self, line: str, rank: str) -> bool:
        """Read a fatal error of Python's and the frames below it; say whether the line was one of them."""
        fatal = _FATAL.search(line)
        if fatal:
            self._close()
            self._fatal = Event("fatal", fatal.group(0)[:MAX_TEXT], self.log.count, rank=rank)
            self._add(self._fatal)
            return True
        if self._fatal is None:
            return False
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread:
            self._current = thread["current"] != "T"
        elif frame and self._current and len(self._fatal.frames) < MAX_FRAMES:
            self._fatal.frames = (f"{frame['file']}:{frame['name']}", *self._fatal.frames)
        elif not frame:
            self._fatal, self._current = None, False
        return bool(thread or frame)

    def _exception(self, found: re.Match[str], line: str, rank: str) -> None:
        frames, self._frames = self._frames, []
        if _QUIET_EXCEPTION.search(found["name"]) or (frames and frames[0] == "noise:"):
            return
        if found["name"] == "EOFError" and any("multiprocessing/connection.py" in frame for frame in frames):
            return  # the other end of a pipe is gone: how it ended is the cause
        self._last = self._open = Event("exception", line.strip("| ")[:MAX_TEXT], self.log.count, tuple(frames), rank)
        self._left = MESSAGE_LINES

    def _close(self) -> None:
        event, self._open, self._left = self._open, None, 0
        if event:
            self._add(event)

    def _plain(self, line: str, rank: str) -> None:
        if not (_HINT.search(line) or _LINKER.search(line)) or NOISE.search(line):  # linkers speak many languages
            return
        inline = _INLINE.search(line)
        kind = "log"
        for name, pattern in (
            ("kernel", _KERNEL),
            ("systemd", _SYSTEMD),
            ("argparse", _ARGPARSE),
            ("linker", _LINKER),
            ("nvcc", _NVCC),
            ("compiler", _COMPILER),
            ("ninja", _NINJA),
            ("shell", _SHELL),
        ):
            if pattern.search(line):
                kind = name
                break
        else:
            if inline:
                kind = "exception"
            elif re.match(r"(?:\S+\.py:\d+: )?\w*Warning: |WARNING\b|\S+: warning: ", line):
                kind = "warning"
        event = Event(kind, line[:MAX_TEXT], self.log.count, rank=rank)
        self._quoted = event if kind == "compiler" else None
        self._add(event)

    def _add(self, event: Event) -> None:
        key = f"{event.kind}{event.text}"
        if key in self._seen:
            return
        form = _NUMBERED.sub("#", key)
        if len(self._seen) < 4 * HEAD:
            self._seen.add(key)
            self._alike[form] += 1
        if self._alike[form] > ALIKE:
            return
        event.wrapped = self.log.ended
        if self.log.stopping:
            return
        if len(self.log.head) < HEAD:
            self.log.head.append(event)
        else:
            self.log.tail.append(event)


def read(lines: Iterable[str]) -> Log:
    """Read a whole log."""
    return Reader().feed_all(lines)


def _strip(text: str) -> tuple[str, str]:
    """Take the prefixes off a line; returns the message and the rank that printed it."""
    rank = ""
    for _again in range(4):
        found = _PREFIX.match(text)
        if not found or not found.end():
            break
        rank = (found["rank"] or "").strip() or rank
        text = text[found.end() :]
    return text, rank
