"""Whether a device trains the same rows with every device cache, and those that the table trains by itself.

``python -m benchmarks.device.check`` says so, and which kernels were chosen for it; `experiment` starts with it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import bunkbed as bb
from benchmarks.device.sides import Batch, Data, Device, Ids, Loss
from bunkbed.torch import Embedding, Optimizer, lookahead

ROWS, DIM, BATCH, STEPS = (3_000, 2_000), 16, 64, 60


@dataclass(frozen=True)
class Checked:
    """What the check found.

    Attributes:
        differing: rows, of all runs with a cache together, with other bits than those of the smallest cache.
        difference: the largest of any weight from that of a table on the CPU, over all runs.
        runs: how many were compared.
        evictions: of the smallest cache, plainly: 0 would prove nothing.
    """

    differing: int
    difference: float
    runs: int
    evictions: int


def check(device: Device, seed: int) -> Checked:
    """Trains a small case with caches from the smallest to all, and with none, plainly and with lookahead."""
    data = Data(Ids(ROWS[0], 1.05), Ids(ROWS[1], 1.05), BATCH)
    batches = list(data.drawer((seed, 99))(STEPS))
    smallest = [max(np.unique(batch[i].numpy()).size for batch in batches) for i in range(2)]
    part = [max(least, rows // 20) for least, rows in zip(smallest, ROWS, strict=True)]
    wanted, _ = train(Device("cpu"), batches, None, ahead=False)
    first, counts = train(device, batches, smallest, ahead=False)
    others = [(smallest, True), *[(rows, ahead) for rows in (part, list(ROWS)) for ahead in (False, True)]]
    found = [train(device, batches, rows, ahead=ahead)[0] for rows, ahead in others]
    none = [train(device, batches, [0, 0], ahead=ahead)[0] for ahead in (False, True)]
    differing = sum(
        int((a.view(np.uint32) != b.view(np.uint32)).any(axis=1).sum())
        for run in found
        for a, b in zip(run, first, strict=True)
    )
    # By slots: the weights come first, users' and products'.
    difference = max(
        float(np.abs(a.astype(np.float64) - b).max())
        for run in [first, *found, *none]
        for a, b in zip(run[:2], wanted[:2], strict=True)
    )
    return Checked(differing, difference, 1 + len(found) + len(none), int(counts["device_evictions"]))


def train(
    device: Device, batches: list[Batch], frames: list[int] | None, *, ahead: bool
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Every slot of every row after a step for each batch, weights first; and the users' table's counters."""
    model: Any = torch.nn.Module()
    layers = []
    for i, rows in enumerate(ROWS):
        cache = None if frames is None else frames[i] * DIM * 12
        layers.append(
            Embedding(
                rows, DIM, optimizer=bb.Adam(lr=0.01), init=bb.Normal(0.1), seed=i,
                device=device.torch, device_cache=cache,
            )
        )  # fmt: skip
    model.user, model.product = layers
    optimizer, loss = Optimizer(model), Loss(device, BATCH)
    loader: Any = batches
    if ahead:
        loader = lookahead(batches, model, ids=lambda batch: {model.user: batch[0], model.product: batch[1]})
    for users, products in loader:
        optimizer.zero_grad()
        (loss(model.user(users), model.product(products)) * BATCH).backward()
        optimizer.step()
    counts = dict(model.user.table.stats())
    tables = [layer.table for layer in layers]
    slots = ["weight", *tables[0].slots]
    rows = [table.get(np.arange(table.num_rows), slot) for slot in slots for table in tables]
    for table in tables:
        table.close(commit=False)
    return rows, counts


def small_case(device: Device, seed: int, steps: int) -> dict[str, float]:
    """So many steps of the smallest cache with `lookahead`, where every step loads and evicts: for a sanitizer."""
    data = Data(Ids(ROWS[0], 1.05), Ids(ROWS[1], 1.05), BATCH)
    batches = list(data.drawer((seed, 98))(steps))
    smallest = [max(np.unique(batch[i].numpy()).size for batch in batches) for i in range(2)]
    return train(device, batches, smallest, ahead=True)[1]


def main() -> None:
    from benchmarks.device import report

    options = argparse.ArgumentParser(prog="python -m benchmarks.device.check", description=__doc__)
    options.add_argument("--device", default="", help="as torch names it; default: an accelerator, else cpu")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, help="only so many steps of one small case, compared with nothing")
    given = options.parse_args()
    here = Device(given.device)
    print(f"device: {here.label}")
    if given.steps:
        counts = small_case(here, given.seed, given.steps)
        print(f"{given.steps:,} steps, {counts['device_evictions']:,} rows evicted")
        return
    results = report.Results(checked=check(here, given.seed))
    print(report.checked_line(results.checked))  # type: ignore[arg-type]
    print("\n".join(report.kernel_lines(report.chooser.choices)))
    if found := report.verdicts(results):
        sys.exit("failed: " + "; ".join(found))


if __name__ == "__main__":
    main()
