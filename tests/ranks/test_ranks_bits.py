"""W processes that share a table give the bits of one process that runs their batches one after another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bunkbed.torch as bt
from bunkbed.torch.base.gradients import Part
from bunkbed.torch.ranks import group
from bunkbed.torch.ranks.exchange import Exchange
from bunkbed.torch.ranks.group import RanksError
from rank_cases import Case, cases, run
from rank_processes import spawn

CASES = {**cases(), "gradients added": Case(sums=True, micro=2, ahead=True)}
#: Four processes repeat the cases whose order of additions differs most from that of two.
FOUR = (
    "plain",
    "accumulation",
    "a loss for each lookup",
    "scaler, Inf on one rank",
    "two losses on one forward",
    "ids ahead",
    "weighted bags",
    "admission",
    "admission by the second step",
)


def _train(rank: int, world: int, names: tuple[str, ...], folder: str) -> dict[str, Any]:
    found = {}
    for number, name in enumerate(names):
        place = Path(folder) / str(number)
        found[name] = run(CASES[name], world, rank, place)
    return found


@functools.cache
def _alone(name: str, world: int) -> dict[str, Any]:
    return run(CASES[name], world, None)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(2, _train, 2, tuple(CASES), str(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(4, _train, 4, FOUR, str(tmp_path_factory.mktemp("four")))


def _assert_same(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found.keys() == alone.keys()
    wrong = {
        key: int((np.asarray(value) != np.asarray(alone[key])).sum())
        for key, value in found.items()
        if not np.array_equal(value, alone[key], equal_nan=key == "norms")
    }
    assert not wrong, f"values that differ: {wrong}"


@pytest.mark.parametrize("name", CASES)
def test_two_processes_have_the_bits_of_one(two: list[dict[str, Any]], name: str) -> None:
    for found in two:
        _assert_same(found[name], _alone(name, 2))


@pytest.mark.parametrize("name", FOUR)
def test_four_processes_have_the_bits_of_one(four: list[dict[str, Any]], name: str) -> None:
    for found in four:
        _assert_same(found[name], _alone(name, 4))


def test_three_processes_have_the_bits_of_one_where_gradients_are_added(tmp_path: Path) -> None:
    for found in spawn(3, _train, 3, ("gradients added",), str(tmp_path)):
        _assert_same(found["gradients added"], _alone("gradients added", 3))


#: Trained with a room of 64 bytes, so that most messages are large.
BULK = (
    "plain",
    "two losses on one forward",
    "ids ahead",
    "weighted bags",
    "scaler, Inf on one rank",
    "gradients added",
)


def _train_in_bulk(rank: int, world: int, names: tuple[str, ...], has: tuple[bool, ...]) -> list[Any]:
    """Train where ranks' process groups have what stands for NCCL, or some do; count its calls, and the room."""
    group._ROOM = 64
    group._bulk_device = lambda _: torch.device("cpu") if has[rank] else None
    calls, exchange = [], dist.all_to_all_single

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(more["group"] is dist.group.WORLD)
        return exchange(*arguments, **more)

    dist.all_to_all_single = counted
    found = {name: run(CASES[name], world, rank) for name in names}
    return [found, calls, group.ranks_of().room]


@pytest.mark.parametrize("world", [2, 4])
def test_the_rest_of_large_messages_goes_through_the_process_group(world: int) -> None:
    names = BULK[: 6 if world == 2 else 2]
    for found, calls, room in spawn(world, _train_in_bulk, world, names, (True,) * world):
        for name in names:
            _assert_same(found[name], _alone(name, world))
        assert len(calls) > 50 and all(calls) and room <= 256  # grown by the first gather


def test_where_one_rank_has_no_nccl_all_messages_go_through_gloo() -> None:
    for found, calls, room in spawn(2, _train_in_bulk, 2, BULK[:1], (True, False)):
        _assert_same(found["plain"], _alone("plain", 2))
        assert calls == [] and room > 256


def _differ_in_bulk(rank: int) -> str:
    group._ROOM = 64
    group._bulk_device = lambda _: torch.device("cpu")
    table = bt.Embedding(100, 4).table
    with pytest.raises(RanksError) as error:
        table.lookup(np.arange(50)) if rank == 0 else table.contains(np.arange(7))
    return str(error.value)


def test_ranks_that_do_different_things_find_it_with_large_messages() -> None:
    for message in spawn(2, _differ_in_bulk):
        assert "rank 0 is at a lookup; rank 1 is at a contains of table 0, 'table'" in message


def _train_with_sums_per_rank(rank: int) -> dict[str, Any]:
    """Train where each rank first adds the gradients of a row, as most systems do."""
    arrive = Exchange.arrive

    def summed_first(self: Exchange, number: int, task: int, parts: list[Part]) -> None:
        local = self._tables[number]().local
        for part in parts:
            batch = local.batch(part.ids)
            part.ids, part.grads = batch.unique(), batch.sum(part.scaled())[0]
        arrive(self, number, task, parts)

    Exchange.arrive = summed_first
    return run(CASES["plain"], 2, rank)


def test_sums_of_each_rank_first_are_found() -> None:
    found = spawn(2, _train_with_sums_per_rank)[0]
    with pytest.raises(AssertionError, match="values that differ"):
        _assert_same(found, _alone("plain", 2))
