"""How do I train a table from several processes with Accelerate?

    torchrun --nproc-per-node=2 examples/torch/processes_accelerate.py

The `Accelerator` makes the process group, so the model is made after it. `accelerate launch` works as torchrun does.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from processes import Ratings, batches, loss_of, show

from bunkbed.torch import Optimizer


def main() -> None:
    accelerator = Accelerator(cpu=True)
    folder = Path("processes_accelerate")
    model = Ratings(folder)
    whole = accelerator.prepare(model)
    optimizer = Optimizer(whole, dense=torch.optim.AdamW(whole.parameters(), lr=0.01))
    losses = []
    for batch in batches(range(300), accelerator.process_index):
        loss = loss_of(whole, batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(whole.parameters(), 1.0)  # sees the rows of all processes
        optimizer.step()
        losses.append(loss.item())
    model.user.table.close(commit=True)
    model.item.table.close(commit=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        show(folder, "Accelerate", losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
