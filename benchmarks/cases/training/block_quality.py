"""Quality of block order against a uniform shuffle, on planted data: ``--seeds 20 --out block_quality.png``.

Each seed plants factors of users and items, draws pairs from the softmax of their products, and trains BPR with Adam
from the same initial rows, for the same number of epochs, in both orders. Uniform: samples shuffled, negatives drawn
from all items. Blocks: `bunkbed.BlockOrder`, negatives drawn from the item block of the batch. The tables are in RAM,
because values do not depend on it. The score is Recall@20 on pairs that were left out, over the recall of the planted
factors. A seed gives one difference; the figures are their mean, standard error and 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import bunkbed as bb
from benchmarks.harness.figures import Figure, Settings

TOP = 20
STUDENT_95 = {2: 12.71, 3: 4.303, 5: 2.776, 10: 2.262, 20: 2.093, 40: 2.023}  # by number of seeds


@dataclass(frozen=True)
class Shape:
    """Sizes of the planted data and of the training."""

    users: int = 2_000
    items: int = 1_500
    pairs: int = 100  # of a user, a fifth left out
    dim: int = 16
    batch: int = 256
    epochs: int = 12
    negatives: int = 4
    lr: float = 0.005
    decay: float = 0.02


@dataclass(frozen=True)
class Planted:
    """Pairs to train, int64[N], the items of each user that are left out, bool[users, items], and all scores."""

    users: np.ndarray
    items: np.ndarray
    left_out: np.ndarray
    scores: np.ndarray

    def recall(self, scores: np.ndarray) -> float:
        """Recall@20 of the pairs that are left out, among the items that were not trained."""
        scores = scores.copy()
        scores[self.users, self.items] = -np.inf
        top = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
        found = np.take_along_axis(self.left_out, top, 1).sum(1)
        return float(np.mean(found / np.minimum(TOP, self.left_out.sum(1))))


def plant(shape: Shape, seed: int) -> Planted:
    """Return planted data: pairs without repeats, popular and rare items."""
    rng = np.random.default_rng(seed)
    wide = np.sqrt(6 / shape.dim)
    user = rng.normal(0, wide, (shape.users, shape.dim))
    item = rng.normal(0, 1, (shape.items, shape.dim))
    scores = user @ item.T + rng.normal(0, 1, shape.items)
    noisy = scores + rng.gumbel(size=scores.shape)  # the top k of this are k draws of the softmax without repeats
    chosen = np.argsort(-noisy, axis=1)[:, : shape.pairs]
    chosen = rng.permuted(chosen, axis=1)
    test = chosen[:, : shape.pairs // 5]
    left_out = np.zeros(scores.shape, bool)
    np.put_along_axis(left_out, test, True, 1)
    items = chosen[:, shape.pairs // 5 :]
    users = np.repeat(np.arange(shape.users), items.shape[1])
    return Planted(users, items.ravel(), left_out, scores)


def step(shape: Shape, user: bb.Table, item: bb.Table, ids: np.ndarray, right: np.ndarray, wrong: np.ndarray) -> None:
    """One step of BPR; `wrong` is int64[B, negatives]."""
    n = len(ids)
    rows, items = user.lookup(ids), np.concatenate([right, wrong.ravel()])
    found = item.lookup(items)
    good, bad = found[:n], found[n:].reshape(n, -1, shape.dim)
    lead = np.einsum("bd,bd->b", rows, good)[:, None] - np.einsum("bd,bkd->bk", rows, bad)
    slope = -1 / (1 + np.exp(lead)) / wrong.shape[1]
    total = slope.sum(1)[:, None]
    of_user = total * good - np.einsum("bk,bkd->bd", slope, bad) + shape.decay * rows
    of_good = total * rows + shape.decay * good
    of_bad = -slope[:, :, None] * rows[:, None] + shape.decay / wrong.shape[1] * bad
    user.update(ids, of_user.astype(np.float32))
    item.update(items, np.concatenate([of_good, of_bad.reshape(-1, shape.dim)]).astype(np.float32))


def train(shape: Shape, data: Planted, blocks: int, seed: int) -> float:
    """Return the recall after training in `blocks` blocks of users and of items, as a share of the planted recall."""
    rows = {"dim": shape.dim, "optimizer": bb.Adam(shape.lr), "init": bb.Normal(0.1)}
    rng = np.random.default_rng(seed)
    order = bb.BlockOrder([data.users, data.items], blocks, seed=seed)
    with (
        bb.create(None, num_rows=shape.users, seed=2 * seed, **rows) as user,
        bb.create(None, num_rows=shape.items, seed=2 * seed + 1, **rows) as item,
    ):
        for epoch in range(shape.epochs):
            members = [order.members(epoch, 1, block) for block in range(blocks)]
            for batch in order.batches(epoch, shape.batch):
                among = members[batch.blocks[1]]
                wrong = among[rng.integers(0, len(among), (len(batch.indices), shape.negatives))]
                step(shape, user, item, data.users[batch.indices], data.items[batch.indices], wrong)
        scores = user.lookup(np.arange(shape.users)) @ item.lookup(np.arange(shape.items)).T
    return data.recall(scores) / data.recall(data.scores)


def measure(shape: Shape, blocks: int, seeds: int, first: int) -> np.ndarray:
    """Return float64[seeds, 2]: the score in uniform order and in blocks."""
    found = np.empty((seeds, 2))
    for at, seed in enumerate(range(first, first + seeds)):
        data = plant(shape, seed)
        found[at] = train(shape, data, 1, seed), train(shape, data, blocks, seed)
        print(f"seed {seed}: uniform {found[at][0]:.4f}, {blocks} x {blocks} blocks {found[at][1]:.4f}", flush=True)
    return found


def figures(found: np.ndarray, blocks: int) -> list[Figure]:
    """The scores, and the difference with its confidence interval."""
    count, difference = len(found), found[:, 1] - found[:, 0]
    mean, error = float(difference.mean()), float(difference.std(ddof=1) / math.sqrt(count))
    half = STUDENT_95[count] * error
    both = [
        Figure(f"Recall@{TOP} over the planted optimum, {name}", float(scores.mean()), low=float(scores.min()),
               high=float(scores.max()), count=count)
        for name, scores in (("uniform", found[:, 0]), (f"{blocks} x {blocks} blocks", found[:, 1]))
    ]  # fmt: skip
    note = f"standard error {error:.4f}; seeds differ by {found[:, 0].std(ddof=1):.4f} (standard deviation)"
    interval = Figure(
        "blocks - uniform, 95 % interval", mean, low=mean - half, high=mean + half, count=count, note=note
    )
    return [*both, interval]


def draw(path: Path, found: np.ndarray, blocks: int) -> None:
    """Draw each seed's two scores, and the differences with the interval of their mean."""
    from matplotlib.figure import Figure as Picture

    shown = figures(found, blocks)[-1]
    assert shown.value is not None and shown.low is not None and shown.high is not None
    picture = Picture(figsize=(9, 4), layout="constrained", facecolor="white")
    pairs, differences = picture.subplots(1, 2)
    for uniform, block in found:
        pairs.plot([0, 1], [uniform, block], color="#7a869a", linewidth=0.8, marker="o", markersize=4)
    pairs.set_xticks([0, 1], ["uniform", f"{blocks} x {blocks} blocks"])
    pairs.set_xlim(-0.3, 1.3)
    pairs.set_ylabel(f"Recall@{TOP} over the planted optimum")
    pairs.set_title(f"{len(found)} seeds, the same data and initial rows", fontsize=10)
    differences.axvline(0, color="#1f2933", linewidth=0.8)
    differences.axvspan(shown.low, shown.high, color="#3b6fb6", alpha=0.2, label="95 % interval of the mean")
    differences.axvline(shown.value, color="#3b6fb6", label=f"mean {shown.value:+.4f}")
    differences.plot(
        np.sort(found[:, 1] - found[:, 0]), np.arange(1, len(found) + 1), "o", color="#c8553d", markersize=4
    )
    differences.yaxis.get_major_locator().set_params(integer=True)
    differences.set_xlabel("blocks - uniform")
    differences.set_ylabel("seeds, by difference")
    differences.set_title("difference for each seed", fontsize=10)
    differences.legend(frameon=False, fontsize=8, loc="upper left")
    picture.savefig(path, dpi=130)


def quality(settings: Settings) -> list[Figure]:
    """The case of the suite."""
    shape = Shape(users=60, items=40, pairs=10, epochs=1) if settings.tiny else Shape()
    blocks = settings.pick(3, 6, 6)
    return figures(measure(shape, blocks, settings.pick(2, 5, 20), settings.seed), blocks)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=20, choices=STUDENT_95)
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--blocks", type=int, default=6, help="of users and of items")
    options.add_argument("--epochs", type=int, default=Shape.epochs)
    options.add_argument("--out", type=Path, help="the picture, PNG")
    given = options.parse_args()
    found = measure(Shape(epochs=given.epochs), given.blocks, given.seeds, given.first)
    for figure in figures(found, given.blocks):
        print(f"{figure.name}: {figure.value:+.4f} ({figure.low:.4f} to {figure.high:.4f}) {figure.note}")
    if given.out:
        draw(given.out, found, given.blocks)


if __name__ == "__main__":
    main()
