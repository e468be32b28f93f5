"""`admit=`: its values, where it is kept, and that every way to train admits the rows of the reference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable
from bunkbed.testing.compare import assert_same_bits, assert_same_rows, counts_of

DIM = 4
IDS = np.arange(600)
RULES: list[float] = [0.2, 3]
FACTS: dict[str, Any] = {"dim": DIM, "optimizer": bb.Adam(lr=0.01), "seed": 5, "admit": 0.2}
COUNTED: dict[str, Any] = {**FACTS, "admit": 3}


def batches(seed: int, steps: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 600, 80), rng.standard_normal((80, DIM)).astype(np.float32)) for _ in range(steps)]


def train(*tables: Any, seed: int, steps: int = 6) -> None:
    for ids, grads in batches(seed, steps):
        for table in tables:
            table.update(ids, grads)


@pytest.mark.parametrize(
    ("admit", "kind", "message"),
    [
        (0, ValueError, "above 0 and below 1.*or an int from 2 to 128.*got 0; admit=None stores every row"),
        (1, ValueError, "got 1; admit=None"),
        (1.0, ValueError, r"got 1\.0; admit=None"),
        (1.5, ValueError, r"got 1\.5; admit=None"),
        (-0.25, ValueError, r"got -0\.25"),
        (math.nan, ValueError, "got nan"),
        (math.inf, ValueError, "got inf"),
        (3.0, ValueError, r"got 3\.0"),
        (-2, ValueError, "got -2"),
        (129, ValueError, "got 129; admit=None"),
        (True, TypeError, "got True"),
        ("x", TypeError, "got 'x'"),
        ([0.5], TypeError, r"got \[0\.5\]"),
    ],
)
def test_bad_values(tmp_path: Path, admit: Any, kind: type[Exception], message: str) -> None:
    makes: list[Callable[..., Any]] = [
        lambda **rules: bb.create(tmp_path / "table", dim=2, **rules),
        lambda **rules: bb.ShardedTable.create(tmp_path / "table", shards=2, dim=2, **rules),
        bb.Retention,
    ]
    for make in makes:
        with pytest.raises(kind, match=f"admit must be .*{message}"):
            make(admit=admit)
    assert not (tmp_path / "table").exists()
    table = bb.create(None, dim=2, admit=0.5)
    with pytest.raises(kind, match="admit must be"):
        table.retention = bb.Retention(admit=admit)
    assert table.retention == bb.Retention(admit=0.5)


def test_a_table_of_any_id_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"admit=0\.5 is for a table of any id.*give num_rows=None"):
        bb.create(tmp_path / "table", dim=2, num_rows=100, admit=0.5)
    with bb.create(tmp_path / "table", dim=2, num_rows=100, ram="16MiB") as table:
        with pytest.raises(ValueError, match=r"admit=0\.5 is for a table of any id"):
            bb.open(tmp_path / "table", create={"admit": 0.5})
        assert not table.retention


def test_it_is_a_rule_of_its_own() -> None:
    rules = bb.Retention(admit=np.float32(0.25))  # type: ignore[arg-type]
    assert rules and not rules.removes and type(rules.admit) is float
    rules = bb.Retention(admit=np.int32(3))  # type: ignore[arg-type]
    assert (
        rules and not rules.removes and type(rules.admit) is int and rules == bb.Retention.from_native(rules.native())
    )
    with pytest.raises(ValueError, match="give one of these"):
        bb.Retention(admit=0.5, keep=3)
    table = bb.create(None, dim=2, admit=0.5)
    assert table.record_bytes == bb.create(None, dim=2).record_bytes
    with pytest.raises(ValueError, match="no rule by which rows go"):
        table.sweep()
    with pytest.raises(ValueError, match="made without expire= and max_rows="):
        table.retention = bb.Retention(expire=3, admit=0.5)
    aged = bb.create(None, dim=2, expire=3)
    aged.retention = bb.Retention(expire=3, admit=0.5)
    with pytest.raises(ValueError, match="cannot all go"):
        aged.retention = bb.Retention(admit=0.5)


def test_it_is_stored_and_changes_as_the_other_rules(tmp_path: Path) -> None:
    bb.create(tmp_path / "table", dim=2, ram="16MiB").close()
    with bb.open(tmp_path / "table", create={"admit": 0.5}, ram="16MiB") as table:
        assert table.retention.admit == 0.5
    with bb.open(tmp_path / "table", ram="16MiB") as table, bb.open(tmp_path / "table", mode="r") as reader:
        assert table.retention == reader.retention == bb.Retention(admit=0.5)
        table.retention = bb.Retention(admit=0.125)
        table.commit()
        reader.refresh()
        assert reader.retention.admit == 0.125
        with pytest.raises(bb.ReadOnlyError):
            reader.retention = bb.Retention(admit=0.5)
        assert bb.open(tmp_path / "table", create={"dim": 2, "admit": None}).retention == bb.Retention()
        table.close()
    with bb.open(tmp_path / "table", mode="r") as reader:
        assert not reader.retention


COPIES: dict[str, Callable[[Path, Path], Any]] = {
    "opened again": lambda path, to: path.rename(to),
    "a copy": lambda path, to: bb.copy(path, to),
    "bfloat16 and back": lambda path, to: (
        bb.copy(path, to.with_name("half"), dtype="bfloat16"),
        bb.copy(to.with_name("half"), to, dtype="float32"),
    ),
    "shards": lambda path, to: (bb.copy(path, to), bb.reshard(to, shards=3)),
    "shards and back": lambda path, to: (bb.copy(path, to), bb.reshard(to, shards=3), bb.reshard(to, shards=1)),
}


@pytest.mark.parametrize("admit", RULES)
@pytest.mark.parametrize("how", COPIES)
def test_copies_go_on_with_the_same_rows(tmp_path: Path, how: str, admit: float) -> None:
    facts = {**FACTS, "admit": admit}
    oracle = ReferenceTable(**facts)
    with bb.create(tmp_path / "table", ram="16MiB", **facts) as table:
        train(table, oracle, seed=1)
    COPIES[how](tmp_path / "table", tmp_path / "copy")
    assert bb.check(tmp_path / "copy") == []
    with bb.open(tmp_path / "copy", ram="64MiB") as copied:
        assert copied.retention == bb.Retention(admit=admit)
        assert counts_of(copied).tolist() == counts_of(oracle).tolist()
        assert (len(counts_of(oracle)) > 50) == (admit == 3)
        train(copied, oracle, seed=2)
        assert copied.contains(IDS).tolist() == oracle.contains(IDS).tolist()
        if "bfloat16" not in how:
            assert_same_rows(copied, oracle, IDS)


@pytest.mark.parametrize("admit", RULES)
def test_tables_of_a_run(tmp_path: Path, admit: float) -> None:
    facts = {**FACTS, "admit": admit}
    oracle = ReferenceTable(**facts)
    with bb.Run(tmp_path / "run", ram="96MiB") as run:
        tables = [run.table("user", create=facts), run.table("item", create={**facts, "shards": 2})]
        train(*tables, oracle, seed=1)
        run.commit()
    with bb.Run(tmp_path / "run", ram="96MiB") as run:
        tables = [run.table("user"), run.table("item")]
        train(*tables, oracle, seed=2)
        for table in tables:
            assert_same_rows(table, oracle, IDS)
        run.commit()


@pytest.mark.parametrize("facts", [FACTS, COUNTED], ids=str)
def test_ids_batches_and_several_tables_in_one_call_agree(facts: dict[str, Any]) -> None:
    tables = [bb.create(None, **facts) for _ in range(3)]
    oracle = ReferenceTable(**facts)
    for ids, grads in batches(3, 12):
        oracle.update(ids, grads)
        tables[0].update(ids, grads)
        batch = tables[1].batch(ids)
        tables[1].lookup_batch(batch, len(ids))
        tables[1].update_batch(batch, batch.sum(grads)[0])
        other = tables[2].batch(ids)
        sums = other.sum(grads)[0]
        _native.update_many([tables[2].plain_core], [other], [sums], [None], [None])
    for table in tables:
        assert_same_rows(table, oracle, IDS)
        assert table.stats()["refused_rows"] == oracle.stats()["refused_rows"] > 0
        assert table.stats()["admitted_rows"] == len(table)


def test_imported_rows_are_all_stored(tmp_path: Path) -> None:
    with bb.create(None, **FACTS) as table, bb.create(None, **{**FACTS, "admit": 0.001}) as other:
        train(table, seed=1)
        bb.export_rows(table, tmp_path / "rows.parquet")
        bb.import_rows(other, tmp_path / "rows.parquet")
        assert len(other) == len(table) > 10
        assert_same_bits(other.lookup(IDS), table.lookup(IDS))


@pytest.mark.parametrize("admit", RULES)
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag", "Embedding, device_cache=0", "in files", "shards"])
def test_layers_of_torch(tmp_path: Path, kind: str, admit: float) -> None:
    torch = pytest.importorskip("torch")
    bt = pytest.importorskip("bunkbed.torch")
    facts: dict[str, Any] = {"seed": 5, "optimizer": bb.Adam(lr=0.01), "retention": bb.Retention(admit=admit)}
    if kind == "in files":
        facts |= {"path": tmp_path / "table", "ram": "16MiB"}
    if kind == "shards":
        facts |= {"path": tmp_path / "table", "ram": "64MiB", "shards": 2}
    if "device_cache" in kind:
        facts |= {"path": tmp_path / "table", "ram": "16MiB", "device_cache": 0}
    layer = (bt.EmbeddingBag if kind == "EmbeddingBag" else bt.Embedding)(None, DIM, **facts)
    optimizer = bt.Optimizer(layer)
    oracle = ReferenceTable(**{**FACTS, "init": layer.table.init, "admit": admit})
    for ids, grads in batches(4, 12):
        if kind == "EmbeddingBag":
            rows, wanted = layer(torch.from_numpy(ids.reshape(-1, 1)), per_sample_weights=None), grads
        else:
            rows, wanted = layer(torch.from_numpy(ids)), grads
        assert_same_bits(rows.detach().numpy(), oracle.lookup(ids))
        (rows * torch.from_numpy(wanted)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        oracle.update(ids, wanted)
    assert_same_rows(layer.table, oracle, IDS)
    assert 20 < len(oracle) < 500
    layer.table.close()


@pytest.mark.parametrize("admit", [0.5, 2])
def test_a_device_cache_is_refused(tmp_path: Path, admit: float) -> None:
    bt = pytest.importorskip("bunkbed.torch")
    where = {"path": tmp_path / "table", "ram": "16MiB"}
    with pytest.raises(ValueError, match=f"admit={admit} does not; leave device_cache out or give device_cache=0"):
        bt.Embedding(None, DIM, retention=bb.Retention(admit=admit), device_cache="1MiB", **where)
    bb.open(tmp_path / "table", ram="16MiB").close()  # it is not left open
    other = bt.Embedding(None, DIM, device_cache="1MiB", path=tmp_path / "other", ram="16MiB")
    with pytest.raises(ValueError, match=f"admit={admit} does not work with a device cache"):
        other.table.retention = bb.Retention(admit=admit)
    other.table.close()


@pytest.mark.parametrize("admit", RULES)
def test_checkpoints_of_tables_in_ram_go_on_with_the_same_rows(tmp_path: Path, admit: float) -> None:
    torch = pytest.importorskip("torch")
    bt = pytest.importorskip("bunkbed.torch")

    def make(seed: int) -> Any:
        return bt.Embedding(None, DIM, seed=seed, optimizer=bb.Adam(lr=0.01), retention=bb.Retention(admit=admit))

    layer = make(5)
    facts = {**FACTS, "init": layer.table.init, "admit": admit}
    oracle = ReferenceTable(**facts)
    train(layer.table, oracle, seed=1)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    for other in (make(5), make(6)):  # another seed makes another table
        other.load_state_dict(torch.load(tmp_path / "layer.pt"))
        expected = ReferenceTable(**facts)
        train(expected, seed=1)
        assert counts_of(other.table).tolist() == counts_of(expected).tolist()
        train(other.table, expected, seed=2)
        assert_same_rows(other.table, expected, IDS)


def test_what_the_command_line_shows(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    for name, rules in (("rare", {"admit": 0.125}), ("both", {"admit": 0.5, "expire": 4}), ("third", {"admit": 3})):
        with bb.create(tmp_path / name, dim=2, ram="16MiB", **rules) as table:
            table.update(np.arange(200), np.ones((200, 2), np.float32))
    code, out, _ = cli("info", "rare")
    assert code == 0 and "with its state" in out and "age" not in out.split("rules")[0]
    assert "admit 0.125; the writer's table.stats() counts admitted and refused rows" in " ".join(out.split())
    assert json.loads(cli("info", "rare", "--json")[1])["rules"]["admit"] == 0.125
    out = " ".join(cli("info", "third")[1].split())
    assert "store a row at 3 steps that name it; 200 ids are counted; the writer's" in out
    assert json.loads(cli("info", "third", "--json")[1])["counted_ids"] == 200
    out = " ".join(cli("info", "both")[1].split())
    assert "rules expire after 4 (step), admit 0.5; the clock is at 1; the writer's" in out
    assert "rules expire after 4 (step), admit 0.5" in " ".join(cli("sweep", "both", "--dry-run")[1].split())
    code, _, err = cli("sweep", "rare", "--dry-run")
    assert code != 0 and "has no rule by which rows go" in " ".join(err.split())


def test_counts_are_no_changes(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with bb.create(path, ram="16MiB", **COUNTED) as table:
        table.update([1, 2, 3], np.ones((3, DIM), np.float32))
        first = table.commit(keep="first")
        table.update([1, 2], np.ones((2, DIM), np.float32))
        table.commit()
        assert [(part.ids.size, part.deleted.size) for part in bb.changes(path, since=first)] in ([], [(0, 0)])
        table.update([1], np.ones((1, DIM), np.float32))
        table.commit()
        assert [one for part in bb.changes(path, since=first) for one in part.ids.tolist()] == [1]
        assert table.delete([1, 2, 7]) == 1  # the count of 2 goes, too
        table.commit()
        deleted = [one for part in bb.changes(path, since=first) for one in part.deleted.tolist()]
        assert sorted(deleted) == [1, 2]
        assert counts_of(table).tolist() == [[3, 1, 1]]


def test_every_budget_and_number_of_threads_and_shards_has_the_same_rows(tmp_path: Path) -> None:
    facts = {**COUNTED, "expire": 7}
    oracle = ReferenceTable(**facts)
    least = bb.create(None, **facts).spec.minimum_ram(600, True)
    tables = [
        bb.create(None, **facts),
        bb.create(tmp_path / "least", ram=least, **facts),
        bb.create(tmp_path / "ample", ram="64MiB", **facts),
        bb.create(tmp_path / "disk", ram="8MiB", disk="400MiB", **facts),
        bb.ShardedTable.create(tmp_path / "shards", shards=3, ram="64MiB", **facts),
    ]
    before = bb.get_num_threads()
    try:
        for seed in range(8):
            for number, (ids, grads) in enumerate(batches(seed)):
                oracle.update(ids, grads)
                for place, table in enumerate(tables):
                    bb.set_num_threads(1 + (place + number) % 3)
                    table.update(ids, grads)
            if seed % 3 == 1:
                assert len({one.sweep().expired for one in tables}) == 1
                oracle.sweep()
            for table in tables:
                table.commit()
                assert_same_rows(table, oracle, IDS)
                assert counts_of(table).tolist() == counts_of(oracle).tolist()
    finally:
        bb.set_num_threads(before)
    assert len(oracle) > 100
    for table in tables:
        table.close()


def test_snapshots_of_a_run_keep_their_counts_with_other_shards(tmp_path: Path) -> None:
    oracle = ReferenceTable(**COUNTED)
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        table = run.table("user", create=COUNTED)
        train(table, oracle, seed=1, steps=4)
        run.commit(keep="early")
        early = counts_of(oracle).tolist()
        train(table, oracle, seed=2, steps=4)
        run.commit()
    bb.reshard(tmp_path / "run", shards=2)
    with bb.Run(tmp_path / "run", ram="64MiB", mode="r", snapshot="early") as run:
        assert counts_of(run.table("user")).tolist() == early
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        table = run.table("user")
        assert counts_of(table).tolist() == counts_of(oracle).tolist() != early
        train(table, oracle, seed=3)
        assert_same_rows(table, oracle, IDS)
        run.commit()


def test_the_budget_has_room_for_so_many_counts(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"dim": DIM, "admit": 2}
    least = bb.create(None, **facts).spec.minimum_ram(8000, True)
    with bb.create(tmp_path / "table", ram=least, **facts) as table:
        first = 0
        with pytest.raises(
            MemoryError, match=r"counts of \d+ other ids\).*nothing was changed; open it with ram="
        ) as raised:
            for first in range(0, 10**6, 500):
                table.update(np.arange(first, first + 500), np.ones((500, DIM), np.float32))
        assert 8000 <= table.stats()["counted_ids"] == first and len(table) == 0 and table.step == first // 500
        assert table.stats()["ram_bytes"] <= least
        table.update(np.arange(500), np.ones((500, DIM), np.float32))  # these have an entry already
        assert len(table) == 500
        more = int(str(raised.value).split("ram=")[-1].split()[0])
        table.commit()
    with bb.open(tmp_path / "table", ram=more + (64 << 10)) as table:
        table.update(np.arange(first, first + 500), np.ones((500, DIM), np.float32))
        assert table.stats()["counted_ids"] == first


@pytest.mark.parametrize("fault", ["lost_count", "counts_not_moved", "count_survives_delete", "old_counts_stay"])
def test_seeded_bugs_of_counts_are_found(tmp_path: Path, fault: str) -> None:
    facts = {**COUNTED, "expire": 9}
    oracle = ReferenceTable(**facts)
    _native.set_fault(fault)
    _native.set_compaction_slack(0)
    try:
        table = bb.create(tmp_path / "table", ram="8MiB", **facts)
        for seed in range(5):
            train(table, oracle, seed=seed, steps=4)
            for one in (table, oracle):
                one.delete(np.arange(40))
                one.sweep()
                one.commit()
        table.compact()
        table.commit()
        try:
            table.close()
            table = bb.open(tmp_path / "table", ram="8MiB")
        except bb.CorruptionError as error:
            assert "holds counts of" in str(error) or "hold counts of" in str(error)
            return
        with pytest.raises(AssertionError):
            assert counts_of(table).tolist() == counts_of(oracle).tolist()
        table.close()
    finally:
        _native.set_fault(None)
        _native.set_compaction_slack(256 << 10)


@pytest.mark.parametrize("fault", ["admission_without_step", "admission_by_place"])
def test_seeded_bugs_are_found(fault: str) -> None:
    oracle = ReferenceTable(**FACTS)
    _native.set_fault(fault)
    try:
        table = bb.create(None, **FACTS)
        train(table, oracle, seed=1, steps=2)
        with pytest.raises(AssertionError):
            assert_same_rows(table, oracle, IDS)
    finally:
        _native.set_fault(None)
