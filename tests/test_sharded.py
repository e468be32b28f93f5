"""`bb.ShardedTable`: the bits of one table, in several directories that commit as one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.sharding import MAX_SHARDS, Split, shard_name, shards_of
from bunkbed.testing.compare import assert_same_bits, zipf_ids

ROWS = 2_000
FACTS: dict[str, Any] = {
    "dim": 20,
    "num_rows": ROWS,
    "optimizer": bb.Adam(lr=0.01, state_dtype="bfloat16"),
    "init": bb.Normal(0.1),
    "seed": 3,
    "dtype": "bfloat16",
}
EVERY = np.arange(ROWS)


def make(path: Path, shards: int | None = 3, **kwargs: Any) -> bb.ShardedTable:
    return bb.ShardedTable.create(path, **{"ram": "32MiB", **FACTS, "shards": shards, **kwargs})


def batches(steps: int, size: int = 700, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        (zipf_ids(rng, ROWS, size), rng.standard_normal((size, FACTS["dim"])).astype(np.float32)) for _ in range(steps)
    ]


def train(*tables: Any, steps: int = 5, seed: int = 0) -> None:
    for ids, grads in batches(steps, seed=seed):
        for table in tables:
            table.update(ids, grads)


def assert_same_tables(ours: Any, other: Any, ids: np.ndarray = EVERY) -> None:
    for slot in ("weight", *other.slots):
        assert_same_bits(ours.get(ids, slot), other.get(ids, slot), slot)
    assert ours.contains(ids).tolist() == other.contains(ids).tolist()
    assert (ours.step, len(ours), ours.nbytes) == (other.step, len(other), other.nbytes)


# ---- Who has a row


def test_the_rule_that_divides_rows_is_file_format() -> None:
    ids = np.array([0, 1, 2, 3, 12345, 2**31, 2**40 + 3, 2**63 - 1])
    assert shards_of(ids, 1).tolist() == [0] * 8
    assert shards_of(ids, 5).tolist() == [4, 2, 2, 0, 0, 0, 2, 0]
    assert shards_of(ids, 1024).tolist() == [_owner(int(one), 1024) for one in ids]
    counts = np.bincount(shards_of(np.arange(80_000), 8), minlength=8)
    assert counts.min() > 9_600 and counts.max() < 10_400


def _owner(row: int, shards: int) -> int:
    """The rule once more, in Python's integers."""
    mask = 2**64 - 1
    x = row + 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x >> 32) * shards >> 32


def test_a_split_keeps_the_order_of_the_batch_within_a_shard() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 1_000)
    split = Split(ids, 4)
    assert split.order is not None
    for index in range(4):
        places = split.order[split.part(index)]
        assert (np.diff(places) > 0).all() and (shards_of(ids[places], 4) == index).all()
    out = np.empty_like(ids)
    split.put(split.take(ids), out)
    assert out.tolist() == ids.tolist()


def test_a_shard_holds_its_own_rows_only(tmp_path: Path) -> None:
    places = [tmp_path / "ssd0", tmp_path / "ssd1"]
    with make(tmp_path / "user", None, directories=places) as table:
        train(table)
        stored = EVERY[table.contains(EVERY)]
        owners = table.shards_of(EVERY)
        assert table.directories == tuple(place / shard_name(i) for i, place in enumerate(places))
        assert table.num_shards == 2 and not list((tmp_path / "user" / "tables").iterdir())
    with bb.Run(tmp_path / "user", mode="r") as run:
        found = []
        for index in range(2):
            ids = np.concatenate([ids for ids, _ in run.table(shard_name(index)).scan()])
            assert (owners[ids] == index).all()
            found += ids.tolist()
    assert sorted(found) == stored.tolist()


# ---- The same bits


