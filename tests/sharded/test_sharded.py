"""`bb.ShardedTable`: the bits of one table, in several directories that commit as one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.files.sharding import MAX_SHARDS, Split, shard_name, shards_of
from bunkbed.testing.compare import assert_same_bits, zipf_ids
from sharded_setup import EVERY, FACTS, ROWS, assert_same_tables, batches, make, train

# ---- Who has a row


def test_the_rule_that_divides_rows_is_file_format() -> None:
    ids = np.array([0, 1, 2, 3, 12345, 2**31, 2**40 + 3, 2**63 - 1])
    assert shards_of(ids, 1).tolist() == [0] * 8
    assert shards_of(ids, 5).tolist() == [4, 2, 2, 0, 0, 0, 2, 0]
    assert shards_of(ids, 1024).tolist() == [_owner(int(one), 1024) for one in ids]
    counts = np.bincount(shards_of(np.arange(80_000), 8), minlength=8)
    assert counts.min() > 9_600 and counts.max() < 10_400


def test_shards_of_ids_of_any_shape(tmp_path: Path) -> None:
    with make(tmp_path / "user", 4) as table:
        for ids in ([[1, 2, 3], [4, 5, 6]], 7, np.arange(10)[::3], np.zeros((0, 3), np.int64)):
            shards = table.shards_of(ids)
            assert shards.shape == np.shape(ids)
            assert shards.reshape(-1).tolist() == [_owner(one, 4) for one in np.reshape(ids, -1).tolist()]


def test_a_split_refuses_what_it_cannot_divide() -> None:
    ids, parts = np.arange(5), np.zeros(4, np.uint16)
    for wrong, count in ((parts[:0], 2), (parts, 0), (parts, 2**63), (np.zeros(65537, np.uint16), 2)):
        with pytest.raises(ValueError, match=r"must be 1 to 65,536, got \d"):
            _native.split(ids, wrong, count)
    with pytest.raises(TypeError):
        _native.split(ids, parts.astype(np.int64), 2)
    with pytest.raises(ValueError, match=r"id 0 at position 0 is in a shard that belongs to none of 2 parts"):
        _native.split(ids, parts + np.uint16(2), 2)
    with pytest.raises(ValueError, match=r"the number of shards must be 1 to 65,536, got 0"):
        _native.shards_of(ids, 0)
    rows, out = np.zeros((3, 2), np.float32), np.empty(4, np.float32)
    with pytest.raises(IndexError, match="place 3 is outside of 3 rows"):
        _native.gather_scaled(rows, np.array([0, 3]), 1.0, out)
    with pytest.raises(ValueError, match="3 rows of 2 values do not fill an array of 4"):
        _native.gather_scaled(rows, np.arange(3), 1.0, out)
    _native.gather_scaled(rows + np.float32(3), np.array([2, 0]), 0.5, out)
    assert out.tolist() == [1.5] * 4


def _owner(row: int, shards: int) -> int:
    """Return the shard of a row by the same rule, with Python's integers."""
    mask = 2**64 - 1
    x = row + 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x >> 32) * shards >> 32


def test_a_split_keeps_the_order_of_the_batch_within_a_shard() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 1_000)
    split = Split.by_shard(ids, 4)
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
    assert {core.step() for core in table.core._cores} == {41}
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
        assert repr(reader).endswith("3 shards, 2000 rows x 20 bfloat16, Adam, step 5, commit 1>")
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
        ({"shards": True}, TypeError, "shards must be an int or None, got True"),
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


def test_a_plain_table_is_not_created_on_a_sharded_one(tmp_path: Path) -> None:
    make(tmp_path / "user").close()
    before = sorted(tmp_path.rglob("*"))
    for durability in ("durable", "scratch"):
        with pytest.raises(FileExistsError, match=r"there is a sharded table; open it with bunkbed\.open"):
            bb.create(tmp_path / "user", dim=4, durability=durability)
    assert sorted(tmp_path.rglob("*")) == before
    assert bb.check(tmp_path / "user") == []


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


def test_check_finds_a_row_in_another_shards_directory(tmp_path: Path) -> None:
    path = tmp_path / "user"
    with make(path) as table:
        train(table)
        owners = table.shards_of(EVERY)
        table.commit(keep="sound")
        first, stranger = table.core.tables()[0], int(EVERY[owners == 2][0])
        # A caller that uses a shard's core directly can do this.
        first.core.set(np.array([stranger]), 0, np.zeros((1, FACTS["dim"]), np.float32))
        table.commit()
    for repair in (False, True):
        (problem,) = [each for each in bb.check(path, repair=repair) if each.kind == "misplaced"]
        assert f"a record of id {stranger}, which is shard 2's, in shard 0" in problem.found
        assert "put it back from a copy" in problem.remedy and problem.epochs
        assert problem.file.parent == first.path and problem.offset > 0
    report = bb.check(path)
    assert report.sound_epochs == [1]  # the commit before is all there
