"""`lookahead` yields the loader's batches as they are, having staged the next ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer, lookahead

torch.set_num_threads(1)


def make() -> tuple[Any, Any]:
    """A layer whose table is all in RAM: batches pass, one is pulled ahead."""
    emb = Embedding(100, 2)
    return emb, emb.table


def batches(count: int) -> list[Any]:
    return [torch.tensor([[index, index + 1]]) for index in range(count)]


ROWS, DIM, BATCH = 6000, 16, 300


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Any]:
    """A layer whose table is fully written and far larger than its cache, which holds some 1,500 rows."""
    path = tmp_path / "rows"
    with bb.create(path, dim=DIM, num_rows=ROWS, optimizer=bb.Adam(lr=0.1), ram="64MiB") as table:
        table.set(np.arange(ROWS), np.zeros((ROWS, DIM), np.float32))
    emb = Embedding(ROWS, DIM, path=path, ram="512KiB")
    yield emb
    emb.table.close(commit=False)


def zipf_batches(count: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, ROWS + 1) ** 0.6
    places = rng.permutation(ROWS)
    return [torch.from_numpy(places[rng.choice(ROWS, BATCH, p=weights / weights.sum())]) for _ in range(count)]


def train(emb: Any, iterator: Iterable[Any]) -> None:
    optimizer = Optimizer(emb)
    for ids in iterator:
        optimizer.zero_grad()
        emb(ids).pow(2).sum().backward()
        optimizer.step()
    optimizer.detach()


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_rows_are_there_when_their_batch_begins(on_disk: Any, depth: int | None) -> None:
    loader = list(torch.arange(ROWS).reshape(-1, BATCH))  # disjoint: no row is there by chance
    table = on_disk.table
    for index, batch in enumerate(lookahead(loader, on_disk, ids=lambda b: {on_disk: b}, depth=depth, window=4)):
        assert batch is loader[index]
        table.contains(batch)  # waits for what is being staged, which counts as missed when it is there
        before = table.stats()
        on_disk(batch)
        after = table.stats()
        missed = after["misses"] - before["misses"]
        assert missed == (len(batch.unique()) if index == 0 else 0)
    assert index + 1 == len(loader)
    assert after["staged_rows"] == ROWS - BATCH


def test_depth_0_passes_batches_through(on_disk: Any) -> None:
    loader = zipf_batches(5)
    assert all(a is b for a, b in zip(lookahead(loader, on_disk, lambda b: {on_disk: b}, depth=0), loader, strict=True))
    assert on_disk.table.stats()["staged_rows"] == 0


def test_evaluation_stages_nothing(on_disk: Any) -> None:
    on_disk.eval()
    for batch in lookahead(zipf_batches(5), on_disk, ids=lambda b: {on_disk: b}):
        on_disk(batch)
    assert on_disk.table.stats()["staged_rows"] == 0


def test_a_window_misses_less_than_none(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with bb.create(path, dim=64, num_rows=ROWS, optimizer=bb.Adam(lr=0.1), ram="64MiB") as table:
        table.set(np.arange(ROWS), np.zeros((ROWS, 64), np.float32))
    emb = Embedding(ROWS, 64, path=path, ram="1.5MiB")
    loader = zipf_batches(60)
    missed = {}
    for window in (1, 16):
        train(emb, loader[:20])
        before = emb.table.stats()["misses"]
        train(emb, lookahead(loader, emb, ids=lambda b: {emb: b}, depth=1, window=window))
        missed[window] = emb.table.stats()["misses"] - before
    emb.table.close(commit=False)
    assert missed[16] < 0.9 * missed[1]


def test_what_was_planned_is_forgotten_when_the_loop_is_left(on_disk: Any) -> None:
    table = on_disk.table
    for count, _ in enumerate(lookahead(zipf_batches(40), on_disk, ids=lambda b: {on_disk: b}, window=20)):
        if count == 7:
            assert table.stats()["window_batches"] > 2
            assert table.stats()["window_bytes"] > 0
            break
    assert table.stats()["window_batches"] == table.stats()["window_bytes"] == 0
    assert table.stats()["frame_capacity"] > 1000


def test_two_loops_over_one_table_at_once(on_disk: Any) -> None:
    first, second = zipf_batches(12, seed=1), zipf_batches(9, seed=2)
    pairs = zip(
        lookahead(first, on_disk, ids=lambda b: {on_disk: b}),
        lookahead(second, on_disk, ids=lambda b: {on_disk: b}),
        strict=False,
    )
    for index, (a, b) in enumerate(pairs):
        assert a is first[index]
        assert b is second[index]
        on_disk(torch.cat([a, b]))
    assert index == 8


def test_batches_larger_than_the_window_wait_and_come(on_disk: Any) -> None:
    loader = [torch.arange(ROWS).roll(97 * i) for i in range(4)]  # every row, several times the cache
    seen = []
    for batch in lookahead(loader, on_disk, ids=lambda b: {on_disk: b}):
        seen.append(batch)
        assert on_disk(batch).shape == (ROWS, DIM)
    assert all(a is b for a, b in zip(seen, loader, strict=True))


def test_the_table_may_be_closed_and_rewound_meanwhile(on_disk: Any) -> None:
    table = on_disk.table
    epoch = table.commit(keep="here")
    for index, batch in enumerate(lookahead(zipf_batches(12), on_disk, ids=lambda b: {on_disk: b})):
        if index == 4:
            table.rewind("here")
        if index == 8:
            table.commit()
        on_disk(batch)
    assert table.epoch > epoch
    with pytest.raises(bb.TableClosedError):
        for index, _ in enumerate(lookahead(zipf_batches(12), on_disk, ids=lambda b: {on_disk: b})):
            if index == 4:
                table.close(commit=False)


def test_length_and_iterating_again() -> None:
    emb, _ = make()
    wrapped = lookahead(batches(5), emb, ids=lambda b: {emb: b})
    assert len(wrapped) == 5
    assert len(list(wrapped)) == len(list(wrapped)) == 5
    assert list(lookahead([], emb, ids=lambda b: {emb: b})) == []
    with pytest.raises(TypeError, match="has no len"):
        len(lookahead(iter(batches(1)), emb, ids=lambda b: {emb: b}))


def test_an_error_of_the_loader_comes_after_the_batches_before_it() -> None:
    def loader() -> Iterator[Any]:
        yield from batches(3)
        raise ValueError("disk on fire")

    emb, _ = make()
    seen = []
    with pytest.raises(ValueError, match="disk on fire"):
        for batch in lookahead(loader(), emb, ids=lambda b: {emb: b}):
            seen.append(batch)
    assert len(seen) == 3


def test_a_wrong_id_is_reported_where_its_batch_would_come() -> None:
    emb, _ = make()
    seen = []
    with pytest.raises(IndexError, match="id 100 at position 1 is outside"):
        for batch in lookahead([*batches(2), torch.tensor([5, 100])], emb, ids=lambda b: {emb: b}):
            seen.append(batch)
    assert len(seen) == 2


def test_stopping_early_closes_the_loader() -> None:
    closed = []

    def loader() -> Iterator[Any]:
        try:
            yield from batches(10)
        finally:
            closed.append(True)

    emb, _ = make()
    for _ in lookahead(loader(), emb, ids=lambda b: {emb: b}):
        break
    assert closed == [True]


def test_several_layers_and_several_lookups(on_disk: Any) -> None:
    bag = EmbeddingBag(ROWS, DIM, table=on_disk.table)
    model = torch.nn.ModuleList([on_disk, bag])
    loader = list(torch.arange(600).reshape(-1, 100))
    for batch in lookahead(loader, model, ids=lambda b: {on_disk: [b, b + 1000], bag: (b + 2000).int()}, depth=1):
        on_disk.table.contains(batch)  # waits for what is being staged
    assert on_disk.table.stats()["staged_rows"] == 3 * 500  # all but the first batch's


def test_a_table_that_comes_late(tmp_path: Path) -> None:
    layers = []
    for name in ("early", "late"):
        with bb.create(tmp_path / name, dim=DIM, num_rows=ROWS, ram="64MiB") as table:
            table.set(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
        layers.append(Embedding(ROWS, DIM, path=tmp_path / name, ram="1MiB"))
    early, late = layers

    def ids(batch: Any) -> dict[Any, Any]:
        return {
            layer: batch for layer in layers if (batch[0] >= 1500 if layer is late else not 1500 <= batch[0] < 3000)
        }

    loader = list(torch.arange(ROWS).reshape(-1, BATCH))
    for batch in lookahead(loader, torch.nn.ModuleList(layers), ids=ids, depth=1, window=4):
        for layer in ids(batch):
            layer.table.contains(batch)
            before = layer.table.stats()["misses"]
            layer(batch)
            # The very first batch of all cannot have been staged.
            assert layer.table.stats()["misses"] - before == (BATCH if batch[0] == 0 else 0)
    for layer in (early, late):
        layer.table.close(commit=False)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (lambda b: {"user": b}, ValueError, "ids names str, which is not a bunkbed.torch layer of the model"),
        (
            lambda b: {Embedding(5, 2): b},
            ValueError,
            "ids names Embedding, which is not a bunkbed.torch layer",
        ),
        (lambda b: b, TypeError, r"ids must return \{layer: ids\}, got Tensor"),
        (lambda b: {}[1], KeyError, "1"),
    ],
)
def test_ids_that_name_no_layer(ids: Any, error: Any, message: str) -> None:
    emb, _ = make()
    with pytest.raises(error, match=message):
        list(lookahead(batches(2), emb, ids=ids))


def test_wrong_arguments() -> None:
    emb, _ = make()
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        lookahead([], [emb], ids=lambda b: {})
    with pytest.raises(TypeError, match=r"ids must be a function from a batch to \{layer: ids\}, got dict"):
        lookahead([], emb, ids={})
    with pytest.raises(ValueError, match="depth must be at least 0, got -1"):
        lookahead([], emb, ids=lambda b: {}, depth=-1)
    with pytest.raises(ValueError, match="window must be 1 to 32, got 33"):
        lookahead([], emb, ids=lambda b: {}, window=33)


def test_training_is_bit_identical_at_any_depth_and_without(tmp_path: Path) -> None:
    results = []
    for number, (depth, window, accumulate) in enumerate(
        [(0, None, 1), (None, None, 1), (1, 1, 1), (2, 32, 1), (7, 9, 1), (0, None, 3), (None, None, 3)]
    ):
        torch.manual_seed(0)
        emb = Embedding(20_000, 8, path=tmp_path / f"{number}", ram="1MiB", optimizer=bb.Adam(lr=0.1), seed=0)
        opt = Optimizer(emb)
        loader = torch.utils.data.DataLoader((torch.rand(100_000) ** 2 * 20_000).long(), batch_size=2000)
        opt.zero_grad()
        for index, ids in enumerate(lookahead(loader, emb, lambda b, emb=emb: {emb: b}, depth, window)):
            emb(ids).pow(2).sum().backward()
            if index % accumulate == accumulate - 1:
                opt.step()
                opt.zero_grad()
            if index == 20:  # evaluation in between
                emb.eval()
                emb(torch.arange(5000))
                emb.train()
        results.append((accumulate, emb.table.get(np.arange(20_000)).tobytes()))
        emb.table.close(commit=False)
    for accumulate in (1, 3):
        assert len({rows for count, rows in results if count == accumulate}) == 1
