"""Device memory in use, as torch's allocator counts it: the budget and a batch's needs, whatever the table's size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

torch = pytest.importorskip("torch", reason="torch is not installed")

import bunkbed.torch as bt  # noqa: E402
from bunkbed.torch.device import window  # noqa: E402

DIM, BATCH = 32, 2048


class OnThisThread:
    """In place of the thread of `lookahead`, whose memory torch's profiler does not see: runs the work at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        work(*args)

    def shutdown(self, **_: Any) -> None:
        pass


def bytes_above_the_budget(num_rows: int, frames: int, optimizer: bb.Optimizer, ahead: bool) -> float:
    """Bytes that training allocates through torch, at most at a time, less those of a cache of `frames` rows.

    Given in records of a batch's rows.

    On the CPU device the allocator counts everything: rows kept, rows on their way, and the model's own tensors.
    """
    rng = np.random.default_rng(0)
    batches = [torch.from_numpy(rng.integers(0, num_rows, BATCH)) for _ in range(8)]
    record_bytes = 4 * DIM * (1 + len(optimizer.slots))
    layer = bt.Embedding(num_rows, DIM, optimizer=optimizer, device_cache=frames * record_bytes)
    opt = bt.Optimizer(layer)
    loader = bt.lookahead(batches, layer, ids=lambda ids: {layer: ids}) if ahead else batches
    activities = [torch.profiler.ProfilerActivity.CPU]
    with layer.table, torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        for ids in loader:
            opt.zero_grad()
            (layer(ids) ** 2).mean().backward()
            opt.step()
        assert layer.table.stats()["device_evictions"] > 0
        assert layer.table.record_bytes == record_bytes
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    in_use = np.cumsum([event.nbytes() for event in changes])
    needed = max(len(ids.unique()) for ids in batches) * record_bytes
    return (int(in_use.max()) - frames * record_bytes) / needed


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("optimizer", [bb.Adam(), bb.SGD()], ids=["adam", "sgd"])
def test_training_takes_its_budget_and_what_a_batch_needs(
    optimizer: bb.Optimizer, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "ThreadPoolExecutor", OnThisThread)
    above = {
        (num_rows, frames): bytes_above_the_budget(num_rows, frames, optimizer, ahead)
        for num_rows in (50_000, 1_000_000)
        for frames in (3_000, 9_000)
    }
    print(f"above the budget, in records of a batch's rows, by rows of table and cache: {above}")
    # Neither the cache nor the table has a part in it: a batch's records as they come and as they are updated, its
    # lookups, their gradients, and the sums of these. A record of Adam is three times the weights.
    allowed = 3.0 if optimizer.slots else 6.0
    if ahead:  # and the numbers of two coming batches, at most eight of 8 bytes for each id
        allowed += 2 * 64 / (4 * DIM * (1 + len(optimizer.slots)))
    assert max(above.values()) <= allowed, above
    if not ahead:  # a small cache has not always room for two
        assert max(above.values()) - min(above.values()) < 0.2, above
