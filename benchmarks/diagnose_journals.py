"""How long it takes to diagnose eight journals of 50 MB: benchmarks/diagnose_journals.py [--megabytes 50] [--count 8]

The journals are files in the format of `journalctl -o cat`: a real start (tests/unit/fixtures/logs), traffic, and a
failure at the end. They are read through `cat`, as journalctl's output is: line by line, never whole.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import diagnose  # noqa: E402
from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_facts import Facts  # noqa: E402
from ansible_collections.gpufleet.sglang.plugins.module_utils._journal import ProcessLines  # noqa: E402
from ansible_collections.gpufleet.sglang.plugins.module_utils._why import read_lines  # noqa: E402

TRAFFIC = (
    "[2026-12-01 02:19:58] Prefill batch, #new-seq: 1, #new-token: 15, #cached-token: 0, token usage: 0.00,"
    " #running-req: 0, #queue-req: 0, input throughput (token/s): 1.63\n"
    "[2026-12-01 02:19:58] Decode batch, #running-req: 1, #token: 31, token usage: 0.00, cuda graph: True,"
    " gen throughput (token/s): 17.77, #queue-req: 0\n"
    '[2026-12-01 02:19:58] INFO:     127.0.0.1:52744 - "POST /generate HTTP/1.1" 200 OK\n'
)
OTHER = "[2026-12-01 02:19:58] Tree cache: evicted {number} tokens of a request, host pool at 0.31, nothing unusual\n"
END = (
    "[2026-12-01 02:20:01] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/v/site-packages/sglang/srt/managers/scheduler.py", line 2000, in run_scheduler_process\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB\n\n"
    "[2026-12-01 02:20:01] Received sigquit from a child process. It usually means the child failed.\n"
)


def write(path: Path, megabytes: int) -> None:
    """Write a journal: a start, nine parts of traffic to one of other lines, an end."""
    start = (ROOT / "tests/unit/fixtures/logs/cpu-kill-main.log").read_text(encoding="utf-8", errors="replace")
    size = len(TRAFFIC * 30 + OTHER * 10)
    with path.open("w", encoding="utf-8") as file:
        file.write(start)
        for block in range(megabytes * 1_000_000 // size):
            file.write(TRAFFIC * 30 + "".join(OTHER.format(number=10 * block + at) for at in range(10)))
        file.write(END)


def main() -> int:
    """Write, diagnose side by side, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--count", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.log") for number in range(args.count)]
        for path in paths:
            write(path, args.megabytes)
        codes: list[str] = []

        def work(mine: list[Path]) -> None:
            for path in mine:
                found = diagnose(read_lines(ProcessLines().lines(["cat", str(path)], seconds=60)), Facts(failed=True))
                codes.append(found.code if found else "none")

        begun, spent = time.monotonic(), time.process_time()
        threads = [threading.Thread(target=work, args=(paths[at::2],)) for at in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - begun
        busy = time.process_time() - spent
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took = f"{seconds:.1f} s ({busy:.1f} s of CPU), {memory:.0f} MB"
    print(f"{args.count} journals of {args.megabytes} MB: {took}, {sorted(set(codes))}")
    return 0 if seconds <= 15 and memory <= 200 and set(codes) == {"gpu_oom"} else 1


if __name__ == "__main__":
    sys.exit(main())
