"""`suggest_blocks`: the least number of blocks whose rows fit in the budget of their tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

ROWS, DIM = 20_000, 64
RECORD_BYTES = 3 * 4 * DIM  # with Adam


def table_of(path: Path | None, rows: int | None = ROWS, **arguments: Any) -> bb.Table:
    return bb.create(path, dim=DIM, num_rows=rows, optimizer=bb.Adam(0.01), **arguments)


def test_the_suggested_blocks_fit_and_fewer_would_not(tmp_path: Path) -> None:
    with table_of(tmp_path / "user", ram="64MiB") as user, table_of(tmp_path / "item", ROWS // 2, ram="64MiB") as item:
        for mib in (12, 8, 5):
            blocks = bb.suggest_blocks([user, item], ram=mib << 20)
            # One block of each table, and the next block of the larger one.
            bytes_of = [(2 * ROWS + ROWS // 2) / count * RECORD_BYTES for count in (blocks, blocks - 1)]
            assert bytes_of[0] < 0.9 * (mib << 20), blocks
            assert bytes_of[1] > 0.5 * (mib << 20), blocks
            assert bb.suggest_blocks([item, user], ram=f"{mib}MiB") == blocks
        assert bb.suggest_blocks([user], ram=12 << 20) < bb.suggest_blocks([user, item], ram=12 << 20)


def test_the_cache_of_the_suggested_budget_holds_the_two_largest_blocks(tmp_path: Path) -> None:
    ram, rows = 3 << 20, 10_000  # blocks of about 250 rows, whose sizes differ much
    with bb.create(tmp_path / "item", dim=256, num_rows=rows, optimizer=bb.Adam(0.01), ram=ram) as item:
        frames = item.stats()["frame_capacity"]
        blocks = bb.suggest_blocks([item], ram=ram)
        order = bb.BlockOrder([np.arange(rows)], blocks)
        largest = max(len(order.members(epoch, 0, block)) for epoch in range(5) for block in range(blocks))
        assert 2 * rows / blocks < 0.8 * frames < 2 * largest <= frames


def test_one_block_where_all_rows_fit(tmp_path: Path) -> None:
    with table_of(tmp_path / "item", ram="64MiB") as item:
        wanted = item.wanted_bytes()
        assert wanted is not None
        assert bb.suggest_blocks([item], ram=wanted) == 1
        assert bb.suggest_blocks([item], ram=wanted * 9 // 10) > 1
        assert bb.suggest_blocks([item]) == 1


def test_two_columns_of_one_table_hold_two_blocks(tmp_path: Path) -> None:
    with table_of(tmp_path / "entity", ram="64MiB") as entity:
        one, two = (bb.suggest_blocks([entity] * columns, ram="4MiB") for columns in (1, 2))
    # Two resident blocks and the next one, compared with one and the next one.
    assert 1.4 < two / one < 1.7


def test_a_table_in_ram_counts_in_full(tmp_path: Path) -> None:
    with table_of(tmp_path / "user", ram="64MiB") as user, table_of(None, 5_000) as item:
        alone = bb.suggest_blocks([user], ram="5MiB")
        assert bb.suggest_blocks([user, item], ram=(5 << 20) + 5_000 * RECORD_BYTES * 3 // 2) <= alone
        assert bb.suggest_blocks([user, item], ram="8MiB") > bb.suggest_blocks([user], ram="8MiB")
        with pytest.raises(ValueError, match="is too small for 2 tables with any number of blocks"):
            bb.suggest_blocks([user, item], ram="4MiB")


def test_a_table_of_unknown_size_counts_its_stored_rows(tmp_path: Path) -> None:
    with table_of(tmp_path / "word", None, ram="64MiB") as word:
        with pytest.raises(ValueError, match="table 'word' has no num_rows and stores no rows, so its size is unknown"):
            bb.suggest_blocks([word])
        word.update(np.arange(10_000) * 10**9, np.ones((10_000, DIM), np.float32))
        assert bb.suggest_blocks([word], ram="64MiB") == 1
        assert bb.suggest_blocks([word], ram="5MiB") > 1


def test_a_sharded_table_needs_the_buffers_of_each_shard(tmp_path: Path) -> None:
    sharded = bb.ShardedTable.create(
        tmp_path / "sharded", shards=4, dim=DIM, num_rows=ROWS, optimizer=bb.Adam(0.01), ram="64MiB"
    )
    with sharded, table_of(tmp_path / "plain", ram="64MiB") as plain:
        assert bb.suggest_blocks([sharded], ram="8MiB") >= bb.suggest_blocks([plain], ram="8MiB")
        least = [needed_of([table]) for table in (plain, sharded)]
        assert 3 * least[0] < least[1] < 5 * least[0]


def needed_of(tables: list[bb.Table]) -> int:
    """Return the least RAM that the error names."""
    with pytest.raises(ValueError, match="must be at least") as caught:
        bb.suggest_blocks(tables, ram=1)
    return int(re.findall(r"at least (\d+)", str(caught.value))[0])


def test_the_least_ram_that_an_error_names_is_enough(tmp_path: Path) -> None:
    with table_of(tmp_path / "user", ram="64MiB") as user, table_of(tmp_path / "item", 3, ram="64MiB") as item:
        least = needed_of([user, item])
        assert bb.suggest_blocks([user, item], ram=least) <= 3  # not more blocks than the smaller table has rows
        with pytest.raises(ValueError, match=re.escape(f"ram={least - 1} (")):
            bb.suggest_blocks([user, item], ram=least - 1)


@pytest.mark.parametrize(
    ("tables", "ram", "error", "message"),
    [
        ([], "1GiB", ValueError, "suggest_blocks: tables is empty; give the table of each column"),
        (["user"], "1GiB", TypeError, "suggest_blocks: tables must be a list of tables, got ['user']"),
        (table_of(None), "1GiB", TypeError, "suggest_blocks: tables must be a list of tables, got <bunkbed.Table"),
        ([table_of(None)], 0, ValueError, "a size must be above 0 bytes, got 0"),
        ([table_of(None)], "much", ValueError, "cannot read the size 'much'"),
    ],
)
def test_bad_arguments_are_refused(tables: Any, ram: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        bb.suggest_blocks(tables, ram=ram)
