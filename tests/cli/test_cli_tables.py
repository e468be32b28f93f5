"""`info`, `check`, `snapshots`, `import`, `export` on tables and runs made with the public functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.core.budget import format_bytes
from bunkbed.io.setting import Setting

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "user"
    with bb.create(path, dim=8, num_rows=1000, optimizer=bb.Adam(lr=0.01), ram="4MiB", seed=3) as made:
        made.update(np.arange(10), np.ones((10, 8), np.float32))
        made.commit(meta={"epoch": 1}, keep="first")
        made.update(np.arange(20), np.ones((20, 8), np.float32))
    return path


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    with bb.Run(path, ram="8MiB") as run:
        user = run.table("user", create={"dim": 4, "num_rows": 50, "optimizer": bb.SGD(), "seed": 0})
        run.table("item", create={"dim": 4, "num_rows": 60, "optimizer": bb.SGD(), "seed": 1})
        user.update(np.arange(5), np.ones((5, 4), np.float32))
        run.commit(files={"dense.pt": b"1234"}, meta={"step": 1}, keep="best")
    return path


def test_info_says_how_state_is_stored(cli: Run, tmp_path: Path) -> None:
    kwargs = {"dim": 8, "num_rows": 100, "ram": "4MiB"}
    bb.create(tmp_path / "wide", optimizer=bb.Adam(), **kwargs).close()
    bb.create(tmp_path / "narrow", optimizer=bb.Adam(state_dtype="bfloat16"), dtype="bfloat16", **kwargs).close()
    bb.create(tmp_path / "none", optimizer=bb.SGD(), **kwargs).close()
    for name, line, size in (
        ("wide", "exp_avg, exp_avg_sq in float32", 96),
        ("narrow", "exp_avg, exp_avg_sq in bfloat16", 48),
        ("none", "slots       none", 32),
    ):
        code, out, _ = cli("info", str(tmp_path / name))
        assert code == 0 and line in out and f"{size} bytes with its state" in out
    about = json.loads(cli("info", str(tmp_path / "narrow"), "--json")[1])
    assert (about["dtype"], about["state_dtype"], about["record_bytes"]) == ("bfloat16", "bfloat16", 48)
    assert json.loads(cli("info", str(tmp_path / "none"), "--json")[1])["state_dtype"] is None


def test_info_of_a_table(cli: Run, table: Path) -> None:
    code, out, err = cli("info", str(table))
    assert (code, err) == (0, "")
    assert "20 stored of 1,000" in out
    assert "Adam(lr=0.01" in out
    assert "first (commit 1)" in out

    code, out, _ = cli("info", str(table), "--json")
    about = json.loads(out)
    assert (about["kind"], about["num_rows"], about["dim"], about["stored_rows"]) == ("table", 1000, 8, 20)
    assert (about["step"], about["epoch"], about["snapshots"]) == (2, 2, {"first": 1})
    assert about["disk_bytes"] >= about["live_bytes"] > 0


def test_info_of_a_sharded_table(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "user"
    places = [tmp_path / "ssd0", tmp_path / "ssd1"]
    with bb.ShardedTable.create(path, directories=places, dim=8, num_rows=1000, ram="32MiB") as made:
        made.update(np.arange(20), np.ones((20, 8), np.float32))
        made.commit(keep="first")
        owned = np.bincount(made.shards_of(np.arange(20)), minlength=2).tolist()
    code, out, err = cli("info", str(path))
    assert (code, err) == (0, "") and out.startswith(f"sharded table {path}")
    assert "20 stored of 1,000" in out and "first (commit 1)" in out and "1, after step 1" in out
    for index in range(2):
        assert f"shard {index}" in out and str(places[index] / f"shard-000{index}") in out
    about = json.loads(cli("info", str(path), "--json")[1])
    assert (about["kind"], about["stored_rows"], about["step"]) == ("sharded table", 20, 1)
    assert [shard["stored_rows"] for shard in about["shards"]] == owned and sum(owned) == 20
    assert sum(shard["disk_bytes"] for shard in about["shards"]) == about["disk_bytes"] > 0
    assert cli("check", str(path))[1] == f"sound  sharded table {path}\n"


def test_info_of_a_run(cli: Run, run_folder: Path) -> None:
    code, out, err = cli("info", str(run_folder))
    assert (code, err) == (0, "")
    assert "best (commit 1)" in out and "user" in out and "item" in out

    about = json.loads(cli("info", str(run_folder), "--json")[1])
    assert about["kind"] == "run"
    assert about["tables"]["user"]["stored_rows"] == 5
    assert about["tables"]["item"]["stored_rows"] == 0
    assert about["meta"]["step"] == 1


def test_snapshots(cli: Run, table: Path, run_folder: Path) -> None:
    assert json.loads(cli("snapshots", str(table), "--json")[1])["snapshots"] == {"first": 1}
    assert json.loads(cli("snapshots", str(run_folder), "--json")[1])["snapshots"] == {"best": 1}
    out = cli("snapshots", str(table))[1]
    assert "first" in out and "only it holds" in out
    found = json.loads(cli("snapshots", str(table), "--json")[1])
    (detail,) = found["details"]
    assert found["held_bytes"] == detail["own_bytes"]  # alone
    assert f"together they hold {format_bytes(found['held_bytes'])} beyond the newest commit" in out
    assert (detail["name"], detail["epoch"], detail["step"], detail["stored_rows"]) == ("first", 1, 1, 10)
    assert detail["own_bytes"] <= detail["bytes"] and detail["time"].startswith("20")
    with bb.open(table, ram="4MiB") as writer:
        writer.drop("first")
    assert cli("snapshots", str(table))[1] == f"{table} keeps no snapshots\n"


def test_what_two_snapshots_hold_goes_with_the_last(cli: Run, tmp_path: Path) -> None:
    with bb.create(tmp_path / "t", dim=64, num_rows=4000, ram="8MiB") as table:
        table.set(np.arange(4000), np.zeros((4000, 64), np.float32))
        table.commit(keep="a")
        table.commit(keep="b", meta={"again": 1})
        for number in range(2):
            table.set(np.arange(4000), np.ones((4000, 64), np.float32))
            table.commit(meta={"number": number})
    held = json.loads(cli("snapshots", str(tmp_path / "t"), "--json")[1])["held_bytes"]
    assert held > 4000 * 64 * 4
    out = cli("snapshots", str(tmp_path / "t"), "--drop", "a")[1]
    assert out.startswith("dropped a (commit 1)\n0 B that no other commit needs\n"), out
    out = cli("snapshots", str(tmp_path / "t"), "--drop", "b")[1]
    assert out.startswith(f"dropped b (commit 2)\n{format_bytes(held)} that no other commit needs\n"), out


def test_snapshots_are_dropped(cli: Run, table: Path, run_folder: Path) -> None:
    code, out, err = cli("snapshots", str(table), "--drop", "last")
    assert code == 1 and out == "" and "has no snapshot 'last'; there are: 'first'" in err
    code, out, _ = cli("snapshots", str(table), "--drop", "first")
    assert code == 0 and out.startswith("dropped first (commit 1)\n") and "keeps no snapshots" in out
    found = json.loads(cli("snapshots", str(run_folder), "--drop", "best", "--json")[1])
    assert (found["snapshots"], found["dropped"]) == ({}, ["best"])
    assert cli("check", str(table))[0] == cli("check", str(run_folder))[0] == 0


def test_check_of_what_is_sound(cli: Run, table: Path, run_folder: Path) -> None:
    assert cli("check", str(table))[:2] == (0, f"sound  table {table}\n")
    assert cli("check", str(run_folder))[:2] == (0, f"sound  run {run_folder}\n")
    found = json.loads(cli("check", str(table), "--json")[1])
    assert (found["path"], found["sound"], found["problems"]) == (str(table), True, [])
    assert found["epochs"] == found["sound_epochs"] == [1, 2] and found["bytes_read"] > 0


def test_check_of_what_is_damaged(cli: Run, table: Path) -> None:
    largest = max((path for path in table.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    stored = [at for at, byte in enumerate(content) if byte]
    content[stored[len(stored) // 2]] ^= 0x10
    largest.write_bytes(bytes(content))
    code, out, err = cli("check", str(table), "--json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert not found["sound"] and found["problems"]
    assert Path(found["problems"][0]["file"]).name == largest.name and found["problems"][0]["remedy"]
    code, out, _ = cli("check", str(table))
    assert code == 1 and out.startswith("problem  ")
    assert cli("check", "nowhere")[:2] == (1, "")
    code, _, err = cli("check", str(table), "--fall-back-to", "1")
    assert code == 2 and "--repair" in err


def test_check_repairs_and_goes_back_only_when_told(cli: Run, table: Path) -> None:
    manifest = table / "manifest-0000000000000002"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    code, out, _ = cli("check", str(table), "--repair")
    assert code == 1 and "--repair --fall-back-to 1" in out and manifest.exists()
    code, _, err = cli("check", str(table), "--repair", "--fall-back-to", "7")
    assert code == 1 and "commit 7 is not there; sound ones: 1" in err
    code, out, err = cli("check", str(table), "--repair", "--fall-back-to", "1")
    assert (code, err) == (0, "") and "repaired" in out and "went back to commit 1 (step 1)" in out
    assert not manifest.exists()
    with bb.open(table, ram="4MiB") as again:
        assert (again.step, len(again)) == (1, 10)


def test_copy(cli: Run, table: Path, run_folder: Path) -> None:
    code, out, err = cli("copy", str(table), "backup", "--snapshot", "first")
    assert (code, err) == (0, "") and out.startswith(f"copied commit 1 of table {table} to backup: ")
    assert " linked; verified" in out
    code, out, _ = cli("copy", str(table), "backup", "--no-link", "--json")
    done = json.loads(out)
    assert (done["epoch"], done["linked_bytes"]) == (2, 0) and done["copied_bytes"] > 0
    assert json.loads(cli("snapshots", "backup", "--json")[1])["snapshots"] == {"first": 1}
    code, out, _ = cli("copy", str(table), "serving", "--dtype", "bfloat16", "--optimizer", "sgd")
    assert code == 0 and "20 rows rewritten" in out
    assert json.loads(cli("info", "serving", "--json")[1])["slots"] == []
    code, _, err = cli("copy", str(table), "serving", "--dtype", "bfloat16")
    assert code == 1 and "give another one" in err and err.count("\n") == 1
    assert cli("copy", str(run_folder), "run-backup")[0] == 0
    assert cli("check", "run-backup")[0] == cli("check", "backup")[0] == cli("check", "serving")[0] == 0


def test_reshard(cli: Run, table: Path) -> None:
    code, _, err = cli("reshard", str(table), "--shards", "3")
    assert code == 1 and "--drop-snapshots" in err
    code, out, err = cli("reshard", str(table), "--shards", "3", "--drop-snapshots")
    assert (code, err) == (0, "") and out.endswith("has 3 shards at commit 2: 20 rows rewritten and verified\n")
    code, out, _ = cli("reshard", str(table), "--shards", "3", "--json")
    assert code == 0 and json.loads(out)["rows"] == 0
    assert cli("check", str(table))[0] == 0


def test_ctrl_c(cli: Run, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bb, "copy", interrupted)
    monkeypatch.setattr(bb, "check", interrupted)
    assert cli("copy", str(table), "backup") == (130, "", "error: interrupted; backup is as it was\n")
    assert cli("check", str(table)) == (130, "", "error: interrupted before everything was looked at\n")


def test_not_a_table(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("hello")
    code, _, err = cli("info", "empty")
    assert code == 1 and err.startswith("error: ") and "empty" in err and err.count("\n") == 1
    code, _, err = cli("info", "file.txt")
    assert (code, err) == (1, "error: file.txt: is a file; give the folder of a table or of a run\n")


def test_export_and_import(cli: Run, table: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    code, out, err = cli("export", str(table), "rows.parquet")
    assert (code, out, err) == (0, "wrote 20 rows to rows.parquet\n", "")
    code, out, _ = cli("import", "copy", "rows.parquet", "--dim", "8", "--num-rows", "1000", "--json")
    assert code == 0
    assert json.loads(out)["rows"] == 20
    with bb.open(table, mode="r", ram="4MiB") as one, bb.open("copy", mode="r", ram="4MiB") as other:
        assert np.array_equal(one.lookup(np.arange(20)), other.lookup(np.arange(20)))


def test_import_from_npy(cli: Run, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((30, 4), dtype=np.float32)
    np.save(tmp_path / "rows.npy", rows)
    code, out, err = cli("import", "t", "rows.npy", "--dim", "4", "--optimizer", "sgd")
    assert (code, out, err) == (0, "imported 30 rows into t\n", "")
    with bb.open("t", mode="r", ram="4MiB") as table:
        assert np.array_equal(table.lookup(np.arange(30)), rows)


def test_import_into_a_table_that_is_otherwise(cli: Run, table: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.ones((3, 8), np.float32))
    for flag, value, is_so in (
        ("--dim", "4", "8"),
        ("--num-rows", "10", "1000"),
        ("--optimizer", "adagrad", "adam"),
    ):
        code, out, err = cli("import", str(table), "rows.npy", flag, value)
        assert code == 2 and out == ""
        problem = f"{flag} {value}: table {table} is there and has {is_so}; leave {flag} out, or name another table"
        assert err == f"error: {problem}\n"
    with bb.open(table, ram="4MiB") as opened:
        assert opened.epoch == 2 and opened.optimizer.lr == 0.01
        assert not np.array_equal(opened.lookup([0]), np.ones((1, 8)))
    same = ("--dim", "8", "--num-rows", "1000", "--optimizer", "adam")
    assert cli("import", str(table), "rows.npy", *same)[0] == 0
    with bb.open(table, ram="4MiB") as opened:
        assert opened.optimizer.lr == 0.01, "a table keeps its hyperparameters"
        assert np.array_equal(opened.lookup([0]), np.ones((1, 8)))


def test_import_maps_ids_and_export_keeps_what_is_there(cli: Run, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 4), dtype=np.float32)
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "ids.npy", np.array([7, 1, 5]))
    code, _, err = cli("import", "t", "rows.npy", "--dim", "4", "--ids", "ids.npy", "--optimizer", "sgd")
    assert (code, err) == (0, "")
    (tmp_path / "words").write_text("".join(f"w{at}\n" for at in range(8)))
    assert cli("export", "t", "rows.vec", "--vocab", "words")[0] == 0
    assert [line.split()[0] for line in Path("rows.vec").read_text().splitlines()[1:]] == ["w1", "w5", "w7"]
    code, _, err = cli("export", "t", "rows.vec")
    assert code == 1 and "exists already and is as it was" in err and "--overwrite" in err and err.count("\n") == 1
    assert cli("export", "t", "rows.vec", "--overwrite")[0] == 0
    assert cli("import", "u", "rows.vec", "--dim", "4", "--ids", "word")[0] == 0
    assert cli("import", "v", "rows.vec", "--dim", "4", "--vocab", "new", "--num-rows", "3")[0] == 0
    assert Path("new").read_text() == "1\n5\n7\n"
    with bb.open("u", mode="r", ram="4MiB") as table, bb.open("v", mode="r", ram="4MiB") as packed:
        assert np.array_equal(table.lookup([7, 1, 5]), rows)
        assert np.array_equal(packed.lookup([2, 0, 1]), rows)
    code, _, err = cli("import", "u", "rows.any", "--format", "word2vec", "--ids", "word")
    assert code == 1 and "rows.any: no such file" in err


def test_an_interrupted_import_or_export_leaves_things_as_they_were(
    cli: Run, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "rows.npy", np.ones((3, 8), np.float32))

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Setting, "set", interrupted)
        message = "error: interrupted; {} {}\n"
        assert cli("import", "t", "rows.npy", "--dim", "8") == (130, "", message.format("t", "was not created"))
        assert cli("import", str(table), "rows.npy") == (130, "", message.format(table, "is as it was"))
    assert not (tmp_path / "t").exists()
    with bb.open(table, mode="r", ram="4MiB") as reader:
        assert reader.epoch == 2
    monkeypatch.setattr(bb.Table, "scan_slots", interrupted)
    assert cli("export", str(table), "out.npy") == (130, "", message.format("out.npy", "is as it was"))
    assert not list(tmp_path.glob("*out*"))


def test_progress_shows_rows_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from bunkbed.cli.commands import rows as rows_commands

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(rows_commands, "stderr", lambda: console)
    with rows_commands._row_bars("checking", "importing") as (checking, importing):
        checking(20, 20)
        importing(7, 20)
    shown = screen.getvalue()
    assert "checking" in shown and "importing" in shown and "7/20" in shown and "rows" in shown


def test_export_of_optimizer_state(cli: Run, table: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    code, _, err = cli("export", str(table), "rows.parquet", "--slots", "weight,exp_avg")
    assert (code, err) == (0, "")
    assert set(pq.read_schema("rows.parquet").names) == {"id", "weight", "exp_avg"}
    with bb.open(table, mode="r", ram="4MiB") as reader:
        assert reader.epoch == 2, "an export commits nothing"


def test_a_failed_import_leaves_no_table(cli: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((3, 5), np.float32))
    code, _, err = cli("import", "t", "rows.npy", "--dim", "4")
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert not (tmp_path / "t").exists()
    code, _, err = cli("import", "t", "rows.csv", "--dim", "4")
    assert code == 1 and "cannot tell the format of rows.csv" in err
