# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Shared doubles of the health tests: real logs with what they must give, and a journal in memory."""

from __future__ import annotations

import json
from pathlib import Path

LOGS = Path(__file__).parent / "fixtures" / "logs"
CPU = "process weights kv_pool warmup ready"
GPU = "process weights kv_pool graphs warmup ready"
DETOK = ["Subprocess detokenizer (pid=", "SIGQUIT received."]
SCHED = ["Subprocess scheduler_0 (pid=", "SIGQUIT received."]
BIND = ["ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use"]

REPLAYS = [  # real logs of SGLang 0.5.23 (cpu) and 0.5.17 (gpu-h200): phases, KV tokens, how the error lines begin
    ("cpu-attn-bad", "process", None, ["sglang serve: error: argument --attention-backend: invalid choice: 'nope'"]),
    ("cpu-dp2", "process", None, ["AssertionError: SGLANG_CPU_OMP_THREADS_BIND is not set", "EOFError"]),
    ("cpu-kill-detok", CPU, 8192, DETOK),
    ("cpu-kill-main", CPU, 8192, []),
    ("cpu-kill-scheduler", CPU, 8192, SCHED),
    ("cpu-mem-fraction-small", CPU, 1860010, ["SIGTERM received."]),
    (
        "cpu-model-hub-offline",
        "process",
        None,
        [
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files",
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
        ],
    ),
    (
        "cpu-model-missing",
        "process",
        None,
        [
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form",
            "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/srv/nope'.",
        ],
    ),
    ("cpu-no-env", "process weights", None, ["ModuleNotFoundError: No module named 'vllm' (sglang/srt/layers/rotary_"]),
    ("cpu-no-weights", "process weights", None, ["RuntimeError: Cannot find any model weights with `/srv/m-qwen3` (s"]),
    ("cpu-port-in-use", "process weights kv_pool warmup", 8192, BIND),
    ("cpu-port-in-use-sglang", "process weights kv_pool warmup", 8192, BIND),  # prints "fired up" all the same
    ("cpu-serve", CPU, 8192, DETOK),
    ("cpu-term-loading", "process weights kv_pool", 8192, ["BrokenPipeError: [Errno 32] Broken pipe"]),
    ("cpu-tp2", CPU, 8192, ["SIGTERM received."]),
    ("cpu-api-key", CPU, 8192, ["SIGTERM received."]),
    ("gpu-h200-broken-package", "process", None, ["ModuleNotFoundError: No module named 'sgl_kernel.infllm_v2'"]),
    ("gpu-h200-cold", GPU, 10903115, ["SIGTERM received.", *DETOK]),
    ("gpu-h200-warm", GPU, 10903115, ["SIGTERM received.", *SCHED]),
    ("gpu-h200-w0", GPU, 197152, ["SIGTERM received.", *DETOK]),
    ("gpu-h200-w1", "process weights", None, ["ValueError: Loaded weights leave no GPU memory for the KV cache under"]),
    ("gpu-h200-unit-bulk-warm-lost", GPU, 3605358, ["SIGTERM received.", *SCHED]),
]


def lines_of(name):
    return (LOGS / f"{name}.log").read_bytes().decode("utf-8", "replace").split("\n")[:-1]


class Journal:
    """Answers the few journalctl commands that are used, from a list of entries."""

    def __init__(self):
        self.entries = []
        self.calls = []
        self.read = 0

    def add(self, message, unit="a.service", invocation="i1", manager=False, at=None):
        number = len(self.entries) + 1
        names = ("UNIT", "INVOCATION_ID") if manager else ("_SYSTEMD_UNIT", "_SYSTEMD_INVOCATION_ID")
        self.entries.append(
            {
                "__CURSOR": f"c{number}",
                "__MONOTONIC_TIMESTAMP": str(int((number if at is None else at) * 1e6)),
                "MESSAGE": message,
                names[0]: unit,
                names[1]: invocation,
                "_PID": "1",
            }
        )

    def lines(self, argv, *, seconds):
        self.calls.append(list(argv))
        options = dict(item.split("=", 1) for item in argv if item.startswith("--") and "=" in item)
        chosen = self.entries
        if "--cursor" in options:  # the entry itself, where it matches
            chosen = chosen[int(options["--cursor"][1:]) - 1 :]
        for name in ("_SYSTEMD_INVOCATION_ID", "INVOCATION_ID"):
            wanted = [item.split("=", 1)[1] for item in argv if item.startswith(name + "=")]
            if wanted:
                chosen = [
                    item
                    for item in chosen
                    if wanted[0] in (item.get("INVOCATION_ID"), item.get("_SYSTEMD_INVOCATION_ID"))
                ]
        if "--unit" in argv:
            units = [argv[at + 1] for at, item in enumerate(argv) if item == "--unit"]
            chosen = [item for item in chosen if item.get("UNIT", item.get("_SYSTEMD_UNIT")) in units]
        if "--lines" in options:
            chosen = chosen[-int(options["--lines"]) :]
        for item in chosen:
            self.read += 1
            yield json.dumps(item).encode()
