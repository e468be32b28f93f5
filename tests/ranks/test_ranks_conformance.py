"""The conformance suite on a table of two processes: this one runs the tests, the other one follows with no ids."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed import _native
from bunkbed.testing import TableTests
from bunkbed.torch.ranks import group
from bunkbed.window import Window
from rank_processes import free_port, start_group

#: Calls of the core that are collective, and what the other process gives: no ids.
COLLECTIVE = (
    "lookup",
    "get",
    "contains",
    "set",
    "erase",
    "removable",
    "forget_counts",
    "update",
    "rewind",
    "set_optimizer",
    "set_retention",
    "set_clock",
)
#: Counters that both processes have; of the others each has its part.
COMMON = ("updates", "commits", "threads")
NONE = np.empty(0, np.int64)
RULES = {field.name for field in dataclasses.fields(bb.Retention)}
_counter = itertools.count()


def _arguments(table: Any, name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a call with no ids, like the call `given` of the first process."""
    dim = table.dim
    if name == "lookup":
        return NONE, given[1], np.empty((0, dim), np.float32)
    if name == "get":
        return NONE, given[1], np.empty((0, *given[2].shape[1:]), np.float32)
    if name == "contains":
        return NONE, np.empty(0, np.bool_)
    if name == "set":
        return NONE, given[1], np.empty((0, *given[2].shape[1:]), np.float32)
    if name == "erase":
        return given if len(given) > 1 else (NONE,)  # of a sweep, each process has the ids of both
    if name == "update":
        return NONE, np.empty((0, dim), np.float32), *given[2:]
    return tuple(bb.Retention.from_native(one) if isinstance(one, _native.Retention) else one for one in given)


def _follow(port: int, pipe: Any) -> None:
    """Run the second process: do what the first one says, until it says "end"."""
    start_group(1, 2, port)
    tables: dict[int, Any] = {}
    while True:
        what, number, *given = pipe.recv()
        if what == "end":
            break
        # An error of the first process reaches this one, too; the first one has the test.
        with contextlib.suppress(Exception):
            if what == "make":
                tables[number] = _make(*given)
            elif what == "close":
                try:
                    tables.pop(number).core.close()
                finally:
                    pipe.send("closed")  # its files can be opened now
            elif what == "scan":
                pipe.send([(ids.copy(), [one.copy() for one in rows]) for ids, rows in tables[number]._scan(*given)])
            elif what in ("stats", "counted"):
                pipe.send(getattr(tables[number].core, what)(*given))
            else:
                given = [one.native() if isinstance(one, bb.Retention) else one for one in given]
                getattr(tables[number].core, what)(*given)
    dist.destroy_process_group()


def _make(places: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    sizes = kwargs["num_rows"], kwargs["dim"]
    others = {key: value for key, value in kwargs.items() if key not in ("num_rows", "dim")}
    rules = {key: others.pop(key) for key in RULES if key in others}
    retention = bb.Retention(**rules) if rules else None
    return bt.Embedding(*sizes, retention=retention, **others, **places).table


class _Leader:
    """The first process: makes tables whose collective calls are made by both."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def make(self, places: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        kwargs = {"seed": 0, **kwargs}  # a layer would draw one
        number = next(_counter)
        self._pipe.send(("make", number, places, kwargs))
        table = _make(places, kwargs)
        core, pipe = table.core, self._pipe
        for name in COLLECTIVE:
            setattr(core, name, self._both(table, number, name, getattr(core, name)))
        close, stats, counted, scan = core.close, core.stats, core.counted, table._scan

        def close_both() -> None:
            is_open = not core.closed
            if is_open:
                pipe.send(("close", number))
            close()
            if is_open:
                assert pipe.recv() == "closed"

        def all_stats() -> dict[str, Any]:
            mine = stats()
            pipe.send(("stats", number))
            return {
                key: value if key in COMMON else value + other
                for (key, value), other in zip(mine.items(), pipe.recv().values(), strict=True)
            }

        def all_counted(part: int, parts: int) -> tuple[Any, ...]:
            mine = counted(part, parts)
            pipe.send(("counted", number, part, parts))
            theirs = pipe.recv()
            return *(np.concatenate(both) for both in zip(mine[:3], theirs[:3], strict=True)), max(mine[3], theirs[3])

        def whole_scan(fields: Any, chunk: int) -> Iterator[Any]:
            yield from scan(fields, chunk)
            pipe.send(("scan", number, fields, chunk))
            yield from pipe.recv()

        core.close, core.stats, core.counted, table._scan = close_both, all_stats, all_counted, whole_scan
        table.scan = functools.partial(bb.Table.scan, table)
        table.scan_slots = functools.partial(bb.Table.scan_slots, table)
        return table

    def _both(self, table: Any, number: int, name: str, call: Any) -> Any:
        def made(*given: Any) -> Any:
            self._pipe.send((name, number, *_arguments(table, name, given)))
            return call(*given)

        return made


@pytest.fixture(scope="module")
def leader() -> Iterator[_Leader]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bunkbed.torch", "pytest"])
    port = free_port()
    ours, theirs = context.Pipe()
    process = context.Process(target=_follow, args=(port, theirs), daemon=True)
    process.start()
    start_group(0, 2, port)
    yield _Leader(ours)
    ours.send(("end", 0))
    dist.destroy_process_group()
    process.join(10)
    assert process.exitcode == 0
    for _, ranks in group._known.values():  # its thread: this process goes on with other tests
        ranks.end()
    group._known.clear()


class _RankTests(TableTests):
    """The suite on a table of two processes."""

    @pytest.fixture(autouse=True)
    def _lead(self, leader: _Leader) -> None:
        self.leader = leader

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        return self.leader.make({}, kwargs)

    def test_topk_is_exact(self, pair: Any, k: int = 1) -> None:
        """A reader does it: no process has all rows."""
        with pytest.raises(bb.BunkbedError, match="topk"):
            pair[0].topk(np.zeros((1, self.dim), np.float32), k)

    def test_a_window_moves_no_value(self, pair: Any) -> None:
        """`bunkbed.torch.lookahead` plans for all processes."""
        with Window(pair[0]) as window, pytest.raises(bb.BunkbedError, match="lookahead"):
            window.push(np.array([1]))


class TestRanksInRam(_RankTests):
    """In RAM."""


class TestRanksWithFiles(_RankTests):
    """In files, which one process opens again."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        return self.leader.make({"path": tmp_path / "table", "ram": "64MiB"}, kwargs)


class TestRanksWithSeveralShards(_RankTests):
    """With three shards in each process."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        return self.leader.make({"path": tmp_path / "table", "ram": "96MiB", "shards": 6}, kwargs)
