"""Hugging Face's Trainer: our optimizer in place of its own, checkpoints, resuming, the best model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bunkbed.torch import Embedding, Optimizer

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)
# It warns about pinned memory without a GPU and about its own coming changes.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

ROWS, DIM = 50, 4


class Recommender(torch.nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = Embedding(ROWS, DIM, path=path, ram="8MiB", seed=0)
        self.head = torch.nn.Linear(DIM, 1)

    def forward(self, ids: Any, labels: Any) -> dict[str, Any]:
        out = self.head(self.user(ids))[:, 0]
        return {"loss": torch.nn.functional.mse_loss(out, labels), "out": out}

    def trained(self) -> tuple[Any, Any, int]:
        return (
            torch.from_numpy(self.user.table.get(range(ROWS))),
            self.head.weight.detach().clone(),
            self.user.table.step,
        )


def samples(sign: float) -> list[dict[str, Any]]:
    """Pairs to train; with sign -1 their opposite, which gets worse with each epoch."""
    generator = torch.Generator().manual_seed(0)
    return [
        {"ids": torch.randint(0, ROWS, (), generator=generator), "labels": sign * torch.randn((), generator=generator)}
        for _ in range(32)
    ]


def trainer(folder: Path, model: Any, *, lr: float = 0.05, ours: bool = True, **arguments: Any) -> Any:
    given = {"save_strategy": "epoch", "per_device_train_batch_size": 8, "max_grad_norm": 0.5, **arguments}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    settings = transformers.TrainingArguments(str(folder), label_names=["labels"], **quiet, **given)
    optimizer = Optimizer(model, dense=torch.optim.AdamW(model.parameters(), lr=lr)) if ours else None
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step) if ours else None
    return transformers.Trainer(
        model, settings, train_dataset=samples(1.0), eval_dataset=samples(-1.0), optimizers=(optimizer, scheduler)
    )


def test_resuming_from_a_checkpoint_ends_where_an_uninterrupted_run_does(tmp_path: Path) -> None:
    model = Recommender(tmp_path / "whole")
    trainer(tmp_path / "a", model, num_train_epochs=3).train()
    whole = model.trained()
    model.user.table.close()
    for epochs, checkpoint in ((2, None), (3, tmp_path / "b" / "checkpoint-8")):
        model = Recommender(tmp_path / "user")
        trainer(tmp_path / "b", model, num_train_epochs=epochs).train(
            resume_from_checkpoint=checkpoint and str(checkpoint)
        )
        parts = model.trained()
        model.user.table.close()
    assert whole[2] == parts[2] == 12
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("total", [None, 1])
def test_the_best_model_is_loaded_at_the_end(total: int | None, tmp_path: Path) -> None:
    model = Recommender(tmp_path / "user")
    fit = trainer(
        tmp_path / "out",
        model,
        lr=0.3,
        num_train_epochs=4,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        load_best_model_at_end=True,
        save_total_limit=total,
    )
    fit.train()
    losses = [entry["eval_loss"] for entry in fit.state.log_history if "eval_loss" in entry]
    assert losses.index(min(losses)) == 0  # three commits came after it
    assert fit.state.best_metric == min(losses)
    assert fit.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)
    model.user.table.close()


def test_its_own_optimizer_is_refused(tmp_path: Path) -> None:
    model = Recommender(tmp_path / "user")
    with pytest.raises(RuntimeError, match=r"no Optimizer steps them; write\n +opt = bunkbed.torch.Optimizer"):
        trainer(tmp_path / "out", model, ours=False, num_train_epochs=1).train()
    assert model.user.table.step == 0
    model.user.table.close()
