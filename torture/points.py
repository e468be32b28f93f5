"""Requirements of the durability issue, and how far a run of the parts has shown each requirement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torture.parts import Result


@dataclass(frozen=True)
class Point:
    """Requirement, with its figures: (part, start of the name, least number of tries).

    Results whose names start with `comparison` are shown, too. A least number of 0 means all cases (`Result.wanted`).
    """

    what: str
    figures: Sequence[tuple[str, str, int]]
    comparison: str = ""


#: The number of operations of a life varies by a few with the timing of its threads: the last ones may not occur.
ALL_BUT_A_FEW = 0.99

POINTS = (
    Point("power loss; seeded bugs caught", [("powerloss", "states", 100_000), ("mutants", "seeded bugs", 10)]),
    Point(
        "kill -9 at operations, failpoints, random",
        [
            ("kills", "kill -9 at every op", 0),
            ("kills", "kill -9 at every fail", 0),
            ("load", "kill -9 at random", 500),
        ],
    ),
    Point(
        "every operation failed: EIO, ENOSPC, EINTR, short",
        # "short" is tried at every operation, but only reads and writes can be short, and only these count.
        [("faults", f"operation fails: {name}", int(name == "short")) for name in ("EIO", "ENOSPC", "EINTR", "short")],
    ),
    Point(
        "bit flips, truncations; other stores too",
        [("corruption", "single-bit flips", 0), ("corruption", "truncations", 0)],
        comparison="the same on",
    ),
    Point(
        "fuzz executions: manifests, headers",
        [
            ("fuzz", "fuzz executions without a crash: manifest", 6_000_000),
            ("fuzz", "fuzz executions without a crash: segment", 4_000_000),
        ],
    ),
    Point("batches of one epoch", [("epochs", "batches", 100_000)]),
    Point(
        "threads of random calls: TSan, ASan; seeded bugs",
        [
            ("sanitizers", "calls of threads under the thread", 200_000),
            ("sanitizers", "calls of threads under the address", 200_000),
            ("sanitizers", "seeded bugs", 8),
        ],
    ),
    Point("training killed and resumed, final bits", [("resume", "kills of", 20), ("resume", "training killed", 1)]),
)


def table(found: Iterable[tuple[str, Result]]) -> list[str]:
    """Return one line per requirement: held, in part (fewer tries than wanted), FAILED, or not run."""
    results = list(found)
    lines = ["", "It must show:"]
    for number, point in enumerate(POINTS, 1):
        texts = []
        is_sound = is_whole = True
        for part, beginning, least in point.figures:
            result = next((r for p, r in results if p == part and r.name.startswith(beginning)), None)
            if result is None:
                is_sound &= not any(p == part and not r.ok for p, r in results)
                is_whole = False
                texts.append("not run")
                continue
            is_sound &= result.ok
            is_whole &= result.tried >= (least or ALL_BUT_A_FEW * result.wanted)
            texts.append(f"{result.passed:,} of {result.tried:,}")
        state = "FAILED" if not is_sound else "held" if is_whole else "in part"
        if all(text == "not run" for text in texts) and is_sound:
            state, texts = "not run", []
        others = [
            f"{r.name.removeprefix(point.comparison).split(':')[0].strip()} {r.passed:,} of {r.tried:,}"
            for _, r in results
            if point.comparison and r.name.startswith(point.comparison) and r.tried
        ]
        text = "; ".join(texts) + (f" ({', '.join(others)})" if others else "")
        lines.append(f"  {number}  {state:8} {point.what:50} {text}".rstrip())
    return lines
