"""One table: look up, update, commit. Making and opening tables is in `opening`."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from bunkbed import _native
from bunkbed.core.arguments import (
    Floats,
    Ids,
    as_flag,
    as_ids,
    as_number,
    as_offsets,
    as_out,
    as_rows,
    as_whole,
    describe,
)
from bunkbed.core.budget import COUNTED_BYTES, Budget
from bunkbed.core.typed import shortened, typed
from bunkbed.core.types import Array
from bunkbed.machine.rates import Machine, remembered
from bunkbed.table.commits import TableCommits
from bunkbed.table.core import Above, Batch, Core
from bunkbed.table.deletes import TableDeletes
from bunkbed.table.explain import Explanation, explain
from bunkbed.table.facts import TableFacts
from bunkbed.table.reader import TableReader
from bunkbed.table.topk import topk
from bunkbed.table.uncommitted import warn_when_it_goes

POOLINGS = ("sum", "mean", "sqrtn", "none")
_NOTHING_ABOVE = nullcontext()


class Table(TableFacts, TableCommits, TableReader, TableDeletes):
    """An embedding table: rows of `dim` weights and their optimizer state, in RAM and, with a path, on disk.

    Made by `bunkbed.create` and `bunkbed.open`.

    Owns the table's files (one writer, any number of readers), its RAM budget and its background writes.
    Thread-safe: calls from several threads run one after another. Changes are durable up to the last `commit`; later
    changes are lost if the process dies. The caller that opened the table closes it. `close` and the end of a ``with``
    block commit first; a block left by an exception does not commit.

    >>> import bunkbed as bb, numpy as np
    >>> with bb.create(None, dim=2, num_rows=10, optimizer=bb.SGD(lr=1.0), init=bb.Zeros()) as table:
    ...     table.update(np.array([3, 3]), np.ones((2, 2), np.float32))
    ...     table.lookup(np.array([3, 4]))
    array([[-2., -2.],
           [ 0.,  0.]], dtype=float32)
    """

    def __init__(
        self,
        spec: _native.TableSpec,
        path: Path | None,
        mode: Literal["w", "r"],
        *,
        name: str | None = None,
        run: Any = None,
    ) -> None:
        # Internal: definition, core and fields of a record. Other packages use the core where no method of the table
        # does what they need.
        self.spec = spec
        self._path = path
        self._mode: Literal["w", "r"] = mode
        self._name = name or ("table" if path is None else path.name)
        self.core: Core = None  # type: ignore[assignment]  # until `_start`
        self._budget: Budget | None = None
        self._ram_bytes = 0
        self._ram_above = 0  # the part of `_ram_bytes` that the device cache takes for its id map
        self._run = run  # the bunkbed.Run that the table belongs to; Any, because this module must not import it
        #: What lies above, if anything: a device cache, which has newer rows, or a check of a reader's age.
        self._above: Callable[[], Above | None] | None = None
        #: Guards `_opens` and closing. For a writer this is `path_lock`, which is also locked while the path is opened.
        self._opening: AbstractContextManager[object] = threading.RLock()
        self._opens = 1
        #: Internal: what a framework keeps alive for as long as the table.
        self.companion: object = None
        self._closed = False
        self._pid = os.getpid()
        self.warns_of_loss = True  # internal: False once it has warned, or another object warns
        self._opened_s = 0.0
        self.fields: dict[str, tuple[int, int]] = {}
        self._dim = int(spec.dim)

    def _start(self, core: Core) -> None:
        self.core = core
        self._opened_s = time.monotonic()
        self._start_following()
        self.fields = {name: (index, length) for index, (name, length) in enumerate(core.fields())}

    # ---- Size and statistics

    @property
    def nbytes(self) -> int:
        """Bytes of all records (weights and optimizer state): of `num_rows` rows; if None, of the stored rows."""
        rows = self.num_rows
        return self.record_bytes * (len(self) if rows is None else rows)

    def __len__(self) -> int:
        """Return the number of stored rows: those updated or set at least once."""
        with self._reading():
            return int(self.core.stats()["stored_rows"])

    def __bool__(self) -> bool:
        return True

    def stats(self) -> dict[str, int | float]:
        """Return the counters since the table was opened, and its memory now.

        ``hits + misses + first_touches == unique_rows``: wanted rows, each counted once a step. ``hits`` were in RAM,
        ``misses`` were read from disk, ``first_touches`` were not stored (they cost no read). A device cache has its
        own counters, ``device_hits`` and ``device_misses``. Each row that it loads from the table counts here, every
        time; rows that it writes back do not count. ``open_s``: seconds since the table was opened.
        ``read_records`` of the log are read alone (``single_records``), with neighbours (``merged_records``) or by the
        large reads of a sweep (``swept_records``), whatever costs the disk least; `machine.read_paths` says when.
        ``indexed_records``: records read to find the rows, by opening, `refresh` and `rewind`. ``expired_rows``,
        ``evicted_rows``: those that `sweep` removed, of a table with rules for that. ``admitted_rows``,
        ``refused_rows``: with ``admit=``, rows that steps stored, and did not; a row counts once in each such step.
        ``counted_ids``: with ``admit=n``, ids that steps have named and not stored; ``written_counts``: to the log.
        """
        values: dict[str, int | float] = self.core.stats()
        values.update(self._removed_rows(), threads=_native.get_num_threads())
        above = self._cache_above()
        if above is not None:
            values.update(above.stats())
        values["open_s"] = time.monotonic() - self._opened_s
        return values

    def explain(self, since: Explanation | Mapping[str, int | float] | None = None) -> Explanation:
        """Compare the speed of the table with the limit of this machine: ``print(table.explain())``.

        Measures nothing. The machine's rates are those that `bunkbed.machine.measure` (or ``bunkbed plan``) measured
        here before; without them the limit is unknown.

        Args:
            since: an earlier result of `explain` or `stats` of this table; only later work counts. Default: everything
                since the table was opened.

        Raises:
            ValueError: `since` is from an earlier opening of the table. TableClosedError: the table is closed.
        """
        return explain(self, since)

    def _machine(self) -> Machine | None:
        """Return the measured rates of this machine and of the table's disk; None if there are none."""
        return None if self._path is None else remembered(self._path)

    # ---- The device cache

    # Internal: put `above` (returns it, or None once it is gone) above the table.
    def put_above(self, above: Callable[[], Above | None] | None) -> None:
        self._above = above

    _put_above = put_above

    def _cache_above(self) -> Above | None:
        # In a forked child the cache's locks may never be released. The core then reports the fork.
        return self._above() if self._above is not None and self.is_own else None

    def _reading(self) -> AbstractContextManager[None]:
        above = self._cache_above()
        return _NOTHING_ABOVE if above is None else above.reading()

    def _writing(self) -> AbstractContextManager[None]:
        above = self._cache_above()
        return _NOTHING_ABOVE if above is None else above.writing()

    # ---- Rows

    def lookup(self, ids: ArrayLike, *, touch: bool = True, out: Array | None = None) -> Array:
        """Return a copy of the weights of rows, after all earlier updates.

        Args:
            ids: int64[...], any shape; duplicates are fine; empty gives an empty result.
            touch: False (evaluation) inserts nothing into the cache and leaves recency alone.
            out: C-contiguous float32[..., dim] to write into; also float16 (or bfloat16, by a dtype of that name or
                uint16) for a table of that dtype. Default: a new array, the caller's.

        Returns:
            float32[..., dim]; an untouched row has its initial value. `out` when given; a new array is aligned to 64
            bytes.

        Raises:
            IndexError: an id outside the table; names the first and its position.
            TypeError: ids that are not integers. ValueError: `out` of another shape, dtype or byte order, or that
            shares memory with `ids`.
            CorruptionError: a stored record fails its checksum.
        """
        array = as_ids(ids, table=f"table '{self._name}'")
        touch = as_flag(touch, what="touch", table=f"table '{self._name}'")
        if self._above is None:
            return self._lookup(array, touch, out)
        with self._reading():
            return self._lookup(array, touch, out)

    def _lookup(self, array: Ids, touch: bool, out: Array | None) -> Array:
        shape = (*array.shape, self._dim)
        if out is None:
            rows: Floats = _native.empty_rows(array.size, self._dim)
            if array.ndim == 1:  # without reshape: in a small batch each NumPy call costs noticeable time
                self.core.lookup(array, touch, rows)
                return rows
            self.core.lookup(array.reshape(-1), touch, rows)
            return rows.reshape(shape)
        narrow = {"float16": ("float16",), "bfloat16": ("bfloat16", "uint16")}.get(self.dtype, ())
        result = as_out(out, shape, *narrow, table=f"table '{self._name}'", read=(array,))
        if result.dtype == np.float32:
            self.core.lookup(array.reshape(-1), touch, result.reshape(-1, self._dim))
            return result
        wide = _native.empty_rows(array.size, self._dim)
        self.core.lookup(array.reshape(-1), touch, wide)
        _native.narrow(wide.reshape(-1), self.spec.dtype, result.view(np.uint16).reshape(-1))  # exact
        return result

    def lookup_bags(
        self,
        ids: ArrayLike,
        offsets: ArrayLike,
        *,
        pooling: str = "mean",
        weights: ArrayLike | None = None,
        touch: bool = True,
        out: Array | None = None,
    ) -> Floats:
        """Return the pooled rows of bags of ids, summed in batch order.

        Args:
            ids: int64[N].
            offsets: int64[B], where each bag starts in `ids`; the first is 0; the last bag ends at N. An empty bag
                gives zeros.
            pooling: ``"sum"``, ``"mean"``, ``"sqrtn"`` (sum divided by the root of the count), or ``"none"``: the
                rows themselves, float32[N, dim].
            weights: float32[N] factors of the rows. With them mean divides by the sum of weights, sqrtn by the root of
                the sum of their squares (TensorFlow's combiners); a bag for which that is 0 is zeros.
            touch: see `lookup`.
            out: C-contiguous float32[B, dim] (of "none": [N, dim]) to write into. Default: a new array, the caller's.

        Returns:
            float32[B, dim]; `out` when given; a new array is aligned to 64 bytes.

        Raises:
            ValueError: no such pooling, bad offsets, weights of another length, `out` of another shape or dtype.
            IndexError, TypeError, CorruptionError: see `lookup`.
        """
        label = f"table '{self._name}'"
        if not isinstance(pooling, str) or pooling not in POOLINGS:
            raise ValueError(f"{label}: pooling must be one of {', '.join(POOLINGS)}, got {shortened(pooling)}")
        touch = as_flag(touch, what="touch", table=label)
        array = as_ids(ids, table=label)
        if array.ndim != 1:
            raise ValueError(f"{label}: ids of bags must be int64[N], got {describe(array)}")
        starts = as_offsets(offsets, array.size, table=label)
        factors = None if weights is None else as_rows(weights, array.shape, what="weights", table=label)
        shape = (array.size if pooling == "none" else starts.size, self._dim)
        if out is None:
            result: Floats = _native.empty_rows(*shape)
        else:
            result = as_out(out, shape, table=label, read=(array, starts, factors))
        with self._reading():
            if pooling == "none":
                self.core.lookup(array, touch, result)
            else:
                self.core.lookup_bags(array, starts, POOLINGS.index(pooling), factors, touch, result)
        if pooling == "none" and factors is not None:
            result *= factors[:, None]
        return result

    def update(self, ids: ArrayLike, grads: ArrayLike, *, lr: float | None = None, step: int | None = None) -> None:
        """Run one optimizer step.

        Gradients of equal ids are summed, in batch order, and the row is updated once. On an error the table is
        unchanged.

        Args:
            ids: int64[N]; an empty batch counts as a step.
            grads: float32[N, dim], finite.
            lr: learning rate of this step instead of the optimizer's.
            step: the step's number, in [1, 2**63 - 2], instead of ``table.step + 1``. A sharded table passes its number
                to each shard.

        Raises:
            ValueError: a NaN or Inf gradient (names the first, its position and id), another shape, no step left.
            IndexError, TypeError: see `lookup`. ReadOnlyError: a reader.
            MemoryError: the budget cannot hold the directory of so many rows; the message says how much is needed.
            OSError: the disk is full or failing; nothing was changed.
        """
        label = f"table '{self._name}'"
        array = as_ids(ids, table=label)
        values = as_rows(grads, (*array.shape, self._dim), what="grads", table=label)
        lr, step = self._checked_step(lr, step)
        with self._writing():
            self.core.update(array.reshape(-1), values.reshape(-1, self._dim), lr, step)

    def _checked_step(self, lr: float | None, step: int | None) -> tuple[float | None, int | None]:
        label = f"table '{self._name}'"
        if lr is not None:
            lr = as_number(lr, what="lr", table=label)
            if not (math.isfinite(lr) and lr >= 0):
                raise ValueError(f"{label}: lr must be finite and at least 0, got {lr:f}")
        if step is not None:
            step = as_whole(step, what="step", table=label, low=1, high=2**63 - 2)
        return lr, step

    # A framework's training step finds its unique ids once (batch), then calls lookup_batch, Batch.sum, update_batch.

    def batch(self, ids: ArrayLike) -> Batch:
        """Return a `_native.Batch` of the ids of a training step, int64[N], with its unique ids.

        Raises:
            IndexError, TypeError: see `lookup`.
        """
        return self.core.batch(as_ids(ids, table=f"table '{self._name}'").reshape(-1))

    def lookup_batch(self, batch: Any, size: int, *, touch: bool = True) -> Floats:
        """Look up a `batch` of `size` ids; return float32[N, dim] in the order of the ids."""
        self._require_batch(batch)
        if size != batch.num_ids():
            raise ValueError(f"table '{self._name}': the batch has {batch.num_ids()} ids, got size={size!r}")
        if self._mode == "r":
            with self._reading():  # checks the age; a writer's device cache calls this itself
                pass
        out: Floats = _native.empty_rows(batch.num_ids(), self._dim)
        self.core.lookup_batch(batch, as_flag(touch, what="touch", table=f"table '{self._name}'"), out)
        return out

    #: The type that `batch` returns.
    _batch_class: type[Any] = _native.Batch

    def _require_batch(self, batch: Any) -> None:
        if not isinstance(batch, self._batch_class):
            raise TypeError(f"table '{self._name}': batch must be what Table.batch made, got {shortened(batch)}")

    def update_batch(self, batch: Any, sums: Floats, *, lr: float | None = None, step: int | None = None) -> None:
        """Run one step with the sums of ``batch.sum``. The caller has checked that they are finite."""
        self._require_batch(batch)
        values = as_rows(sums, (len(batch), self._dim), what="sums", table=f"table '{self._name}'")
        self.core.update_batch(batch, values, *self._checked_step(lr, step))

    def stage(self, ids: ArrayLike) -> None:
        """Start to prefetch rows for a later lookup; moves records, never values. ids: int64[...].

        Returns while the reads are running. A call that needs one of the rows waits for it. At most half of the cache
        is used, for one batch at a time: a second call waits for the first.
        """
        self.core.stage(as_ids(ids, table=f"table '{self._name}'").reshape(-1))

    # Internal: (index, length) of a slot.
    def field(self, slot: str) -> tuple[int, int]:
        if not isinstance(slot, str) or slot not in self.fields:
            known = ", ".join(self.fields)
            raise ValueError(f"table '{self._name}' has no slot {shortened(slot)}; it has: {known}")
        return self.fields[slot]

    def get(self, ids: ArrayLike, slot: str = "weight") -> Floats:
        """Return a raw slot of rows and leave the cache as it is; a row not stored has its initial value.

        Args:
            ids: int64[...].
            slot: ``"weight"`` or one of `slots`.

        Returns:
            float32[..., length of the slot].

        Raises:
            ValueError: no such slot; the message lists the slots.
            IndexError, TypeError, CorruptionError: see `lookup`.
        """
        index, length = self.field(slot)
        array = as_ids(ids, table=f"table '{self._name}'")
        out = np.empty((*array.shape, length), np.float32)
        with self._reading():
            self.core.get(array.reshape(-1), index, out.reshape(-1, length))
        return out

    def set(self, ids: ArrayLike, values: ArrayLike, slot: str = "weight") -> None:
        """Write a raw slot of rows, for imports; not an optimizer step. Of equal ids the last one is written.

        A row not yet stored gets the initial values of its other slots. A 16-bit slot rounds to nearest, ties to even.

        Args:
            ids: int64[...].
            values: float32[..., length of the slot], finite, and finite when rounded.
            slot: ``"weight"`` or one of `slots`.

        Raises:
            ValueError: no such slot, another shape, a NaN or Inf, a value beyond the slot's dtype. IndexError,
            TypeError, ReadOnlyError, MemoryError, OSError: see `update`.
        """
        index, length = self.field(slot)
        label = f"table '{self._name}'"
        array = as_ids(ids, table=label)
        rows = as_rows(values, (*array.shape, length), what="values", table=label)
        self._require_time()
        self.put(array.reshape(-1), rows.reshape(-1, length), index)

    def contains(self, ids: ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether each row is stored (was updated or set). ids: int64[...]; returns bool[...]."""
        array = as_ids(ids, table=f"table '{self._name}'")
        out = np.empty(array.shape, np.bool_)
        with self._reading():
            self.core.contains(array.reshape(-1), out.reshape(-1))
        return out

    @typed
    def scan(self, slot: str = "weight", chunk: int = 65_536) -> Iterator[tuple[Ids, Floats]]:
        """Yield every stored row once, in log order.

        Args:
            slot: ``"weight"`` or one of `slots`.
            chunk: maximum rows of one pair, at least 1.

        Yields:
            (int64[n], float32[n, length of the slot]), new arrays that the caller owns.

        Raises:
            BunkbedError: the table was changed during the scan. ValueError: no such slot.
        """
        return ((ids, values) for ids, (values,) in self.scan_slots((slot,), chunk))

    # Internal: scan several slots in one pass over the log; yields (int64[n], [float32[n, length], ...]).
    def scan_slots(self, slots: Sequence[str], chunk: int) -> Iterator[tuple[Ids, list[Floats]]]:
        return self.scan_fields([self.field(slot) for slot in slots], chunk)

    # Internal: the same for (number, length) of fields, as `field` returns them, and `usage_fields`.
    def scan_fields(self, fields: Sequence[tuple[int, int]], chunk: int) -> Iterator[tuple[Ids, list[Floats]]]:
        if chunk < 1:
            raise ValueError(f"table '{self._name}': chunk must be at least 1, got {chunk}")
        return self._scan(fields, chunk)

    def _scan(self, fields: Sequence[tuple[int, int]], chunk: int) -> Iterator[tuple[Ids, list[Floats]]]:
        with self._reading():
            scan = _native.Scan(self.plain_core, [index for index, _ in fields])
        yield from self._rows_of(scan, fields, chunk)

    def _rows_of(
        self, scan: _native.Scan, fields: Sequence[tuple[int, int]], chunk: int
    ) -> Iterator[tuple[Ids, list[Floats]]]:
        if chunk > 65_536:  # no buffers larger than the table. After `Scan`, which raises first for an unusable table
            chunk = min(chunk, max(len(self), 65_536))
        while True:
            ids = np.empty(chunk, np.int64)
            values = [np.empty((chunk, length), np.float32) for _, length in fields]
            count = scan.next(ids, values)
            if count == 0:
                return
            yield ids[:count], [one[:count] for one in values]

    @typed
    def topk(
        self,
        queries: ArrayLike,
        k: int,
        *,
        ids: ArrayLike | None = None,
        exclude: ArrayLike | None = None,
    ) -> tuple[Ids, Floats]:
        """Return the exact best rows by dot product, from a stream of rows.

        Args:
            queries: float32[Q, dim], or float32[dim] for one.
            k: rows wanted, at least 1.
            ids: int64[M], the rows to choose from (duplicates count once). Default: every stored row.
            exclude: ids to leave out: int64[E] for all queries, or a sequence of Q such arrays.

        Returns:
            (ids int64[Q, k], scores float32[Q, k]), best first, of equal scores the lower id first; without the
            leading axis for one query. Rows whose score is NaN because of overflow come last. Where fewer rows exist:
            id -1, score -inf.

        Raises:
            ValueError: k below 1; queries of another shape or not finite; a number of `exclude` arrays other than the
            number of queries.
        """
        with self.at_one_commit():
            return topk(self, queries, k, ids=ids, exclude=exclude)

    # Internal: a context in which a reader does not move, and is not older than it may be; of a writer, nothing.
    @contextmanager
    def at_one_commit(self) -> Iterator[None]:
        if self._mode == "w" or not self.is_own:  # the core reports a fork
            yield
            return
        with self._reading(), self._held():
            yield

    # ---- Closing; commits are in `TableCommits`

    @typed
    def close(self, commit: bool = True) -> None:
        """Commit (a writer, unless `commit` is False) and release files and memory. Closing twice is no error.

        If the commit fails the table stays open and nothing is lost. Where the path was opened several times, only the
        last close releases. Another thread that opens the path waits until `close` returns.
        """
        with self._alone():
            if self._closed:
                return
            if commit and self._mode == "w" and self._run is None:
                self._commit(None, None)
            if self._opens > 1:
                self._opens -= 1
            else:
                self.release()

    def _alone(self) -> AbstractContextManager[object]:
        """Return a context in which no other thread opens or closes the table."""
        # In a forked child the lock may never be released. The core then reports the fork.
        return self._opening if self.is_own else nullcontext()

    # Internal: close without a commit, however often the path was opened.
    def release(self) -> None:
        with self._alone():
            self._closed = True
            above = self._cache_above()
            budget = self._budget if self.is_own else None
            if budget is not None:
                budget.start_leaving(self)
            try:
                self.core.close()
                self.core.set_device_cache(None, None)  # breaks the reference cycle between the two
                if above is not None:
                    above.table_closed()
            finally:
                if budget is not None:
                    budget.leave(self)

    def __del__(self) -> None:
        # At interpreter exit `opening._shut_down` has warned already, while modules were still loaded.
        if not sys.is_finalizing():
            warn_when_it_goes(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"table '{self._name}' cannot be pickled or copied: it is files and memory, not a value; "
            'pass its path and open it there with bb.open(path, mode="r")'
        )

    # ---- As a member of a shared budget (see Budget)

    def wanted_bytes(self) -> int | None:
        """Return the bytes beyond which more RAM has no use; None when unknown."""
        return int(self.spec.wanted_ram(self._path is not None)) or None

    def minimum_bytes(self) -> int:
        """Return the bytes below which the table cannot work now."""
        stats = {"stored_rows": 0, "counted_ids": 0, "directory_bytes": 0} if self.core is None else self.core.stats()
        on_disk = self._path is not None
        counted = COUNTED_BYTES * int(stats["counted_ids"]) if self._mode == "w" else 0
        stored = max(self.spec.minimum_ram(int(stats["stored_rows"]), on_disk) + counted, self._stored_hint)
        return int(max(stored, self.spec.minimum_ram(0, on_disk) + stats["directory_bytes"])) + self._ram_above

    #: The bytes that a table needs while it is being opened and has no core yet.
    _stored_hint = 0

    def apply_share(self, num_bytes: int) -> None:
        """Set the RAM budget to `num_bytes`."""
        self.plain_core.set_ram(num_bytes and num_bytes - self._ram_above)
        self._ram_bytes = num_bytes

    def reserve_ram(self, num_bytes: int) -> None:
        """Give `num_bytes` more of the budget to the device cache; a negative number returns them.

        Raises:
            MemoryError: the budget is too small for both.
        """
        above = self._ram_above + num_bytes
        if self._ram_bytes and not self._closed:
            needed = self.minimum_bytes() + num_bytes
            if num_bytes > 0 and needed > self._ram_bytes:
                raise MemoryError(
                    f"table '{self._name}': its device cache's id map takes {num_bytes} of the {self._ram_bytes} bytes "
                    f"of its ram, which must be at least {needed}; make it more, or the device cache smaller"
                )
            self.plain_core.set_ram(self._ram_bytes - above)
        self._ram_above = above
