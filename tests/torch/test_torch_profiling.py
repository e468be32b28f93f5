"""What tables do shows in `torch.profiler` as named ranges."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer, lookahead
from sharded_setup import FACTS, make, train

ROWS, DIM, BATCH, STEPS = 6000, 16, 300, 6


def counted(work: Any) -> Counter[str]:
    """How often each range of ours came up while `work` ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return Counter({event.key: event.count for event in profile.key_averages() if event.key.startswith("bunkbed")})


@pytest.mark.parametrize("kind", ["rows", "bags"])
def test_lookups_updates_staging_and_stalls_show(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "user"
    with bb.create(path, dim=DIM, num_rows=ROWS, optimizer=bb.Adam(lr=0.1), ram="64MiB") as table:
        table.set(np.arange(ROWS), np.zeros((ROWS, DIM), np.float32))
    layer: Any = (Embedding if kind == "rows" else EmbeddingBag)(ROWS, DIM, path=path, ram="512KiB")
    optimizer = Optimizer(layer)
    batches = list(torch.randperm(ROWS)[: BATCH * STEPS].reshape(STEPS, -1, 3))

    def loop(loader: Any) -> None:
        for ids in loader:
            optimizer.zero_grad()
            layer(ids).pow(2).sum().backward()
            optimizer.step()

    before = layer.table.stats()
    found = counted(lambda: loop(batches))
    assert found == {"bunkbed lookup user": STEPS, "bunkbed update user": STEPS, "bunkbed stall user": STEPS}
    assert layer.table.stats()["stall_s"] > before["stall_s"]
    found = counted(lambda: loop(lookahead(batches, layer, ids=lambda b: {layer: b}, window=4)))
    assert found["bunkbed stage user"] == 2 * STEPS  # each batch is planned once, and begins once
    assert found["bunkbed lookup user"] == found["bunkbed update user"] == STEPS
    layer.table.close(commit=False)


def test_a_call_that_fails_leaves_no_range_open() -> None:
    layer = Embedding(10, 2)

    def work() -> None:
        with pytest.raises(IndexError, match="id 10 at position 0"):
            layer(torch.tensor([10]))
        layer(torch.tensor([1]))

    assert counted(work) == {"bunkbed lookup table": 2}


def test_ranges_that_fail_are_said_and_stop_no_lookup(tmp_path: Path, monkeypatch: Any) -> None:
    from bunkbed import _native

    path = tmp_path / "user"
    with bb.create(path, dim=DIM, num_rows=ROWS, ram="64MiB", init=bb.Zeros()) as table:
        table.set(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
    said: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    with bb.open(path, mode="r", ram="512KiB") as reader:

        def broken() -> Any:
            raise ValueError("no range")

        rows = _native.with_stalls(broken, reader.lookup, np.arange(100))
        np.testing.assert_array_equal(rows, 1.0)
        assert [str(each.exc_value) for each in said] == ["no range"]
        assert _native.stall_ranges() is None


def test_stalls_of_a_shard_go_where_the_callers_do(tmp_path: Path) -> None:
    """In whichever thread: each thread reports its stalls to a profiler of all threads, such as TensorFlow's."""
    import contextlib
    import threading

    from bunkbed import _native

    threads_before = bb.get_num_threads()
    bb.set_num_threads(4)
    try:
        with make(tmp_path / "user") as table:
            train(table)
        threads: list[int] = []

        @contextlib.contextmanager
        def note() -> Any:
            threads.append(threading.get_ident())
            yield

        with bb.open(tmp_path / "user", mode="r") as reader:
            ids = np.arange(FACTS["num_rows"])
            rows = _native.with_stalls(note, reader.lookup, ids)
            np.testing.assert_array_equal(rows, reader.lookup(ids))
        assert len(threads) == 3 and len(set(threads)) >= 2  # one for each shard: the caller, and one or two others
    finally:
        bb.set_num_threads(threads_before)
