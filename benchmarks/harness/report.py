"""The suite's figures as JSON and as a Markdown table.

`write` merges by case: cases that did not run this time keep the figures, machine and revision of the run that
measured them, so that a suite can be run in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import suite
from benchmarks.harness.figures import Figure, Outcome, Size

SIZES: dict[Size, str] = {"tiny": "tiny: no figure", "quick": "quick", "full": ""}


def show(outcome: Outcome) -> None:
    """Prints a case's figures."""
    if outcome.skipped:
        print(f"skipped: {outcome.skipped}", flush=True)
    elif outcome.failed:
        print(f"FAILED: {outcome.failed}", flush=True)
    else:
        print(outcome.machine)
        for figure in outcome.figures:
            print(f"  {figure.line()}")
        print(f"  [{outcome.seconds:.0f} s{disturbed(outcome)}]", flush=True)


def disturbed(outcome: Outcome) -> str:
    """A warning where other processes, kernel threads among them, took more than a fifth of a core."""
    return f"; DISTURBED: other processes kept {outcome.others:.1f} cores busy" if outcome.others > 0.2 else ""


def read(folder: Path) -> list[Outcome]:
    """What an earlier run wrote, or nothing."""
    path = folder / "figures.json"
    if not path.exists():
        return []
    return [Outcome.from_json(data) for data in json.loads(path.read_text())["cases"]]


def merge(old: Sequence[Outcome], new: Sequence[Outcome]) -> list[Outcome]:
    """New outcomes over old ones, in the suite's order; one that was skipped replaces nothing."""
    found = {outcome.case: outcome for outcome in old}
    for outcome in new:
        if not (outcome.skipped and outcome.case in found):
            found[outcome.case] = outcome
    return [found[case.name] for case in suite.CASES if case.name in found]


def write(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Write figures.json and figures.md."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = merge(read(folder), outcomes)
    text = json.dumps({"cases": [outcome.to_json() for outcome in merged]}, indent=1)
    (folder / "figures.json").write_text(text + "\n")
    (folder / "figures.md").write_text(markdown(merged))


def markdown(outcomes: Sequence[Outcome]) -> str:
    """One table of what has a target, then one section a case."""
    lines = ["# Figures of the benchmark suite", ""]
    lines += ["Written by `python -m benchmarks`; `RESULTS.md` says how they are measured and holds the claims.", ""]
    lines += ["| case | figure | reached (least to most) | wanted | |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        for figure in outcome.figures:
            if figure.target:
                lines.append(f"| {outcome.case} | {row(figure)} |")
        if outcome.failed:
            lines.append(f"| {outcome.case} | failed: {outcome.failed} | | | |")
    lines.append("")
    whats = {case.name: case for case in suite.CASES}
    for outcome in outcomes:
        size = f" ({SIZES[outcome.size]})" if SIZES[outcome.size] else ""
        lines += [f"## {outcome.case}{size}", "", f"{whats[outcome.case].what}.", ""]
        if outcome.skipped or outcome.failed:
            lines += [f"Skipped: {outcome.skipped}" if outcome.skipped else f"Failed: {outcome.failed}", ""]
            continue
        lines += [f"    {outcome.command}", ""]
        lines += [f"- {figure.line()}" for figure in outcome.figures]
        revision = f"revision {outcome.revision}, " if outcome.revision else ""
        lines += [
            "",
            f"{revision}{outcome.seconds:.0f} s{disturbed(outcome)}. " + "; ".join(outcome.machine.splitlines()),
            "",
        ]
    return "\n".join(lines)


def row(figure: Figure) -> str:
    """The cells of a figure with a target."""
    verdict = {True: "reached", False: "**missed**", None: "not measured"}[figure.reached]
    return f"{figure.name} | {figure.text()} | {figure.target} | {verdict}"
