"""Torture: ``python -m torture [PART ...]``.

Without names it runs every part; ``--list`` lists the parts. A part can be run alone, smaller (``--size 0.1``) or with
a limit of seconds. The exit status is 1 when a promise did not hold.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path

from torture import points
from torture.parts import Result, Size

#: name -> (module, function, description)
PARTS = {
    "powerloss": ("lives.powerloss", "run", "power is lost at every operation; the oracle compares every bit"),
    "mutants": ("lives.mutants", "run", "seeded protocol bugs that the oracle must catch"),
    "kills": ("lives.kills", "at_every_operation", "kill -9 at every operation and failpoint of a life"),
    "load": ("lives.kills", "at_random", "kill -9 at random times while a run trains and commits"),
    "faults": ("lives.faults", "run", "every operation fails in turn: EIO, ENOSPC, EINTR, short"),
    "several": ("lives.several", "run", "two or three operations fail in one life; the same process goes on"),
    "pairs": ("stories.pairs", "run", "every pair of features in a story against the oracle; holes raise their error"),
    "between": ("stories.between", "run", "every call between two steps of scans, exports, topk, copies, readers"),
    "corruption": (
        "corruption",
        "run",
        "every bit flipped, every length cut; files swapped, foreign, hostile; other stores too",
    ),
    "epochs": ("epochs", "run", "readers that refresh during commits and compaction never see two epochs"),
    "stress": ("stress.stress", "run", "threads and reader processes call everything at once; bounds of every row"),
    "dropin": ("dropin", "run", "random training programs have the losses and rows of torch.nn"),
    "budgets": ("budgets", "run", "random tables and budgets of RAM: what create accepts trains every row"),
    "ranks": ("ranks", "run", "random jobs of several processes have the bits of one; a rank killed at any time"),
    "feed": ("feed", "run", "a writer and a consumer of changes killed at any time; none is lost or given twice"),
    "resume": ("resume", "run", "a training run killed at 20 points ends like one never killed"),
    "trends": ("trends", "run", "segments, files, descriptors, memory and threads stay bounded over 10,000 commits"),
    "fuzz": ("fuzz", "run", "coverage-guided fuzzing of every parser; needs clang"),
    "sanitizers": ("sanitizers", "run", "threads of random calls under TSan and ASan; needs a compiler that has them"),
}


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m torture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("names", nargs="*", metavar="PART", help="parts to run; all where none is named")
    options.add_argument("--list", action="store_true", help="show the parts")
    options.add_argument("--size", type=float, default=1.0, help="a factor on how much is tried; 1: the long form")
    options.add_argument("--seconds", type=float, default=1800.0, help="most a part may take, about")
    options.add_argument("--seed", type=int, default=0, help="of everything random")
    options.add_argument("--processes", type=int, default=max(1, os.cpu_count() or 1), help="at once")
    options.add_argument("--json", type=Path, help="write the figures here")
    return options.parse_args()


def show(part: str, results: list[Result], seconds: float) -> None:
    for result in results:
        state = "score" if result.score else "ok" if result.ok else "FAILED"
        print(f"{state:7} {result.name}: {result.passed:,} of {result.tried:,}", flush=True)
        for line in result.note.splitlines():
            print(f"        {line}")
        for failure in result.failures:
            print(f"        ! {failure}")
    print(f"        {part}: {seconds:.0f} s\n", flush=True)


def main() -> int:
    options = arguments()
    if options.list:
        for name, (_, _, what) in PARTS.items():
            print(f"{name:11} {what}")
        return 0
    unknown = [name for name in options.names if name not in PARTS]
    if unknown:
        print(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    size = Size(options.size, options.seconds, options.seed, options.processes)
    figures: list[dict[str, object]] = []
    found: list[tuple[str, Result]] = []
    start = time.monotonic()
    is_sound = True
    for name in options.names or PARTS:
        module, function, _ = PARTS[name]
        begin = time.monotonic()
        print(f"{name} begins", file=sys.stderr, flush=True)
        try:
            results = getattr(importlib.import_module(f"torture.{module}"), function)(size)
        except RuntimeError as error:
            results = [Result(name, failures=[str(error)])]
        seconds = time.monotonic() - begin
        show(name, results, seconds)
        found += [(name, result) for result in results]
        is_sound &= all(result.ok for result in results)
        figures += [{"part": name, "ok": result.ok, "seconds": round(seconds, 1), **vars(result)} for result in results]
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(points.table(found)))
    print(f"\n{time.monotonic() - start:.0f} s in all")
    print("every promise held" if is_sound else "a promise did not hold")
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
