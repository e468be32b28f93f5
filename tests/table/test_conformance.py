"""The shipped suite against every tier combination."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cases.exactness import smallest_ram

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable, TableTests

_SMALLEST: dict[str, int] = {}


def tiny_ram(folder: Path, *, make: Callable[..., Any] = bb.create, **kwargs: Any) -> int:
    """The smallest budget such a table opens with: everything is evicted all the time."""
    key = f"{make.__qualname__} {sorted(kwargs.items(), key=lambda item: item[0])}"
    if key not in _SMALLEST:
        counter = itertools.count()
        _SMALLEST[key] = smallest_ram(lambda ram: make(folder / f"probe-{next(counter)}", ram=ram, **kwargs))
    return _SMALLEST[key]


class TestReference(TableTests):
    """The oracle passes its own suite, or the suite asks for something else."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        return ReferenceTable(**kwargs)


class TestRamOnly(TableTests):
    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        return bb.create(None, **kwargs)


class TestRamOnlyWithinABudget(TableTests):
    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        return bb.create(None, ram="64MiB", **kwargs)


class _Together(bb.Table):
    """Looks up and updates through the calls of several tables, with another table before and after this one."""

    other: bb.Table

    def _lookup(self, array: Any, touch: bool, out: Any) -> Any:
        if out is not None:
            return super()._lookup(array, touch, out)
        size, dim = array.size, self.dim
        ids = np.concatenate([[1, 1], array.reshape(-1), [0]])
        rows = _native.empty_rows(1, 3 * 4 + size * dim)
        other = self.other.plain_core
        _native.lookup_many(
            [other, self.plain_core, other],
            ids,
            [2, size, 1],
            [touch] * 3,
            [False, size % 2 == 0, True],
            [None] * 3,
            rows,
            [0, 8, 8 + size * dim],
        )
        return rows[0, 8 : 8 + size * dim].reshape(*array.shape, dim)

    def update(self, ids: Any, grads: Any, *, lr: float | None = None, step: int | None = None) -> None:
        array, values = np.asarray(ids), np.asarray(grads)
        if not array.size or array.dtype != np.int64 or values.shape != (*array.shape, self.dim):
            return super().update(ids, grads, lr=lr, step=step)
        batches = [self.batch(array), self.other.batch(np.array([1, 1]))]
        arrays = [values.reshape(-1, self.dim).astype(np.float32), np.ones((2, 4), np.float32)]
        (sums, norm), (others, _) = _native.sum_many(batches, arrays, [None, None])
        if not np.isfinite(norm):
            return super().update(ids, grads, lr=lr, step=step)
        _native.update_many(
            [self.other.plain_core, self.plain_core], batches[::-1], [others, sums], [None, lr], [None, step]
        )


class TestTogether(TableTests):
    """In calls together with another table, with as little RAM as opens."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        table = bb.create(tmp_path / "table", ram=tiny_ram(tmp_path, **kwargs), _make=_Together, **kwargs)
        table.other = bb.create(None, dim=4, num_rows=10)
        return table


class TestAmpleRam(TableTests):
    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        return bb.create(tmp_path / "table", ram="64MiB", **kwargs)


class TestTinyRam(TableTests):
    """As little RAM as opens."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        return bb.create(tmp_path / "table", ram=tiny_ram(tmp_path, **kwargs), **kwargs)

    def reopen(self, table: Any, *, mode: Any = "w", commit: bool = True) -> Any:
        ram = table.ram_bytes
        table.close(commit=commit)
        return bb.open(table.path, mode=mode, ram=ram)


class TestScratch(TestTinyRam):
    """Nothing kept, and the same bits."""

    keeps_commits = False

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        ram = tiny_ram(tmp_path, **kwargs)
        return bb.create(tmp_path / "table", ram=ram, durability="scratch", **kwargs)

    def reopen(self, table: Any, *, mode: Any = "w", commit: bool = True) -> Any:
        self.skip_without_commits()


class TestDiskLimited(TestTinyRam):
    """As little RAM as opens, and a limit of the files: room is asked for before each change."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        # Segments of a table of unknown size are larger.
        disk = "256MiB" if kwargs.get("num_rows") is None else "16MiB"
        return bb.create(tmp_path / "table", ram=tiny_ram(tmp_path, **kwargs), disk=disk, **kwargs)


class TestSharedBudget(TableTests):
    """The table shares one `bb.Budget` with another table."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        budget = bb.Budget("48MiB")
        self.other = bb.create(tmp_path / "other", dim=4, num_rows=10, ram=budget)
        return bb.create(tmp_path / "table", ram=budget, **kwargs)


class TestReopened(TableTests):
    """Every table was committed empty and opened again before the test gets it."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        bb.create(tmp_path / "table", ram="16MiB", **kwargs).close()
        return bb.open(tmp_path / "table", ram="16MiB")


@pytest.mark.usefixtures("native_defaults")
class TestOneThread(TestTinyRam):
    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        bb.set_num_threads(1)
        return super().make_table(tmp_path, **kwargs)


@pytest.mark.usefixtures("native_defaults")
class TestThreadsRead(TestTinyRam):
    """Where the kernel has io_uring the others use it."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        _native.set_io("threads")
        return super().make_table(tmp_path, **kwargs)


class _AtLevel(TestTinyRam):
    __test__ = False
    level = ""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        try:
            _native.set_simd(self.level)
        except ValueError as error:
            pytest.skip(str(error))
        return super().make_table(tmp_path, **kwargs)


@pytest.mark.usefixtures("native_defaults")
class TestScalar(_AtLevel):
    __test__ = True
    level = "scalar"


@pytest.mark.usefixtures("native_defaults")
class TestAvx2(_AtLevel):
    __test__ = True
    level = "avx2"


@pytest.mark.usefixtures("native_defaults")
class TestAvx512(_AtLevel):
    __test__ = True
    level = "avx512"


class TestSharded(TableTests):
    """Divided over three directories."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        places = [tmp_path / "ssd0", tmp_path / "ssd1"]
        return bb.ShardedTable.create(tmp_path / "table", shards=3, directories=places, ram="64MiB", **kwargs)


class TestShardedTinyRam(TestTinyRam):
    """Divided, and as little RAM as opens."""

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        ram = tiny_ram(tmp_path, make=bb.ShardedTable.create, shards=3, **kwargs)
        return bb.ShardedTable.create(tmp_path / "table", shards=3, ram=ram, **kwargs)

    def reopen(self, table: Any, *, mode: Any = "w", commit: bool = True) -> Any:
        ram = table.ram_bytes + table.ram_bytes // 8  # a shard's directory of any id has grown
        table.close(commit=commit)
        return bb.open(table.path, mode=mode, ram=ram)


class TestOneShard(TableTests):
    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        return bb.ShardedTable.create(tmp_path / "table", shards=1, ram="32MiB", **kwargs)
