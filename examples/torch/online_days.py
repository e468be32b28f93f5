"""How do I train on a stream of days whose items come and go, so that old rows go and a server follows?

    python examples/torch/online_days.py                             # needs `pip install "bunkbed[train]"`
    python examples/torch/online_days.py --days 90 --picture days.svg

The stream is generated: each day new items appear, items live for two weeks and are hardly seen afterwards, and what
people like drifts. The same model trains on it twice, with and without rows that expire. Each day it is first judged on
interactions that it has not seen, then trained on them; then old items are swept, and the tables are committed
together. A reader in this process follows the commits, as `bunkbed serve` does.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, Optimizer

USERS, DIM, LIFE = 2_000, 16, 14


@dataclass
class Day:
    """What one day showed: quality on its own interactions before training on them, and the tables after it."""

    auc: float
    rows: int
    nbytes: int
    age_s: float


class Stream:
    """Interactions with planted truth. Item i is born on day ``i // new`` and lives `LIFE` days."""

    def __init__(self, new: int, per_day: int) -> None:
        self.new, self.per_day = new, per_day
        rng = np.random.default_rng(1)
        self.users = rng.standard_normal((2, USERS, 8))

    def day(self, day: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return int64 users and items, and float32 clicks, of one day."""
        rng = np.random.default_rng([2, day])
        users = rng.integers(0, USERS, self.per_day)
        newest = self.new * (day + 1)
        items = rng.integers(max(0, newest - self.new * LIFE), newest, self.per_day)
        items = np.where(rng.random(self.per_day) < 0.005, rng.integers(0, newest, self.per_day), items)
        angle = day / 60  # what people like turns by a right angle in three months
        taste = np.cos(angle) * self.users[0, users] + np.sin(angle) * self.users[1, users]
        logits = (taste * self.of_items(items)).sum(1)
        clicks = rng.random(self.per_day) < 1 / (1 + np.exp(-logits))
        return torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(clicks.astype(np.float32))

    def of_items(self, items: np.ndarray) -> np.ndarray:
        known, inverse = np.unique(items, return_inverse=True)
        return np.stack([np.random.default_rng([3, item]).standard_normal(8) for item in known.tolist()])[inverse]


def auc(scores: np.ndarray, clicks: np.ndarray) -> float:
    """Return the chance that a clicked interaction has a higher score than another."""
    ranks = np.empty(scores.size)
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, scores.size + 1)
    positives = int(clicks.sum())
    above = ranks[clicks > 0].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (scores.size - positives)))


def live(folder: Path, stream: Stream, days: int, expire: int | None) -> list[Day]:
    """Train day by day; return what each day showed."""
    with bb.Run(folder, ram="256MiB") as run:
        make = {"dim": DIM, "init": bb.Normal(std=0.1), "optimizer": bb.Adam(lr=0.02)}
        rules = {} if expire is None else {"expire": expire, "clock": "event"}
        users = Embedding(USERS, DIM, table=run.table("user", create={**make, "num_rows": USERS}))
        items = Embedding(None, DIM, table=run.table("item", create={**make, **rules}))
        optimizer = Optimizer(torch.nn.ModuleList([users, items]))
        run.commit()
        seen = []
        with bb.Run(folder, ram="64MiB", mode="r") as server:
            shown = server.table("item")
            server.watch(max_age_s=2.0)
            for day in range(days):
                if expire is not None:
                    items.table.clock = day
                of_day = stream.day(day)
                scores = []
                for user, item, click in zip(*(part.split(512) for part in of_day), strict=True):
                    logits = (users(user) * items(item)).sum(1)
                    scores.append(logits.detach().numpy())  # before the step
                    optimizer.zero_grad()
                    torch.nn.functional.binary_cross_entropy_with_logits(logits, click).backward()
                    optimizer.step()
                if expire is not None:
                    items.table.sweep()
                run.commit(meta={"day": day})
                quality = auc(np.concatenate(scores), of_day[2].numpy())
                nbytes = int(items.table.stats()["live_bytes"])
                shown.lookup(of_day[1].numpy()[:100])  # a request
                seen.append(Day(quality, len(items.table), nbytes, server.age_s))
        return seen


def draw(path: Path, runs: dict[str, list[Day]]) -> None:
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "bunkbed", "svg.fonttype": "none", "font.size": 9})
    picture, axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained")
    titles = ("AUC of the day", "item rows", "MiB of item rows", "age of the reader, ms")
    for place, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        for (name, days), color in zip(runs.items(), ("#a3acb9", "#2a7f62"), strict=True):
            values = [(one.auc, one.rows, one.nbytes / 2**20, one.age_s * 1e3)[place] for one in days]
            axis.plot(values, color=color, label=name)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("day")
        axis.set_ylim(0.5 if place == 0 else 0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False)
    picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--days", type=int, default=90)
    options.add_argument("--new", type=int, default=200, help="new items a day")
    options.add_argument("--interactions", type=int, default=20_000, help="a day")
    options.add_argument("--expire", type=int, default=7, help="days after which an item goes that was not seen")
    options.add_argument("--picture", type=Path, help="draw AUC, rows, bytes and age by day into this file")
    given = options.parse_args()
    torch.manual_seed(0)
    stream, runs = Stream(given.new, given.interactions), {}
    for name, expire in (("every row stays", None), (f"expire={given.expire}", given.expire)):
        with tempfile.TemporaryDirectory() as folder:
            days = runs[name] = live(Path(folder) / "run", stream, given.days, expire)
        half, age_s = np.mean([one.auc for one in days[given.days // 2 :]]), max(one.age_s for one in days)
        size = f"{days[-1].rows:,} item rows, {days[-1].nbytes / 2**20:.1f} MiB"
        print(f"{name}: AUC {half:.4f} in the second half, {size}; the reader at most {age_s:.2f} s behind", flush=True)
    if given.picture is not None:
        draw(given.picture, runs)


if __name__ == "__main__":
    main()
