"""One table trained by several processes: the time of a step, against a table of each process's own.

``torchrun --nproc-per-node=2 -m benchmarks.cases.ranks`` prints, for the same ids in turns: *local*, a table of each
process's own (``placement="local"``); *shared*, one table over all; *ahead*, the same with `lookahead`, which exchanges
the ids of a batch while the model works on the one before. A step is forward, backward and `Optimizer.step`;
with ``--work N`` also a product of two N x N matrices between forward and backward, as a model's work, which can hide
an exchange.

``--tables 26`` looks up as many tables in an `EmbeddingCollection`. ``--ram 64MiB --rows 2000000 --dir DIR`` gives the
tables files, and compares *ahead* with *one*: one process with the same RAM that trains the batches of all ranks.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

import bunkbed as bb
from benchmarks.harness import common
from bunkbed.torch import Embedding, EmbeddingCollection, Optimizer, lookahead

Batches: TypeAlias = Callable[[int, int], list[torch.Tensor]]

_DIM = 32
_CHUNK = 65_536


class _Trained:
    """One way to place the tables, with the loop that trains them.

    Args:
        name: of the way.
        model: its tables.
        batches: (step, rank) -> the ids of each table.
        ahead: whether the loop uses `lookahead`.
        ranks: whose batches this process trains in a step.
        work: width of the square matrices that are multiplied in a step; 0: none.
    """

    def __init__(
        self, name: str, model: EmbeddingCollection, batches: Batches, *, ahead: bool, ranks: range, work: int
    ) -> None:
        self.name = name
        self.times: list[float] = []
        self.exchanges = 0.0
        self._model, self._batches, self._is_ahead, self._ranks = model, batches, ahead, ranks
        self._optimizer = Optimizer(model)
        self._work = torch.ones(work, work)
        self._at = 0

    def _loop(self, steps: int) -> Iterator[list[dict[str, torch.Tensor]]]:
        """Return the inputs of `steps` steps: of each, those of one rank after another."""
        names = list(self._model)
        steps_of_ranks = [
            [dict(zip(names, self._batches(self._at + step, rank), strict=True)) for rank in self._ranks]
            for step in range(steps)
        ]
        self._at += steps
        if not self._is_ahead:
            return iter(steps_of_ranks)
        model = self._model
        return iter(
            lookahead(
                steps_of_ranks,
                model,
                ids=lambda step: {model[name]: [one[name] for one in step] for name in names},
            )
        )

    def run(self, steps: int) -> None:
        """Train `steps` steps; keep the time of each."""
        shared = next(iter(self._model.values()))._pending.rank_rows
        before = 0 if shared is None else shared.ranks.exchanges
        loop = self._loop(steps)
        start = time.perf_counter()
        for inputs_of_ranks in loop:
            for inputs in inputs_of_ranks:
                rows = self._model(inputs)
                torch.mm(self._work, self._work)
                torch.autograd.backward(list(rows.values()), [torch.ones_like(one) for one in rows.values()])
            self._optimizer.step()
            self._optimizer.zero_grad()
            now = time.perf_counter()
            self.times.append(now - start)
            start = now
        if shared is not None:
            self.exchanges = (shared.ranks.exchanges - before) / steps

    def fill(self) -> None:
        """Store all rows: rows that were never trained are not read from the disk."""
        for layer in self._model.values():
            table = layer.table
            for start in range(0, layer.num_embeddings, _CHUNK):
                ids = np.arange(start, min(start + _CHUNK, layer.num_embeddings) if dist.get_rank() == 0 else start)
                table.set(ids, np.full((len(ids), _DIM), 0.5, np.float32))
            table.commit()

    def close(self) -> None:
        """Close the tables."""
        for layer in self._model.values():
            layer.table.close(commit=False)


def _ways(arguments: Namespace, folder: Path | None) -> list[_Trained]:
    """Return the ways that are compared; of those with files, the first one is trained by rank 0 alone."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def batches(step: int, rank: int) -> list[torch.Tensor]:
        random = np.random.default_rng([step, rank])
        return [
            torch.from_numpy((random.zipf(1.05, arguments.ids) * 7919) % arguments.rows)
            for _ in range(arguments.tables)
        ]

    def model(name: str, **where: Any) -> EmbeddingCollection:
        layers = {}
        for index in range(arguments.tables):
            if folder is not None:
                where |= {"path": folder / name / str(index), "ram": arguments.ram}
            layers[f"t{index}"] = Embedding(arguments.rows, _DIM, seed=index, optimizer=bb.Adam(lr=1e-3), **where)
        return EmbeddingCollection(layers)

    def way(name: str, *, ahead: bool = False, ranks: range = range(rank, rank + 1), **where: Any) -> _Trained:
        return _Trained(name, model(name, **where), batches, ahead=ahead, ranks=ranks, work=arguments.work)

    if folder is not None:
        first = [way("one", placement="local", ahead=True, ranks=range(world))] if rank == 0 else []
        return [*first, way("ahead", ahead=True)]
    return [way("local", placement="local"), *([way("shared"), way("ahead", ahead=True)] if world > 1 else [])]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the times of a step, on rank 0."""
    parser = common.parser(__doc__)
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--ids", type=int, default=8192, help="ids of a rank's batch, for each table")
    parser.add_argument("--rows", type=int, default=300_000, help="rows of a table")
    parser.add_argument("--ram", help="budget of a table with files, in --dir; without it tables are in RAM")
    parser.add_argument("--work", type=int, default=0, help="width of two square matrices that a step multiplies")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps of a round")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with contextlib.ExitStack() as opened:
        names: list[str | None] = [None]
        if arguments.ram and dist.get_rank() == 0:
            size = 3 * arguments.tables * arguments.rows * _DIM * 12
            names = [str(opened.enter_context(common.workspace(arguments.dir, size)))]
        dist.broadcast_object_list(names)
        ways = _ways(arguments, None if names[0] is None else Path(names[0]))
        _compare(ways, arguments)
        for way in ways:
            way.close()
        dist.barrier()
    dist.destroy_process_group()


def _compare(ways: list[_Trained], arguments: Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    is_alone = arguments.ram is not None  # the first way is rank 0's alone
    turns = [None, *ways] if is_alone and rank else ways  # the others wait meanwhile
    if arguments.ram:
        for way in ways:
            way.fill()
    for number in range(arguments.rounds + 1):
        for way in turns:
            dist.barrier()
            if way is not None:
                way.run(arguments.steps)
                if number == 0:
                    way.times.clear()
    if rank:
        return
    first_s = statistics.median(ways[0].times)
    where = f"with {arguments.ram} for a table" if arguments.ram else "in RAM"
    print(f"{world} processes, {arguments.tables} tables {where}, {arguments.ids} ids of {arguments.rows} rows each")
    for way in ways:
        middle = statistics.median(way.times)
        low, high = np.percentile(way.times, [10, 90])
        print(
            f"{way.name:7} {middle * 1e3:7.2f} ms a step ({low * 1e3:.2f} to {high * 1e3:.2f}, 80 %), "
            f"{middle / first_s:5.2f} of {ways[0].name}, {way.exchanges:.2f} all-to-alls a step"
        )
    if len(ways) == 3:
        local, shared, ahead = (statistics.median(way.times) for way in ways)
        print(
            f"sharing adds {(shared - local) * 1e3:.2f} ms to a step; lookahead hides "
            f"{(shared - ahead) / (shared - local):.0%} of it"
        )


if __name__ == "__main__":
    main()
