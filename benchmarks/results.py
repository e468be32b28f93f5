"""Makes RESULTS.md, one table for each claim, from results.toml: ``python -m benchmarks.results``."""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA, PAGE = HERE / "results.toml", HERE / "RESULTS.md"
VERDICTS = ("met", "missed", "none")
COLUMNS = ("case", "command", "machine", "median", "range", "peer", "target", "verdict")


@dataclass(frozen=True)
class Reading:
    """A figure on one machine; its fields are described in results.toml."""

    machine: str
    date: datetime.date
    median: str
    verdict: str
    range: str = "-"
    ms: tuple[float, float] | None = None


@dataclass(frozen=True)
class Row:
    """One case of a claim."""

    case: str
    command: str
    readings: tuple[Reading, ...]
    peer: str = "-"
    target: str = "-"
    cause: str = ""

    def line(self) -> str:
        """The row in Markdown; readings of several machines are lines of a cell, one where they are equal."""
        medians = [r.median + (f", {r.ms[0]:,g} / {r.ms[1]:,g} ms" if r.ms else "") for r in self.readings]
        verdicts = {"met": "met", "missed": f"missed: {self.cause}", "none": "-"}
        columns = [
            [self.case],
            [f"`{self.command}`"],
            [f"{r.machine} {r.date}" for r in self.readings],
            medians,
            [r.range for r in self.readings],
            [self.peer],
            [self.target],
            [verdicts[r.verdict] for r in self.readings],
        ]
        cells = ["<br>".join(column if len(set(column)) > 1 else column[:1]) for column in columns]
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Claim:
    title: str
    rows: tuple[Row, ...]


def read() -> tuple[dict[str, Any], list[Claim]]:
    """results.toml and its claims."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return data, [Claim(claim["title"], tuple(map(row, claim["rows"]))) for claim in data["claims"]]


def row(data: dict[str, Any]) -> Row:
    return Row(**{**data, "readings": tuple(Reading(**reading) for reading in data["readings"])})


def page() -> str:
    """The text of RESULTS.md."""
    data, claims = read()
    lines = [data["head"] + "\n".join(f"- {name}: {what}." for name, what in data["machines"].items()), ""]
    for claim in claims:
        lines += [f"## {claim.title}", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [*(row.line() for row in claim.rows), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
