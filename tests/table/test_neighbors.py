"""The rows nearest to one: exactly, as a command, and from an exported index that USearch opens by itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.io.formats import usearch_index
from io_setup import check_whole_or_not_at_all

Run = Callable[..., tuple[int, str, str]]
DIM = 12


@pytest.fixture
def table(tmp_path: Path) -> Iterator[bb.Table]:
    """Rows of any 64-bit id, the largest too, written in no order; the lengths of their vectors differ widely."""
    rng = np.random.default_rng(0)
    with bb.create(tmp_path / "t", dim=DIM, ram="4MiB", seed=1) as made:
        ids = np.unique(np.append(rng.integers(0, 2**63 - 1, 1500), [7, 2**63 - 1]))
        rows = rng.standard_normal((len(ids), DIM)) * rng.gamma(2, 1, (len(ids), 1))
        order = rng.permutation(len(ids))
        made.set(ids[order], rows[order].astype(np.float32))
        yield made


def nearest(table: bb.Table, ids: np.ndarray, k: int, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """By NumPy in float64, over everything."""
    parts = list(table.scan())
    keys, rows = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]).astype(float)
    queries = table.lookup(ids).astype(float)
    if metric == "cosine":
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    scores = queries @ rows.T
    scores[keys[None] == ids[:, None]] = -np.inf
    best = np.argsort(-scores, axis=1)[:, :k]
    return keys[best], np.take_along_axis(scores, best, 1)


@pytest.mark.parametrize("metric", ["dot", "cosine"])
def test_neighbors_are_exact(table: bb.Table, metric: str) -> None:
    ids = np.concatenate([part[0] for part in table.scan()])[:40]
    found, scores = bb.neighbors(table, ids, 9, metric=metric)
    wanted, wanted_scores = nearest(table, ids, 9, metric)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-5, atol=1e-6)
    assert not (found == ids[:, None]).any()
    one, one_scores = bb.neighbors(table, int(ids[3]), 9, metric=metric)
    np.testing.assert_array_equal(one, found[3])
    np.testing.assert_array_equal(one_scores, scores[3])


def test_few_rows_rows_of_zeros_and_no_ids() -> None:
    with bb.create(None, dim=2, num_rows=9) as table:
        table.set([2, 4, 6], np.array([[1, 0], [0, 0], [3e-30, -4e-30]], np.float32))
        ids, scores = bb.neighbors(table, [2, 4], 4, metric="cosine")
        assert ids.tolist() == [[6, 4, -1, -1], [2, 6, -1, -1]]
        assert scores.tolist() == [[np.float32(0.6), 0.0, -np.inf, -np.inf], [0.0, 0.0, -np.inf, -np.inf]]
        for metric in ("dot", "cosine"):
            assert bb.neighbors(table, [], 4, metric=metric)[0].shape == (0, 4)


def test_what_has_no_neighbors_is_said(table: bb.Table) -> None:
    with pytest.raises(ValueError, match=r"table 't': id 8 at position 1 was never updated or set"):
        bb.neighbors(table, [7, 8])
    with pytest.raises(IndexError, match=r"-3 at position 1"):
        bb.neighbors(table, [7, -3])
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        bb.neighbors(table, 7, 0)
    with pytest.raises(ValueError, match="metric must be one of dot, cosine, got 'l2'"):
        bb.neighbors(table, 7, metric="l2")


def test_the_command_of_a_table(cli: Run, table: bb.Table, tmp_path: Path) -> None:
    table.commit()
    wanted, scores = nearest(table, np.array([2**63 - 1]), 3, "cosine")
    code, out, err = cli("neighbors", "t", "--id", str(2**63 - 1), "-k", "3", "--metric", "cosine", "--json")
    found = json.loads(out)
    assert (code, err, found["table"], found["id"], found["metric"]) == (0, "", "t", 2**63 - 1, "cosine")
    assert [one["id"] for one in found["neighbors"]] == wanted[0].tolist()
    assert [one["score"] for one in found["neighbors"]] == pytest.approx(scores[0].tolist(), abs=1e-6)
    wanted, scores = nearest(table, np.array([7]), 10, "dot")
    code, out, err = cli("neighbors", "t", "--id", "7")
    lines = [line.split() for line in out.splitlines()]
    assert (code, err, lines[0], lines[1]) == (0, "", ["nearest", "to", "7", "in", "t"], ["id", "dot"])
    assert lines[2:] == [
        [str(place + 1), str(one), f"{score:.4f}"]
        for place, (one, score) in enumerate(zip(wanted[0].tolist(), scores[0].tolist(), strict=True))
    ]
    for arguments, problem in (
        (("t", "--id", "8"), "table 't': id 8 at position 0 was never updated or set"),
        (("t", "--id", "u7"), "--id must be an integer, as this table's ids are, got 'u7'"),
        (("t", "--id", str(2**63)), f"--id must be below 2**63, got {2**63}"),
        (("t", "--id", "7", "--table", "item"), "t is one table; leave --table out"),
        (("nowhere", "--id", "7"), "nowhere: no such table or run"),
    ):
        code, out, err = cli("neighbors", *arguments)
        assert code != 0 and out == "" and problem in err and err.count("\n") == 1, err


def test_the_command_of_a_run(cli: Run, tmp_path: Path) -> None:
    rows = np.array([[1, 0], [2, 2], [0, 3]], np.float32)
    with bb.Run(tmp_path / "run", ram="16MiB") as run:
        for name in ("item", "other"):
            run.table(name, create={"dim": 2, "num_rows": 50, "optimizer": bb.SGD()})
        run.table("item").set([5, 6, 9], rows)
        run.table("other").set([1, 2, 3], rows[::-1])
        run.commit(keep="early")
        run.table("item").set([9], -rows[:1])
    assert "6  " in cli("neighbors", "run", "--id", "5")[1]
    found = json.loads(cli("neighbors", "run", "--id", "3", "--table", "other", "--json")[1])
    assert found["neighbors"] == [{"id": 2, "score": 2.0}, {"id": 1, "score": 0.0}]
    scores = [
        json.loads(cli("neighbors", "run", "--id", "5", "--json", *snapshot)[1])["neighbors"][1]
        for snapshot in ((), ("--snapshot", "early"))
    ]
    assert scores == [{"id": 9, "score": -1.0}, {"id": 9, "score": 0.0}]
    code, _, err = cli("neighbors", "run", "--id", "5", "--table", "user")
    assert code != 0 and "has no table 'user'; give --table as one of item, other" in err


def test_the_command_of_a_training_run_speaks_the_files_ids(cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 60, 2_000), rng.integers(0, 15, 2_000)
    lines = [f"u{user},{1000 + item + 15 * (user % 2)}\n" for user, item in zip(users, items, strict=True)]
    Path("ratings.csv").write_text("user,item\n" + "".join(lines))
    options = ("--dim", "8", "--ram", "4MiB", "--threads", "1", "--epochs", "10", "--lr", "0.05", "--out", "runs/a")
    assert cli("train", "ratings.csv", *options)[0] == 0
    found = json.loads(cli("neighbors", "runs/a", "--id", "1003", "-k", "5", "--metric", "cosine", "--json")[1])
    assert found["id"] == 1003 and {one["id"] // 15 for one in found["neighbors"]} <= {1000 // 15, 1014 // 15}
    assert all(1000 <= one["id"] < 1015 for one in found["neighbors"]), "items of the same users"
    found = json.loads(cli("neighbors", "runs/a", "--id", "u7", "--table", "user", "--json")[1])
    assert found["id"] == "u7" and all(int(one["id"][1:]) % 2 for one in found["neighbors"]), "users of the same items"
    code, _, err = cli("neighbors", "runs/a", "--id", "9")
    assert code == 1 and "item '9' is not among the 30 known; the nearest are 1000" in err


# ---- An index of USearch


@pytest.mark.parametrize("metric", ["dot", "cosine"])
def test_an_index_finds_the_exact_neighbors(table: bb.Table, tmp_path: Path, metric: str) -> None:
    index_module = pytest.importorskip("usearch.index")
    seen: list[tuple[int, int]] = []
    file = tmp_path / "rows.usearch"
    count = bb.export_rows(table, file, metric=metric, chunk=400, progress=lambda *at: seen.append(at))
    assert count == len(table) and seen[-1] == (count, count) and len(seen) > 3
    index = index_module.Index.restore(str(file))
    assert (len(index), index.ndim, index.metric.name) == (count, DIM, {"dot": "IP", "cosine": "Cos"}[metric])
    ids = np.concatenate([part[0] for part in table.scan()])
    assert set(np.asarray(index.keys[:count]).tolist()) == set(ids.tolist()) and 2**63 - 1 in index
    asked = ids[:200]
    wanted, _ = bb.neighbors(table, asked, 5, metric=metric)
    matches = index.search(table.lookup(asked), 6)
    hits = [len(set(keys) & set(best)) for keys, best in zip(matches.keys.tolist(), wanted.tolist(), strict=True)]
    assert sum(hits) >= 0.97 * 5 * len(asked)
    before, again = bb.get_num_threads(), tmp_path / "again.usearch"
    bb.set_num_threads(4)
    try:
        bb.export_rows(table, again, metric=metric, chunk=400)
    finally:
        bb.set_num_threads(before)
    assert again.read_bytes() == file.read_bytes()


def test_an_index_comes_back_bit_for_bit(table: bb.Table, tmp_path: Path) -> None:
    pytest.importorskip("usearch")
    bb.export_rows(table, tmp_path / "rows.usearch", metric="cosine")
    ids = np.concatenate([part[0] for part in table.scan()])
    with bb.create(None, dim=DIM, seed=2) as other:
        assert bb.import_rows(other, tmp_path / "rows.usearch", chunk=300) == len(table)
        np.testing.assert_array_equal(other.lookup(ids), table.lookup(ids))
    with bb.create(None, dim=DIM, num_rows=10) as other, pytest.raises(IndexError, match=r"is outside \[0, 10\)"):
        bb.import_rows(other, tmp_path / "rows.usearch")
    with bb.create(tmp_path / "none", dim=DIM, ram="4MiB") as empty:
        assert bb.export_rows(empty, tmp_path / "none.usearch") == 0
        assert bb.import_rows(empty, tmp_path / "none.usearch") == 0


def test_an_index_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    pytest.importorskip("usearch")
    with bb.create(None, dim=DIM) as table:
        table.set(np.arange(600), np.random.default_rng(0).standard_normal((600, DIM)).astype(np.float32))
        check_whole_or_not_at_all(table, tmp_path, "usearch")


def test_an_index_stays_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("usearch")
    taken: list[int] = []
    reserve = bb.Table.reserve_ram
    monkeypatch.setattr(bb.Table, "reserve_ram", lambda table, size: (taken.append(size), reserve(table, size))[1])
    with bb.create(tmp_path / "t", dim=DIM, ram="3MiB") as table:
        table.set(np.arange(5000), np.ones((5000, DIM), np.float32))
        with pytest.raises(
            MemoryError, match=r"an index of 5,000 rows of 12 takes up to 3.2 MiB .* of at least \d+"
        ) as e:
            bb.export_rows(table, tmp_path / "rows.usearch")
        assert not list(tmp_path.glob("*usearch*")) and taken == []
    with bb.open(tmp_path / "t", mode="r", ram=int(str(e.value).split()[-2])) as reader:
        bb.export_rows(reader, tmp_path / "rows.usearch")
        size = usearch_index.index_bytes(5000, DIM)
        assert taken == [size, -size] and (tmp_path / "rows.usearch").stat().st_size < size
        np.testing.assert_array_equal(reader.lookup([3]), np.ones((1, DIM)))


def test_a_sharded_table_makes_an_index(tmp_path: Path) -> None:
    index_module = pytest.importorskip("usearch.index")
    with bb.ShardedTable.create(tmp_path / "s", shards=2, dim=DIM, num_rows=900, ram="32MiB") as table:
        table.set(np.arange(0, 900, 2), np.random.default_rng(0).standard_normal((450, DIM)).astype(np.float32))
        assert bb.export_rows(table, tmp_path / "rows.usearch") == 450
        index = index_module.Index.restore(str(tmp_path / "rows.usearch"), view=True)
        assert len(index) == 450
        np.testing.assert_array_equal(index.get(88), table.lookup([88])[0])
        assert (
            bb.neighbors(table, 88, 1)[0].tolist()
            == [key for key in index.search(table.lookup([88])[0], 2).keys.tolist() if key != 88][:1]
        )


def test_indexes_that_do_not_fit(tmp_path: Path) -> None:
    index_module = pytest.importorskip("usearch.index")
    rows = np.random.default_rng(0).standard_normal((4, DIM)).astype(np.float32)

    def made(keys: list[int], *, dtype: str = "f32", multi: bool = False) -> Path:
        index = index_module.Index(ndim=DIM, metric="ip", dtype=dtype, multi=multi)
        index.add(np.array(keys, np.uint64), rows[: len(keys)])
        index.save(str(tmp_path / "rows.usearch"))
        return tmp_path / "rows.usearch"

    with bb.create(None, dim=DIM) as table, bb.create(None, dim=3) as narrow:
        bb.import_rows(table, made([1, 2, 3], dtype="f16"))
        np.testing.assert_array_equal(table.lookup([1, 2, 3]), rows[:3].astype(np.float16))
        with pytest.raises(ValueError, match=r"vectors must be float32\[N, 3\], got float32\[2, 12\]"):
            bb.import_rows(narrow, made([1, 2]))
        with pytest.raises(ValueError, match="key 5 has several vectors; nothing was changed"):
            bb.import_rows(table, made([4, 5, 5], multi=True))
        with pytest.raises(IndexError, match=f"key {2**63} is no id, which is below"):
            bb.import_rows(table, made([4, 2**63]))
        with pytest.raises(TypeError, match=r"got I8\[2, 12\]"):
            bb.import_rows(table, made([4, 5], dtype="i8"))
        (tmp_path / "bad.usearch").write_bytes(b"none" * 100)
        with pytest.raises(ValueError, match=r"bad\.usearch is not a USearch index"):
            bb.import_rows(table, tmp_path / "bad.usearch")
        assert not table.contains([4, 5]).any() and len(narrow) == 0


def test_metrics_and_a_missing_library_are_said(
    cli: Run, table: bb.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.commit()
    with pytest.raises(ValueError, match="metric must be one of dot, cosine, got 'l2'"):
        bb.export_rows(table, tmp_path / "rows.usearch", metric="l2")
    code, _, err = cli("export", "t", "rows.parquet", "--metric", "dot")
    assert code == 1 and "the format parquet has no metric; leave metric= out" in err
    for module in ("usearch", "usearch.index"):
        monkeypatch.setitem(sys.modules, module, None)
    for arguments in (("export", "t", "rows.usearch"), ("export", "t", "rows.any", "--format", "usearch")):
        code, _, err = cli(*arguments)
        assert code == 1 and 'needs usearch; install it with: pip install "bunkbed[ann]"' in err
    (tmp_path / "rows.usearch").touch()
    with pytest.raises(ImportError, match=r"needs usearch; install it with"):
        bb.import_rows(table, tmp_path / "rows.usearch")


def test_the_command_writes_an_index_of_a_metric(cli: Run, table: bb.Table) -> None:
    index_module = pytest.importorskip("usearch.index")
    table.commit()
    assert cli("export", "t", "rows.usearch", "--metric", "cosine")[0] == 0
    assert index_module.Index.metadata("rows.usearch")["kind_metric"].name == "Cos"
    code, _, err = cli("export", "t", "rows.usearch")
    assert code == 1 and "exists already and is as it was" in err
    assert cli("export", "t", "rows.any", "--format", "usearch")[0] == 0
    assert cli("export", "t", "rows.usearch", "--overwrite")[0] == 0
    assert index_module.Index.metadata("rows.usearch")["kind_metric"].name == "IP"
