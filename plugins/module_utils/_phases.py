# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Reading an engine's log: how far a server has come and which lines say why it did not.

A LogDigest is fed one line after the other and stays small whatever comes: it is what a watch carries
from one slice to the next instead of the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

PHASES = ("none", "process", "weights", "kv_pool", "graphs", "warmup", "ready")
MAX_ERRORS = 8
MAX_CHARS = 500
FORGET_AFTER = 60.0  # s without a further error line

# What a phase begins with, in the wording of SGLang 0.5.x; matched at the start of the message.
_PHASE_LINES = (
    ("ready", re.compile(r"The server is fired up and ready to roll!")),
    ("warmup", re.compile(r"Engine startup timings \(s\)|INFO: +(Uvicorn running on|Started server process)")),
    ("graphs", re.compile(r"Capture .*cuda graph begin|Running FlashInfer autotune", re.IGNORECASE)),
    ("kv_pool", re.compile(r"(KV|Mamba) Cache is allocated|Memory pool end|max_total_num_tokens=\d")),
    ("weights", re.compile(r"Load weight begin")),
)
_STAMP = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?(?P<rank>(?: [A-Z]+\d+)*)\] ?")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SIZES = re.compile(r"max_total_num_tokens=(\d+)")
_RUNNING = re.compile(r"max_running_requests=(\d+)")
_BIND = re.compile(r"\[Errno 98\] error while attempting to bind", re.IGNORECASE)

# Lines that follow from a failure and never are its cause (taxonomy of launch failures, wrappers and symptoms).
_WRAPPER = re.compile(
    r"Received sigquit from a child|SIGQUIT received|SIGTERM received|Subprocess \S+ \(pid=\d+\) crashed"
    r"|Rank \d+ scheduler died during initialization|Scheduler hit an exception"
    r"|Initialization failed\. (Please see the error|warmup error)|Capture .*cuda graph failed"
    r"|Possible solutions:|Ninja build failed|Could not load any common_ops library|EngineCore failed"
    r"|failed to be inspected|watchdog timeout|Connection closed by peer|Killed$|ptxas fatal +: Ptx assembly aborted",
    re.IGNORECASE,
)
# Lines with an alarming word that every healthy server may print.
_NOISE = re.compile(
    r"server_args=|Ignore import error when loading|Fail to set RLIMIT_NOFILE|nanobind: leaked|leaked function"
    r"|post-warmup freeze_gc failed|Pyspy failed|All pyspy dump|CUDA (user-triggered )?coredump|INFO: "
    r"|Prefill batch|Decode batch|^\S+\.py:\d+: \w*Warning: |warnings\.warn\(|Ignoring incompatible"
    r"|Health check request received during shutdown|Cannot detect CUDA architecture|Invalid HTTP request received"
    r"|kill_process_tree called|Sleeping \d+ seconds before crash|No live scheduler processes|Gracefully exiting"
    r"|Waiting [\d.]+ seconds for CUDA coredumps|^\s*\[--|to silence this warning|^usage: ",
    re.IGNORECASE,
)
_NOISE_EXCEPTION = re.compile(r"(KeyboardInterrupt|SystemExit)\b|asyncio\.exceptions\.CancelledError")
_ERROR = re.compile(
    r"\b(error|fatal|exception|fail(?:ed|ure)?|cannot|can't|could ?n[o']t|unable to|no such file|not found|denied"
    r"|refused|out of memory|not enough memory|no space left|undefined symbol|unsupported|invalid|illegal"
    r"|abort(?:ed)?)\b|\bOOM\b|\[Errno \d+\]|terminate called",
    re.IGNORECASE,
)
# Plain substrings: a line with none of them is no error line, and that is found out cheaply.
_HINTS = (
    *("error", "fatal", "exception", "fail", "cannot", "can't", "could", "unable", "such", "found", "denied"),
    *("refused", "memory", "space", "undefined", "unsupported", "invalid", "illegal", "abort", "oom", "errno"),
    *("terminate", "sig", "subprocess", "scheduler", "killed", "closed", "ptxas", "possible", "watchdog", "exit"),
    *("interrupt", "warning"),
)
_STRONG = re.compile(
    r"^(ERROR|CRITICAL|FATAL)\b|^\S+\.service: (Failed|A process of this unit has been killed)"
    r"|\berror: |fatal error|\[Errno \d+\]|CUDA error|out of memory|not enough memory",
    re.IGNORECASE,
)
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failure|OOM)\b(?::|$)")
_ARGPARSE = re.compile(r"\S.*: error: ")
_TRAFFIC = re.compile(r'Prefill batch|Decode batch|INFO: +\S+:\d+ - "')
_EXIT = re.compile(r"Main process exited, code=(?P<code>\w+), status=(?P<status>\d+)")
_RESULT = re.compile(r"Failed with result '(?P<result>[^']+)'")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')


