"""The same recipe trained by one process and by several: quality, and the time of an epoch.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.cases.training.ranks ml1m
    torchrun --standalone --nproc-per-node=2 -m benchmarks.cases.training.ranks gowalla

Rank 0 first trains alone, with all processors, while the others wait; then all ranks train the recipe together. The
batches are the same, and each rank takes its part, so the runs differ by rounding. Prints both runs' figures on the
test items. With ranks that share a machine, the time is what dividing the work costs there, not what it gains.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.cases.training.quality import FILES, load
from benchmarks.harness import common
from bunkbed.run.run import Run
from bunkbed.torch import open_run
from bunkbed.train.data.interactions import Dataset
from bunkbed.train.evaluate.evaluator import evaluate_run
from bunkbed.train.loop import Trainer
from bunkbed.train.processes.team import join_team
from bunkbed.train.recipes import RECIPES
from bunkbed.train.settings.config import TrainConfig


def _trained(run: Run, config: TrainConfig, data: Dataset) -> dict[str, float]:
    """Train; return the time of the parts."""
    began = time.perf_counter()
    with run:
        trainer = Trainer(config, data, run)
        outcome = trainer.fit()
    return {
        "steps_ms": trainer.step_seconds / outcome.step * 1e3,
        "epoch_s": (time.perf_counter() - began) / outcome.epoch,
    }


def _report(what: str, times: dict[str, float], folder: Path, config: TrainConfig, data: Dataset) -> dict[str, Any]:
    with Run(folder, mode="r") as run:
        result = evaluate_run(run, data, config)
    figures = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    print(f"{what}: {figures}  a step {times['steps_ms']:.2f} ms, an epoch {times['epoch_s']:.2f} s", flush=True)
    return {**times, **result.metrics}


def _arguments(argv: list[str] | None) -> Namespace:
    options = common.parser(__doc__)
    options.add_argument("name", choices=sorted(FILES))
    options.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    options.add_argument("--epochs", type=int, help="fewer than the recipe's; yields no figure")
    return options.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = _arguments(argv)
    config = replace(RECIPES[arguments.name], ram="1GiB")
    if arguments.tiny:
        config = replace(config, dim=8, batch_size=256, epochs=2, negatives=min(config.negatives, 20))
    if arguments.epochs:
        config = replace(config, epochs=arguments.epochs)
    data = load(arguments.name, arguments.data, tiny=arguments.tiny)
    with common.workspace(arguments.dir, 1 << 30) as own:
        one = {}
        if os.environ.get("RANK", "0") == "0":  # the others wait in `join_team`
            print(common.machine(Path.cwd()))
            times = _trained(Run(own / "one", ram=config.ram), config, data)
            one = _report("one process", times, own / "one", config, data)
        team = join_team()
        folder = Path(team.first("a folder", lambda: str(own / "many")))
        times = _trained(open_run(folder, ram=config.ram), config, data)
        if team.is_first:
            many = _report(f"{team.world} ranks", times, folder, config, data)
            print(f"a step of {team.world} ranks takes {many['steps_ms'] / one['steps_ms']:.2f} of one process's")
        team.gather("the end", lambda: None)  # the folder of rank 0 is removed when all are done
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
