"""`lookahead` yields the loader's batches as they are, having staged the next ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer, lookahead

torch.set_num_threads(1)


class Spy:
    """A table that notes what was staged."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.staged: list[list[int]] = []

    def stage(self, ids: Any) -> None:
        self.staged.append(ids.tolist())
        self._table.stage(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def make() -> tuple[Any, Spy]:
    spy = Spy(bb.create(None, dim=2, num_rows=100))
    return Embedding(100, 2, table=spy), spy


def batches(count: int) -> list[Any]:
    return [torch.tensor([[index, index + 1]]) for index in range(count)]


@pytest.mark.parametrize("depth", [0, 1, 3, 50])
def test_the_next_batches_are_staged_before_one_is_used(depth: int) -> None:
    emb, spy = make()
    loader = batches(6)
    for index, batch in enumerate(lookahead(loader, emb, ids=lambda b: {emb: b}, depth=depth)):
        assert batch is loader[index]
        assert len(spy.staged) == min(6, index + 1 + depth)
    assert index == 5
    assert spy.staged == [b[0].tolist() for b in loader]


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


def test_several_layers_and_several_lookups() -> None:
    emb, spy = make()
    bag = EmbeddingBag(100, 2, table=spy)
    model = torch.nn.ModuleList([emb, bag])
    list(lookahead(batches(2), model, ids=lambda b: {emb: [b, b + 10], bag: b.int()}))
    assert spy.staged == [[0, 1], [10, 11], [0, 1], [1, 2], [11, 12], [1, 2]]


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


def test_training_is_bit_identical_at_any_depth_and_without(tmp_path: Any) -> None:
    results = []
    for depth in (None, 0, 2, 7):
        torch.manual_seed(0)
        path = tmp_path / f"{depth}"
        emb = Embedding(20_000, 8, path=path, ram="1MiB", optimizer=bb.Adam(lr=0.1), seed=0)
        opt = Optimizer(emb)
        loader = torch.utils.data.DataLoader((torch.rand(20_000) ** 2 * 20_000).long(), batch_size=2000)
        iterator = loader if depth is None else lookahead(loader, emb, ids=lambda b, emb=emb: {emb: b}, depth=depth)
        for ids in iterator:
            opt.zero_grad()
            emb(ids).pow(2).sum().backward()
            opt.step()
        results.append(emb.table.get(np.arange(20_000)).tobytes())
        emb.table.close(commit=False)
    assert results.count(results[0]) == 4
