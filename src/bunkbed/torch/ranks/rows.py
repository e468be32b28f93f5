"""`RankRows`: the rows of a table that several ranks share, with the interface of the core of a table.

Calls that read or change rows, and changes of hyperparameters, are collective: every rank makes them, with its own ids,
which may be none. `stage` and facts are this rank's own. A change has two phases, as in
`bunkbed.sharded.base.rows`: every rank checks and prepares, all hear of any error, and only then every rank applies its
part.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.types import Array, Json
from bunkbed.errors import BunkbedError, TableClosedError
from bunkbed.sharded.base.bag_pooling import BagPooling
from bunkbed.sharded.base.rows import ShardedBatch, ShardedRows, checker_of
from bunkbed.table.sweeps import first_removable
from bunkbed.table.table import Table
from bunkbed.torch.ranks.exchange import exchange_of
from bunkbed.torch.ranks.group import Kind, Ranks
from bunkbed.torch.ranks.plan import empty_rows, split_by_owner

_ASK = Kind(20, "a read of rows")
_ANSWER = Kind(21, "the answer to a read of rows")
_CHANGE = Kind(22, "a change of rows")
_READY = Kind(23, "the check of a change")


class Changes:
    """Counts the changes that were made on all ranks of tables that are committed together.

    A change is a step, a call of `set`, new hyperparameters, or going back to a commit.

    Attributes:
        condition: held while this rank applies its part of a change, and notified afterwards.
        count: the number of changes.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.RLock())
        self.count = 0