@dataclass
class LogDigest:
    """All that is kept of one invocation's log. Times are those the lines were fed with."""

    phase: str = "none"
    phase_times: dict[str, float] = field(default_factory=dict)
    lines: int = 0  # fed so far, without the traffic that probes cause themselves
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    bind_error: str = ""
    tracebacks: list[str] = field(default_factory=list)  # innermost exceptions, first ones first
    causes: list[str] = field(default_factory=list)  # plain error lines before the first wrapper, first ones first
    symptoms: list[str] = field(default_factory=list)  # wrappers and what comes after them
    wrapped: bool = False  # a wrapper has been seen: what comes now follows from the failure
    in_traceback: bool = False
    frame: str = ""  # innermost frame of the traceback being read
    message: int = 0  # lines of an exception's message that may still follow
    last_error: float = 0.0  # when the last error line came
    exit: str = ""  # systemd's word for how the main process ended: "exited 2", "killed 9"
    nan: str = ""  # the engine found NaN among its values (and went on with others)
    result: str = ""  # systemd's result of the unit: exit-code, signal, timeout, ...

    def feed(self, text: str, time: float = 0.0) -> None:
        """Take one line of the log, as the journal has it."""
        self._reach("process", time)
        raw = _ANSI.sub("", text.rstrip().rsplit("\r", 1)[-1])[: MAX_CHARS * 2].rstrip()
        line = _STAMP.sub("", raw, count=1)
        stamped = line != raw
        if _TRAFFIC.match(line):
            self.in_traceback, self.message = False, 0
            return
        self.lines += 1
        if self._traceback(line, stamped, time):
            return
        if "NaN detected in" in line and not self.nan:
            self.nan = _cut(line)
        if _BIND.search(line) and not self.bind_error:
            self.bind_error = _cut(line)
        self._phase(line, time)
        self._errors(line, time)

    def feed_systemd(self, text: str, time: float = 0.0) -> None:
        """Take a message of systemd's own about the unit."""
        self.lines += 1
        ended = _EXIT.search(text)
        if ended:
            self.exit = f"{ended['code']} {ended['status']}"
        result = _RESULT.search(text)
        if result:
            self.result = result["result"]
        elif not ended and _STRONG.search(text):
            self._settle(time)
            _add(self.causes, _cut(text), push=True)

    def _settle(self, time: float) -> None:
        """Forget errors that a serving server has survived for a minute: they are not why it died."""
        if self.phase == "ready" and not self.wrapped and time - self.last_error > FORGET_AFTER:
            self.tracebacks, self.causes = [], []
        self.last_error = time

    def _reach(self, phase: str, time: float) -> None:
        if PHASES.index(phase) > PHASES.index(self.phase):
            self.phase = phase
            self.phase_times[phase] = time
            if phase == "ready":  # whatever was wrong while starting did no harm
                self.tracebacks, self.causes, self.symptoms, self.wrapped = [], [], [], False

    def _phase(self, line: str, time: float) -> None:
        if line.startswith("server_args="):
            return
        for phase, pattern in _PHASE_LINES:
            if pattern.match(line):
                if phase == "ready" and self.bind_error:
                    return  # its warm-up talked to the server that has the port
                self._reach(phase, time)
                break
        if line.startswith("max_total_num_tokens="):
            self.kv_tokens = _number(_SIZES, line)
            self.max_running_requests = _number(_RUNNING, line)

    def _traceback(self, line: str, stamped: bool, time: float) -> bool:
        """Follow a traceback; True when the line was part of one."""
        if "Traceback (most recent call last):" in line:
            before = line.split("Traceback (most", 1)[0]
            if _NOISE.search(before):
                self.message = 0
                self.in_traceback, self.frame = True, "noise"
                return True
            self.in_traceback, self.frame, self.message = True, "", 0
            return True
        if self.in_traceback:
            if stamped:  # another process cut in, or the exception line never came
                self.in_traceback = False
                return False
            frame = _FRAME.match(line)
            if frame:
                if self.frame != "noise":
                    self.frame = f"{_short(frame['file'])}:{frame['line']} in {frame['name']}"
                return True
            if not line.strip() or line[0].isspace() or line.lstrip().startswith(("|", "+")):
                return True
            self.in_traceback = False
            if self.frame != "noise" and not _NOISE_EXCEPTION.match(line):
                self._exception(line, time)
            return True
        if line.startswith(_CHAINED):
            return True
        if self.message and not stamped and line.strip():
            # the rest of an exception's message: printed as it stands below its first line
            self.message -= 1
            target = self.symptoms if self.wrapped else self.tracebacks
            if target and any(map(str.isalnum, line)) and not _WRAPPER.search(line) and len(target[-1]) < MAX_CHARS:
                target[-1] = _cut(f"{target[-1]} {line.strip()}")
            return True
        if stamped or not line.strip():
            self.message = 0
        return False

    def _exception(self, line: str, time: float) -> None:
        self._settle(time)
        text = _cut(f"{line} ({self.frame})" if self.frame and len(line) < MAX_CHARS - 120 else line)
        target = self.symptoms if self.wrapped or _WRAPPER.search(line) else self.tracebacks
        known = [item.split(" (", 1)[0] for item in target]
        if text.split(" (", 1)[0] not in known:
            _add(target, text)
            self.message = 3

    def _errors(self, line: str, time: float) -> None:
        lowered = line.lower()
        if not any(hint in lowered for hint in _HINTS):  # most lines; the patterns below are dear
            return
        if _NOISE.search(line) and not self._bind(line):
            return
        if _WRAPPER.search(line):
            self._settle(time)
            self.wrapped = True
            _add(self.symptoms, _cut(line))
        elif self._bind(line) or _ARGPARSE.match(line) or _EXCEPTION.match(line) or _ERROR.search(line):
            self._settle(time)
            target = self.symptoms if self.wrapped else self.causes
            if _cut(line) not in target:
                _add(target, _cut(line), push=bool(_STRONG.search(line)))

    @staticmethod
    def _bind(line: str) -> bool:
        return bool(_BIND.search(line))

    def error_lines(self) -> list[str]:
        """Return what a person should read, most telling first; [] when no line says anything."""
        if self.bind_error:
            return [self.bind_error]
        chosen: list[str] = []
        strong = [line for line in self.causes if _STRONG.search(line) or _EXCEPTION.match(line)]
        weak = [line for line in self.causes if line not in strong]
        groups = [strong, self.tracebacks, weak] if strong and not self.tracebacks else [self.tracebacks, strong, weak]
        for group in groups:
            chosen += [line for line in group if line not in chosen]
        if not self.tracebacks and not strong:
            # died without a word of its own: then the symptoms are all there is
            chosen = [*[line for line in self.symptoms if line not in chosen], *chosen]
        return chosen[:MAX_ERRORS]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the next slice."""
        return asdict(self)


def digest_from_dict(data: Mapping[str, Any]) -> LogDigest:
    """Build a digest from what to_dict() gave; unknown keys are dropped."""
    known = {item.name for item in fields(LogDigest)}
    return LogDigest(**{key: value for key, value in data.items() if key in known})


def _add(target: list[str], line: str, push: bool = False) -> None:
    """Append to a bounded list: the first lines stay; push drops the last kept one for a stronger line."""
    if len(target) < MAX_ERRORS:
        target.append(line)
    elif push:
        weak = [index for index, item in enumerate(target) if not _STRONG.search(item)]
        if weak:
            del target[weak[-1]]
            target.append(line)


def _cut(line: str) -> str:
    line = line.strip()
    return line if len(line) <= MAX_CHARS else line[: MAX_CHARS - 3] + "..."


def _short(path: str) -> str:
    return path.rsplit("site-packages/", 1)[-1]


def _number(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    return int(found.group(1)) if found else None
