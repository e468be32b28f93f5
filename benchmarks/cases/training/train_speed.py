"""Training speed: `bunkbed train` compared with the same model written by hand in plain torch, both all in RAM.

    python -m benchmarks.cases.training.train_speed ml1m-bce
    python -m benchmarks.cases.training.train_speed ml1m

Both do the steps of the same recipe (`bunkbed.train.recipes`): model, loss with its L2 term, batch size, number and
kind of negatives, none of which the user has, pairs in a new random order every epoch, float32, lazy Adam on the
tables and Adam on the dense weight. A step's time includes drawing its pairs and negatives; evaluation and
commits are in neither.

    bunkbed  `Trainer.fit` with default options and a live panel drawn to nowhere, as `bunkbed train` runs it
    torch    `nn.Embedding(sparse=True)`, one SparseAdam for both tables, autograd through `bmm` or `mm`, logits
             losses of `torch.nn.functional`; negatives by `torch.randint`, those the user has drawn again, found in a
             bool[users, items] matrix; pairs by `torch.randperm`. No progress is shown and the loss is read every step.

Each side is a process of its own with its own thread pools. They train in turn, at least `--seconds` each, in the order
ours, theirs, theirs, ours; a ratio is of neighbouring turns. Printed are the median ratio, the least and the most.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import bunkbed as bb
from benchmarks.cases.training.quality import FILES, load
from benchmarks.harness import common
from bunkbed.train.data.interactions import Dataset
from bunkbed.train.data.splits import split
from bunkbed.train.recipes import RECIPES
from bunkbed.train.settings.config import TrainConfig


class Ours:
    """`Trainer.fit`, stopped after each turn; the run is in a temporary folder."""

    def __init__(self, config: TrainConfig, data: Dataset) -> None:
        from rich.console import Console

        from bunkbed.train.loop import Trainer
        from bunkbed.train.output.display import open_display

        self._folder = tempfile.TemporaryDirectory()
        config = replace(config, epochs=1_000_000, eval_every=1_000_000, commit_every=1_000_000)
        self._trainer = Trainer(config, data, bb.Run(Path(self._folder.name) / "run", ram=config.ram))
        nowhere = Path(os.devnull).open("w")  # noqa: SIM115  open until the process ends
        console = Console(file=nowhere, force_terminal=True, width=120)
        self._display = open_display(console, title="speed", metric=config.metric)
        self._batch_size = config.step_pairs

    def turn(self, seconds: float) -> dict[str, float]:
        """Train that long, commit (not timed), and say how many pairs in how many seconds."""
        trainer = self._trainer
        end = time.perf_counter() + seconds
        steps, spent, pairs = len(trainer.losses), trainer.step_seconds, trainer.pairs_done

        def on_event(event: Any) -> None:
            self._display(event)
            if time.perf_counter() > end:
                trainer.request_stop()

        with self._display:
            trainer.fit(on_event)
        return {
            "pairs": trainer.pairs_done - pairs,
            "seconds": trainer.step_seconds - spent,
            "loss": statistics.mean(trainer.losses[steps:]),
        }


class Theirs:
    """The same training as plain torch has it."""

    def __init__(self, config: TrainConfig, data: Dataset) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until one opts in or out
        torch.manual_seed(config.seed)
        pairs = split(data.train, config).train
        self._config = config
        self._users, self._items = torch.from_numpy(pairs.users), torch.from_numpy(pairs.items)
        self._num_items = data.num_items
        self._seen = torch.zeros(data.num_users, data.num_items, dtype=torch.bool)
        self._seen[self._users, self._items] = True
        self._seen_flat = self._seen.view(-1)
        self.user = torch.nn.Embedding(data.num_users, config.dim, sparse=True)
        self.item = torch.nn.Embedding(data.num_items, config.dim, sparse=True)
        for layer in (self.user, self.item):
            torch.nn.init.normal_(layer.weight, std=config.init_std)
        self.weight = torch.nn.Parameter(torch.ones(config.dim))
        self._sparse = torch.optim.SparseAdam([self.user.weight, self.item.weight], lr=config.lr)
        self._dense = torch.optim.Adam([self.weight], lr=config.lr)
        self._order = torch.randperm(len(pairs))
        self._next = 0

    def turn(self, seconds: float) -> dict[str, float]:
        """Train that long."""
        began = time.perf_counter()
        losses, pairs = [], 0
        while True:
            if self._next >= len(self._order):
                self._order, self._next = torch.randperm(len(self._order)), 0
            chosen = self._order[self._next : self._next + self._config.step_pairs]
            self._next += len(chosen)
            losses.append(self._step(self._users[chosen], self._items[chosen]))
            pairs += len(chosen)
            spent = time.perf_counter() - began
            if spent >= seconds:
                return {"pairs": pairs, "seconds": spent, "loss": statistics.mean(losses)}

    def _step(self, users: torch.Tensor, positives: torch.Tensor) -> float:
        draw = self.shared_items if self._config.share_negatives else self.own_items
        return self.train(users, *draw(users, positives))

    def train(self, users: torch.Tensor, items: torch.Tensor, seen: torch.Tensor | None) -> float:
        """One step on a batch."""
        loss = self.loss(users, items, seen)
        self._sparse.zero_grad()
        self._dense.zero_grad()
        loss.backward()
        self._sparse.step()
        self._dense.step()
        return loss.item()

    def own_items(self, users: torch.Tensor, positives: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Each pair's item and negatives of its own, int64[B, 1 + K]."""
        offsets = users[:, None] * self._num_items
        negatives = torch.randint(self._num_items, (len(users), self._config.negatives))
        bad = self._seen_flat[offsets + negatives]
        while bad.any():
            negatives[bad] = torch.randint(self._num_items, (int(bad.sum()),))
            bad = self._seen_flat[offsets + negatives]
        return torch.cat([positives[:, None], negatives], 1), None

    def shared_items(self, users: torch.Tensor, positives: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pairs' items and the step's negatives, int64[B + K], and which user has which, bool[B, K]."""
        negatives = torch.randperm(self._num_items)[: self._config.negatives]
        return torch.cat([positives, negatives]), self._seen[users][:, negatives]

    def loss(self, users: torch.Tensor, items: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Of a batch, with its L2 term."""
        config, batch, count = self._config, len(users), self._config.negatives
        user, item = self.user(users), self.item(items)
        query = user * self.weight
        if seen is None:  # cross-entropy of every pair with its own negatives
            scores = torch.bmm(item, query[:, :, None])[:, :, 0]
            labels = torch.zeros_like(scores)
            labels[:, 0] = 1.0
            loss = functional.binary_cross_entropy_with_logits(scores, labels)
            positive, negative = item[:, 0], item[:, 1:]
            squares = (user.square().sum() + positive.square().sum() + negative.square().sum() / count) / batch
        else:  # BPR of every pair with the step's negatives, the harder ones weighing more
            positive, negative = item[:batch], item[batch:]
            scores = (query @ negative.T).masked_fill(seen, -torch.inf)
            weights = torch.softmax(scores.detach() * config.hardness, 1)
            ahead = scores - (query * positive).sum(1, keepdim=True)
            loss = (functional.softplus(ahead) * weights).sum() / batch
            squares = (user.square().sum() + positive.square().sum()) / batch + negative.square().sum() / count
        return loss + config.l2 / 2 * squares


def child(side: str, name: str, data: Path, *, tiny: bool, threads: int) -> None:
    """One side as a process; see `common.serve`."""
    if threads:
        torch.set_num_threads(threads)
        bb.set_num_threads(threads)
    trained = {"bunkbed": Ours, "torch": Theirs}[side](configured(name, tiny=tiny), load(name, data, tiny=tiny))

    def handle(seconds: float) -> dict[str, Any]:
        return dict(trained.turn(seconds))

    common.serve(handle)


def configured(name: str, *, tiny: bool) -> TrainConfig:
    """The recipe; its learning rate does not decay, so that a turn is like the next."""
    config = replace(RECIPES[name], lr_decay=1.0)
    return replace(config, dim=8, batch_size=64, negatives=min(config.negatives, 20)) if tiny else config


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure one recipe; the spread of the ratio and of the sides."""
    options = common.parser(__doc__)
    options.add_argument("name", choices=sorted(name for name in FILES if name.startswith("ml1m")))
    options.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    options.add_argument("--rounds", type=int, default=10, help="turns of each side")
    options.add_argument("--seconds", type=float, default=2.0, help="of training, a turn")
    options.add_argument("--threads", type=int, default=0, help="compute threads of both; 0: the defaults of each")
    options.add_argument("--child", choices=["bunkbed", "torch"], help="(inner) be one side")
    settings = options.parse_args(arguments)
    if settings.child:
        child(settings.child, settings.name, settings.data, tiny=settings.tiny, threads=settings.threads)
        return {}
    if settings.tiny:
        settings.rounds, settings.seconds = 2, 0.3
    config = configured(settings.name, tiny=settings.tiny)
    print(common.machine())
    print(
        f"{settings.name}: {config.model} {config.loss}, dim {config.dim}, batch {config.step_pairs:,}, "
        f"{config.negatives} {'shared' if config.share_negatives else 'own'} negatives; "
        f"threads {settings.threads or 'by default'}"
    )
    argv = ["-m", "benchmarks.cases.training.train_speed", settings.name, "--data", str(settings.data)]
    argv += ["--threads", str(settings.threads), *(["--tiny"] if settings.tiny else [])]
    sides = {side: common.Child([*argv, "--child", side]) for side in ("bunkbed", "torch")}
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    try:
        for process in sides.values():
            process.ask(seconds=settings.seconds)  # warm: caches, allocators, rows never seen
        for round_ in range(settings.rounds):
            for side in list(sides) if round_ % 2 == 0 else list(reversed(sides)):
                turns[side].append(sides[side].ask(seconds=settings.seconds))
    finally:
        for process in sides.values():
            process.close()
    return report(turns, config)


def report(turns: dict[str, list[dict[str, Any]]], config: TrainConfig) -> dict[str, Any]:
    """Print both sides and their ratio, and give it back."""
    rates = {side: [turn["pairs"] / turn["seconds"] for turn in all_turns] for side, all_turns in turns.items()}
    for side, values in rates.items():
        print(
            f"{side:>8}: {common.spread(values, 'pairs/s', 1)}; "
            f"{config.step_pairs / statistics.median(values) * 1e3:.2f} ms a step; "
            f"loss {turns[side][-1]['loss']:.4f}"
        )
    ratios = [ours / theirs for ours, theirs in zip(rates["bunkbed"], rates["torch"], strict=True)]
    print(
        f"samples/s, bunkbed / torch: median {statistics.median(ratios):.2f}, "
        f"least flattering round {min(ratios):.2f}, best {max(ratios):.2f} (n={len(ratios)})"
    )
    return {"ratios": ratios, **{side: statistics.median(values) for side, values in rates.items()}}


if __name__ == "__main__":
    main()
