"""Ages, counts, rules and clock go with the rows: into copies, other shards, other dtypes, layers and device caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.testing import ReferenceTable
from bunkbed.testing.sweeps import assert_same_sweep

RULES: dict[str, Any] = {"expire": 9, "clock": "event", "max_rows": 120, "evict": "rarest"}


def trained(path: Path) -> ReferenceTable:
    """Make a table at `path`; return its oracle."""
    arguments: dict[str, Any] = {"dim": 4, "optimizer": bb.Adam(lr=0.01), **RULES}
    oracle = ReferenceTable(**arguments)
    with bb.create(path, ram="16MiB", **arguments) as table:
        rng = np.random.default_rng(0)
        for day in range(12):
            table.clock = oracle.clock = day
            ids = rng.integers(0, 500, 60)
            grads = rng.standard_normal((60, 4)).astype(np.float32)
            table.update(ids, grads)
            oracle.update(ids, grads)
        table.commit(keep="kept")
        table.clock = oracle.clock = 14
    return oracle


COPIES: dict[str, Callable[[Path, Path], Any]] = {
    "a copy": lambda path, to: bb.copy(path, to),
    "bfloat16": lambda path, to: bb.copy(path, to, dtype="bfloat16"),
    "without state": lambda path, to: bb.copy(path, to, optimizer=bb.SGD(lr=0.1)),
    "shards": lambda path, to: (bb.copy(path, to), bb.reshard(to, shards=3, drop_snapshots=True)),
}


@pytest.mark.parametrize("how", COPIES)
def test_ages_go_with_the_rows(tmp_path: Path, how: str) -> None:
    oracle = trained(tmp_path / "table")
    COPIES[how](tmp_path / "table", tmp_path / "copy")
    assert bb.check(tmp_path / "copy") == []
    with bb.open(tmp_path / "copy", ram="64MiB") as copied:
        assert (copied.retention, copied.clock, copied.step) == (bb.Retention(**RULES), 14, 12)
        swept = assert_same_sweep(copied, oracle)
        assert swept.expired > 20 and swept.evicted > 20
        assert sorted(oracle._places) == sorted(int(row) for ids, _ in copied.scan() for row in ids)


def test_rows_of_a_run(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        for name, shards in (("user", {}), ("item", {"shards": 2})):
            table = run.table(name, create={"dim": 2, "expire": 3, **shards})
            for step in range(5):
                table.update([step, step + 1], np.ones((2, 2), np.float32))
        run.commit()
        assert run.table("item").sweep().expired == run.table("user").sweep().expired == 2
        run.commit()
    with bb.Run(tmp_path / "run", mode="r", ram="64MiB") as run:
        for name in ("user", "item"):
            table = run.table(name)
            assert table.contains(np.arange(6)).tolist() == [False, False, True, True, True, True]
            assert table.sweep(dry_run=True).removed == 0


@pytest.mark.parametrize("rows", [0, 60, 1000])
@pytest.mark.parametrize("clock", ["step", "event"])
def test_a_device_cache_keeps_ages(tmp_path: Path, rows: int, clock: Any) -> None:
    torch = pytest.importorskip("torch")
    bt = pytest.importorskip("bunkbed.torch")
    retention = bb.Retention(expire=6, max_rows=150, evict="rarest", clock=clock)
    oracle = ReferenceTable(dim=4, optimizer=bb.SGD(lr=0.1), init=bb.Normal(1.0), seed=1, **vars(retention))
    layer = bt.Embedding(
        None,
        4,
        seed=1,
        optimizer=bb.SGD(lr=0.1),
        retention=retention,
        path=tmp_path / "table",
        ram="16MiB",
        device_cache=rows and rows * (4 * 4 + 12),
    )
    optimizer = bt.Optimizer(layer)
    rng = np.random.default_rng(0)
    for step in range(24):
        if clock == "event":
            layer.table.clock = oracle.clock = step // 2
        ids = rng.integers(0, 400, 40)
        layer(torch.from_numpy(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        oracle.update(ids, np.ones((40, 4), np.float32))
        if step % 8 == 7:
            assert assert_same_sweep(layer.table, oracle).removed > 5
    ids = np.arange(400)
    np.testing.assert_array_equal(layer.table.lookup(ids), oracle.lookup(ids))
    if rows:
        assert layer.table.stats()["device_hits"] > 0
    layer.table.close()


def test_layers_of_torch_and_keras(tmp_path: Path) -> None:
    bt = pytest.importorskip("bunkbed.torch")
    retention = bb.Retention(expire=6, keep=2)
    bt.EmbeddingBag(None, 4, retention=retention, path=tmp_path / "table", ram="16MiB").table.close()
    layer = bt.Embedding(None, 4, path=tmp_path / "table", ram="16MiB")
    assert layer.table.retention == retention
    layer.table.close()
    layer = bt.Embedding(None, 4, path=tmp_path / "table", ram="16MiB", retention=bb.Retention(expire=7))
    assert layer.table.retention == bb.Retention(expire=7)
    with pytest.raises(ValueError, match="retention= cannot be given together with table="):
        bt.Embedding(None, 4, table=layer.table, retention=retention)
    layer.table.close()


def test_checkpoints_of_tables_in_ram_have_ages(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    bt = pytest.importorskip("bunkbed.torch")
    for clock in ("step", "event"):
        retention = bb.Retention(expire=5, clock=clock, keep=1)

        def make(seed: int, retention: bb.Retention = retention) -> Any:
            return bt.Embedding(None, 2, seed=seed, retention=retention, optimizer=bb.SGD(lr=0.1))

        layer = make(3)
        for step in range(20):
            if clock == "event":
                layer.table.clock = step
            layer.table.update([step, 3], np.ones((2, 2), np.float32))
        expected = layer.table.sweep(dry_run=True)
        assert expected.expired == 14
        torch.save(layer.state_dict(), tmp_path / "layer.pt")
        for other in (make(3), make(4)):  # another seed makes another table
            other.load_state_dict(torch.load(tmp_path / "layer.pt"))
            assert (other.table.retention, other.table.clock) == (retention, layer.table.clock)
            assert other.table.sweep(dry_run=True) == expected
        assert copy.deepcopy(layer).table.sweep(dry_run=True) == expected
        later = make(3)
        if clock == "event":
            later.table.clock = 90  # the clock goes back with the rows
        later.load_state_dict(torch.load(tmp_path / "layer.pt"))
        assert later.table.sweep(dry_run=True) == expected
        plain = bt.Embedding(None, 2, seed=3, optimizer=bb.SGD(lr=0.1))
        plain.load_state_dict(torch.load(tmp_path / "layer.pt"))
        assert np.array_equal(plain.table.lookup([3, 19]), layer.table.lookup([3, 19]))
        with pytest.raises(RuntimeError, match=r"the saved 'usage' must be int64\[20, 2\]"):
            damaged = layer.state_dict()
            damaged["rows.usage"] = damaged["rows.usage"][:3]
            make(3).load_state_dict(damaged)


def test_a_padding_row_stays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    bt = pytest.importorskip("bunkbed.torch")
    for rules in ({"expire": 2}, {"max_rows": 3, "evict": "smallest"}, {"expire": 1, "clock": "event"}):
        retention = bb.Retention(**rules)  # type: ignore[arg-type]
        where = {"path": tmp_path / retention.clock / str(retention.expire), "ram": "16MiB"}
        layer = bt.Embedding(None, 4, padding_idx=0, retention=retention, **where)
        if retention.clock == "event":
            layer.table.clock = 20_000
        optimizer = bt.Optimizer(layer)
        for step in range(6):
            if retention.clock == "event":
                assert layer.table.clock == 20_000 + step
                layer.table.clock += 1
            layer(torch.tensor([0, step + 1])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert layer.table.sweep().removed > 1
        assert layer(torch.tensor([0])).tolist() == [[0.0] * 4] and not layer.table.lookup([0]).any()
        layer.table.close()


def test_another_layer_does_not_change_the_rules(tmp_path: Path) -> None:
    bt = pytest.importorskip("bunkbed.torch")
    where = {"path": tmp_path / "table", "ram": "16MiB", "optimizer": bb.Adam(lr=0.1)}
    layer = bt.Embedding(None, 4, retention=bb.Retention(expire=6), **where)
    with pytest.raises(ValueError, match="which another layer has open, has"):
        bt.Embedding(None, 4, retention=bb.Retention(expire=9), **where)
    assert layer.table.retention.expire == 6
    for wrong in ({"expire": 3}, 30):
        with pytest.raises(TypeError, match=r"retention must be a bunkbed\.Retention"):
            bt.Embedding(None, 4, retention=wrong)
    with pytest.raises(ValueError, match=r"num_embeddings=100 was given.*give num_embeddings=None"):
        bt.Embedding(100, 4, retention=bb.Retention(expire=9))
    layer.table.close()


def test_a_run_whose_clock_went_back_is_divided_without_its_snapshots(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        table = run.table("item", create={"dim": 2, "expire": 3, "clock": "event"})
        for clock, keep in ((4, "a"), (90, "b")):
            table.clock = clock
            table.update([clock], np.ones((1, 2), np.float32))
            run.commit(keep=keep)
        run.rewind("a")
        table = run.table("item")
        table.clock = 5
        for row in (5, 6):
            table.update([row], np.ones((1, 2), np.float32))
        run.commit()
    with pytest.raises(ValueError, match="has the clock 5, an earlier one than before"):
        bb.reshard(tmp_path / "run", shards=2)
    bb.reshard(tmp_path / "run", shards=2, drop_snapshots=True)
    with bb.Run(tmp_path / "run", mode="r", ram="64MiB") as run:
        assert run.table("item").clock == 5 and run.table("item").contains([4, 5, 6, 90]).tolist() == [True] * 3 + [
            False
        ]


def test_the_clock_stays_where_the_dense_optimizer_decides_the_rule(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    bt = pytest.importorskip("bunkbed.torch")
    layer = bt.Embedding(None, 4, padding_idx=0, retention=bb.Retention(expire=2, clock="event"))
    layer.table.clock = 20_000
    before = layer.table
    optimizer = bt.Optimizer(layer, dense=torch.optim.Adagrad(layer.parameters(), lr=0.1))
    assert layer.table is not before and isinstance(layer.table.optimizer, bb.Adagrad)
    assert layer.table.clock == 20_000
    layer(torch.tensor([0, 5])).sum().backward()
    optimizer.step()
    layer.table.clock = 20_002
    assert layer.table.sweep().expired == 1 and not layer.table.lookup([0]).any()


def test_rows_that_were_saved_without_ages_get_that_of_the_load() -> None:
    torch = pytest.importorskip("torch")
    bt = pytest.importorskip("bunkbed.torch")
    plain = bt.Embedding(None, 2, padding_idx=0, seed=3, optimizer=bb.SGD(lr=0.1))
    for step in range(4):
        plain.table.update([step + 1], np.ones((1, 2), np.float32))
    layer = bt.Embedding(None, 2, padding_idx=0, seed=3, optimizer=bb.SGD(lr=0.1), retention=bb.Retention(expire=3))
    layer.load_state_dict(plain.state_dict())
    assert layer.table.step == 4 and layer.table.sweep(dry_run=True).ages == (bb.Bin(0, 0, 4),)
    for _ in range(3):
        layer.table.update([9], np.ones((1, 2), np.float32))
    assert layer.table.sweep().expired == 4
    assert not layer(torch.tensor([0])).any() and layer.table.contains([0]).all()
