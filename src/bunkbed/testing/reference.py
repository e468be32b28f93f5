"""`ReferenceTable`: a table in plain NumPy, the oracle that every kind of table is compared with."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bunkbed.core import optim
from bunkbed.core.arguments import as_whole
from bunkbed.core.init import Initializer, Normal
from bunkbed.core.retention import Retention
from bunkbed.core.types import Array, Json
from bunkbed.errors import TableClosedError
from bunkbed.table.commits import PendingCommit
from bunkbed.table.sweeps import NEVER_GOES, Bin, Swept
from bunkbed.testing import arithmetic, philox
from bunkbed.testing.arithmetic import FloatArray, IntArray

Initial = Callable[[IntArray], ArrayLike]


class ReferenceTable:
    """The public methods of a table in plain NumPy and one dictionary, with the same bits as the engine.

    Owns its rows in RAM. Not thread-safe. Commits are copies in memory: `commit` keeps a copy, `revert` and `rewind`
    return to a copy. Needs no closing.

    Args:
        dim: weights per row.
        num_rows: ids are in ``[0, num_rows)``; None: any non-negative int64.
        optimizer: one of ``bb.SGD``, ``bb.Adagrad``, ``bb.RowwiseAdagrad``, ``bb.Adam`` (the default).
        init: ``bb.Zeros``, ``bb.Normal`` or ``bb.Uniform``; default ``Normal(std=0.01)``.
        seed: seed of the initialiser and of stochastic rounding.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``: dtype of the stored weights.
        initial: overrides `init`: a function from int64[N] ids to float32[N, dim] rows.
        name: the table's name in errors.
        rules: those of `Retention`, by name.

    >>> from bunkbed import SGD, Zeros
    >>> table = ReferenceTable(dim=2, optimizer=SGD(lr=0.5), init=Zeros())
    >>> table.update([3, 3], np.ones((2, 2), np.float32))
    >>> table.lookup([3, 4]).tolist()
    [[-1.0, -1.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        *,
        dim: int,
        num_rows: int | None = None,
        optimizer: optim.Optimizer | None = None,
        init: Initializer | None = None,
        seed: int = 0,
        dtype: str = "float32",
        initial: Initial | None = None,
        name: str = "reference",
        **rules: Any,
    ) -> None:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
        self.dim = dim
        self.num_rows = num_rows
        self.optimizer = optimizer if optimizer is not None else optim.Adam()
        self.init = init if init is not None else Normal(std=0.01)
        self.seed = seed
        self.dtype = dtype
        self.state_dtype: str = getattr(self.optimizer, "state_dtype", "float32")
        self.name = name
        self.retention = Retention(**rules)
        self._clock = -1 if self.retention.clock == "event" else 0
        # Row -> (time of the last step that named it, number of these steps), for stored rows.
        self._usage: dict[int, tuple[int, int]] = {}
        # Row -> (number of steps that named it, time of the last one), for rows that are not stored; the least time.
        self._counted, self._counts_since = dict[int, tuple[int, int]](), 0
        self.meta: Json = {}
        self.step = 0
        self.epoch = 0
        self.path = None
        self.run = None
        self.mode = "w"
        self.ram_bytes = 0
        self.closed = False
        self.is_dirty = False
        self._initial = initial
        # An untouched slot is the optimizer's initial value, rounded to nearest.
        self._slots = {
            slot: (width, philox.narrow_nearest(self.state_dtype, np.array([initial], np.float32))[0])
            for slot, (width, initial) in arithmetic.optimizer_slots(self.optimizer, dim).items()
        }
        self._widths = {"weight": dim, **{slot: width for slot, (width, _) in self._slots.items()}}
        # Row -> index in the arrays below, for stored rows.
        self._places: dict[int, int] = {}
        self._arrays = {slot: np.zeros((0, width), np.float32) for slot, width in self._widths.items()}
        self._commits: dict[int, Json] = {}
        self._names: dict[str, int] = {}
        counters = ("lookups", "updates", "ids", "unique_rows", "commits", "admitted_rows", "refused_rows")
        self._counts = dict.fromkeys(counters, 0)
        self._keep_state()

    # ---- reading

    @property
    def nbytes(self) -> int:
        """Bytes of all records: of `num_rows` rows; if None, of the stored rows."""
        widths = [(self._dtype_of(slot), width) for slot, width in self._widths.items()]
        record = sum(-(-width * (4 if dtype == "float32" else 2) // 4) * 4 for dtype, width in widths)
        return record * (len(self) if self.num_rows is None else self.num_rows)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the optimizer's arrays."""
        return tuple(self._slots)

    def __len__(self) -> int:
        """Return the number of stored rows."""
        return len(self._places)

    def lookup(self, ids: ArrayLike, *, touch: bool = True, out: Array | None = None) -> Array:
        """Return a copy of the weights, float32[..., dim], of int64[...] ids; `touch` has no effect.

        `out` may have the 16-bit dtype of the rows: float16, or uint16 for bfloat16.
        """
        wanted = self._check_ids(ids)
        self._counts["lookups"] += 1
        self._counts["ids"] += wanted.size
        values = self._gather(wanted.ravel(), "weight").reshape(*wanted.shape, self.dim)
        return _filled(out, values)

    def lookup_bags(
        self,
        ids: ArrayLike,
        offsets: ArrayLike,
        *,
        pooling: str = "mean",
        weights: ArrayLike | None = None,
        touch: bool = True,
        out: FloatArray | None = None,
    ) -> FloatArray:
        """Return pooled rows, float32[B, dim]; bag b is ``ids[offsets[b]:offsets[b + 1]]``; empty bags give zeros."""
        if pooling not in ("sum", "mean", "sqrtn", "none"):
            raise ValueError(f"table {self.name!r}: pooling must be one of sum, mean, sqrtn, none, got {pooling!r}")
        wanted = self._check_ids(ids)
        if wanted.ndim != 1:
            raise ValueError(f"ids must be int64[N], got int64{list(wanted.shape)}")
        starts = np.asarray(offsets)
        if starts.size and (starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > wanted.size):
            raise ValueError(f"offsets must rise from 0 to at most {wanted.size}, got {starts.tolist()}")
        factors = None if weights is None else np.asarray(weights, np.float32)
        if factors is not None and factors.shape != wanted.shape:
            raise ValueError(f"weights must be float32[{wanted.size}], got float32{list(factors.shape)}")
        rows = self._gather(wanted, "weight")
        if pooling == "none":
            return _filled(out, rows if factors is None else rows * factors[:, None])
        ends = np.append(starts[1:], wanted.size)[: starts.size]
        result = np.zeros((starts.size, self.dim), np.float32)
        for bag, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            result[bag] = arithmetic.pool(rows[start:end], pooling, None if factors is None else factors[start:end])
        return _filled(out, result)

    def get(self, ids: ArrayLike, slot: str = "weight") -> FloatArray:
        """Return the raw values of one slot, float32[..., width]."""
        wanted = self._check_ids(ids)
        width = self._check_slot(slot)
        return self._gather(wanted.ravel(), slot).reshape(*wanted.shape, width)

    def contains(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return bool[...]: whether each row is stored (was updated or set)."""
        wanted = self._check_ids(ids)
        stored = [int(row) in self._places for row in wanted.ravel()]
        return np.array(stored, np.bool_).reshape(wanted.shape)

    def scan(self, slot: str = "weight", chunk: int = 65_536) -> Iterator[tuple[IntArray, FloatArray]]:
        """Yield every stored row as (int64[n], float32[n, width]), in the order rows were first stored."""
        self._check_open()
        self._check_slot(slot)
        ids = np.fromiter(self._places, np.int64, len(self._places))
        for start in range(0, ids.size, chunk):
            part = ids[start : start + chunk]
            yield part, self._gather(part, slot)

    def topk(
        self, queries: ArrayLike, k: int, *, ids: ArrayLike | None = None, exclude: ArrayLike | None = None
    ) -> tuple[IntArray, FloatArray]:
        """Return the k best rows by dot product for each query: (int64[Q, k], float32[Q, k]), best first.

        Candidates are `ids`, or every stored row, without `exclude` (one set for all queries, or one a query). Of
        equal scores the lower id is first; NaN scores are last. Where fewer rows exist: id -1, score -inf.
        """
        vectors = np.asarray(queries, np.float32)
        if vectors.ndim == 1:
            best = self.topk(vectors[None], k, ids=ids, exclude=exclude)
            return best[0][0], best[1][0]
        candidates = np.unique(self._check_ids(list(self._places) if ids is None else ids))
        rows = self._gather(candidates, "weight")
        best_ids = np.full((len(vectors), k), -1, np.int64)
        best_scores = np.full((len(vectors), k), -np.inf, np.float32)
        for index, query in enumerate(vectors):
            each = isinstance(exclude, list | tuple) and len(exclude) > 0 and np.ndim(exclude[0]) > 0
            left_out = np.asarray([] if exclude is None else exclude[index] if each else exclude)  # type: ignore[index]
            with np.errstate(over="ignore", invalid="ignore"):
                scores = arithmetic.lane_sum(rows * query)
            out = np.isin(candidates, left_out)
            order = [i for i in np.lexsort((candidates, -scores, np.isnan(scores))).tolist() if not out[i]][:k]
            best_ids[index, : len(order)] = candidates[order]
            best_scores[index, : len(order)] = scores[order]
        return best_ids, best_scores

    def stats(self) -> dict[str, float]:
        """Return the counters that do not depend on a cache."""
        stored = len(self._places)
        unique = self._counts["unique_rows"]
        rates = {"hits": unique, "misses": 0, "first_touches": 0, "evictions": 0, "counted_ids": len(self._counted)}
        return {**self._counts, **rates, "stored_rows": stored, "frames": stored, "frame_capacity": stored}

    # ---- writing

    def update(self, ids: ArrayLike, grads: ArrayLike, *, lr: float | None = None, step: int | None = None) -> None:
        """Run one optimizer step: int64[N] ids, float32[N, dim] gradients, duplicates summed in batch order.

        `lr` and `step` replace the optimizer's rate and ``self.step + 1`` for this step.
        """
        wanted = self._check_ids(ids)
        values = self._check_values(grads, (*wanted.shape, self.dim), "grads").reshape(-1, self.dim)
        wanted = wanted.ravel()
        bad = np.argwhere(~np.isfinite(values))
        if bad.size:
            position, column = bad[0].tolist()
            raise ValueError(
                f"table {self.name!r}: gradient at position {position} (id {wanted[position]}), "
                f"element {column}, is {values[position, column]}; nothing was changed"
            )
        rate = float(self.optimizer.lr if lr is None else lr)  # type: ignore[attr-defined]
        with np.errstate(over="ignore", invalid="ignore"):
            unique, sums = arithmetic.sum_duplicates(wanted, values)
        overflowed = np.flatnonzero(~np.isfinite(sums).all(axis=1))
        if overflowed.size:
            raise ValueError(
                f"table {self.name!r}: the gradients of id {unique[overflowed[0]]} are finite, "
                "their sum is not; nothing was changed"
            )
        self._require_time()
        if step is not None and step < self.step and self.retention.removes and self.retention.clock == "step":
            raise ValueError(f"table {self.name!r}: step {step} is before step {self.step}; nothing was changed")
        self.step = self.step + 1 if step is None else step
        self._counts["updates"] += 1
        self.is_dirty = True
        self._counts["unique_rows"] += unique.size
        unique, sums = self._admitted(unique, sums)
        places = self._store(unique)
        for row in unique.tolist():
            self._name_row(row, 1)
        rows = {slot: array[places] for slot, array in self._arrays.items()}
        weight = rows.pop("weight")
        arithmetic.apply_optimizer(self.optimizer, lr=rate, step=self.step, grad=sums, weight=weight, slots=rows)
        for field, (slot, array) in enumerate({"weight": weight, **rows}.items()):
            self._arrays[slot][places] = philox.narrow_stochastic(
                self._dtype_of(slot), array, seed=self.seed, ids=unique, step=self.step, field=field
            )

    def _admitted(self, ids: IntArray, sums: FloatArray) -> tuple[IntArray, FloatArray]:
        """Return the rows that this step updates: those that are stored, and those that it admits."""
        if self.retention.admit is None:
            return ids, sums
        stored = self.contains(ids)
        if self.retention.counts_steps:
            drawn = np.array([has or self._counts_to(row) for has, row in zip(stored, ids.tolist(), strict=True)], bool)
        else:
            drawn = philox.are_admitted(self.retention.admit, seed=self.seed, ids=ids, step=self.step)
        self._counts["admitted_rows"] += int((drawn & ~stored).sum())
        self._counts["refused_rows"] += int((~drawn & ~stored).sum())
        return ids[drawn | stored], sums[drawn | stored]

    def _counts_to(self, row: int) -> bool:
        """Count a step that names a row that is not stored; return whether the step stores it."""
        count, time = self._counted.get(row, (0, 0))
        if count + 1 >= cast("int", self.retention.admit):
            return True
        self._counted[row] = count + 1, arithmetic.latest_time(max(time, self.clock, self._counts_since))
        return False

    def delete(self, ids: ArrayLike) -> int:
        """Delete rows of int64[...] ids; return how many were stored. A deleted row has its initial values again."""
        before = len(self._places)
        for row in self._check_ids(ids).ravel().tolist():
            self._places.pop(row, None)
            self._usage.pop(row, None)
            self.is_dirty |= self._counted.pop(row, None) is not None
        if len(self._places) < before:
            self.is_dirty = True
            kept = np.fromiter(self._places.values(), np.int64, len(self._places))
            self._arrays = {slot: array[kept] for slot, array in self._arrays.items()}
            self._places = {row: place for place, row in enumerate(self._places)}
        return before - len(self._places)

    @property
    def clock(self) -> int:
        """The time of the clock by which rows expire; see `Table.clock`."""
        return self.step if self.retention.clock == "step" else self._clock

    @clock.setter
    def clock(self, value: int) -> None:
        as_whole(value, what="clock", low=0, high=2**63 - 1)
        if self.retention.clock == "step":
            raise ValueError(f"table {self.name!r}: its clock is its step, which cannot be set")
        if value < self._clock:
            raise ValueError(f"table {self.name!r}: the clock cannot go back from {self._clock} to {value}")
        self.is_dirty = self.is_dirty or value != self._clock
        self._clock = value

    def sweep(self, *, dry_run: bool = False) -> Swept:
        """Remove the rows that have expired, and those beyond ``max_rows``; see `Table.sweep`."""
        self._check_open()
        rules, now = self.retention, self.clock
        if not rules.removes:
            raise ValueError(f"table {self.name!r} has no rule by which rows go")
        ages = {row: now - last for row, (last, _) in self._usage.items() if last != NEVER_GOES}
        expired = [row for row, age in ages.items() if rules.expire is not None and age >= rules.expire]
        expired.sort(key=lambda row: (self._usage[row][0], row))
        goes = expired[: max(0, len(self) - rules.keep)]
        others = sorted(set(ages).difference(expired), key=lambda row: (self._worth(row), row))
        too_many = 0 if rules.max_rows is None else max(0, len(self) - len(goes) - rules.max_rows)
        evicted = others[:too_many] if len(goes) == len(expired) else []
        swept = Swept(
            rows=len(self),
            expired=len(goes),
            evicted=len(evicted),
            spared=len(expired) - len(goes),
            freed_bytes=0,
            clock=now,
            cut=self._cut(evicted[-1]) if evicted else None,
            ages=_bins(list(ages.values())),
            counts=_bins([self._usage[row][1] for row in ages]),
            dry_run=dry_run,
        )
        if not dry_run:
            self.delete(np.array(goes + evicted, np.int64))
            if rules.expire is not None and now - rules.expire + 1 > self._counts_since:
                self._counts_since, self.is_dirty = now - rules.expire + 1, True
                self._counted = {row: one for row, one in self._counted.items() if one[1] >= self._counts_since}
        return swept

    def spare(self, row: int) -> None:
        """Keep a stored row from every sweep."""
        self._usage[row] = NEVER_GOES, 0
        self.is_dirty = True

    def _name_row(self, row: int, steps: int) -> None:
        last, count = self._usage.get(row, (0, 0))
        if last != NEVER_GOES:
            self._usage[row] = self.clock, count + steps

    def _require_time(self) -> None:
        if self.clock < 0:
            raise ValueError(f"table {self.name!r}: its clock was not set; assign table.clock first")

    def usage(self, ids: IntArray) -> FloatArray:
        """Return as `bunkbed.testing.compare.usage_of`."""
        found = np.zeros((ids.size, 3), np.float32)
        for place, row in enumerate(ids.tolist()):
            last, count = self._usage.get(row, (0, 0))
            found[place] = np.array([last & 0xFFFFFFFF, last >> 32, count], np.uint32).view(np.float32)
        return found

    def counted(self) -> IntArray:
        """Return as `bunkbed.testing.compare.counts_of`."""
        return np.array(sorted((row, *one) for row, one in self._counted.items()), np.int64).reshape(-1, 3)

    def _worth(self, row: int) -> float:
        """Return by what rows are evicted, the least first."""
        if self.retention.evict == "smallest":
            weights = self._arrays["weight"][self._places[row]].astype(np.float64)
            return float(np.cumsum(weights * weights)[-1])
        return self._usage[row][self.retention.evict == "rarest"]

    def _cut(self, row: int) -> float:
        worth = self._worth(row)
        orders = {"oldest": self.clock - worth, "rarest": worth, "smallest": math.sqrt(worth)}
        return orders[self.retention.evict]

    def set(self, ids: ArrayLike, values: ArrayLike, slot: str = "weight") -> None:
        """Overwrite one slot of int64[N] rows with float32[N, width]; of equal ids the last one is written."""
        wanted = self._check_ids(ids)
        width = self._check_slot(slot)
        fresh = self._check_values(values, (*wanted.shape, width), "values").reshape(-1, width)
        if not np.isfinite(fresh).all():
            raise ValueError(f"table {self.name!r}: values must be finite; nothing was changed")
        fresh = philox.narrow_nearest(self._dtype_of(slot), fresh)
        bad = np.argwhere(np.isinf(fresh))
        if bad.size:
            raise ValueError(
                f"table {self.name!r}: value at position {bad[0][0]} is beyond what {self._dtype_of(slot)} holds; "
                "nothing was changed"
            )
        self._require_time()
        places = self._store(wanted.ravel())
        for row in wanted.ravel().tolist():
            self._name_row(row, 0)
        self.is_dirty = self.is_dirty or wanted.size > 0
        self._arrays[slot][places] = fresh  # NumPy assigns in order, so the last of equal ids stays

    def stage(self, ids: ArrayLike) -> None:
        """Check the ids; the oracle has nothing to prefetch."""
        self._check_ids(ids)

    # ---- commits

    def commit(self, meta: Mapping[str, Any] | None = None, keep: str | None = None) -> int:
        """Keep a copy of the table as the next epoch and return its number.

        Without changes since the last commit, and without `meta` or `keep`, return the last epoch.
        """
        self._check_open()
        if not self.is_dirty and meta is None and keep is None:
            return self.epoch
        if meta is not None:
            self.meta = copy.deepcopy(dict(meta))
        self.epoch += 1
        self._counts["commits"] += 1
        if keep is not None:
            self._names[keep] = self.epoch
        self._keep_state()
        return self.epoch

    def begin_commit(self, meta: Mapping[str, Any] | None = None, keep: str | None = None) -> PendingCommit:
        """Commit, and return a pending commit that is over."""
        epoch = self.commit(meta, keep)
        return PendingCommit(lambda: epoch, lambda: True)

    def snapshots(self) -> dict[str, int]:
        """Return name -> epoch of the kept commits."""
        return dict(self._names)

    def drop(self, name: str) -> None:
        """Remove a kept commit."""
        if name not in self._names:
            raise ValueError(f"table {self.name!r} has no snapshot {name!r}; it has {sorted(self._names)}")
        del self._names[name]
        self._collect()

    def rewind(self, snapshot: str | int) -> None:
        """Set rows, slots and step back to a kept commit, which becomes the newest one."""
        epoch = self._names.get(snapshot) if isinstance(snapshot, str) else snapshot
        if epoch not in self._commits:
            raise ValueError(f"table {self.name!r} has no snapshot {snapshot!r}; it has {sorted(self._names)}")
        newest = self.epoch
        self._restore(self._commits[epoch])
        self.epoch = newest + 1
        self._keep_state()

    def revert(self) -> None:
        """Go back to the last commit, like opening a table after its process ended without a commit."""
        self._restore(self._commits[self.epoch])

    def compact(self) -> int:
        """Do nothing: there is no log."""
        return 0

    def refresh(self) -> int:
        """Return the epoch: a writer is always at the newest."""
        return self.epoch

    def close(self, commit: bool = True) -> None:
        """Commit unless `commit` is False, and refuse later calls."""
        if self.closed:
            return
        if commit:
            self.commit()
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)

    # ---- inside

    def _check_open(self) -> None:
        if self.closed:
            raise TableClosedError(f"table {self.name!r} is closed; open it again")

    def _check_ids(self, ids: ArrayLike) -> IntArray:
        self._check_open()
        array = np.asarray(ids)
        if array.size == 0 and not isinstance(ids, np.ndarray):
            array = array.astype(np.int64)
        if array.dtype.kind not in "iu":
            raise TypeError(f"ids must be int64, got {array.dtype}{list(array.shape)}")
        limit = math.inf if self.num_rows is None else self.num_rows
        bad = np.flatnonzero((array.ravel() < 0) | (array.ravel() >= min(limit, 2**63)))
        if bad.size:
            bound = "2**63" if self.num_rows is None else self.num_rows
            raise IndexError(
                f"table {self.name!r}: id {array.ravel()[bad[0]]} at position {bad[0]} is outside [0, {bound})"
            )
        return array.astype(np.int64)

    def _check_slot(self, slot: str) -> int:
        if slot not in self._widths:
            raise ValueError(f"table {self.name!r} has no slot {slot!r}; it has {sorted(self._widths)}")
        return self._widths[slot]

    def _dtype_of(self, slot: str) -> str:
        return self.dtype if slot == "weight" else self.state_dtype

    def _check_values(self, values: ArrayLike, shape: tuple[int, ...], what: str) -> FloatArray:
        array = np.asarray(values)
        if array.dtype != np.float32:
            raise TypeError(f"{what} must be float32{list(shape)}, got {array.dtype}{list(array.shape)}")
        if array.shape != shape:
            raise ValueError(f"{what} must be float32{list(shape)}, got float32{list(array.shape)}")
        return array

    def _initial_rows(self, ids: IntArray) -> FloatArray:
        if self._initial is not None:
            rows = np.asarray(self._initial(ids), np.float32)
        else:
            rows = philox.initial_rows(self.init, self.seed, ids, self.dim)
        return philox.narrow_nearest(self.dtype, rows)

    def _gather(self, ids: IntArray, slot: str) -> FloatArray:
        places = np.array([self._places.get(row, -1) for row in ids.tolist()], np.int64)
        values = np.empty((ids.size, self._widths[slot]), np.float32)
        stored = places >= 0
        values[stored] = self._arrays[slot][places[stored]]
        if not stored.all():
            values[~stored] = self._initial_rows(ids[~stored]) if slot == "weight" else self._slots[slot][1]
        return values

    def _store(self, ids: IntArray) -> IntArray:
        """Return the indices of the rows; store rows that are missing."""
        fresh = [row for row in dict.fromkeys(ids.tolist()) if row not in self._places]
        for row in fresh:
            self._counted.pop(row, None)
        if fresh:
            start = len(self._places)
            self._places.update({row: start + index for index, row in enumerate(fresh)})
            needed = len(self._places)
            for slot, array in self._arrays.items():
                if needed > len(array):  # doubled, so that the total cost of growth is linear in the rows
                    grown = np.empty((max(needed, 2 * len(array)), array.shape[1]), np.float32)
                    grown[: len(array)] = array
                    self._arrays[slot] = array = grown
                if slot == "weight":
                    array[start:needed] = self._initial_rows(np.array(fresh, np.int64))
                else:
                    array[start:needed] = self._slots[slot][1]
        return np.array([self._places[row] for row in ids.tolist()], np.int64)

    def _keep_state(self) -> None:
        self._commits[self.epoch] = {
            "places": dict(self._places),
            "arrays": {slot: array[: len(self._places)].copy() for slot, array in self._arrays.items()},
            "step": self.step,
            "clock": self._clock,
            "usage": dict(self._usage),
            "counted": (dict(self._counted), self._counts_since),
            "meta": copy.deepcopy(self.meta),
        }
        self.is_dirty = False
        self._collect()

    def _collect(self) -> None:
        """Remove every commit except the last and the kept ones."""
        kept = {self.epoch, *self._names.values()}
        self._commits = {epoch: state for epoch, state in self._commits.items() if epoch in kept}

    def _restore(self, state: Json) -> None:
        self._places = dict(state["places"])
        self._arrays = {slot: array.copy() for slot, array in state["arrays"].items()}
        self.step = state["step"]
        self._clock, self._usage = state["clock"], dict(state["usage"])
        self._counted, self._counts_since = dict(state["counted"][0]), state["counted"][1]
        self.meta = copy.deepcopy(state["meta"])
        self.is_dirty = False


def _bins(values: list[int]) -> tuple[Bin, ...]:
    numbers = collections.Counter(value.bit_length() for value in values)
    return tuple(Bin(2**i // 2, 2**i - 1, rows) for i, rows in sorted(numbers.items()))


def _filled(out: Array | None, values: FloatArray) -> Array:
    """Return `values`, in `out` if given; a uint16 `out` gets the upper halves, which are bfloat16."""
    if out is None:
        return values
    if out.shape != values.shape:
        raise ValueError(f"out must be float32{list(values.shape)}, got {out.dtype}{list(out.shape)}")
    out[...] = values.view(np.uint32) >> np.uint32(16) if out.dtype == np.uint16 else values
    return out
