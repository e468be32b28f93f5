"""Full ranking of all users, compared with the bare float32 product of users and items.

    python -m benchmarks.cases.training.full_ranking

An evaluation ranks every held-out item among all items that its user does not have in training, from tables in RAM:
lookups, products, hidden items, ranks and metrics. Gowalla in the LightGCN authors' split (7 held-out items a user) and
generated pairs of 40,000 users and 54,000 items (one held-out item a user), rows of 64 normal numbers. The product is
that of the same rows, already in memory, in blocks of the same size on as many threads, and nothing else. Both take
turns in one process. The ratio of their processor times changes less on a machine that others use too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

import bunkbed as bb
from benchmarks.cases.training.quality import FILES, load
from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings, missing
from bunkbed.train.data.interactions import Interactions, Vocab
from bunkbed.train.evaluate.evaluator import Evaluator
from bunkbed.train.models.scorer import Scorer

DIM = 64
GENERATED = (40_000, 54_000)
PAIRS_PER_USER = 9
MOST = 1.5
#: Users and items of a block of the bare product.
BLOCK = (256, 1024)


def full_ranking(settings: Settings) -> list[Figure]:
    """The suite's case."""
    sizes = (300, 500) if settings.tiny else GENERATED
    found = measure(f"generated, {sizes[0]:,} x {sizes[1]:,}", *generate(*sizes, settings.seed), settings)
    if settings.tiny:
        return found
    path = settings.data / FILES["gowalla"]["path"]
    if not path.exists():
        return [*found, missing("Gowalla, evaluation / product", f"{path} is not there; pass --data", at_most=MOST)]
    gowalla = load("gowalla", settings.data, tiny=False)
    assert gowalla.test is not None
    return [*measure("Gowalla", gowalla.train, gowalla.test, settings), *found]


def generate(num_users: int, num_items: int, seed: int) -> tuple[Interactions, Interactions]:
    """Make training pairs, popular items among them, and one held-out pair for each user."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(num_users), PAIRS_PER_USER)
    items = (num_items * rng.random(len(users)) ** 3).astype(np.int64)
    train = Interactions(users, items, Vocab.of(list(range(num_users))), Vocab.of(list(range(num_items))))
    return train, train.replace(np.arange(num_users), rng.integers(0, num_items, num_users))


def measure(name: str, train: Interactions, held: Interactions, settings: Settings) -> list[Figure]:
    """Take turns: evaluations and bare products of tables with as many rows as the pairs have users and items."""
    tables = []
    for seed, rows in enumerate((train.num_users, train.num_items)):
        tables.append(bb.create(None, dim=DIM, num_rows=rows, ram=2 * rows * DIM * 4 + common.MIB, optimizer=bb.SGD()))
        common.fill(tables[-1], seed=settings.seed + seed)
    scorer = Scorer(*tables)
    evaluator = Evaluator(held, train, ranking="full", ks=(10, 20))
    users, items = (torch.from_numpy(table.lookup(np.arange(table.num_rows))) for table in tables)
    threads = bb.get_num_threads()
    spent: dict[str, list[float]] = {"evaluation": [], "the product": []}

    def side(name: str, call: Callable[[], object]) -> Callable[[object], None]:
        def step(_: object) -> None:
            before = time.process_time()
            call()
            spent[name].append(time.process_time() - before)

        return step

    sides = {
        "evaluation": side("evaluation", lambda: evaluator.evaluate(scorer)),
        "the product": side("the product", lambda: products(users, items, threads)),
    }
    times = turns.interleave(sides, [None], rounds=settings.pick(2, 4, 7), steps=1, warmup=1)
    for table in tables:
        table.close(commit=False)
    rate = 2 * len(users) * len(items) * DIM / times.median("the product") / 1e9
    note = f"{threads} threads; the product at {rate:.0f} GFLOP/s"
    in_processor = [ours / bare for ours, bare in zip(*spent.values(), strict=True)][1:]  # the first warms
    return [
        one(f"{name}, evaluation / product", times.ratios("evaluation", "the product"), note=note, at_most=MOST),
        one(f"{name}, the same in processor time", in_processor),
        *(replace(each, name=f"{name}, {each.name}") for each in turns.step_times(times, unit="s")),
    ]


def one(name: str, ratios: list[float], **more: Any) -> Figure:
    return Figure(name, statistics.median(ratios), "x", min(ratios), max(ratios), len(ratios), **more)


def products(users: torch.Tensor, items: torch.Tensor, threads: int) -> None:
    """Multiply all users by all items; each thread writes its blocks to one buffer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    buffers: SimpleQueue[torch.Tensor] = SimpleQueue()
    for _ in range(threads):
        buffers.put(torch.empty(BLOCK))

    def work(first: int) -> None:
        buffer = buffers.get()
        multiply(users[first : first + BLOCK[0]], items, buffer)
        buffers.put(buffer)

    with ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1)) as pool:
        list(pool.map(work, range(0, len(users), BLOCK[0])))
    torch.set_num_threads(before)


def multiply(users: torch.Tensor, items: torch.Tensor, buffer: torch.Tensor) -> None:
    for first in range(0, len(items), buffer.shape[1]):
        part = items[first : first + buffer.shape[1]]
        torch.mm(users, part.T, out=buffer[: len(users), : len(part)])


def main(arguments: list[str] | None = None) -> None:
    """Measure both data sets."""
    options: Any = common.parser(__doc__)
    options.add_argument("--quick", action="store_true", help="fewer turns")
    options.add_argument("--data", type=Path, default=Settings().data, help="folder of the data sets")
    chosen = options.parse_args(arguments)
    size: Any = "tiny" if chosen.tiny else "quick" if chosen.quick else "full"
    print(common.machine())
    for figure in full_ranking(Settings(size, chosen.dir, chosen.seed, chosen.data)):
        print(figure.line())


if __name__ == "__main__":
    main()
