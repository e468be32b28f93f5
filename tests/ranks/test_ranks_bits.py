"""W processes that share a table give the bits of one process that runs their batches one after another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bunkbed.torch.base.gradients import Part
from bunkbed.torch.ranks.exchange import Exchange
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
