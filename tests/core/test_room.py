"""What `create` says about its budget of RAM is so; the torture part `budgets` tries more random tables."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torture.budgets import Case, outcome, reader

import bunkbed as bb

#: One number a row, because the directory is what needs the RAM.
NARROW = {"dim": 1, "optimizer": bb.SGD(1.0), "init": bb.Zeros()}


def require_small_directory(table: bb.Table) -> None:
    """The directory takes 5 bytes a row or 17 a stored row, whichever is less, and some for growth."""
    assert table.num_rows is not None
    assert table.stats()["directory_bytes"] < min(5.1 * table.num_rows, 18 * len(table)) + 40_000


@pytest.mark.parametrize("seed", range(24))
def test_random_tables_and_budgets(seed: int, tmp_path: Path) -> None:
    outcome(Case.of(seed), tmp_path)


def test_the_cases_are_of_each_kind(tmp_path: Path) -> None:
    kinds = {outcome(case, tmp_path / f"{case.seed}")[0] for case in map(Case.of, (0, 1, 2, 3, 14, 188))}
    assert kinds == {"accepted", "warned", "refused"}


def test_a_reader_needs_at_most_eight_bytes_a_row(tmp_path: Path) -> None:
    is_ok, text = reader(1_000_000, tmp_path)
    assert is_ok, text


def test_the_minimum_of_the_issue_trains_every_row(tmp_path: Path) -> None:
    """A million rows x 64 with Adam stopped at 725,000 rows with 18 MiB."""
    least = bb.minimum_ram(1_000_000, 64)
    assert least < 8 << 20
    with bb.create(tmp_path / "table", dim=64, num_rows=1_000_000, ram=least) as table:
        for start in range(0, 1_000_000, 50_000):
            table.update(np.arange(start, start + 50_000), np.ones((50_000, 64), np.float32))
        assert len(table) == 1_000_000


@pytest.mark.parametrize("order", ["ascending", "random"])
def test_the_directory_is_small_while_rows_come(order: str, tmp_path: Path) -> None:
    rows = 1_000_000
    ids = np.arange(rows)
    if order == "random":
        np.random.default_rng(0).shuffle(ids)
    least = bb.minimum_ram(rows, 1, bb.SGD())
    ram = least + (1 << 20)
    with bb.create(tmp_path / "table", num_rows=rows, ram=ram, **NARROW) as table:
        for start in range(0, rows, 20_000):
            some = ids[start : start + 20_000]
            table.update(some, -(some % 100 + 1).astype(np.float32)[:, None])
            assert table.stats()["ram_bytes"] <= ram
            require_small_directory(table)
            if start % 200_000 == 0:
                table.commit()
                some = ids[: start + 20_000]
                assert np.array_equal(table.lookup(some)[:, 0], (some % 100 + 1).astype(np.float32))
    for budget in (least, ram, 64 << 20):
        with bb.open(tmp_path / "table", ram=budget, mode="r") as reading:
            require_small_directory(reading)
            assert np.array_equal(reading.lookup(ids)[:, 0], (ids % 100 + 1).astype(np.float32))


def test_the_minimum_may_be_set_later(tmp_path: Path) -> None:
    rows = 400_000
    ids = np.random.default_rng(1).permutation(rows)[:80_000]
    least = bb.minimum_ram(rows, 1, bb.SGD())
    with bb.create(tmp_path / "table", num_rows=rows, ram=least + (4 << 20), **NARROW) as table:
        table.update(ids, -(ids % 100 + 1).astype(np.float32)[:, None])
        table.plain_core.set_ram(least)
        assert table.stats()["ram_bytes"] <= least
        assert np.array_equal(table.lookup(ids)[:, 0], (ids % 100 + 1).astype(np.float32))
        with pytest.raises(MemoryError, match=r"needs ram=\d+ at least"):
            table.plain_core.set_ram(least // 3)
        table.update(np.arange(rows), np.zeros((rows, 1), np.float32))
        assert len(table) == rows


def test_neighbours_that_are_stored_open_again_with_what_they_took(tmp_path: Path) -> None:
    """Half of the ranges are flat and half are empty: half of what the minimum allows for."""
    rows = 2_000_000
    with bb.create(tmp_path / "table", num_rows=rows, ram="20MiB", **NARROW) as table:
        table.update(np.arange(rows // 2), np.zeros((rows // 2, 1), np.float32))
        used = table.stats()["directory_bytes"]
        assert used < 2.6 * rows
    budget = bb.minimum_ram(rows // 2, 1, bb.SGD(), num_rows=rows) - rows * 2
    with bb.open(tmp_path / "table", ram=budget) as again:
        assert again.stats()["directory_bytes"] == used


def test_few_rows_of_many_leave_the_budget_to_the_cache(tmp_path: Path) -> None:
    with bb.create(tmp_path / "table", num_rows=100_000_000, ram="1GiB", **NARROW) as table:
        table.update(np.arange(10_000) * 9_999, np.zeros((10_000, 1), np.float32))
        assert table.stats()["directory_bytes"] < 1 << 20


def test_a_table_that_was_filled_up_opens_again_with_its_budget(tmp_path: Path) -> None:
    with bb.create(tmp_path / "table", ram="2MiB", **NARROW) as table:
        stored = 0
        with pytest.raises(MemoryError, match=r"open it with ram=\d+ or more"):
            while True:
                ids = np.arange(stored, stored + 100) * 7
                table.update(ids, -np.ones((100, 1), np.float32))
                stored += 100
        assert len(table) == stored > 50_000
    with bb.open(tmp_path / "table", ram="2MiB") as again:
        assert (again.lookup(np.arange(stored) * 7) == 1).all()
    with bb.open(tmp_path / "table", ram="2MiB", mode="r") as reading:
        assert (reading.lookup(np.arange(stored) * 7) == 1).all()


def _warning(make: object) -> str:
    with pytest.warns(UserWarning, match="has room for") as shown:
        make()  # type: ignore[operator]
    assert len(shown) == 1
    return str(shown[0].message)


@pytest.mark.parametrize(
    ("definition", "ram"),
    [
        ({"dim": 108, "num_rows": 276_146, "optimizer": bb.Adagrad(0.01)}, 6_641_490),
        ({"dim": 6, "dtype": "float16", "num_rows": 13_368, "optimizer": bb.Adam()}, 283_044),
    ],
)
def test_a_table_in_ram_stores_the_rows_that_its_warning_names(definition: dict[str, Any], ram: int) -> None:
    """A directory of all rows, flat and ready, would take the room of a fifth of them."""
    made: list[bb.Table] = []
    text = _warning(lambda: made.append(bb.create(None, ram=ram, **definition)))
    named = int(re.findall(r"for ([\d,]+) of", text)[0].replace(",", ""))
    with made[0] as table:
        ids = np.linspace(0, table.num_rows - 1, named, dtype=np.int64)
        for start in range(0, named, 64):
            some = ids[start : start + 64]
            table.update(some, np.ones((len(some), table.dim), np.float32))
        assert len(table) == named


@pytest.mark.parametrize("num_rows", [None, 300_000])
def test_a_table_in_ram_gives_the_room_of_deleted_rows_to_others(num_rows: int | None) -> None:
    """The directory grows after the deletes, and takes frames from the rows that are left."""
    definition = {"dim": 8, "num_rows": num_rows, "optimizer": bb.Adam(0.1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not all rows have room
        tables = [bb.create(None, ram=ram, **definition) for ram in (1_000_000, None)]
    stored = 0
    with pytest.raises(MemoryError, match="lives in RAM only"):
        while True:
            for table in tables:
                table.update(np.arange(stored, stored + 64), np.ones((64, 8), np.float32))
            stored += 64
    ids = np.arange(stored)
    ids, gone = np.concatenate([ids[:50], ids[-150:]]), ids[50:-150]
    full, others = stored, 100_000 + np.random.default_rng(0).permutation(170_000)
    for table in tables:
        table.delete(gone)
    for start in range(0, full * 3 // 4, 64):
        some = others[start : start + 64]
        for table in tables:
            table.update(some, np.full((64, 8), start, np.float32))
        ids = np.concatenate([ids, some])
    for slot in ("weight", *tables[0].slots):
        assert np.array_equal(tables[0].get(ids, slot), tables[1].get(ids, slot))
    assert len(tables[0]) == len(ids) > 4000
    refused = 0
    for row in others[len(ids) : 4 * len(ids)]:
        try:
            tables[0].update([row], np.ones((1, 8), np.float32))
        except MemoryError as error:
            assert f"full after {len(tables[0])} rows" in str(error)
            refused += 1
    assert refused > len(ids)
    assert np.array_equal(tables[0].lookup(ids), tables[1].lookup(ids))
    tables[0].delete(others[len(ids) :])
    tables[0].delete(ids[:-100])
    tables[0].plain_core.set_ram(600_000)
    assert np.array_equal(tables[0].lookup(ids[-100:]), tables[1].lookup(ids[-100:]))


def test_a_budget_without_room_for_all_rows_warns_once(tmp_path: Path) -> None:
    given = {"dim": 8, "num_rows": 50_000_000}
    needed = bb.minimum_ram(50_000_000, 8)
    text = _warning(lambda: bb.create(tmp_path / "a", ram="64MiB", **given).close())
    assert text.startswith("table 'a': ram=67108864 (64.0 MiB) has room for ")
    assert "of its 50,000,000 rows; training or setting more will be a MemoryError; if more will be stored, " in text
    assert f"give it ram={needed} (" in text
    named = int(re.findall(r"for ([\d,]+) of", text)[0].replace(",", ""))
    assert bb.minimum_ram(named, 8, num_rows=50_000_000) <= 64 << 20 < bb.minimum_ram(named + 1, 8, num_rows=50_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bb.open(tmp_path / "a", ram="64MiB").close()  # said once
        bb.create(tmp_path / "b", ram=needed, **given).close()
        bb.create(
            tmp_path / "c", ram="64MiB", dim=8, num_rows=1 << 50
        ).close()  # more than any table stores: sparse ids
        bb.create(tmp_path / "d", ram="64MiB", dim=8).close()
    _warning(lambda: bb.create(tmp_path / "e", ram=bb.Budget("64MiB"), **given).close())
    _warning(lambda: bb.ShardedTable.create(tmp_path / "f", shards=4, ram="64MiB", **given).close())
    text = _warning(lambda: bb.create(None, ram="1MiB", dim=64, num_rows=10_000))
    assert "give it a path or ram=" in text
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        _warning(lambda: run.table("user", create=given))
        _warning(lambda: run.table("item", create={**given, "shards": 2}))


def test_a_warning_that_is_an_error_makes_nothing(tmp_path: Path) -> None:
    given = {"dim": 8, "num_rows": 50_000_000}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (
            lambda: bb.create(tmp_path / "a", ram="64MiB", **given),
            lambda: bb.ShardedTable.create(tmp_path / "b", shards=2, ram="64MiB", **given),
        ):
            with pytest.raises(UserWarning, match="has room for"):
                make()
        assert not list(tmp_path.iterdir())
        with bb.Run(tmp_path / "run", ram="64MiB") as run:
            for create in (given, {**given, "shards": 2}):
                with pytest.raises(UserWarning, match="has room for"):
                    run.table("user", create=create)
            run.table("user", create={"dim": 8, "num_rows": 100})


def test_a_budget_counts_what_its_tables_need(tmp_path: Path) -> None:
    needed = bb.minimum_ram(900_000, 2, bb.SGD())
    budget = bb.Budget(2 * needed + (1 << 20))
    given = {"dim": 2, "num_rows": 900_000, "optimizer": bb.SGD(), "ram": budget}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = bb.create(tmp_path / "a", **given), bb.create(tmp_path / "b", **given)
    for table in (first, second):
        table.update(np.arange(900_000), np.zeros((900_000, 2), np.float32))
    _warning(lambda: bb.create(tmp_path / "c", **given))
    for table in (first, second):
        table.close(commit=False)


def test_the_minimum_refuses_what_is_no_table() -> None:
    with pytest.raises(ValueError, match="rows must be at least 0, got -1"):
        bb.minimum_ram(-1, 8)
    with pytest.raises(ValueError, match=r"dim must be in"):
        bb.minimum_ram(10, 0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        bb.minimum_ram(10, 8, dtype="int8")
    assert bb.minimum_ram(0, 8) > 0
