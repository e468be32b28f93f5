"""``bunkbed train --device --device-cache``: the same rows and losses, and progress that shows the hit rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bunkbed as bb  # noqa: E402
from bunkbed.train.data.interactions import read_dataset  # noqa: E402
from bunkbed.train.loop import Trainer  # noqa: E402
from bunkbed.train.models import losses, plain_losses  # noqa: E402
from bunkbed.train.output.display import epoch_line, step_line  # noqa: E402
from bunkbed.train.output.events import EpochReport, StepReport  # noqa: E402
from bunkbed.train.settings.config import TrainConfig  # noqa: E402


def write_pairs(path: Path) -> Path:
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 300, 3000), np.minimum(rng.zipf(1.2, 3000), 400)
    pairs = sorted(set(zip(users.tolist(), items.tolist(), strict=True)))
    path.write_text("".join(f"{user},{item}\n" for user, item in pairs))
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True, "loss": "bce"},
        {"model": "gmf", "share_negatives": True},
        {"model": "sasrec", "loss": "softmax"},
    ],
)
def test_a_device_cache_changes_no_loss_and_no_row(tmp_path: Path, options: dict[str, Any]) -> None:
    data = read_dataset(write_pairs(tmp_path / "pairs.csv"))
    found, rates = [], []
    for cache in (None, "1MiB", "20KiB", 0):
        config = TrainConfig(
            epochs=2, dim=8, batch_size=32, negatives=1, ram="8MiB", threads=1, device_cache=cache, **options
        )
        events: list[Any] = []
        with bb.Run(tmp_path / f"run {cache}", ram=config.ram) as run:
            trainer = Trainer(config, data, run)
            outcome = trainer.fit(events.append)
            rows = [run.tables[name].get(np.arange(run.tables[name].num_rows)).tobytes() for name in sorted(run.tables)]
            found.append((trainer.losses, outcome.best, rows))
            del trainer
        reports = [event for event in events if isinstance(event, EpochReport)]
        rates.append([report.device_hit_rate for report in reports])
    assert all(other == found[0] for other in found[1:])
    assert rates[0] == [None, None] and rates[3] == [None, None]
    assert all(rate is not None and 0 < rate <= 1 for rate in rates[1] + rates[2])
    assert rates[2][1] < rates[1][1] and rates[1][1] > 0.99, "a small cache misses rows"


def test_progress_shows_the_device(tmp_path: Path) -> None:
    step: dict[str, Any] = dict.fromkeys(StepReport.__dataclass_fields__, 1)
    epoch: dict[str, Any] = {**dict.fromkeys(EpochReport.__dataclass_fields__, 1), "metrics": {}, "ranking": ""}
    assert "device 87.5% hits" in step_line(StepReport(**{**step, "device_hit_rate": 0.875}))
    assert "device 87.5% hits" in epoch_line(EpochReport(**{**epoch, "device_hit_rate": 0.875}))
    assert "device" not in step_line(StepReport(**{**step, "device_hit_rate": None}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_cache": "lots"}, "option device_cache: cannot read the size 'lots'"),
        ({"device": "2"}, "option device must be a device of torch such as cpu, cuda or cuda:1, got '2'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    data = read_dataset(write_pairs(tmp_path / "pairs.csv"))
    for name in ("nonsense", "cuda:99"):
        with bb.Run(tmp_path / name, ram="8MiB") as run, pytest.raises(ValueError, match=f"there is no '{name}' here"):
            Trainer(TrainConfig(device=name, ram="8MiB"), data, run)


@pytest.mark.parametrize("kind", ["bpr", "bce"])
@pytest.mark.parametrize("hardness", [0.0, 2.0])
@pytest.mark.parametrize("shared", [False, True])
def test_plain_losses_are_the_kernels(kind: str, hardness: float, shared: bool) -> None:
    if kind == "bce" and hardness:
        pytest.skip("hardness is for bpr")
    generator = torch.Generator().manual_seed(1)
    shape = (5 + 7, 6) if shared else (5, 1 + 3, 6)
    found = []
    for module in (losses, plain_losses):
        generator.manual_seed(1)
        users, items, weight = (torch.randn(s, generator=generator) for s in ((5, 6), shape, (6,)))
        bias = torch.randn(shape[:-1], generator=generator)
        inputs = [x.requires_grad_() for x in (users, items, weight, bias)]
        options: dict[str, Any] = {"kind": kind, "weight": weight, "bias": bias, "l2": 0.1, "hardness": hardness}
        if shared:
            loss = module.shared_loss(users, items, seen=torch.tensor([3, 8]), **options)
        else:
            loss = module.pair_loss(users, items, **options)
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in inputs)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(plain, ours, rtol=1e-5, atol=1e-6)
