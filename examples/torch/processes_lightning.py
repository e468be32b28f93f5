"""How do I train a table from several processes with Lightning?

    torchrun --nproc-per-node=2 examples/torch/processes_lightning.py

Lightning makes the process group after the module, so the layers are made in `configure_model`, not in `__init__`.
"""

from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from processes import Ratings, batches, loss_of, show
from torch.utils.data import DataLoader, TensorDataset

from bunkbed.torch import Optimizer

SIZE, STEPS = 256, 300


class Module(lightning.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.model = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:  # Lightning may call this again
            self.model = Ratings(self.folder)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = loss_of(self.model, tuple(batch))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return Optimizer(self, dense=torch.optim.AdamW(self.parameters(), lr=0.01), replace=True)


def main() -> None:
    folder = Path("processes_lightning")
    # Lightning's sampler gives each process its part.
    parts = [torch.cat(columns) for columns in zip(*batches(range(2 * STEPS), 0, SIZE), strict=True)]
    loader = DataLoader(TensorDataset(*parts), batch_size=SIZE)
    module = Module(folder)
    trainer = lightning.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, default_root_dir=folder, gradient_clip_val=1.0,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)  # its checkpoint, saved by one process, commits the tables of all
    module.model.user.table.close()
    module.model.item.table.close()
    if trainer.is_global_zero:
        show(folder, "Lightning", module.losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
