"""How do I train a table from several processes with Ray Train?

    pip install "ray[train]"
    python examples/torch/processes_ray.py

Ray starts the processes and their group; the training function is that of `processes.py`. All processes must see the
folder of the tables: without a shared disk, on one host.
"""

import os
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from processes import Ratings, batches, loss_of, show
from ray.train import RunConfig, ScalingConfig
from torch.nn.parallel import DistributedDataParallel

from bunkbed.torch import Optimizer


def train(options: dict[str, str]) -> None:
    """Train in one process of the group that Ray has made."""
    folder, rank = Path(options["folder"]), ray.train.get_context().get_world_rank()
    model = Ratings(folder)
    whole = DistributedDataParallel(model)  # as ray.train.torch.prepare_model(model) does
    optimizer = Optimizer(whole, dense=torch.optim.AdamW(whole.parameters(), lr=0.01))
    losses = []
    for batch in batches(range(300), rank):
        loss = loss_of(whole, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.user.table.close(commit=True)
    model.item.table.close(commit=True)
    torch.distributed.barrier()
    if rank == 0:
        show(folder, "Ray Train", losses)


def main() -> None:
    folder = Path("processes_ray").resolve()
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    # Two for the workers; without spare ones, Ray's own helpers may wait for the workers to end.
    ray.init(num_cpus=4, include_dashboard=False)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
