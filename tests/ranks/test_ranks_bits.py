"""W processes that share a table give the bits of one process that runs their batches one after another."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed.torch.base import groups
from bunkbed.torch.base.gradients import Part
from bunkbed.torch.ranks import group
from bunkbed.torch.ranks.exchange import Exchange
from rank_cases import Case, cases, run
from rank_processes import GROUP_SECONDS, spawn

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


# ---- Large messages go through the ranks' own process group, which has NCCL on GPUs and gloo here

TWO = (
    "plain",
    "two losses on one forward",
    "ids ahead",
    "weighted bags",
    "scaler, Inf on one rank",
    "gradients added",
)
GPUS = ("0", "1", "2", "3")
ROWS = 100_000


def _prepare(rank: int, gpus: tuple[str, ...], room: int = 0) -> list[str]:
    """Give this rank's process group gloo in the place of NCCL; return the list of its calls."""
    if room:
        group.Ranks._room = property(lambda _: room, lambda *_: None)
    groups.gpu_of = lambda _: (torch.device("cpu") if gpus[rank] else None, gpus[rank])
    calls, exchange = [], dist.all_to_all_single

    def counted(*arguments: Any, **more: Any) -> Any:
        assert more["group"] is dist.group.WORLD
        calls.append("rest")
        return exchange(*arguments, **more)

    dist.all_to_all_single = counted
    return calls


def _train_in_bulk(rank: int, world: int, names: tuple[str, ...], gpus: tuple[str, ...]) -> list[Any]:
    calls = _prepare(rank, gpus, 64)  # most messages are large
    found = {name: run(CASES[name], world, rank) for name in names}
    return [found, len(calls)]


@pytest.mark.parametrize(("world", "names"), [(2, TWO), (4, TWO[:2])])
def test_large_messages_have_the_bits_of_one_process(world: int, names: tuple[str, ...]) -> None:
    said = spawn(world, _train_in_bulk, world, names, GPUS)
    for found, calls in said:
        for name in names:
            _assert_same(found[name], _alone(name, world))
        assert calls > 30 * len(names) // world


@pytest.mark.parametrize("gpus", [("0", ""), ("0", "0")])
def test_without_a_gpu_for_each_rank_all_goes_through_gloo(gpus: tuple[str, ...]) -> None:
    for found, calls in spawn(2, _train_in_bulk, 2, TWO[:1], gpus):
        _assert_same(found["plain"], _alone("plain", 2))
        assert calls == 0


def _loop(rank: int, layer: bt.Embedding, steps: int, *, ahead: bool = True, leaves: bool = False) -> None:
    """Train with messages that are larger than the room."""
    optimizer = bt.Optimizer(layer)

    def ids(step: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng([step, rank]).permutation(ROWS)[:40_000])

    loader = bt.lookahead(range(steps), layer, ids=lambda step: {layer: ids(step)}) if ahead else range(steps)
    for step in loader:
        if leaves and step == 3 and rank == 0:
            raise OSError("the loop is left")
        layer(ids(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _fail(rank: int, how: str) -> tuple[str, float]:
    calls = _prepare(rank, GPUS)
    layer = bt.Embedding(ROWS, 4, optimizer=bb.SGD(lr=0.1))
    _loop(rank, layer, 2)
    assert calls
    began = time.monotonic()
    with pytest.raises((bb.BunkbedError, OSError)) as error:
        if how == "leaves":
            _loop(rank, layer, 6, leaves=True)
        elif how == "mixed":
            _loop(rank, layer, 3, ahead=rank == 1)
        elif rank == 0:
            layer(torch.arange(40_000))
        else:
            layer.table.contains(np.arange(30_000))
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        # Where the first to hear of it has ended, the other one hears that.
        ("leaves", ("the loop is left", "rank")),
        ("mixed", ("the ranks do not do the same", "rank")),
        ("other calls", (2 * ("rank 0 is at a lookup; rank 1 is at a contains of table 0, 'table'",))),
    ],
)
def test_ranks_that_do_different_things_hear_of_it_at_once(how: str, messages: tuple[str, str]) -> None:
    for (message, seconds), wanted in zip(spawn(2, _fail, how), messages, strict=True):
        assert wanted in message and seconds < GROUP_SECONDS / 2


class _Recomputed(nn.Module):
    """A model whose lookup is made again in the backward pass; `head` is used by one rank only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = bt.Embedding(5000, 32, optimizer=bb.SGD(lr=0.1), seed=1)
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor, uses_head: bool) -> torch.Tensor:
        found: torch.Tensor = checkpoint(lambda ids: torch.tanh(self.first(self.rows(ids))), ids, use_reentrant=False)
        return (self.head(found) if uses_head else found).sum()


def _train_recomputed(rank: int) -> list[str]:
    calls = _prepare(rank, GPUS)
    model = _Recomputed()
    whole = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.001)

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses other annotations than its own
        calls.append("reduction")
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda one: one.value()[0] / 2)

    whole.register_comm_hook(None, reduce)
    optimizer = bt.Optimizer(whole)
    for step in range(3):
        ids = torch.from_numpy(np.random.default_rng([step, rank]).integers(0, 5000, 4000))
        whole(ids, rank == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return calls


def test_a_lookup_that_is_made_again_does_not_get_between_reductions() -> None:
    one, other = spawn(2, _train_recomputed)
    assert one == other and "rest" in one and one.count("reduction") >= 3
