"""Draws the pages' pictures that are not drawn by hand, into ``docs/``.

    python docs/site/pictures.py cost     # docs/cost.svg, from benchmarks/results.toml
    python docs/site/pictures.py screen   # docs/training-screen.svg, as `bunkbed train` shows it, of a generated file
    python docs/site/pictures.py report RUN   # docs/report.png, the top of the run's report (needs Chromium and Pillow)

``docs/tiers.svg`` is written by hand.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import results  # noqa: E402

OURS, THEIRS = "#2a7f62", "#a3acb9"
#: What is compared: heading, the command of rows in results.toml, their peers with names for people.
PANELS = (
    ("Table fits RAM, Adam", "adam", {"torch SparseAdam": "torch SparseAdam"}),
    ("Table fits RAM, dense Adam", "dense-adam", {"Keras Adam": "Keras Adam", "torch dense Adam": "torch Adam"}),
    (
        "Table larger than the memory limit",
        "larger-than-memory",
        {"without lookahead": "Bunkbed", "memmap + madvise": "memmap + madvise", "np.memmap": "np.memmap"},
    ),
    ("The same, key-value stores", "key-value-stores", {"LMDB": "LMDB", "RocksDB": "RocksDB"}),
)
COMMAND = [
    "train",
    "ratings.csv",
    "--dim",
    "64",
    "--ram",
    "4MiB",
    "--epochs",
    "8",
    "--lr",
    "0.01",
    "--out",
    "runs/first",
]


def cost(target: Path) -> None:
    """Draw the milliseconds per step of Bunkbed and of others, each panel with its own scale."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    data, claims = results.read()
    plt.rcParams.update(
        {"svg.hashsalt": "bunkbed", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    )
    picture, grid = plt.subplots(2, 2, figsize=(9, 4.2), gridspec_kw={"height_ratios": [3, 4]})
    rows = {(row.command, row.peer): row for claim in claims for row in claim.rows if row.readings[0].ms}
    for axes, (heading, command, peers) in zip(grid.flat, PANELS, strict=True):
        pairs = [rows[command, peer].readings[0].ms for peer in peers]
        names = ["Bunkbed, lookahead" if "without lookahead" in peers else "Bunkbed", *peers.values()]
        values = [pairs[0][0], *(theirs for _, theirs in pairs)]
        colors = [OURS if name.startswith("Bunkbed") else THEIRS for name in names]
        axes.barh(range(len(values)), values, color=colors, height=0.62)
        for y, value in enumerate(values):
            text = f"{value:,.3g} ms" if value < 1000 else f"{value / 1000:.1f} s"
            axes.annotate(text, (value, y), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(values)), names)
        axes.invert_yaxis()
        axes.set_title(heading, fontsize=10, loc="left", fontweight="bold")
        axes.set_xlim(0, max(values) * 1.18)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    machine = data["machines"]["EPYC"].partition(";")[0]
    picture.tight_layout(w_pad=3, h_pad=2, rect=(0, 0.05, 1, 1))
    picture.text(0.01, 0.01, f"Median of a training step; {machine}; each panel has its own scale", color="#5b6472")
    picture.savefig(target, metadata={"Date": None})


def screen(target: Path) -> None:
    """What a terminal shows in the middle of a training run."""
    import numpy as np
    from rich.console import Console

    from bunkbed.cli import main
    from bunkbed.train.output import display
    from bunkbed.train.output.events import Event, StepReport

    shown: list[Any] = []

    class Recorded(display.LiveDisplay):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if isinstance(event, StepReport) and event.epoch == 4:
                shown.append(self.render())

    display.open_display = lambda console, **given: Recorded(Console(file=sys.stderr, force_terminal=True), **given)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        users, items = rng.integers(0, 5_000, 60_000), (rng.zipf(1.3, 60_000) % 200) * 10
        items = items + users % 10  # ten kinds of users, each with items of its own
        lines = [f"{user},{item}\n" for user, item in zip(users.tolist(), items.tolist(), strict=True)]
        Path("ratings.csv").write_text("user,item\n" + "".join(lines))
        try:
            main(COMMAND)
        except SystemExit as end:
            if end.code:
                raise
        os.chdir(ROOT)
    console = Console(record=True, width=96, file=io.StringIO(), highlight=False)
    console.print(f"[bold]$[/] bunkbed {' '.join(COMMAND)}")
    console.print(shown[len(shown) // 2])
    console.save_svg(str(target), title="bunkbed train", unique_id="training")
    # Nothing is fetched from elsewhere: the page's reader has a monospaced font.
    text = target.read_text()
    while "@font-face" in text:
        start = text.index("@font-face")
        text = text[:start].rstrip() + text[text.index("}", start) + 1 :]
    target.write_text(text)


def report(target: Path, run: Path) -> None:
    """The top of the report page of a run, in 64 colors."""
    from PIL import Image

    from bunkbed.train.report import write_report

    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "report.html", Path(folder) / "report.png"
        write_report(run, page)
        page.write_text(page.read_text().replace(str(run.resolve()), f"runs/{run.name}"))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,750"]
        subprocess.run(["chromium", *options, f"--screenshot={picture}", page.as_uri()], check=True)
        Image.open(picture).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(target, optimize=True)


if __name__ == "__main__":
    {
        "cost": lambda: cost(ROOT / "docs/cost.svg"),
        "screen": lambda: screen(ROOT / "docs/training-screen.svg"),
        "report": lambda: report(ROOT / "docs/report.png", Path(sys.argv[2])),
    }[sys.argv[1]]()