class RankRows:
    """Rows divided over ranks, seen from one rank. Not thread-safe, but its `Changes` are.

    Args:
        name: name of the table.
        spec: its definition.
        local: the rows that this rank owns.
        ranks: the processes that share the table.
        num_shards: shards of the table; shard s belongs to rank s * W // num_shards.
        changes: counts the changes.
    """

    def __init__(
        self, name: str, spec: _native.TableSpec, local: Table, ranks: Ranks, num_shards: int, changes: Changes
    ) -> None:
        self.name = name
        self.local = local
        self.ranks = ranks
        self.num_shards = num_shards
        self.dim = int(spec.dim)
        self.closed = False
        self._process = os.getpid()
        self._changes = changes
        self.exchange = exchange_of(ranks)
        self._checker = checker_of(name, spec)
        self._bags = BagPooling(name)
        self._last = ""  # the last change, for messages
        self.number = self.exchange.join(self)

    def progress(self) -> str:
        """Return what this rank has done with the table, for messages."""
        return f"step {self.step()}, {self.changes} changes{self._last}"

    @property
    def changes(self) -> int:
        """Changes that were made on all ranks."""
        return self._changes.count

    @property
    def is_own(self) -> bool:
        """Whether this process opened the table; in a forked child locks may never be released."""
        return os.getpid() == self._process

    def require_open(self) -> None:
        """Raise TableClosedError if the table is closed, or this process is a fork of the one that opened it."""
        if not self.is_own:
            raise TableClosedError(
                f"table '{self.name}' was opened before this process was forked; a DataLoader worker should pass ids "
                "on, not look them up"
            )
        if self.closed:
            raise TableClosedError(f"table '{self.name}' is closed; make its layer again on every rank")

    # ---- This rank's part

    def read(self, ids: Ids, touch: bool) -> Floats:
        """Return rows that this rank owns, float32[N, dim]."""
        rows = empty_rows(len(ids), self.dim)
        if len(ids):
            self.local.core.lookup(ids, touch, rows)
        return rows

    def deduped(self, ids: Ids) -> _native.Batch:
        """Return the batch of int64[N] ids, with each id once.

        Raises:
            IndexError: an id outside the table.
        """
        return self._checker.batch(ids)

    @contextlib.contextmanager
    def changing(self, *facts: float) -> Iterator[None]:
        """Make a change of this rank's rows inside; `facts` must be equal on all ranks."""
        with self._changes.condition:
            yield
            self._changes.count += 1
            self.ranks.note(self.number, self.changes, *facts)
            self._last = f", last with {', '.join(f'{value:.9g}' for value in facts)}" if facts else ""
            self._changes.condition.notify_all()

    def check_change(self, batch: Any, *, is_step: bool, step: int | None = None) -> None:
        """Raise if this rank could not apply a step, or a `set`, of the rows of `batch`."""
        core = self.local.core
        rows = core if isinstance(core, ShardedRows) else self.local.plain_core
        rows.check_change(batch, is_step, step)

    # ---- Reading

    def lookup(self, ids: Ids, touch: bool, out: Floats) -> None:
        """See `bunkbed.Table.lookup`."""
        self.require_open()
        self.exchange.look_up(self, ids, out, touch=touch)

    def lookup_bags(
        self, ids: Ids, offsets: Ids, pooling: int, weights: Floats | None, touch: bool, out: Floats
    ) -> None:
        """See `bunkbed.Table.lookup_bags`. All rows of the call are in memory at the same time."""
        rows = empty_rows(len(ids), self.dim)
        self.lookup(ids, touch, rows)
        self.pool(rows, offsets, pooling, weights, out)

    def pool(self, rows: Floats, offsets: Ids, pooling: int, weights: Floats | None, out: Floats) -> None:
        """See `BagPooling.pool`."""
        self._bags.pool(rows, offsets, pooling, weights, out)

    def get(self, ids: Ids, field: int, out: Floats) -> None:
        """See `bunkbed.Table.get`."""
        what = f"a get of field {field} of table {self.number}, '{self.name}'"
        self._fill(what, ids, out, lambda own, found: self.local.core.get(own, field, found))

    def contains(self, ids: Ids, out: npt.NDArray[np.bool_]) -> None:
        """See `bunkbed.Table.contains`."""
        what = f"a contains of table {self.number}, '{self.name}'"
        self._fill(what, ids, out, lambda own, found: self.local.core.contains(own, found))

    def _fill(self, what: str, ids: Ids, out: Array, read: Callable[[Ids, Array], None]) -> None:
        """Call ``read(ids, out)`` on the owners of the ids; fill `out` in batch order. All ranks do the same `what`."""
        self.require_open()
        split, asked = self._send(_ASK.of(what), ids)
        own = np.concatenate([part.view(np.int64) for part in asked])
        sizes = [part.nbytes // 8 for part in asked]
        found = np.empty((len(own), *out.shape[1:]), out.dtype)
        try:
            read(own, found)
        except Exception as error:
            self.ranks.fail(_ANSWER, error)
        ends = np.cumsum(sizes)
        answers = self.ranks.swap(_ANSWER, [[found[end - size : end]] for end, size in zip(ends, sizes, strict=True)])
        split.put(np.concatenate([answer.view(out.dtype).reshape(-1, *out.shape[1:]) for answer in answers]), out)

    def _send(self, kind: Kind, ids: Ids, values: Array | None = None, check: Callable[[], object] = int) -> Any:
        """Send each owner its ids, and their values; return the split of the ids and what came from each rank."""
        try:
            self.deduped(ids)
            check()
            split = split_by_owner(ids, self.num_shards, self.ranks.world)
        except Exception as error:
            self.ranks.fail(kind, error)
        mine = split.take(ids)
        sorted_values = None if values is None else split.take(values)
        payloads = []
        for rank in range(self.ranks.world):
            place = split.part(rank)
            payload: list[Any] = [mine[place]]
            if sorted_values is not None:
                payload = [np.array([split.size(rank)], np.int64), mine[place], sorted_values[place]]
            payloads.append(payload)
        return split, self.ranks.swap(kind, payloads)

    # ---- Writing

    def set(self, ids: Ids, field: int, values: Floats) -> None:
        """See `bunkbed.Table.set`. Of equal ids the last one of the last rank is written."""
        self.require_open()
        probe = _native.create("", self.name, self.local.spec, 0, 0)
        what = f"a set of field {field} of table {self.number}, '{self.name}'"
        own, rows = self._come(what, ids, values, lambda: probe.set(ids, field, values))

        def ready() -> None:
            self.check_change(self.local.core.batch(own), is_step=False)

        self._change(ready, lambda: self.local.core.set(own, field, rows))

    def erase(self, ids: Ids, changes: int | None = None) -> tuple[int, int]:
        """See `bunkbed.Table.delete`: the ids of all ranks. Every rank returns the numbers of all ranks."""
        self.require_open()
        if changes is not None:  # of a sweep, which finds the same ids on all ranks: each sends a part
            ids = np.ascontiguousarray(ids[self.ranks.rank :: self.ranks.world])
        _, asked = self._send(_CHANGE.of(f"a delete of table {self.number}, '{self.name}'"), ids)
        own = np.concatenate([part.view(np.int64) for part in asked])
        erased = (0, 0)

        def apply() -> None:
            nonlocal erased
            erased = self.local.core.erase(own)  # calls of all ranks come in one order, so nothing changed meanwhile

        self._change(lambda: None, apply)
        counts = self.ranks.swap(_ANSWER, [[np.array(erased, np.int64)] for _ in range(self.ranks.world)])
        rows, after = np.sum([count.view(np.int64) for count in counts], axis=0).tolist()
        return rows, after

    def removable(
        self, rules: _native.Retention, now: int, most: int, only_expired: bool, after_key: int, after_id: int
    ) -> Json:
        """Return the rows that a sweep removes first, of all ranks in one order; `erase` takes them from any rank."""
        self.require_open()
        what = f"a sweep of table {self.number}, '{self.name}'"
        found: Json = {}
        try:
            found = self.local.core.removable(rules, now, most, only_expired, after_key, after_id)
        except Exception as error:
            self.ranks.fail(_ASK.of(what), error)
        facts = [most, found["rows"], found["expired"], found["changes"], *found["ages"], *found["counts"]]
        mine = [np.array(facts, np.int64), found["keys"], found["ids"]]
        parts = []
        for heard in self.ranks.swap(_ASK.of(what), [mine for _ in range(self.ranks.world)]):
            numbers = heard[: 8 * len(facts)].view(np.int64).tolist()
            keys, ids = np.split(heard[8 * len(facts) :], 2)
            most = min(most, numbers[0])  # ranks may have unlike budgets
            parts.append(
                {
                    "rows": numbers[1],
                    "expired": numbers[2],
                    "changes": numbers[3],
                    "ages": numbers[4 : 4 + len(found["ages"])],
                    "counts": numbers[4 + len(found["ages"]) :],
                    "keys": keys.view(np.uint64),
                    "ids": ids.view(np.int64),
                }
            )
        return first_removable(parts, most)

    def counted(self, part: int, parts: int) -> tuple[Ids, Ids, Ids, int]:
        """Return this rank's ids of a part that steps have named and not stored; see `ShardedRows.counted`."""
        self.require_open()
        return self.local.core.counted(part, parts)

    def set_counts(self, ids: Ids, counts: Ids, times: Ids) -> None:
        """Give ids that are not stored the counts of another table; the ids of all ranks."""
        self.require_open()
        facts = np.ascontiguousarray(np.column_stack((counts, times)), np.int64).view(np.float32)  # bits, moved only
        own, heard = self._come(f"counts of table {self.number}, '{self.name}'", ids, facts, lambda: None)
        numbers = np.ascontiguousarray(heard).view(np.int64).reshape(-1, 2).T.copy()
        self._change(lambda: None, lambda: self.local.core.set_counts(own, numbers[0], numbers[1]))

    def forget_counts(self, before: int) -> int:
        """Forget counts of ids of this rank's rows, as every rank does in its sweep; return how many."""
        self.require_open()
        forgotten = 0

        def apply() -> None:
            nonlocal forgotten
            forgotten = self.local.core.forget_counts(before)

        self._change(lambda: None, apply)
        return forgotten

    def update(self, ids: Ids, grads: Floats, lr: float | None, step: int | None) -> None:
        """See `bunkbed.Table.update`: one step with the gradients of all ranks, added in the order of ranks."""
        self.require_open()

        def check() -> None:
            if not np.isfinite(grads).all():
                self._checker.update(ids, grads, lr, None)  # raises and names the value that is not finite

        own, values = self._come(f"an update of table {self.number}, '{self.name}'", ids, grads, check)
        batch = self.local.core.batch(own)
        sums, norm = batch.sum(values)
        number = self.step() + 1 if step is None else step

        def ready() -> None:
            if not math.isfinite(norm):
                self._checker.update(own, values, lr, None)  # raises and names the sum that overflows
            self.check_change(batch, is_step=True, step=number)

        self._change(
            ready, lambda: self.local.core.update_batch(batch, sums, lr, number), -1.0 if lr is None else lr, number
        )

    def _come(self, what: str, ids: Ids, values: Floats, check: Callable[[], object]) -> tuple[Ids, Floats]:
        """Send ids and values to their owners; return what this rank owns, in the order of ranks."""
        _, heard = self._send(_CHANGE.of(what), ids, values, check)
        own, rows = [], []
        for part in heard:
            count = int(part[:8].view(np.int64)[0])
            own.append(part[8 : 8 + count * 8].view(np.int64))
            rows.append(part[8 + count * 8 :].view(np.float32).reshape(count, -1) if count else values[:0])
        return np.concatenate(own), np.concatenate(rows)

    def _change(self, ready: Callable[[], object], apply: Callable[[], object], *facts: float) -> None:
        error: Exception | None = None
        try:
            ready()
        except Exception as raised:
            error = raised
        self.ranks.swap(_READY, [[] for _ in range(self.ranks.world)], error)
        with self.changing(*facts):
            apply()

    # ---- A training step in three calls

    def batch(self, ids: Ids) -> ShardedBatch:
        """See `bunkbed.Table.batch`."""
        return ShardedBatch(self.deduped(ids), ids.copy())

    def lookup_batch(self, batch: ShardedBatch, touch: bool, out: Floats) -> None:
        """See `bunkbed.Table.lookup_batch`."""
        self.lookup(batch.ids, touch, out)

    def update_batch(self, batch: ShardedBatch, sums: Floats, lr: float | None, step: int | None) -> None:
        """See `bunkbed.Table.update_batch`: each rank's sums are added, in the order of ranks."""
        self.update(batch.unique(), sums, lr, step)

    # ---- Coming batches: `lookahead` plans for all ranks. A call on one table moves this rank's rows only.

    def stage(self, ids: Ids) -> None:
        """See `bunkbed.Table.stage`."""
        self.require_open()
        self._checker.stage(ids)  # an error for a wrong id; has no rows to stage
        split = split_by_owner(ids, self.num_shards, self.ranks.world)
        self.local.core.stage(split.take(ids)[split.part(self.ranks.rank)])

    def expect(self, ids: Ids, most: int) -> int:
        """Raise BunkbedError: a window of one rank does not know what the others will ask of it."""
        raise BunkbedError(
            f"table '{self.name}' is shared by {self.ranks.world} processes, so a window of one process cannot plan; "
            "use bunkbed.torch.lookahead"
        )

    def advance(self, over: int, begins: int, depth: int) -> None:
        """Do nothing: see `expect`."""

    def forget(self, number: int) -> None:
        """Do nothing: see `expect`."""

    # ---- Facts

    def step(self) -> int:
        """Return the steps taken; equal on all ranks."""
        return int(self.local.core.step())

    def payload_bytes(self) -> int:
        """Return the bytes of a row's record."""
        return int(self.local.core.payload_bytes())

    def fields(self) -> list[tuple[str, int]]:
        """Return (name, length) of every field of a record."""
        return list(self.local.core.fields())

    def optimizer(self) -> Json:
        """Return the optimizer's values."""
        return self.local.core.optimizer()

    def set_optimizer(self, values: Json) -> None:
        """See `bunkbed.Table.optimizer`; every rank must make the same change."""
        self._checker.set_optimizer(values)
        self._set_alike(
            f"new hyperparameters of table {self.number}",
            lambda: self.local.core.set_optimizer(values),
            *(float(value) for value in _numbers(values)),
        )

    def retention(self) -> _native.Retention:
        """Return the rules by which rows go; equal on all ranks."""
        return self.local.core.retention()

    def set_retention(self, rules: _native.Retention) -> None:
        """See `bunkbed.Table.retention`; every rank must make the same change."""
        self._set_alike(
            f"new rules of table {self.number}",
            lambda: self.local.core.set_retention(rules),
            *(rules.expire, rules.max_rows, rules.evict, rules.keep, rules.admit, rules.admit_from),
        )

    def clock(self) -> int:
        """Return the time of the table's clock; equal on all ranks."""
        return self.local.core.clock()

    def set_clock(self, now: int) -> None:
        """See `bunkbed.Table.clock`; every rank must set the same."""
        self._set_alike(f"a new time of table {self.number}", lambda: self.local.core.set_clock(now), now)

    def _set_alike(self, what: str, change: Callable[[], object], *facts: float) -> None:
        self.require_open()
        facts = tuple(part for fact in facts for part in _exact(fact))
        # An exchange, so that no rank is a change ahead of one that asks for a commit.
        self.ranks.swap(_READY.of(what), [[] for _ in range(self.ranks.world)])
        with self.changing(*facts):
            change()

    def stats(self) -> dict[str, int | float]:
        """Return the counters of this rank's rows."""
        return self.local.core.stats()


def _exact(fact: float) -> tuple[float, ...]:
    """Return float64 numbers that differ where two facts do: an int64 in two parts."""
    return (float(fact >> 32), float(fact & 0xFFFFFFFF)) if isinstance(fact, int) else (fact,)


def _numbers(values: Json) -> Iterator[float]:
    for value in values.values():
        if isinstance(value, (int, float)):
            yield float(value)
        elif isinstance(value, (list, tuple)):
            yield from (float(one) for one in value)
