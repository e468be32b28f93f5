"""How do I train tables with Lightning: checkpoints of the best epoch, early stopping, clipping, a schedule?

    python examples/torch/lightning_fit.py

`configure_optimizers` returns one `Optimizer`; the other code is ordinary Lightning code. A checkpoint holds the dense
weights and a reference to a kept epoch of each table, so its size does not depend on the tables.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bunkbed as bb
from bunkbed.torch import Embedding, Optimizer

USERS, ITEMS, DIM = 200, 150, 16


class Ratings(lightning.LightningModule):
    def __init__(self, folder: Path, ram: str) -> None:
        super().__init__()
        self.budget = bb.Budget(ram)
        ours = {"ram": self.budget, "optimizer": bb.Adam(lr=0.05), "init": bb.Normal(std=0.1)}
        self.user = Embedding(USERS, DIM, path=folder / "user", **ours)
        self.item = Embedding(ITEMS, DIM, path=folder / "item", **ours)
        self.head = nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        users, items, ratings = batch
        return nn.functional.mse_loss(self.head(self.user(users) * self.item(items))[:, 0], ratings)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("valid", self.loss(batch))

    def configure_optimizers(self) -> dict[str, object]:
        # replace=True: a second fit() calls this again, while the optimizer of the first fit() still exists.
        optimizer = Optimizer(self, dense=torch.optim.AdamW(self.parameters(), lr=0.01), replace=True)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def ratings(count: int, seed: int) -> DataLoader:
    """Return synthetic ratings: users and items are of five kinds; a user likes items of the same kind."""
    generator = torch.Generator().manual_seed(seed)
    users = torch.randint(USERS, (count,), generator=generator)
    items = torch.randint(ITEMS, (count,), generator=generator)
    liked = (users % 5 == items % 5).float() + 0.3 * torch.randn(count, generator=generator)
    return DataLoader(TensorDataset(users, items, liked), batch_size=500)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=40_000)
    options.add_argument("--epochs", type=int, default=10, help="at most")
    options.add_argument("--ram", default="64MiB", help="of both tables")
    given = options.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train, valid = ratings(given.samples, seed=0), ratings(given.samples // 5, seed=1)
        best = ModelCheckpoint(dirpath=folder, monitor="valid", save_top_k=1)
        trainer = lightning.Trainer(
            max_epochs=given.epochs, callbacks=[best, EarlyStopping("valid", patience=2)], gradient_clip_val=1.0,
            accelerator="cpu", devices=1, default_root_dir=folder, logger=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        model = Ratings(folder, given.ram)
        trainer.fit(model, train, valid)
        last = float(trainer.callback_metrics["valid"])
        (found,) = trainer.validate(model, valid, ckpt_path="best", verbose=False)  # restores dense weights and rows

        rows = sum(layer.table.nbytes for layer in (model.user, model.item))
        size = Path(best.best_model_path).stat().st_size
        print(f"{model.user.table.step:,} steps are in the best epoch's rows; a checkpoint of {size / 1e3:.0f} kB")
        print(f"refers to {rows / 1e3:.0f} kB of rows and their optimizer state")
        print(f"loss: last epoch {last:.4f}, best {best.best_model_score:.4f}, best loaded {found['valid']:.4f}")
        model.user.table.close()
        model.item.table.close()


if __name__ == "__main__":
    main()
