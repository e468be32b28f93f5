"""How do I train a table from several processes where FSDP divides the dense weights?

    torchrun --nproc-per-node=2 examples/torch/processes_fsdp.py

`fully_shard` divides every parameter, so it must leave the anchors of the tables out; their rows are divided already.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from processes import Ratings, batches, loss_of, show
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bunkbed.torch import Optimizer, anchors


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path("processes_fsdp")
    model = Ratings(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params=anchors(model))
    optimizer = Optimizer(model, dense=torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for batch in batches(range(300), dist.get_rank()):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.user.table.close(commit=True)
    model.item.table.close(commit=True)
    dist.barrier()
    if dist.get_rank() == 0:
        show(folder, "FSDP", losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
