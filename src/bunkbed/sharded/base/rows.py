"""The rows of a sharded table: each call is divided among the shards.

`ShardedRows` has those methods of `_native.Table` that are about rows; `bunkbed.sharded.core` adds commits. Rules:

1. The arguments of the whole batch are checked before a shard is called, so that messages name the sharded table and
   positions in the caller's batch. The *checker* raises these errors: an empty core in RAM with the name and the
   definition of the table.
2. A shard's part keeps the order of the batch, so the sums of equal ids have the same bits. Bags are pooled here, in
   batch order, from gathered rows.
3. A change has two phases. *Prepare*: each shard finds the unique ids of its part and sums its gradients, and checks
   that it can apply the part (it is writable, its files have room). An error here leaves the table unchanged. *Apply*:
   every shard applies its part and counts the step. Where this fails in some shards only (a read, or memory for the
   directory), the shards no longer agree: the table is *torn*, and accepts only a return to a commit.
4. A change is applied on other threads than the main thread, where Ctrl-C could interrupt it between two shards.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.types import Array, Json
from bunkbed.errors import BunkbedError, ReadOnlyError, TableClosedError
from bunkbed.files.sharding import Split
from bunkbed.sharded.base.bag_pooling import BagPooling
from bunkbed.table.sweeps import first_removable

#: Up to this many ids one thread works on all shards: starting work on other threads costs about as much as the lookup.
FEW_IDS = 256

_NO_IDS: Ids = np.empty(0, np.int64)
# Keys of `Table.stats` that are not the sum over the shards: counted here, or the maximum over the shards.
_OWN = ("lookups", "updates")
_MOST = ("commits", "window_batches", "staging_depth")
_ALWAYS_FITS = 65504.0  # the largest float16, which every dtype can represent


_R = TypeVar("_R")


class ShardedBatch:
    """The ids of a training step with their unique ids, over all shards: the result of `bunkbed.ShardedTable.batch`."""

    def __init__(self, batch: _native.Batch, ids: Ids) -> None:
        self._batch = batch
        self.ids = ids  # int64[N], a copy
        self.sum = batch.sum
        self.sum_squares = batch.sum_squares
        self.sum_bags = batch.sum_bags
        self.num_ids = batch.num_ids

    def __len__(self) -> int:
        return len(self._batch)

    def unique(self) -> Ids:
        """Return int64[U], each id once. The order depends only on the batch."""
        found: Ids = self._batch.unique()
        return found


class ShardedRows:
    """Rows of a sharded table, with the interface of `_native.Table`.

    Owns threads, not the shards. Thread-safe: calls run one after another, like those of one core.

    Args:
        name: name of the sharded table.
        spec: definition of each shard, and so of the whole table.
        cores: the cores of the shards, in order.
        writable: False for readers.
        num_shards: shards of the whole table, of which these are some; default: all.
        first: the number of the first of these.
    """

    def __init__(
        self,
        name: str,
        spec: _native.TableSpec,
        cores: Sequence[_native.Table],
        *,
        writable: bool,
        num_shards: int | None = None,
        first: int = 0,
    ) -> None:
        self.name = name
        self._num_shards = len(cores) if num_shards is None else num_shards
        self._owned = range(first, first + len(cores))
        self._spec = spec
        self._cores = list(cores)
        self._writable = writable
        self._checker = checker_of(name, spec)
        self._bags = BagPooling(name)
        self._lock = threading.RLock()  # guards the fields below and the order of calls
        self._closed = False
        self._torn = ""  # the reason why the shards do not agree, or empty
        self._counts = dict.fromkeys(_OWN, 0)
        self._window: dict[int, list[int]] = {}  # number of a coming batch -> its numbers in the shards
        self._batches_seen = 0
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(len(self._cores) + 1, thread_name_prefix="bunkbed-shard")

    @property
    def cores(self) -> list[_native.Table]:
        """The cores of the shards, in order."""
        return list(self._cores)

    # ---- Checks before a call

    @contextlib.contextmanager
    def alone(self, *, write: bool = False, torn: bool = False) -> Iterator[None]:
        """Keep other threads from the rows inside. Raise where the shards do not agree, unless `torn`."""
        self._require_own_process()  # before the lock is taken: another thread of the parent may have held it
        with self._lock:
            self._require_open()
            if self._torn and not torn:
                raise BunkbedError(self._refusal())
            if write:
                self._require_writer()
            yield

    def _require_own_process(self) -> None:
        if self._pid != os.getpid():
            raise TableClosedError(
                f"table '{self.name}' was opened before this process was forked; open it in the process that uses it "
                "(a DataLoader worker should pass ids on, not look them up)"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise TableClosedError(f"table '{self.name}' is closed; open it again")

    def tear(self, reason: str) -> None:
        """Refuse use until `mend`: the caller changes one shard after another."""
        self._torn = reason

    def mend(self) -> None:
        """Allow use again: the caller has made the shards agree."""
        self._torn = ""

    def _require_writer(self) -> None:
        if not self._writable:
            raise ReadOnlyError(f"table '{self.name}' is open for reading; open it with mode=\"w\" to change it")

    def _refusal(self) -> str:
        how = (
            "go back with rewind(), or close(commit=False) and open it again: both lead to a commit, without what came "
            "after it"
            if self._writable
            else "call refresh(), or open it again"
        )
        return f"table '{self.name}' refuses use: {self._torn}; {how}"

    # ---- Work on several shards

    def _each(
        self, work: Callable[[int, _native.Table], _R], size: int, among: Sequence[int] | None = None
    ) -> list[_R]:
        """Run ``work(index, core)`` for shards, for `size` ids in all. Raise the first error when all have ended."""
        results = self._outcomes(work, size, among)
        return [_result(result) for result in results]

    def _submit(self, work: Callable[[], _R]) -> Future[_R]:
        """Submit work to another thread. If a profiler records this thread's stalls, it records those too."""
        ranges = _native.stall_ranges()
        if ranges is None:
            return self._threads.submit(work)
        return self._threads.submit(cast("Callable[..., _R]", _native.with_stalls), ranges, work)

    def _outcomes(
        self, work: Callable[[int, _native.Table], _R], size: int, among: Sequence[int] | None = None
    ) -> list[_R | _Failed]:
        """Run as `_each` does, but return a `_Failed` for each shard that raised."""

        def one(index: int) -> _R | _Failed:
            try:
                return work(index, self._cores[index])
            except Exception as error:
                return _Failed(error)

        indices = range(len(self._cores)) if among is None else among
        if len(indices) < 2 or size <= FEW_IDS or _native.get_num_threads() == 1:
            return [one(index) for index in indices]
        others: list[Future[_R | _Failed]] = [self._submit(partial(one, index)) for index in indices[1:]]
        try:
            first = one(indices[0])
        finally:
            wait(others)
        return [first, *(other.result() for other in others)]

    def _change(self, what: str, work: Callable[[int, _native.Table], object], size: int) -> None:
        """Apply ``work(index, core)`` to every shard. If only some shards fail, mark the table torn and raise."""

        def run() -> list[object]:
            results = self._outcomes(work, size)
            if not any(isinstance(result, _Failed) for result in results):
                self._torn = ""
            return results

        self._torn = f"{what} was interrupted between two shards"  # until `run` has ended
        if threading.current_thread() is not threading.main_thread():
            results = run()
        else:
            future = self._submit(run)
            try:
                results = future.result()
            except BaseException:
                wait([future])
                self._judge(what, future.result())
                raise
        self._judge(what, results)

    def _judge(self, what: str, results: list[object]) -> None:
        failed = [(index, one.error) for index, one in enumerate(results) if isinstance(one, _Failed)]
        if not failed:
            return
        first, error = failed[0]
        if len(failed) == len(results) and not self._is_broken():
            self._torn = ""
            raise error  # every shard failed before it changed anything
        self._torn = (
            f"{what} failed in shard {first} of {len(results)} after other shards had taken their part ({error})"
        )
        raise BunkbedError(self._refusal()) from error

    def _prepare(self, core: _native.Table, ids: Ids, *, is_step: bool, step: int | None = None) -> _native.Batch:
        """Return the batch of a shard's part; raise where the shard could not apply it."""
        batch = core.batch(ids)
        core.check_change(batch, is_step, step)
        return batch

    def _is_broken(self) -> bool:
        """Return whether a shard refuses use, as it does after a failure in the middle of a change."""
        return any(map(_refuses_use, self._cores))

    def check_ids(self, ids: Ids) -> None:
        """Raise IndexError that names the first id outside the table and its position."""
        self._checker.expect(ids, 0)  # the checker has no rows, so this only checks the ids

    def _split(self, ids: Ids) -> Split:
        self.check_ids(ids)
        return Split.by_shard(ids, self._num_shards, self._owned)

    @staticmethod
    def _holders(split: Split) -> list[int]:
        return [index for index in range(len(split.bounds) - 1) if split.size(index)]

    def _fill(self, ids: Ids, out: Array, read: Callable[[_native.Table, Ids, Array], None]) -> None:
        """Call ``read(core, ids, out)`` of every shard that has some of the ids; fill `out` in batch order."""
        split = self._split(ids)
        mine = split.take(ids)
        found = out if split.order is None else np.empty_like(out)

        def work(index: int, core: _native.Table) -> None:
            part = split.part(index)
            read(core, mine[part], found[part])

        self._each(work, len(ids), self._holders(split))
        split.put(found, out)

    # ---- Reading

    def lookup(self, ids: Ids, touch: bool, out: Floats) -> None:
        """See `bunkbed.Table.lookup`."""
        with self.alone():
            self._counts["lookups"] += 1
            self._fill(ids, out, lambda core, part, rows: core.lookup(part, touch, rows))

    def batch(self, ids: Ids) -> ShardedBatch:
        """See `bunkbed.Table.batch`."""
        with self.alone():
            return ShardedBatch(self._checker.batch(ids), ids.copy())

    def lookup_batch(self, batch: ShardedBatch, touch: bool, out: Floats) -> None:
        """See `bunkbed.Table.lookup_batch`."""
        self.lookup(batch.ids, touch, out)

    def lookup_bags(
        self, ids: Ids, offsets: Ids, pooling: int, weights: Floats | None, touch: bool, out: Floats
    ) -> None:
        """See `bunkbed.Table.lookup_bags`. All rows of the call are in memory at the same time."""
        rows: Floats = _native.empty_rows(len(ids), self._spec.dim)
        self.lookup(ids, touch, rows)
        self._bags.pool(rows, offsets, pooling, weights, out)

    def get(self, ids: Ids, field: int, out: Floats) -> None:
        """See `bunkbed.Table.get`."""
        with self.alone():
            self._fill(ids, out, lambda core, part, values: core.get(part, field, values))

    def contains(self, ids: Ids, out: npt.NDArray[np.bool_]) -> None:
        """See `bunkbed.Table.contains`."""
        with self.alone():
            self._fill(ids, out, lambda core, part, found: core.contains(part, found))

    def scans(self, fields: list[int]) -> list[_native.Scan]:
        """Return a scan of each shard. All start now, so a later change of the table makes each scan raise."""
        with self.alone():
            return [_native.Scan(core, fields) for core in self._cores]

    # ---- Writing

    def update(self, ids: Ids, grads: Floats, lr: float | None, step: int | None) -> None:
        """See `bunkbed.Table.update`."""
        with self.alone(write=True):
            ids = ids.copy()  # another thread may write to the caller's array, and a row would get into a wrong shard
            split = self._split(ids)
            mine, values = split.take(ids), split.take(grads)

            def prepare(index: int, core: _native.Table) -> tuple[_native.Batch, Floats, float]:
                part = split.part(index)
                batch = self._prepare(core, mine[part], is_step=True, step=step)
                return (batch, *batch.sum(values[part]))

            prepared = self._each(prepare, len(ids))
            if not all(np.isfinite(norm) for _, _, norm in prepared):
                self._checker.update(ids, grads, lr, step)  # raises and names the value that is not finite
            self._apply([(batch, sums) for batch, sums, _ in prepared], lr, step, len(ids))

    def update_batch(self, batch: ShardedBatch, sums: Floats, lr: float | None, step: int | None) -> None:
        """See `bunkbed.Table.update_batch`."""
        with self.alone(write=True):
            ids = batch.unique()
            split = Split.by_shard(ids, self._num_shards, self._owned)
            mine, values = split.take(ids), split.take(sums)

            def prepare(index: int, core: _native.Table) -> tuple[_native.Batch, Floats]:
                part = split.part(index)
                shard = self._prepare(core, mine[part], is_step=True, step=step)
                return shard, shard.sum(values[part])[0]  # brings the sums into the order of the shard's batch

            self._apply(self._each(prepare, len(ids)), lr, step, len(ids))

    def check_change(self, batch: ShardedBatch, is_step: bool, step: int | None) -> None:
        """Raise where a shard could not apply a step, or a `set`, with this batch."""
        with self.alone(write=True):
            ids = batch.unique()
            split = self._split(ids)
            mine = split.take(ids)

            def prepare(index: int, core: _native.Table) -> None:
                self._prepare(core, mine[split.part(index)], is_step=is_step, step=step)

            self._each(prepare, len(ids))

    def _apply(self, parts: list[tuple[_native.Batch, Floats]], lr: float | None, step: int | None, size: int) -> None:
        number = self._cores[0].step() + 1 if step is None else step  # the same in all shards, also without rows

        def apply(index: int, core: _native.Table) -> None:
            core.update_batch(*parts[index], lr, number)

        self._change(f"step {number}", apply, size)
        self._counts["updates"] += 1

    def set(self, ids: Ids, field: int, values: Floats) -> None:
        """See `bunkbed.Table.set`."""
        with self.alone(write=True):
            ids = ids.copy()  # see update()
            split = self._split(ids)
            if not (values.max(initial=0.0) < _ALWAYS_FITS and values.min(initial=0.0) > -_ALWAYS_FITS):
                # A temporary table in RAM raises and names the value if one does not fit the dtype.
                _native.create("", self.name, self._spec, 0, 0).set(ids, field, values)
            mine, rows = split.take(ids), split.take(values)
            self._each(lambda index, core: self._prepare(core, mine[split.part(index)], is_step=False), len(ids))

            def apply(index: int, core: _native.Table) -> None:
                core.set(mine[split.part(index)], field, rows[split.part(index)])

            self._change("set()", apply, len(ids))

    def erase(self, ids: Ids, changes: int | None = None) -> tuple[int, int]:
        """See `bunkbed.Table.delete`; raise if rows were changed after `changes` of `removable`."""
        with self.alone(write=True):
            if changes is not None and changes != sum(core.changes() for core in self._cores):
                raise BunkbedError(
                    f"table '{self.name}' was changed while its rows to remove were searched; sweep it between two "
                    "steps; nothing was changed"
                )
            split = self._split(ids)
            mine = split.take(ids)
            erased = [(0, 0)] * len(self._cores)

            def apply(index: int, core: _native.Table) -> None:
                erased[index] = core.erase(mine[split.part(index)])

            self._change("delete()", apply, len(ids))
            return sum(rows for rows, _ in erased), sum(changes for _, changes in erased)

    def removable(
        self, rules: _native.Retention, now: int, most: int, only_expired: bool, after_key: int, after_id: int
    ) -> Json:
        """Return the rows that a sweep removes first, of all shards in one order."""
        with self.alone():
            return first_removable(
                self._each(
                    lambda _, core: core.removable(rules, now, most, only_expired, after_key, after_id), FEW_IDS + 1
                ),
                most,
            )

    def counted(self, part: int, parts: int) -> tuple[Ids, Ids, Ids, int]:
        """Return ids of a part that steps have named and not stored, their counts and times, and the times' bound."""
        with self.alone():
            found = [core.counted(part, parts) for core in self._cores]
        ids, counts, times = (np.concatenate([one[place] for one in found]) for place in range(3))
        return ids, counts, times, max(one[3] for one in found)

    def set_counts(self, ids: Ids, counts: Ids, times: Ids) -> None:
        """Give ids that are not stored the counts of another table."""
        with self.alone(write=True):
            split = self._split(ids)
            mine, numbers, last = split.take(ids), split.take(counts), split.take(times)

            def apply(index: int, core: _native.Table) -> None:
                here = split.part(index)
                core.set_counts(mine[here], numbers[here], last[here])

            self._change("set_counts()", apply, len(ids))

    def forget_counts(self, before: int) -> int:
        """Forget the counts of ids that were last named before this time; return how many."""
        with self.alone(write=True):
            return sum(core.forget_counts(before) for core in self._cores)

    def write_dirty(self) -> None:
        """Start to write dirty rows, as far as the shards' write buffers have room."""
        with self.alone(write=True):
            for core in self._cores:
                core.write_dirty()

    # ---- Coming batches

    def stage(self, ids: Ids) -> None:
        """See `bunkbed.Table.stage`."""
        with self.alone():
            split = self._split(ids)
            mine = split.take(ids)
            for index in self._holders(split):
                self._cores[index].stage(mine[split.part(index)])

    def expect(self, ids: Ids, most: int) -> int:
        """Enter a batch into the windows of all shards or none; return its number, 0 or ``WINDOW_FULL``."""
        with self.alone():
            split = self._split(ids)
            mine = split.take(ids)
            numbers: list[int] = []
            for index, core in enumerate(self._cores):
                number = int(core.expect(mine[split.part(index)], most))
                if number == _native.Table.WINDOW_FULL:
                    for entered, earlier in zip(numbers, self._cores, strict=False):
                        if entered:
                            earlier.forget(entered)
                    return number
                numbers.append(number)
            if not any(numbers):
                return 0
            self._batches_seen += 1
            self._window[self._batches_seen] = numbers
            return self._batches_seen

    def advance(self, over: int, current: int, depth: int) -> None:
        """End one batch and begin the next; prefetch rows of the batches after it."""
        with self.alone():
            none = [0] * len(self._cores)
            ended, present = self._window.pop(over, none), self._window.get(current, none)
            for core, one, other in zip(self._cores, ended, present, strict=True):
                core.advance(one, other, depth)

    def forget(self, number: int) -> None:
        """Remove a coming batch from the windows."""
        self._require_own_process()
        with self._lock:
            for core, one in zip(self._cores, self._window.pop(number, []), strict=False):
                if one:
                    core.forget(one)

    # ---- Facts

    def stats(self) -> dict[str, int | float]:
        """See `bunkbed.Table.stats`."""
        self._require_own_process()
        with self._lock:
            every = [core.stats() for core in self._cores]
            return {
                key: self._counts[key] if key in _OWN else (max if key in _MOST else sum)(one[key] for one in every)
                for key in every[0]
            }

    def step(self) -> int:
        """Return the steps taken; the same in every shard unless the table is torn."""
        return int(self._cores[0].step())

    def is_changed(self) -> bool:
        """Return whether the table changed after the last commit."""
        return any(core.is_changed() for core in self._cores)

    def uncommitted(self) -> tuple[int, bool, int]:
        """Return the changes since the last commit: (rows, True if exact or False if an upper bound, steps)."""
        every = [core.uncommitted() for core in self._cores]
        return sum(one[0] for one in every), all(one[1] for one in every), max(one[2] for one in every)

    def payload_bytes(self) -> int:
        """Return the bytes of a row's record."""
        return int(self._cores[0].payload_bytes())

    def fields(self) -> list[tuple[str, int]]:
        """Return (name, length) of every field of a record."""
        return list(self._cores[0].fields())

    def optimizer(self) -> Json:
        """Return the optimizer's values."""
        found: Json = self._cores[0].optimizer()
        return found

    def set_optimizer(self, values: Json) -> None:
        """See `bunkbed.Table.optimizer`."""
        with self.alone():
            self._checker.set_optimizer(values)
            self._change("new hyperparameters", lambda _, core: core.set_optimizer(values), 0)

    def retention(self) -> _native.Retention:
        """Return the rules by which rows go."""
        return self._cores[0].retention()

    def set_retention(self, rules: _native.Retention) -> None:
        """See `bunkbed.Table.retention`."""
        with self.alone(write=True):
            self._change("new rules", lambda _, core: core.set_retention(rules), 0)

    def clock(self) -> int:
        """Return the time of the table's clock; the same in every shard."""
        return int(self._cores[0].clock())

    def set_clock(self, now: int) -> None:
        """See `bunkbed.Table.clock`."""
        with self.alone(write=True):
            self._change("a new time", lambda _, core: core.set_clock(now), 0)

    def set_device_cache(self, map: object | None, write_back: object | None) -> None:
        """Accept only None, which `Table.close` passes: a sharded table cannot have a device cache."""
        if map is not None:
            raise BunkbedError(f"table '{self.name}' is sharded, and a device cache wants a table that is not")

    def compact(self) -> int:
        """See `bunkbed.Table.compact`."""
        with self.alone(write=True):
            return sum(self._each(lambda _, core: core.compact(), FEW_IDS + 1))


def checker_of(name: str, spec: _native.TableSpec) -> _native.Table:
    """Return a table without rows, whose calls check arguments and name what is wrong."""
    checker = _native.create("", name, spec, 0, 0)
    if spec.retention.clock:
        checker.set_clock(0)  # else its updates would report this first
    return checker


class _Failed:
    """The exception that a shard raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _result(outcome: _R | _Failed) -> _R:
    if isinstance(outcome, _Failed):
        raise outcome.error
    return outcome


def _refuses_use(core: _native.Table) -> bool:
    try:
        core.expect(_NO_IDS, 1)
    except BunkbedError:
        return True
    return False
