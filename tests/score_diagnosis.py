"""Score the diagnosis on reports of failures: tests/score_diagnosis.py REPORTS.jsonl [--split SEED] [--quiet]

Prints right, wrong and silent (unknown_failure) per kind, the misses, and last the line
`total: N right, N wrong, N silent`. --split SEED scores the two random halves of the file apart.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / ".collections"), str(HERE)]

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose import diagnose  # noqa: E402
from report_reader import inputs  # noqa: E402

KINDS = {
    "A": "CUDA toolkit, compilers, libraries",
    "B": "JIT cache",
    "C": "memory",
    "D": "process, ports, systemd, driver",
    "E": "healthy-looking but wrong",
    "F": "model and hub",
}


def judge(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return right, wrong or silent, and the code that was found."""
    lines, facts = inputs(report)
    found = diagnose(lines, facts)
    code = found.code if found else "unknown_failure"
    if code == report["code"]:
        return "right", code
    return ("silent", code) if code == "unknown_failure" else ("wrong", code)


def score(reports: Sequence[Mapping[str, Any]], quiet: bool = False) -> Counter[str]:
    """Print the score of reports and return it."""
    kinds: dict[str, Counter[str]] = {}
    misses = []
    for report in reports:
        verdict, code = judge(report)
        kinds.setdefault(str(report.get("kind", "?")), Counter())[verdict] += 1
        if verdict != "right":
            misses.append((verdict, report, code))
    if not quiet:
        for kind, counts in sorted(kinds.items()):
            name = KINDS.get(kind, "")
            print(f"{kind} {name:36} {counts['right']:3} right {counts['wrong']:3} wrong {counts['silent']:3} silent")
        for verdict, report, code in sorted(misses, key=lambda miss: miss[0], reverse=True):
            first = " ".join(str(report.get("log_excerpt", "")).split())[:110]
            print(f"  {verdict:6} {report.get('id', '?'):5} is {report['code']}, found {code}: {first}")
    return sum(kinds.values(), Counter())


def total(name: str, counts: Mapping[str, int]) -> str:
    """Return the line of totals."""
    return f"{name}: {counts['right']} right, {counts['wrong']} wrong, {counts['silent']} silent"


def main(argv: Sequence[str] | None = None) -> int:
    """Read, score, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path)
    parser.add_argument("--split", type=int, metavar="SEED", help="score two random halves apart")
    parser.add_argument("--quiet", action="store_true", help="only the totals")
    args = parser.parse_args(argv)
    reports = [json.loads(line) for line in args.reports.read_text(encoding="utf-8").splitlines() if line.strip()]
    if args.split is not None:
        order = list(range(len(reports)))
        random.Random(args.split).shuffle(order)
        half = len(order) // 2
        for name, part in (("first half", sorted(order[:half])), ("other half", sorted(order[half:]))):
            print(total(name, score([reports[at] for at in part], quiet=True)))
    print(total("total", score(reports, args.quiet)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
