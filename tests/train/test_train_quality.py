"""The quality measurement, tiny, and the recipes it runs."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bunkbed.train.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
QUALITY = [sys.executable, "-m", "benchmarks.cases.training.quality"]


@pytest.mark.parametrize("name", ["gowalla", "ml1m", "ml1m-neumf"])
def test_quality_runs_tiny(name, tmp_path):
    pytest.importorskip("torch")
    done = subprocess.run(
        [*QUALITY, name, "--tiny", "--dir", str(tmp_path / "space")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine: " in done.stdout
    assert "full ranking of 300 items" in done.stdout
    assert "rows and optimizer state identical to the last bit: True" in done.stdout
    assert "steps identical to the last bit: True" in done.stdout
    assert not (tmp_path / "space").exists(), "temporary files stayed behind"


def test_the_dtype_comparison_runs_tiny(tmp_path):
    pytest.importorskip("torch")
    done = subprocess.run(
        [*QUALITY, "ml1m-bf16", "--tiny", "--dir", str(tmp_path / "space")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bytes of a record: 20 of 96 = 20.8%, a third wanted: reached" in done.stdout
    assert "HR@10 lost by bfloat16 rows and row-wise Adagrad: " in done.stdout


@pytest.mark.parametrize("name", ["ml1m", "ml1m-bce"])
def test_plain_torch_trains_the_same_model(name, tmp_path):
    torch = pytest.importorskip("torch")
    from benchmarks.cases.training.quality import made_up
    from benchmarks.cases.training.train_speed import Theirs, configured

    import bunkbed as bb
    from bunkbed.train.loop import Trainer

    config, data = configured(name, tiny=True), made_up()
    theirs = Theirs(config, data)
    with bb.Run(tmp_path / "run", ram="16MiB") as run:
        trainer = Trainer(config, data, run)
        with torch.no_grad():
            for name in ("user", "item"):
                weight = getattr(theirs, name).weight
                weight.copy_(torch.from_numpy(run.table(name).get(np.arange(len(weight)))))
        for step in range(3):
            batch = trainer._source.batch(1, step)
            users, items = torch.from_numpy(batch.users), torch.from_numpy(batch.items)
            seen = mask = None
            if batch.seen is not None:
                seen = torch.from_numpy(batch.seen)
                mask = torch.zeros(len(users), config.negatives, dtype=torch.bool)
                mask.view(-1)[seen] = True
            ours = trainer.model(users, items, seen)
            trainer.optimizer.zero_grad()
            ours.backward()
            trainer.optimizer.step()
            assert theirs.train(users, items, mask) == pytest.approx(ours.item(), rel=1e-5)


def test_recipes_are_options_like_any_other():
    for recipe in RECIPES.values():
        assert type(recipe).from_dict(recipe.to_dict()) == recipe