@pytest.mark.parametrize("optimizer", [bb.SGD(lr=0.1), FACTS["optimizer"], bb.RowwiseAdagrad(lr=0.1)], ids=repr)
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_rows_are_those_of_one_table(tmp_path: Path, shards: int, optimizer: Any) -> None:
    facts = {**FACTS, "optimizer": optimizer}
    one = bb.create(None, **facts)
    table = make(tmp_path / "user", shards, optimizer=optimizer)
    train(one, table)
    for ids, grads in batches(5, seed=1):  # as a framework's step does it
        for t in (one, table):
            t.optimizer = type(t.optimizer)(**{**vars(t.optimizer), "lr": 0.05})
        mine, theirs = table.batch(ids), one.batch(ids)
        assert len(mine) == len(theirs) and mine.unique().tolist() == theirs.unique().tolist()
        assert_same_bits(table.lookup_batch(mine, ids.size), one.lookup_batch(theirs, ids.size))
        (ours, norm), (sums, expected) = mine.sum(grads), theirs.sum(grads)
        assert norm == expected
        assert_same_bits(ours, sums)
        table.update_batch(mine, ours, lr=0.2)
        one.update_batch(theirs, sums, lr=0.2)
    empty = np.empty(0, np.int64)
    for t in (one, table):
        t.update(empty, np.empty((0, t.dim), np.float32))
        t.update([5, 9], np.ones((2, t.dim), np.float32), step=40)
        t.update([5], np.ones((1, t.dim), np.float32))
    assert table.step == 41
    assert_same_tables(table, one)
    queries = np.random.default_rng(2).standard_normal((3, table.dim)).astype(np.float32)
    for ours, expected in zip(table.topk(queries, 7), one.topk(queries, 7), strict=True):
        assert ours.tolist() == expected.tolist()
    assert {core.step() for core in table._native._cores} == {41}
    table.close()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn", "none"])
def test_bags_are_those_of_one_table(tmp_path: Path, pooling: str, weighted: bool) -> None:
    facts = {**FACTS, "dtype": "float32", "optimizer": bb.SGD(lr=0.1)}
    one = bb.create(None, **facts)
    with make(tmp_path / "user", **{key: facts[key] for key in ("dtype", "optimizer")}) as table:
        train(one, table)
        zeros = np.full((3, 20), -0.0, np.float32)
        for t in (one, table):
            t.set([1, 2, 3], zeros)
        rng = np.random.default_rng(4)
        ids = np.concatenate([[1, 2, 3, 1], zipf_ids(rng, ROWS, 5_000)])
        offsets = np.sort(np.concatenate([[0, 0, 1, 3, 3, 4, 5_004, 5_004], rng.integers(4, 900, 50)]))
        weights = rng.standard_normal(5_004).astype(np.float32) if weighted else None
        arguments: dict[str, Any] = {"pooling": pooling, "weights": weights}
        expected = one.lookup_bags(ids, offsets, **arguments)
        assert_same_bits(table.lookup_bags(ids, offsets, **arguments), expected)
        assert_same_bits(
            table.lookup_bags(ids[:9], [0, 4], pooling=pooling), one.lookup_bags(ids[:9], [0, 4], pooling=pooling)
        )


def test_threads_change_no_bit(tmp_path: Path, native_defaults: None) -> None:
    one = bb.create(None, **FACTS)
    tables = []
    for threads in (1, 4):
        bb.set_num_threads(threads)
        table = make(tmp_path / f"{threads}", 4)
        train(table, steps=10)
        tables.append(table)
    train(one, steps=10)
    for table in tables:
        assert_same_tables(table, one)
        table.close()


def test_training_with_torch_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from bunkbed.torch import Embedding, EmbeddingBag, Optimizer, lookahead

    def run(table: Any) -> Any:
        emb, bag = Embedding(ROWS, 20, table=table), EmbeddingBag(ROWS, 20, mode="mean", table=table)
        torch.manual_seed(0)
        model = torch.nn.ModuleList([emb, bag, torch.nn.Linear(20, 1)])
        opt = Optimizer(model, dense=torch.optim.SGD(model[2].parameters(), lr=0.1))
        stream = [torch.from_numpy(ids).view(7, 100) for ids, _ in batches(8)]
        for ids in lookahead(stream, model, ids=lambda b: {emb: b}):
            loss = (model[2](emb(ids).mean(1)) * model[2](bag(ids))).square().sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
        return model

    one = bb.create(None, **FACTS)
    table = make(tmp_path / "user", ram="2MiB")
    run(one)
    model = run(table)
    assert table.step == 8
    assert_same_tables(table, one)
    state = model.state_dict()
    train(table)
    model.load_state_dict(state)
    assert_same_tables(table, one)
    del model
    table.close()


# ---- Opening


