"""Bags pooled where their rows lie, against the plain composition: look rows up, then add them one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing.arithmetic import pool
from test_conformance import tiny_ram

NUM_ROWS = 3000


def composed(table: Any, ids: Any, offsets: Any, pooling: str, weights: Any) -> Any:
    """The rows of a lookup, pooled bag by bag."""
    rows = table.lookup(ids, touch=False)
    ends = [*offsets[1:], len(ids)]
    bags = [slice(begin, end) for begin, end in zip(offsets, ends, strict=True)]
    return np.stack([pool(rows[bag], pooling, None if weights is None else weights[bag]) for bag in bags])


def make(tmp_path: Path, where: str, dtype: str, dim: int) -> Any:
    """A table a third of whose rows were never stored; with "tiny" hardly any of the others is in RAM."""
    arguments: dict[str, Any] = {"dim": dim, "num_rows": NUM_ROWS, "dtype": dtype, "init": bb.Normal(1.0), "seed": 3}
    if where == "ram":
        table = bb.create(None, **arguments)
    elif where == "tiny":
        table = bb.create(tmp_path / "table", ram=tiny_ram(tmp_path, **arguments), **arguments)
    else:
        table = bb.create(tmp_path / "table", ram="16MiB", **arguments)
    ids = np.flatnonzero(np.arange(NUM_ROWS) % 3)
    table.set(ids, np.random.default_rng(0).standard_normal((len(ids), dim)).astype(np.float32))
    if where == "reopened":  # stored rows come from disk at first, then from RAM
        table.close()
        table = bb.open(tmp_path / "table", ram="16MiB")
    return table


def batch(kind: str) -> tuple[Any, Any]:
    """Ids, hot ones often, and where bags start."""
    rng = np.random.default_rng(1)
    if kind == "many":  # bags of about ten, some empty, the last one too
        ids = (NUM_ROWS * rng.random(5000) ** 3).astype(np.int64)
        offsets = np.sort(rng.integers(0, 5001, 500))
        offsets[0], offsets[-1] = 0, 5000
        return ids, offsets
    if kind == "huge":  # one bag larger than every block, between small ones
        ids = (NUM_ROWS * rng.random(4000) ** 3).astype(np.int64)
        return ids, np.array([0, 0, 3, 3900, 3950])
    ids = 3 * rng.integers(0, NUM_ROWS // 3, 1500) + 1  # all stored, in bags that fill blocks to the brim
    return ids, np.arange(0, 1500, 256)


@pytest.mark.usefixtures("native_defaults")
@pytest.mark.parametrize("kind", ["many", "huge", "full"])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 37), ("bfloat16", 64), ("float16", 6)])
@pytest.mark.parametrize("where", ["ram", "tiny", "reopened"])
def test_bags_are_their_rows_added_one_by_one(tmp_path: Path, where: str, dtype: str, dim: int, kind: str) -> None:
    table = make(tmp_path, where, dtype, dim)
    ids, offsets = batch(kind)
    factors = np.random.default_rng(2).standard_normal(len(ids)).astype(np.float32)
    cases = [(pooling, weights) for pooling in ("sum", "mean", "sqrtn") for weights in (None, factors)]
    expected = [composed(table, ids, offsets, *case) for case in cases]
    levels = [level for level in ("scalar", "avx2", "avx512") if _native.simd_supported(level)]
    settings = [(threads, level) for threads in (1, 3) for level in levels]
    for number, (threads, level) in enumerate(settings):
        bb.set_num_threads(threads)
        _native.set_simd(level)
        for (pooling, weights), wanted in zip(cases, expected, strict=True):
            found = table.lookup_bags(ids, offsets, pooling=pooling, weights=weights, touch=number % 2 == 1)
            np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    table.close(commit=False)


def test_bags_keep_rows_in_ram_as_lookups_do(tmp_path: Path) -> None:
    table = make(tmp_path, "reopened", "float32", 8)
    ids, offsets = np.arange(0, 600), np.arange(0, 600, 20)
    assert table.stats()["frames"] == 0
    table.lookup_bags(ids, offsets, touch=False)
    assert table.stats()["frames"] == 0
    table.lookup_bags(ids, offsets)
    assert table.stats()["frames"] == 400  # a third was never stored
    reads = table.stats()["reads"]
    table.lookup_bags(ids, offsets)
    assert table.stats()["reads"] == reads
    table.close()


def test_bags_that_may_be_evicted_are_counted_once_a_step(tmp_path: Path) -> None:
    table = bb.create(tmp_path / "table", dim=8, num_rows=None, ram="16MiB")
    ids = np.arange(100)
    table.update(ids, np.ones((100, 8), np.float32))
    before = table.stats()
    for _ in range(2):
        table.lookup_bags(np.concatenate([ids, ids]), [0, 50, 150])
    after = table.stats()
    assert after["hits"] - before["hits"] == 100
    assert after["unique_rows"] - before["unique_rows"] == 100
    table.close()


def test_a_bad_id_or_offset_changes_nothing() -> None:
    table = bb.create(None, dim=2, num_rows=10)
    out = np.full((2, 2), 5, np.float32)
    with pytest.raises(IndexError, match="id 10 at position 2 is outside"):
        table.lookup_bags([1, 2, 10], [0, 1], out=out)
    for offsets, message in [
        ([1, 2], "must begin with 0, got 1 at position 0"),
        ([0, 4], "offset 4 at position 1 passes the 3 ids"),
        ([0, 2, 1], "must not decrease, got 1 at position 2 after 2"),
        ([0, -1], "must not decrease, got -1 at position 1 after 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            table.lookup_bags([1, 2, 3], offsets, out=out)
    for wrong in (np.zeros((3, 2), np.float32), np.zeros((2, 2)), np.zeros((2, 4), np.float32)[:, ::2]):
        with pytest.raises(ValueError, match="out must be"):
            table.lookup_bags([1, 2, 3], [0, 1], out=wrong)
    assert (out == 5).all()
