"""A training step, and a lookup, on a table in RAM, compared with torch's and FBGEMM's.

4M rows of 64 float32, 65,536 Zipf(1.05) ids a batch: lookup, backward of a constant gradient, optimizer step.
Ours goes through `bunkbed.torch` (Embedding, backward, Optimizer.step) with its defaults. All take the same batches
in one process, a few steps each in turn (`benchmarks.harness.turns` says how). The published ratio is the median over
rounds; the least flattering round is printed too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings, missing
from benchmarks.peers import Missing, fbgemm, ours, pytorch

#: Target ratios of the issue that asked for speed: (optimizer, peer) -> at least this.
TARGETS = {
    ("adam", "torch"): 6.0,
    ("adagrad", "fbgemm"): 4.0,
    ("rowwise-adagrad", "fbgemm"): 1.5,
    ("sgd", "fbgemm"): 1.8,
}


@dataclass
class Workload:
    """Batches of Zipf ids and the gradient every side gets."""

    num_rows: int
    dim: int
    batches: list[torch.Tensor]
    grad: torch.Tensor
    rounds: int
    steps: int

    @property
    def unique_share(self) -> float:
        """Unique ids of a batch."""
        return statistics.mean(ids.unique().numel() for ids in self.batches) / len(self.grad)

    def __str__(self) -> str:
        return (
            f"{self.num_rows:,} x {self.dim} float32, {len(self.grad):,} Zipf(1.05) ids ({self.unique_share:.0%} "
            "unique), all rows stored, warm"
        )


def workload(settings: Settings, *, num_rows: int = 4_000_000) -> Workload:
    """The resident cases' table and batches."""
    num_rows = 2_000 if settings.tiny else num_rows
    batch, dim = (256, 8) if settings.tiny else (65_536, 64)
    sample = common.zipf(num_rows)
    rng = np.random.default_rng(settings.seed)
    batches = [torch.from_numpy(sample(rng, batch)) for _ in range(8)]
    rounds, steps = settings.pick((2, 2), (8, 4), (20, 5))
    return Workload(num_rows, dim, batches, torch.ones(batch, dim), rounds, steps)


def build(makers: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], list[Figure]]:
    """The sides that can be had, and a figure for each that cannot."""
    sides, absent = {}, []
    for name, make in makers.items():
        try:
            sides[name] = make()
        except Missing as error:
            print(f"{name} is left out: {error}")
            absent.append(missing(f"{name}, a step", str(error)))
    return sides, absent


def compare(settings: Settings, optimizer_name: str) -> list[Figure]:
    """Compare steps of one optimizer with every peer that has it."""
    work = workload(settings)
    print(f"{optimizer_name}: {work}")
    arguments = (optimizer_name, work.num_rows, work.dim, work.grad)
    makers = {turns.OURS: lambda: ours.training(*arguments)}
    if optimizer_name in pytorch.OPTIMIZERS:
        makers["torch"] = lambda: pytorch.training(*arguments)
    if optimizer_name in fbgemm.OPTIMIZERS:
        makers["fbgemm"] = lambda: fbgemm.training(*arguments)
    sides, absent = build(makers)
    times = turns.interleave(sides, work.batches, rounds=work.rounds, steps=work.steps)
    figures = []
    for peer in list(sides)[1:]:
        target = TARGETS.get((optimizer_name, peer))
        figures.append(turns.ratio(times, peer, **({"at_least": target} if target else {})))
    return figures + turns.step_times(times, notes=notes(sides)) + absent


def notes(sides: dict[str, Any]) -> dict[str, str]:
    """What each peer ran with."""
    return {name: module.settings() for name, module in (("torch", pytorch), ("fbgemm", fbgemm)) if name in sides}


def adam(settings: Settings) -> list[Figure]:
    return compare(settings, "adam")


def adagrad(settings: Settings) -> list[Figure]:
    return compare(settings, "adagrad")


def rowwise_adagrad(settings: Settings) -> list[Figure]:
    return compare(settings, "rowwise-adagrad")


def sgd(settings: Settings) -> list[Figure]:
    return compare(settings, "sgd")


def lookup(settings: Settings) -> list[Figure]:
    """Compare lookups alone with torch, FBGEMM and NumPy's `take`."""
    work = workload(settings)
    print(f"lookup: {work}")
    makers = {
        turns.OURS: lambda: ours.lookup(work.num_rows, work.dim),
        "torch": lambda: pytorch.lookup(work.num_rows, work.dim),
        "fbgemm": lambda: fbgemm.lookup(work.num_rows, work.dim, len(work.grad)),
        "numpy take": lambda: numpy_take(work.num_rows, work.dim),
    }
    sides, absent = build(makers)
    times = turns.interleave(sides, work.batches, rounds=2 * work.rounds, steps=work.steps)
    candidates = [name for name in ("torch", "fbgemm") if name in sides]
    faster = times.fastest(candidates)
    name = f"ratio faster of torch and fbgemm / {turns.OURS}"
    figures = [turns.ratio(times, faster, name=name, note=f"the faster was {faster}", at_least=1.4)]
    figures += [turns.ratio(times, peer) for peer in sides if peer not in (turns.OURS, faster)]
    return figures + turns.step_times(times, notes=notes(sides)) + absent


def numpy_take(num_rows: int, dim: int) -> Callable[[torch.Tensor], Any]:
    """The plain baseline."""
    weights = np.full((num_rows, dim), 0.5, np.float32)
    return lambda ids: weights.take(ids.numpy(), axis=0)


def dense_adam(settings: Settings) -> list[Figure]:
    """What most code does: dense Adam, in torch and in Keras on TensorFlow, on a table of 1M rows."""
    from benchmarks.peers import keras_tensorflow

    work = workload(settings, num_rows=1_000_000)
    work.rounds, work.steps = settings.pick((2, 1), (3, 1), (6, 1))
    print(f"dense Adam: {work}")
    arguments = (work.num_rows, work.dim, work.grad)
    sides = {
        turns.OURS: turns.stepping(ours.training("adam", *arguments), work.batches),
        "torch dense Adam": turns.stepping(pytorch.training("dense-adam", *arguments), work.batches),
    }
    absent = []
    child = None
    try:
        child = keras_tensorflow.Keras(settings, work.num_rows, work.dim, len(work.grad), len(work.batches))
        sides["keras Adam"] = child.turn
    except Missing as error:
        absent.append(missing("keras Adam, a step", str(error)))
    try:
        times = turns.take(sides, len(work.batches), rounds=work.rounds, steps=work.steps, warmup=1)
    finally:
        if child is not None:
            child.close()
    figures = [turns.ratio(times, peer) for peer in sides if peer != turns.OURS]
    note = {} if child is None else {"keras Adam": child.settings}
    return figures + turns.step_times(times, notes=note) + absent


CASES = {"adam": adam, "adagrad": adagrad, "rowwise-adagrad": rowwise_adagrad, "sgd": sgd}


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--optimizer", choices=[*CASES], default="adam", help="which optimizer")
    options.add_argument("--quick", action="store_true", help="fewer turns")
    options = options.parse_args()
    print(common.machine())
    size = "tiny" if options.tiny else "quick" if options.quick else "full"
    for figure in CASES[options.optimizer](Settings(size=size, dir=options.dir, seed=options.seed)):
        print(figure.line())


if __name__ == "__main__":
    main()