def test_open_gives_the_table_by_either_name_and_only_once(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    train(table)
    assert bb.open(tmp_path / "user") is table
    assert bb.ShardedTable.open(tmp_path / "user", create={**FACTS, "shards": 3}) is table
    with pytest.raises(ValueError, match="dim is 20 in the table, 21 was asked for"):
        bb.open(tmp_path / "user", create={**FACTS, "dim": 21})
    table.close()
    table.close()
    assert not table.closed, "opened three times"
    table.close()
    assert table.closed and repr(table).endswith("closed>")
    with bb.open(tmp_path / "user", mode="r", ram="8MiB") as reader:
        assert isinstance(reader, bb.ShardedTable) and reader.ram_bytes == 8 << 20
        assert repr(reader).endswith("3 shards, 2000 rows x 20 bfloat16, Adam, step 5, epoch 1>")
    made = bb.ShardedTable.open(tmp_path / "new", create={**FACTS, "shards": 2, "ram": "16MiB"})
    assert made.num_shards == 2 and made.epoch == 0
    made.close(commit=False)
    assert bb.ShardedTable.open(tmp_path / "new").step == 0


def test_what_is_not_one_says_how_it_is_opened(tmp_path: Path) -> None:
    make(tmp_path / "user").close()
    with pytest.raises(bb.FormatError, match=r"one sharded table.*bb\.ShardedTable\.open"):
        bb.Run(tmp_path / "user")
    with pytest.raises(bb.BunkbedError, match="belongs to a run"):
        bb.open(tmp_path / "user" / "tables" / "shard-0000")
    bb.create(tmp_path / "plain", **FACTS, ram="16MiB").close()
    with pytest.raises(bb.FormatError, match=r"not a sharded table.*bb\.open"):
        bb.ShardedTable.open(tmp_path / "plain")
    with bb.Run(tmp_path / "run") as run:
        run.table("user", create=FACTS)
        run.commit()
    with pytest.raises(bb.FormatError, match=r"a run of tables.*bb\.Run"):
        bb.ShardedTable.open(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"no sharded table at .*nothing"):
        bb.ShardedTable.open(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"shards": None}, ValueError, "give shards=, a number, or directories="),
        ({"shards": 0}, ValueError, r"shards must be in \[1, 1024\], got 0"),
        ({"shards": MAX_SHARDS + 1}, ValueError, "got 1025"),
        ({"shards": True}, TypeError, "shards must be an int, got True"),
        ({"directories": []}, ValueError, "directories is empty"),
        ({"directories": "/ssd0"}, TypeError, "directories must be a list of paths, got '/ssd0'"),
        ({"shards": 1, "directories": ["a", "b"]}, ValueError, "1 shards leave 1 of 2 directories empty"),
        ({"dim": 0}, ValueError, "dim must be in"),
        ({"ram": "100KiB"}, MemoryError, r"table 'user': a budget of 100.0 KiB is too small for 3 shards; they need"),
    ],
)
def test_bad_arguments_make_nothing(tmp_path: Path, arguments: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        make(tmp_path / "user", **arguments)
    assert not list(tmp_path.iterdir())


def test_nothing_that_is_there_is_overwritten(tmp_path: Path) -> None:
    make(tmp_path / "user").close()
    for path in (tmp_path / "user",):
        with pytest.raises(FileExistsError, match="a table exists already at"):
            make(path)
    (tmp_path / "ssd1" / "shard-0001").mkdir(parents=True)
    (tmp_path / "ssd1" / "shard-0001" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match=r"ssd1/shard-0001 is there already"):
        make(tmp_path / "item", None, directories=[tmp_path / "ssd0", tmp_path / "ssd1"])
    assert (tmp_path / "ssd1" / "shard-0001" / "mine").exists() and not (tmp_path / "item").exists()
    with bb.open(tmp_path / "user") as table:
        assert table.step == 0


def test_a_table_whose_making_failed_leaves_nothing(tmp_path: Path) -> None:
    _native.arm_failpoint("manifest.durable", 2, "error")
    with pytest.raises(OSError, match="injected"):
        make(tmp_path / "user", None, directories=[tmp_path / "a", tmp_path / "b"])
    _native.disarm_failpoints()
    shutil.rmtree(tmp_path / "b", ignore_errors=True)
    make(tmp_path / "user", None, directories=[tmp_path / "a", tmp_path / "b"]).close()


def test_a_shard_that_moved_is_named_and_can_be_found_again(tmp_path: Path) -> None:
    path, old, new = tmp_path / "user", [tmp_path / "ssd0", tmp_path / "ssd1"], [tmp_path / "ssd0", tmp_path / "ssd2"]
    with make(path, None, directories=old) as table:
        train(table)
        table.commit(keep="a")
        rows = table.lookup(EVERY)
    old[1].rename(new[1])
    for mode in ("w", "r"):
        with pytest.raises(FileNotFoundError, match=rf"shard-0001, {old[1]}/shard-0001, is missing.*directories="):
            bb.open(path, mode=mode)
    with pytest.raises(bb.FormatError, match=r"shard-0000 holds another table .* mixed up"):
        shutil.copytree(new[1] / "shard-0001", tmp_path / "x" / "shard-0000")
        bb.ShardedTable.open(path, directories=[tmp_path / "x", new[1]])
    with bb.ShardedTable.open(path, mode="r", directories=new) as reader:
        assert_same_bits(reader.lookup(EVERY), rows)
    with pytest.raises(FileNotFoundError):
        bb.open(path)  # a reader changes nothing
    with bb.ShardedTable.open(path, directories=new) as table:
        train(table, seed=1)
        table.rewind("a")  # a commit of before the move
    assert bb.check(path) == []
    with bb.open(path) as table:
        assert_same_bits(table.lookup(EVERY), rows)
        assert table.directories[1] == new[1] / "shard-0001"


def test_shards_below_the_path_move_with_it(tmp_path: Path) -> None:
    make(
        tmp_path / "a" / "user", None, directories=[tmp_path / "a" / "user" / "x", tmp_path / "a" / "user" / "y"]
    ).close()
    (tmp_path / "a").rename(tmp_path / "b")
    with bb.open(tmp_path / "b" / "user") as table:
        assert table.directories[1] == tmp_path / "b" / "user" / "y" / "shard-0001"


def test_a_shared_budget_and_a_disk_limit_are_of_the_whole(tmp_path: Path) -> None:
    budget = bb.Budget("24MiB")
    with make(tmp_path / "user", ram=budget, disk="64MiB") as table:
        train(table)
        assert table.ram_bytes == budget.used_bytes <= 24 << 20
        assert table.stats()["disk_limit_bytes"] == 64 << 20
        assert table.stats()["ram_budget_bytes"] == budget.used_bytes
        assert bb.open(tmp_path / "user", disk="64MiB") is table
        table.close()
    assert budget.used_bytes == 0


# ---- Mistakes change nothing


def test_errors_name_the_table_and_the_place_in_the_callers_batch(tmp_path: Path) -> None:
    one = bb.create(None, **FACTS)
    one._name = "user"
    table = make(tmp_path / "user", num_rows=ROWS)
    train(one, table)
    ids, grads = batches(1)[0]
    bad_ids, bad_grads, huge = ids.copy(), grads.copy(), grads.copy()
    bad_ids[611], bad_grads[633, 7] = ROWS, np.inf
    huge[:2], ids[:2] = 3e38, 17
    calls = [
        lambda t: t.lookup(bad_ids),
        lambda t: t.lookup_bags(bad_ids, [0, 3]),
        lambda t: t.batch(bad_ids),
        lambda t: t.update(bad_ids, grads),
        lambda t: t.update(ids, bad_grads),
        lambda t: t.update(ids, huge),
        lambda t: t.update(ids, grads, lr=-1.0),
        lambda t: t.update(ids, grads, step=0),
        lambda t: t.set(ids, bad_grads),
        lambda t: t.set(ids, np.full_like(grads, 3.4e38)),
        lambda t: t.set(ids, grads, "momentum"),
        lambda t: t.stage(bad_ids),
        lambda t: t.contains(bad_ids),
        lambda t: t.get(bad_ids),
        lambda t: t.rewind("no"),
        lambda t: t.refresh(),
        lambda t: t.commit(meta={"x": object()}),
        lambda t: t.commit(keep=""),
    ]
    for call in calls:
        found = []
        for t in (one, table):
            with pytest.raises(Exception, match=r".") as error:
                call(t)
            found.append((type(error.value), str(error.value).replace("table 'table'", "table 'user'")))
        assert found[0][0] is found[1][0]
        if "no snapshot" not in found[0][1]:
            assert found[0] == found[1]
    assert_same_tables(table, one)
    train(one, table, seed=1)
    assert_same_tables(table, one)
    table.close()


# ---- Commits, readers, copies


def test_every_shard_opens_at_the_commit_before_one_that_failed_half_way(tmp_path: Path) -> None:
    one = bb.create(None, **FACTS)
    train(one)
    for name, nth in [("manifest.durable", 1), ("manifest.durable", 2), ("manifest.durable", 3), ("run.tables", 1)]:
        path = tmp_path / f"{name}-{nth}"
        table = make(path)
        train(table)
        table.commit(keep="good", meta={"at": 5})
        train(table, seed=1)
        _native.arm_failpoint(name, nth, "error")
        with pytest.raises(OSError, match="injected"):
            table.commit(meta={"at": 10})
        _native.disarm_failpoints()
        table.close(commit=False)
        with bb.open(path) as again:
            assert (again.epoch, again.meta) == (1, {"at": 5})
            assert {core.step() for core in again._native._cores} == {5}
            assert_same_tables(again, one)
            train(again, seed=1)
            assert again.commit() == 2
        assert bb.check(path) == []


def test_what_a_failed_commit_held_is_in_the_next_one(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    train(table)
    _native.arm_failpoint("run.tables", 1, "error")
    with pytest.raises(OSError, match="injected"):
        table.commit(meta={"at": 5})
    _native.disarm_failpoints()
    assert table.epoch == 0
    table.close()
    with bb.open(tmp_path / "user", mode="r") as reader:
        assert (reader.epoch, reader.step, reader.meta) == (1, 5, {"at": 5})


def test_a_commit_is_of_one_step_while_others_train(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    stop = threading.Event()

    def work() -> None:
        for ids, grads in batches(40):
            table.update(ids, grads)
        stop.set()

    thread = threading.Thread(target=work)
    thread.start()
    seen = set()
    while not stop.is_set():
        table.commit()
        with bb.open(tmp_path / "user", mode="r", ram="8MiB") as reader:
            seen.add(reader.step)  # opening checks that all shards agree
    thread.join()
    table.close()
    assert len(seen) > 1
    one = bb.create(None, **FACTS)
    train(one, steps=40)
    with bb.open(tmp_path / "user") as again:
        assert_same_tables(again, one)


def test_a_lookup_sees_all_of_a_step_or_none_of_it(tmp_path: Path) -> None:
    facts = {"dim": 4, "num_rows": ROWS, "optimizer": bb.SGD(lr=1.0), "init": bb.Zeros(), "dtype": "float32"}
    table = bb.ShardedTable.create(tmp_path / "user", shards=3, ram="32MiB", **facts)
    stop = threading.Event()

    def work() -> None:
        for _ in range(100):
            table.update(EVERY, np.ones((ROWS, 4), np.float32))
        stop.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not stop.is_set():
        assert np.unique(table.lookup(EVERY)).size == 1
    thread.join()
    assert table.lookup([0])[0, 0] == -100
    table.close()


def test_a_reader_moves_all_shards_together(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    one = bb.create(None, **FACTS)
    reader = bb.open(tmp_path / "user", mode="r", ram="8MiB")
    train(table, one)
    assert (table.commit(), reader.refresh(), reader.epoch) == (1, 1, 1)
    assert_same_bits(reader.lookup(EVERY), one.lookup(EVERY))
    assert reader.stats()["indexed_records"] > 0
    cores = list(reader._native._cores)
    train(table, one, seed=1)
    table.commit(keep="ten")
    frozen = bb.open(tmp_path / "user", snapshot="ten", ram="8MiB")
    train(table, seed=2)
    # Shards are durable, the parent does not name them: the reader may not see them.
    _native.arm_failpoint("run.tables", 1, "error")
    with pytest.raises(OSError, match="injected"):
        table.commit()
    _native.disarm_failpoints()
    assert reader.refresh() == 2
    assert all(now is not before for now, before in zip(reader._native._cores, cores, strict=True))
    assert reader.step == 10
    assert_same_bits(reader.lookup(EVERY), one.lookup(EVERY))
    train(one, seed=2)
    table.commit()
    assert reader.refresh() == 3 and reader.step == 15
    assert_same_bits(reader.lookup(EVERY), one.lookup(EVERY))
    assert (frozen.refresh(), frozen.epoch, frozen.step) == (2, 2, 10)
    table.rewind("ten")
    reader.refresh()
    assert_same_bits(reader.lookup(EVERY), frozen.lookup(EVERY))
    for t in (frozen, reader, table):
        t.close()


def test_a_reader_whose_refresh_failed_refuses_use_until_one_succeeds(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    reader = bb.open(tmp_path / "user", mode="r")
    train(table)
    table.commit()
    hidden = tmp_path / "hidden"
    table.directories[2].rename(hidden)
    with pytest.raises((OSError, bb.BunkbedError)):
        reader.refresh()
    with pytest.raises(bb.BunkbedError, match=r"table 'user' refuses use: moving to commit 1 failed.*refresh\(\)"):
        reader.lookup([1])
    hidden.rename(table.directories[2])
    assert reader.refresh() == 1
    assert_same_bits(reader.lookup(EVERY), table.lookup(EVERY))
    reader.close()
    table.close()


def test_snapshots_checks_and_copies_know_it(tmp_path: Path) -> None:
    path, copied = tmp_path / "user", tmp_path / "copy"
    with make(path, None, directories=[tmp_path / "a", tmp_path / "b"]) as table:
        train(table)
        table.commit(keep="five", meta={"at": 5})
        assert bb.copy(path, copied).epoch == 1
        train(table, seed=1)
        table.commit(keep="ten")
        assert table.snapshots() == bb.snapshots(path) == {"five": 1, "ten": 2}
        assert [(s.name, s.step, s.stored_rows) for s in bb.describe_snapshots(path)][1] == ("ten", 10, len(table))
        assert bb.copy(path, copied).present_bytes > 0
        bb.drop_snapshot(path, "five")  # of the table that is open
        assert table.snapshots() == {"ten": 2}
        rows, uuid = table.lookup(EVERY), table.uuid
        assert len(table.explain().counts) > 10
    bb.drop_snapshot(path, "ten")
    assert bb.snapshots(path) == {} and bb.check(path) == [] == bb.check(copied)
    with bb.open(copied) as other:
        assert other.uuid == uuid and other.directories[1] == copied / "tables" / "shard-0001"
        assert_same_bits(other.lookup(EVERY), rows)
        train(other, seed=2)
    bb.copy(path, tmp_path / "small", dtype="float32", optimizer=bb.SGD(lr=1.0))
    with bb.open(tmp_path / "small") as small:
        assert isinstance(small, bb.ShardedTable) and small.uuid != uuid and small.step == 10
        stored = small.contains(EVERY)
        assert_same_bits(small.lookup(EVERY[stored]), rows[stored])


def test_check_finds_what_is_wrong_with_a_shard_and_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "user"
    with make(path, None, directories=[tmp_path / "a", tmp_path / "b"]) as table:
        train(table)
        table.commit()
        rows = table.lookup(EVERY)
        train(table, seed=1)
    newest = max((tmp_path / "b" / "shard-0001").glob("manifest-*"))
    data = bytearray(newest.read_bytes())
    data[60] ^= 1
    newest.write_bytes(data)
    problems = bb.check(path)
    assert problems and any(str(tmp_path / "b" / "shard-0001") in str(problem) for problem in problems)
    assert bb.check(path, repair=True, epoch=1) == []
    with bb.open(path) as table:
        assert table.step == 5 and table.directories[1] == tmp_path / "b" / "shard-0001"
        assert_same_bits(table.lookup(EVERY), rows)
    shutil.rmtree(tmp_path / "b")
    assert any("shard-0001' is lost to the run" in str(problem) for problem in bb.check(path))
    with pytest.raises(FileNotFoundError, match="shard-0001"):
        bb.open(path)


def test_rows_left_uncommitted_are_told_once_by_the_whole(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    train(table)
    with pytest.warns(bb.UncommittedWarning) as warned:
        del table
    assert len(warned) == 1
    assert "table 'user' at" in str(warned[0].message) and "of 5 steps since commit 0" in str(warned[0].message)
    bb.open(tmp_path / "user").close()  # nothing holds its lock


def test_a_program_that_ends_tells_of_uncommitted_rows_once(tmp_path: Path) -> None:
    code = f"""
        import numpy as np, bunkbed as bb
        table = bb.ShardedTable.create({str(tmp_path / "user")!r}, shards=3, dim=2, num_rows=100, ram="32MiB")
        table.update(np.arange(100), np.ones((100, 2), np.float32))
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("UncommittedWarning: table") == 1, done.stderr
    assert "table 'user' at" in done.stderr and "100 changed rows of 1 step" in done.stderr


def test_a_child_after_a_fork_is_refused(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    train(table)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with table._native._lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)  # a lock that nobody gives back in the child
    thread.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(10)
        try:
            table.lookup(EVERY)
        except bb.TableClosedError as error:
            code = 0 if "table 'user' was opened before this process was forked" in str(error) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    over.set()
    thread.join()
    assert code == 0
    table.close()
