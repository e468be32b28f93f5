"""`export` of runs: which commit, which table, and what its rows are called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb

Run = Callable[..., tuple[int, str, str]]


def test_a_run_of_ones_own(cli: Run, tmp_path: Path) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    with bb.Run(tmp_path / "run", ram="16MiB") as run:
        for name in ("item", "other"):
            run.table(name, create={"dim": 2, "num_rows": 5, "optimizer": bb.Adam()})
            run.table(name).update([0], np.ones((1, 2), np.float32))
        item = run.table("item")
        wanted = {}
        run.table("item").set([0, 1, 4], rows)
        run.commit(keep="early")
        wanted["early"] = {slot: item.get(range(5), slot) for slot in ("weight", *item.slots)}
        item.set([4], -rows[:1])
        item.update([1], np.full((1, 2), 3, np.float32))
        item.set([1], rows[1:2])
        wanted["now"] = {slot: item.get(range(5), slot) for slot in ("weight", *item.slots)}
    code, out, err = cli("export", "run", "now.npy", "--table", "item")
    assert (code, out, err) == (0, "wrote 5 rows of item to now.npy\n", "")
    code, out, _ = cli("export", "run", "early.vec", "--table", "item", "--snapshot", "early", "--json")
    assert json.loads(out) == {"path": "run", "table": "item", "snapshot": "early", "file": "early.vec", "rows": 3}
    assert Path("early.vec").read_text() == "3 2\n0 0 1\n1 2 3\n4 4 5\n"
    assert np.load("now.npy")[[0, 1, 4]].tolist() == [[0, 1], [2, 3], [0, -1]]
    for arguments, problem in (
        (("run",), "run run holds several tables; give --table as one of item, other"),
        (("run", "--table", "user"), "run run has no table 'user'; give --table as one of item, other"),
        (("run/tables/item", "--table", "item"), "run/tables/item is one table; leave --table out"),
        (("run", "--table", "item", "--labels", "l"), "--labels: rows of run are called by their ids; leave it out"),
        (("nowhere", "--table", "item"), "nowhere: no such table or run"),
    ):
        code, out, err = cli("export", arguments[0], "none.parquet", *arguments[1:])
        assert code != 0 and out == "" and problem in err and err.count("\n") == 1, err
    assert not list(tmp_path.glob("*none*")) and not Path("l").exists()
    slots = ("weight", "exp_avg", "exp_avg_sq")
    for name, snapshot in (("now", ()), ("early", ("--snapshot", "early"))):
        state = ("--table", "item", "--slots", ",".join(slots), *snapshot)
        assert cli("export", "run", f"{name}.safetensors", *state)[0] == 0
        with bb.create(None, dim=2, num_rows=5, optimizer=bb.Adam()) as other:
            assert bb.import_rows(other, f"{name}.safetensors") == 3
            for slot in slots:
                np.testing.assert_array_equal(other.get(range(5), slot), wanted[name][slot])


def test_a_training_run_calls_rows_what_the_file_calls_them(cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pq = pytest.importorskip("pyarrow.parquet")
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 40, 1_500), rng.integers(0, 25, 1_500)
    lines = [f"u{user},{1000 + item}\n" for user, item in zip(users, items, strict=True)]
    Path("ratings.csv").write_text("user,item\n" + "".join(lines))
    options = ("--dim", "4", "--ram", "4MiB", "--threads", "1", "--epochs", "4", "--out", "runs/a")
    options += ("--lr", "0.3", "--lr-decay", "1.0", "--l2", "0")  # the last epoch is not the best
    assert cli("train", "ratings.csv", *options)[0] == 0
    assert "best" in bb.snapshots("runs/a")
    known = list(dict.fromkeys(line.strip().split(",")[1] for line in lines))  # by first appearance
    with bb.Run("runs/a", mode="r", ram="4MiB", snapshot="best") as run:
        best = run.table("item").lookup(np.arange(25))
        best_users = run.table("user").lookup(np.arange(40))
    with bb.Run("runs/a", mode="r", ram="4MiB") as run:
        newest = run.table("item").lookup(np.arange(25))
    assert not np.array_equal(best, newest), "the last epoch must not be the best, so that the two differ"

    code, out, err = cli("export", "runs/a", "items.parquet", "--table", "item", "--labels", "items.txt")
    assert (code, out, err) == (0, "wrote 25 rows of item, snapshot best, to items.parquet\n", "")
    assert Path("items.txt").read_text().split() == known
    columns = pq.read_table("items.parquet").sort_by("id").to_pydict()
    assert list(columns) == ["id", "word", "weight"]
    assert columns["id"] == list(range(25)) and columns["word"] == known
    np.testing.assert_array_equal(np.array(columns["weight"], np.float32), best)

    assert cli("export", "runs/a", "users.vec", "--table", "user")[0] == 0
    assert {line.split()[0] for line in Path("users.vec").read_text().splitlines()[1:]} == {f"u{n}" for n in range(40)}
    assert cli("export", "runs/a", "items.npy", "--table", "item")[0] == 0
    np.testing.assert_array_equal(np.load("items.npy"), best)

    # And back: by the labels' numbers, by a vocabulary, by position.
    for name, arguments, ids in (
        ("by-label", ("items.parquet", "--ids", "word"), np.array(known).astype(np.int64)),
        ("by-vocab", ("items.parquet", "--ids", "word", "--vocab", "items.txt"), np.arange(25)),
        ("by-position", ("items.npy",), np.arange(25)),
    ):
        assert cli("import", name, *arguments, "--dim", "4")[0] == 0
        with bb.open(name, mode="r", ram="4MiB") as table:
            np.testing.assert_array_equal(table.lookup(ids), best)
    assert cli("import", "users", "users.vec", "--dim", "4", "--vocab", "users.txt")[0] == 0
    order = [int(name[1:]) for name in Path("users.txt").read_text().split()]
    first = list(dict.fromkeys(line.split(",")[0] for line in lines))
    with bb.open("users", mode="r", ram="4MiB") as table:
        found = table.lookup([order.index(int(name[1:])) for name in first])
    np.testing.assert_array_equal(found, best_users)

    # A file that is there stays, and is said before anything is read.
    before = Path("items.txt").read_bytes()
    code, _, err = cli("export", "runs/a", "more.npy", "--table", "user", "--labels", "items.txt")
    assert code != 0 and "items.txt exists already; give another --labels, or --overwrite" in err
    assert Path("items.txt").read_bytes() == before and not Path("more.npy").exists()
    assert cli("export", "runs/a", "more.npy", "--table", "user", "--labels", "items.txt", "--overwrite")[0] == 0
    assert Path("items.txt").read_text().split() == first
    code, _, err = cli("export", "runs/a", "items.parquet", "--table", "item", "--labels", "new.txt")
    assert code == 1 and "exists already and is as it was" in err and not Path("new.txt").exists()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_column_of_words(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("pyarrow")
    rows = np.random.default_rng(0).standard_normal((3, 2), dtype=np.float32)
    (tmp_path / "words").write_bytes("a\nb c\nü\n".encode())
    (tmp_path / "bytes").write_bytes(b"a\nb\n\xff\n")
    file = tmp_path / f"rows{suffix}"
    with bb.create(None, dim=2, num_rows=4) as table, bb.create(None, dim=2) as other:
        table.set([2, 0, 1], rows)
        assert bb.export_rows(table, file, vocab=tmp_path / "words", chunk=2) == 3
        bb.import_rows(other, file, ids="word", vocab=tmp_path / "words")
        np.testing.assert_array_equal(other.lookup([2, 0, 1]), rows)
        bb.import_rows(other, file)  # the ids are there too
        with pytest.raises(ValueError, match=r"word '\\udcff' of id 2 in .*bytes is not UTF-8, which a column of text"):
            bb.export_rows(table, tmp_path / f"bad{suffix}", vocab=tmp_path / "bytes")
        table.set([3], rows[:1])
        with pytest.raises(ValueError, match=r"id 3 has no word in .*words, which names 3"):
            bb.export_rows(table, tmp_path / f"bad{suffix}", vocab=tmp_path / "words")
    assert not list(tmp_path.glob("*bad*"))
