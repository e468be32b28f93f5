"""Lightning's automatic mode: one optimizer, clipping, accumulation, early stopping and the best
checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, Optimizer, lookahead

lightning = pytest.importorskip("lightning")

torch.set_num_threads(1)
# Lightning warns about loggers, workers and small data sets; that is not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Recommender(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, path: Path | None, *, lr: float = 0.05) -> None:
        super().__init__()
        self.user = Embedding(50, 4, path=path, ram="8MiB", optimizer=bb.Adam(lr=lr), seed=0)
        self.head = torch.nn.Linear(4, 1)
        self.lr = lr
        self.losses: list[float] = []

    def forward(self, ids: Any) -> Any:
        return self.head(self.user(ids))[:, 0]

    def training_step(self, batch: Any, index: int) -> Any:
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(float(loss))
        self.log("valid", loss)

    def configure_optimizers(self) -> Any:
        opt = Optimizer(self, dense=torch.optim.Adam(self.parameters(), lr=self.lr), replace=True)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)}


def loader(seed: int, count: int = 32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    data = torch.utils.data.TensorDataset(
        torch.randint(0, 50, (count,), generator=generator), torch.randn(count, generator=generator) * 5
    )
    return torch.utils.data.DataLoader(data, batch_size=8)


def trainer(folder: Path, **kwargs: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet.setdefault("enable_checkpointing", "callbacks" in kwargs)
    return lightning.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **quiet, **kwargs)


def rows(layer: Any) -> Any:
    return torch.from_numpy(layer.table.get(np.arange(50)))


def test_automatic_mode_with_clipping_and_accumulation_equals_a_plain_loop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recommender(None)
    start = {key: value.clone() for key, value in model.head.state_dict().items()}
    trainer(tmp_path, max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2).fit(model, loader(1))
    assert model.user.table.step == 6  # 4 batches, two a step, 3 epochs

    plain = Recommender(None)
    plain.head.load_state_dict(start)
    parts = plain.configure_optimizers()
    opt, scheduler = parts["optimizer"], parts["lr_scheduler"]
    for _ in range(3):
        for index, batch in enumerate(loader(1)):
            if index % 2 == 0:
                opt.zero_grad()
            (plain.training_step(batch, index) / 2).backward()
            if index % 2:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                opt.step()
        scheduler.step()
    torch.testing.assert_close(rows(model.user), rows(plain.user), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(model.head.weight, plain.head.weight, rtol=1e-6, atol=1e-7)


def test_early_stopping_and_reloading_the_best(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    torch.manual_seed(0)
    model = Recommender(tmp_path / "user", lr=0.2)
    best = ModelCheckpoint(dirpath=tmp_path, monitor="valid", mode="min", save_top_k=1)
    fit = trainer(
        tmp_path,
        max_epochs=40,
        num_sanity_val_steps=0,
        callbacks=[best, EarlyStopping("valid", patience=4)],
    )
    fit.fit(model, loader(1), loader(2))  # other targets: it overfits
    losses = np.array(model.losses).reshape(-1, 4).mean(axis=1)
    assert len(losses) == losses.argmin() + 5 < 40
    model.losses.clear()
    fit.validate(model, loader(2), ckpt_path="best", verbose=False)
    assert np.mean(model.losses) == pytest.approx(losses.min(), rel=1e-6)

    again = Recommender.load_from_checkpoint(best.best_model_path, path=tmp_path / "user", lr=0.2)
    with torch.no_grad():
        found = np.mean([float(torch.nn.functional.mse_loss(again(ids), y)) for ids, y in loader(2)])
    assert found == pytest.approx(losses.min(), rel=1e-6)
    model.user.table.close()


def test_resuming_from_a_checkpoint_ends_where_an_uninterrupted_run_does(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    results = []
    for parts in ([4], [2, 4]):
        folder = tmp_path / str(len(parts))
        for epochs in parts:
            torch.manual_seed(0)
            model = Recommender(folder / "user")
            last = ModelCheckpoint(dirpath=folder, save_last=True)
            resume = folder / "last.ckpt"
            trainer(folder, max_epochs=epochs, callbacks=[last]).fit(
                model, loader(1), ckpt_path=str(resume) if resume.exists() else None
            )
            found = rows(model.user), model.head.weight.detach().clone(), model.user.table.step
            model.user.table.close()
        results.append(found)
    assert results[0][2] == results[1][2] == 16
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_fitting_again_replaces_the_optimizer(tmp_path: Path) -> None:
    model = Recommender(None)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(model, loader(1))
    fit.fit_loop.max_epochs = 2
    fit.fit(model, loader(1))
    trainer(tmp_path, max_epochs=1).fit(model, loader(1))
    assert model.user.table.step == 12


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions(tmp_path: Path, precision: str) -> None:
    model = Recommender(None)
    before = rows(model.user)
    trainer(tmp_path, max_epochs=1, precision=precision, gradient_clip_val=1.0).fit(model, loader(1))
    assert model.user.table.step == 4 and not torch.equal(rows(model.user), before)
    assert model.user.anchor.dtype == {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(
        precision, torch.float32
    )


def test_lookahead_feeds_the_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recommender(None)
    batches = lookahead(loader(1), model, ids=lambda batch: {model.user: batch[0]})
    trainer(tmp_path, max_epochs=2).fit(model, batches)
    assert model.user.table.step == 8
