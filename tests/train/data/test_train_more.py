"""`bunkbed train --resume RUN --more FILE`: the larger dataset, the round of training, and what goes wrong."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("matplotlib")

import bunkbed as bb
from bunkbed.train import Recommender
from bunkbed.train.data.interactions import Dataset, read_dataset
from bunkbed.train.data.prepare import prepare_dataset
from bunkbed.train.data.splits import split
from bunkbed.train.data.store import load_dataset, open_dataset
from bunkbed.train.data.stream import open_split
from bunkbed.train.data.vocab import DataError
from bunkbed.train.merge import Merged, merge_datasets
from bunkbed.train.output.progress import Progress
from bunkbed.train.settings.auto import decide_round
from bunkbed.train.settings.config import TrainConfig

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--dim", "8", "--threads", "1", "--batch-size", "64", "--epochs", "2", "--lr", "0.02", "--negatives", "4")
ROUND = ("--resume", "run", "--more", "new.csv", "--epochs", "2")


def pairs_of(rng: Any, count: int, users: int, items: int) -> list[tuple[str, int]]:
    return [
        (f"u{u}", int(i)) for u, i in zip(rng.integers(0, users, count), rng.integers(0, items, count), strict=True)
    ]


def write(path: Path, pairs: list[tuple[Any, ...]], header: str = "user,item") -> Path:
    path.write_text(header + "\n" + "".join(",".join(map(str, pair)) + "\n" for pair in pairs))
    return path


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``old.csv``, and ``new.csv`` with repeated pairs, a user and an item that are new."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    old = pairs_of(rng, 600, 40, 50)
    new = [*old[:5], *pairs_of(rng, 80, 44, 55), ("late", 3), ("late", 999), ("u1", 999), ("late", 3)]
    write(tmp_path / "old.csv", old)
    write(tmp_path / "new.csv", new)
    return tmp_path


def digest(folder: str | Path) -> dict[str, str]:
    """Every file of a folder but its locks, with its bytes."""
    root = Path(folder)
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def rows_of(folder: str | Path) -> dict[str, bytes]:
    with bb.Run(folder, ram="64MiB", mode="r") as run:
        return {name: run.table(name).lookup(np.arange(run.table(name).num_rows)).tobytes() for name in run.table_names}


def metrics_of(folder: str | Path) -> list[tuple[int, float, dict[str, float]]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [(line["epoch"], line["loss"], line["metrics"]) for line in lines if line["kind"] == "epoch"]


def labels(data: Dataset, part: str = "train") -> list[tuple[Any, Any]]:
    pairs = getattr(data, part)
    return list(zip(pairs.user_vocab.decode(pairs.users), pairs.item_vocab.decode(pairs.items), strict=True))


def merged(folder: Path, old: Path, new: Path, **options: Any) -> tuple[Dataset, Merged]:
    for name, path in (("a", old), ("b", new)):
        given = options if name == "a" else {key: one for key, one in options.items() if key not in ("split", "test")}
        prepare_dataset(folder / name, path, ram_bytes=None, **given)
    (folder / "c").mkdir()
    found = merge_datasets(folder / "a", folder / "b", folder / "c", None)
    return load_dataset(folder / "c"), found


def num_known(old: list[tuple[Any, Any]], new: list[tuple[Any, Any]]) -> int:
    users, items = {user for user, _ in old}, {item for _, item in old}
    return sum(user in users and item in items for user, item in {*new} - {*old})


@pytest.mark.parametrize("by", ["random", "last", "time:0.8"])
def test_merged_pairs_are_those_of_one_file(by: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    drawn = pairs_of(rng, 500, 40, 50) + pairs_of(rng, 200, 50, 60)
    pairs = [(*pair, at) for at, pair in enumerate(drawn)]
    header = "user,item,at"
    whole = write(tmp_path / "all.csv", pairs, header)
    old, new = write(tmp_path / "old.csv", pairs[:500], header), write(tmp_path / "new.csv", pairs[500:], header)
    options: Any = {"split": by, "time_col": None if by == "random" else "at"}
    data, found = merged(tmp_path, old, new, **options)
    expected = read_dataset(whole, **options)
    assert data.train.user_vocab.array.equals(expected.train.user_vocab.array)
    assert data.train.item_vocab.array.equals(expected.train.item_vocab.array)
    assert (data.cold_users, data.cold_items) == (expected.cold_users, expected.cold_items)
    assert found.pairs + found.repeated == 200 and found.users > 3 and found.items > 3
    assert found.known == num_known(drawn[:500], drawn[500:]) < found.pairs
    parts = ["train"] if by == "random" else ["train", "test"]
    for part in parts:
        # With `last` the test of the old file comes after its other pairs; the order within a user is the same.
        same = sorted if by == "last" else list
        assert same(labels(data, part)) == same(labels(expected, part))
    if by == "last":
        for user in {user for user, _ in labels(data)}:
            assert [i for u, i in labels(data) if u == user] == [i for u, i in labels(expected) if u == user]


ANY_VALID = ("random", "0.3", "last", "time:0.8")
OF_ORDER = ("last", "time:0.8")  # the others would train on later pairs


@pytest.mark.parametrize(
    ("by", "valid"),
    [("random", valid) for valid in ANY_VALID] + [(by, valid) for by in ("last", "time:0.7") for valid in OF_ORDER],
)
@pytest.mark.parametrize("seed", range(3))
def test_no_pair_that_was_trained_on_is_held_out_later(by: str, valid: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    pairs = [(*pair, at) for at, pair in enumerate(pairs_of(rng, 260, 60, 30))]
    cuts = [0, *sorted(rng.choice(np.arange(60, 260), 2, replace=False).tolist()), 260]
    config = TrainConfig(split=by, valid=valid, seed=seed)
    trained: set[tuple[str, str]] = set()
    was_valid: set[tuple[str, str]] = set()
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        path = write(tmp_path / f"{number}.csv", pairs[first:last], "user,item,at")
        if number == 0:
            prepare_dataset(tmp_path / "r0", path, ram_bytes=None, time_col="at", split=by)
        else:
            prepare_dataset(tmp_path / f"n{number}", path, ram_bytes=None, time_col="at")
            (tmp_path / f"r{number}").mkdir()
            merge_datasets(tmp_path / f"r{number - 1}", tmp_path / f"n{number}", tmp_path / f"r{number}", None)
        data = load_dataset(tmp_path / f"r{number}")
        parts = split(data.train, config)
        sides = [Dataset(parts.train), Dataset(parts.valid)] if parts.valid is not None else [Dataset(parts.train)]
        train, held = (set(labels(side)) for side in sides)
        held_out = held | (set(labels(data, "test")) if data.test is not None else set())
        assert len(train | held_out) == len({pair[:2] for pair in pairs[:last]})
        assert not trained & held_out and not train & held_out
        if valid == "random":
            assert was_valid <= held  # a user keeps its held-out pair
            users = [user for user, _ in labels(data)]
            assert {user for user, _ in held} == {user for user in users if users.count(user) > 1}
            assert len(held) == len({user for user, _ in held})
        trained |= train
        was_valid = held
        # On disk the same pairs are held out.
        stored = open_split(
            open_dataset(tmp_path / f"r{number}").train,
            TrainConfig(split=by, valid=valid, seed=seed, stream=True),
            tmp_path / f"s{number}",
        )
        assert stored.valid is not None and set(labels(Dataset(stored.valid))) == held
        assert stored.train.users.tolist() == parts.train.users.tolist()


def test_a_separate_test_stays_and_is_not_trained_on(tmp_path: Path) -> None:
    old = write(tmp_path / "old.csv", [("a", 1), ("a", 2), ("b", 1)])
    test = write(tmp_path / "test.csv", [("b", 2), ("c", 7)])
    new = write(tmp_path / "new.csv", [("b", 2), ("c", 1), ("d", 8)])
    data, found = merged(tmp_path, old, new, test=test)
    assert labels(data) == [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("d", 8)]
    assert labels(data, "test") == [("b", 2), ("c", 7)]
    assert (data.cold_users, data.cold_items) == (0, 1)  # c has a pair to train on now
    assert found == Merged(pairs=2, known=0, users=1, items=1, repeated=1)


def test_weights_keep_their_scale(tmp_path: Path) -> None:
    old = write(tmp_path / "old.csv", [("a", 1, 1), ("b", 1, 3)], "user,item,rating")
    new = write(tmp_path / "new.csv", [("a", 2, 5), ("b", 2, 4)], "user,item,rating")
    data, _ = merged(tmp_path, old, new, rating_col="rating")
    assert data.train.weights is not None and data.train.weights.tolist() == [0.5, 1.5, 2.5, 2.0]
    with pytest.raises(DataError, match="the run has weights; give --rating-col"):
        prepare_dataset(tmp_path / "d", new, ram_bytes=None)
        merge_datasets(tmp_path / "a", tmp_path / "d", tmp_path / "c", None)
    with pytest.raises(DataError, match="the run has no weights; leave it out"):
        merge_datasets(tmp_path / "d", tmp_path / "b", tmp_path / "c", None)
    several = write(tmp_path / "several.csv", [("a", 1, 1), ("a", 2, 1)], "user,item,rating")
    prepare_dataset(tmp_path / "e", several, ram_bytes=None, rating_col="rating", split="last")
    with pytest.raises(DataError, match="--rating-col and --split last: no rating is stored of held-out pairs"):
        merge_datasets(tmp_path / "e", tmp_path / "b", tmp_path / "c", None)


def test_numbers_among_text_labels_are_text(tmp_path: Path) -> None:
    old = write(tmp_path / "old.csv", [("x", 1), ("7", 2)])
    new = write(tmp_path / "new.csv", [("7", 1), ("8", 2)])
    data, found = merged(tmp_path, old, new)
    assert labels(data) == [("x", 1), ("7", 2), ("7", 1), ("8", 2)] and found.users == 1
    (tmp_path / "d").mkdir()
    prepare_dataset(tmp_path / "e", write(tmp_path / "n.csv", [("1", 1), ("2", 1)]), ram_bytes=None)
    with pytest.raises(DataError, match="the user 'x' is no integer, as all users of the run are"):
        merge_datasets(tmp_path / "e", tmp_path / "a", tmp_path / "d", None)


def test_a_round_goes_on_from_the_best_epoch(cli: Run, files: Path) -> None:
    assert cli("train", "old.csv", *SMALL, "--out", "run")[0] == 0
    before, first = load_dataset("run/data"), metrics_of("run")
    with Recommender.load("run") as model:
        users = model.run.table("user")
        old_rows = users.lookup(np.arange(before.num_users))
    code, out, err = cli("train", *ROUND)
    assert (code, err) == (0, "")
    data = load_dataset("run/data")
    added = len(data.train) - len(before.train)
    users_added, items_added = data.num_users - before.num_users, data.num_items - before.num_items
    assert users_added > 0 and items_added > 0 and added > 50
    said = f"new.csv  {added} new pairs, {users_added} new users, {items_added} new items; {89 - added} repeated pairs"
    assert out.splitlines()[0].startswith(said)
    known = num_known(labels(before), labels(data)) / added
    assert 0.5 < known < 1
    rate, rows = round(1.5 - known, 3), round(1 - 0.3 * known, 3)
    why = f"the run's times {rate:g}: users and items of {100 * known:.0f} % of the new pairs had pairs"
    assert out.splitlines()[1].startswith(f"auto    lr {0.02 * rate:g} ({why}), lr-decay 0.2 (")
    assert out.splitlines()[2] == f"rows    the round begins with the trained rows times {rows:g}"
    assert [epoch for epoch, _, _ in metrics_of("run")] == [1, 2, 3, 4] and metrics_of("run")[:2] == first
    assert labels(data)[: len(before.train)] == labels(before)
    with Recommender.load("run") as model:
        assert model.recommend("late", k=60) and 999 not in dict(model.recommend("u1", k=60))
        assert 999 in dict(model.recommend("u2", k=60))
        assert model.run.table("user").num_rows == data.num_users
        assert np.abs(model.run.table("user").lookup(np.arange(before.num_users)) - old_rows).max() > 0
    assert [path.name for path in files.iterdir() if path.name.startswith(".")] == []
    code, out, _ = cli("train", "--resume", "run")
    assert code == 0 and "after epoch 4" in out and "nothing left to do" in out
    write(files / "third.csv", [("later", 3), ("later", 4)])
    assert cli("train", "--resume", "run", "--more", "third.csv", "--epochs", "1")[0] == 0
    assert load_dataset("run/data").train.rounds == [len(before.train), len(data.train)]
    assert [epoch for epoch, _, _ in metrics_of("run")] == [1, 2, 3, 4, 5]
    for command in ("eval", "report"):
        assert cli(command, "run")[0] == 0


def test_the_larger_tables_are_the_old_ones_and_initial_rows(cli: Run, files: Path, monkeypatch: Any) -> None:
    longer = (*SMALL, "--epochs", "6", "--lr", "0.3")
    assert cli("train", "old.csv", *longer, "--out", "run", "--optimizer", "adam", "--bias")[0] == 0
    old = {}
    with bb.Run("run", mode="r", snapshot="best") as run:
        best = run.meta["progress"]["epoch"]
        for name in run.table_names:
            table = run.table(name)
            old[name] = {slot: table.get(np.arange(table.num_rows), slot) for slot in ("weight", *table.slots)}
            old[name]["step"] = table.step

    for name in ("_go_on", "fit_again", "conclude"):
        monkeypatch.setattr(f"bunkbed.cli.commands.train.{name}", lambda *_: 0)
    code, out, _ = cli("train", *ROUND, "--json")
    said = json.loads(out.splitlines()[0])
    rate, row_scale = 1.5 - said["known"] / said["pairs"], said["row_scale"]
    assert code == 0 and 0.7 < row_scale < 1
    with bb.Run("run", mode="r") as run:
        progress, config = Progress(**run.meta["progress"]), TrainConfig.of_run(run.meta["config"])
        assert (progress.epoch, config.epochs, best < 6) == (6, 8, True)  # else the best rows are the last ones
        assert [progress.lr_factor(epoch, config) for epoch in (7, 8)] == pytest.approx([rate, rate / 5], rel=1e-3)
        assert run.snapshots() == {"best": run.version}
        for name in run.table_names:
            table, rows = run.table(name), len(old[name]["weight"])
            assert table.num_rows is not None and table.num_rows > rows and table.step == old[name]["step"]
            old[name]["weight"] *= np.float32(row_scale**2 if name == "item_bias" else row_scale)
            for slot in ("weight", *table.slots):
                assert table.get(np.arange(rows), slot).tobytes() == old[name][slot].tobytes()
            with bb.create(
                None,
                dim=table.dim,
                num_rows=table.num_rows,
                init=table.init,
                seed=table.seed,
                optimizer=table.optimizer,
            ) as larger:
                new = np.arange(rows, table.num_rows)
                assert table.lookup(new).tobytes() == larger.lookup(new).tobytes()


def test_every_way_has_the_same_bits(cli: Run, files: Path) -> None:
    """In memory, with `--stream`, with three budgets, and interrupted after each commit of the round."""
    found = []
    for ram, more in (("256MiB", ()), ("2MiB", ()), ("1MiB", ()), ("256MiB", ("--stream",))):
        shutil.rmtree("run", ignore_errors=True)
        for arguments in (("old.csv", *SMALL, "--ram", ram, *more, "--out", "run"), ROUND):
            code, _, err = cli("train", *arguments)
            assert code == 0, err
        found.append((rows_of("run"), metrics_of("run")))
    assert all(one == found[0] for one in found[1:])


@pytest.mark.parametrize("valid", ["random", "none"])
def test_an_interrupted_round_goes_on_with_the_same_bits(valid: str, cli: Run, files: Path, monkeypatch: Any) -> None:
    assert cli("train", "old.csv", *SMALL, "--valid", valid, "--out", "run")[0] == 0
    shutil.copytree("run", "twin")
    assert cli("train", *ROUND)[0] == 0
    expected = rows_of("run"), metrics_of("run")
    assert cli("train", "--resume", "twin", "--more", "new.csv", "--epochs", "2", "--threads", "1")[0] == 0
    assert (rows_of("twin"), metrics_of("twin")) == expected

    shutil.rmtree("run")
    assert cli("train", "old.csv", *SMALL, "--valid", valid, "--out", "run")[0] == 0
    from bunkbed.train.loop import Trainer

    fit = Trainer.fit

    def stopped(trainer: Trainer, on_event: Any = None) -> Any:
        seen = []

        def stop(event: object) -> None:
            seen.append(event)
            if len(seen) == 1:
                trainer.request_stop()

        return fit(trainer, stop)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", stopped)
        assert cli("train", *ROUND)[0] == 130
        code, _, err = cli("train", *ROUND)
        assert code != 0 and "its training is not finished" in err
    assert cli("train", "--resume", "run")[0] == 0
    assert (rows_of("run"), metrics_of("run")) == expected


KILLED = """
import os, sys
from bunkbed import _native
from bunkbed.cli.main import main
from bunkbed.files import durable
exchange, point = durable.exchange, {point!r}
def killed(*folders):
    if point == "exchanged":
        exchange(*folders)
    os.kill(os.getpid(), 9)
if point.startswith("run."):
    _native.arm_failpoint(point, 1, "die")
else:
    durable.exchange = killed
sys.argv = ["bunkbed", "train", "--resume", "run", "--more", "new.csv", "--epochs", "2"]
main()
"""


@pytest.mark.parametrize("point", ["run.tables", "run.files", "made", "exchanged"])
def test_a_kill_leaves_the_old_run_or_the_new_one(point: str, cli: Run, files: Path) -> None:
    assert cli("train", "old.csv", *SMALL, "--out", "run")[0] == 0
    before, pairs = digest("run"), len(load_dataset("run/data").train)
    done = subprocess.run([sys.executable, "-c", KILLED.format(point=point)], capture_output=True, text=True)
    assert done.returncode < 0 or (point.startswith("run.") and done.returncode), done.stderr
    assert not done.stderr
    assert Path(".run.more").exists()
    if point == "exchanged":
        assert len(load_dataset("run/data").train) > pairs
        assert cli("recommend", "run", "--user", "late", "-k", "3")[0] == 0
        assert cli("train", "--resume", "run")[0] == 0
    else:
        assert digest("run") == before
        assert cli("recommend", "run", "--user", "u1", "-k", "3")[0] == 0
        assert cli("train", *ROUND)[0] == 0
    assert not Path(".run.more").exists()
    assert [epoch for epoch, _, _ in metrics_of("run")] == [1, 2, 3, 4]


def test_errors_change_nothing(cli: Run, files: Path) -> None:
    assert cli("train", "old.csv", *SMALL, "--user-col", "user", "--item-col", "item", "--out", "run")[0] == 0
    before = digest("run")
    write(files / "columns.csv", [("a", 1)], "who,what")
    write(files / "text.csv", [("a", 1), ("b", "x9")])
    write(files / "same.csv", [line.split(",") for line in (files / "old.csv").read_text().split()[1:4]])
    (files / "damaged.csv").write_bytes(b"\xff\xfe\x00\x00nothing")
    for name, message in {
        "columns.csv": "who, what",
        "text.csv": "the item 'x9' is no integer",
        "same.csv": "same.csv: has no new pair",
        "damaged.csv": "damaged.csv",
        "absent.csv": "absent.csv",
    }.items():
        code, _, err = cli("train", "--resume", "run", "--more", name)
        assert code != 0 and message in err, err
        assert digest("run") == before and not Path(".run.more").exists()
    code, _, err = cli("train", "--resume", "run", "--more", "new.csv", "--dim", "16")
    assert code != 0 and "--dim 16 cannot change on resuming" in err
    code, _, err = cli("train", "--more", "new.csv")
    assert code != 0 and "give the run with --resume RUN" in err
    with bb.Run("run") as run:
        run.commit(keep="mine")
    before = digest("run")
    code, _, err = cli("train", *ROUND)
    assert code != 0 and "has the kept snapshot 'mine'" in err and digest("run") == before


def test_other_columns_are_read_where_they_are_named(cli: Run, files: Path) -> None:
    assert cli("train", "old.csv", *SMALL, "--user-col", "user", "--item-col", "item", "--out", "run")[0] == 0
    write(files / "new.csv", [(1, "late"), (2, "late")], "what,who")
    code, out, err = cli("train", *ROUND, "--user-col", "who", "--item-col", "what", "--json")
    assert code == 0, err
    first = json.loads(out.splitlines()[0])
    assert first["kind"] == "more" and (first["pairs"], first["users"], first["repeated"]) == (2, 1, 0)
    why = "the run's times 1.5: users and items of 0 % of the new pairs had pairs"
    assert first["options"]["lr"] == {"value": 0.03, "reason": why} and first["row_scale"] == 1
    assert "late" in load_dataset("run/data").train.user_vocab.array.to_pylist()


def test_rule_of_the_round() -> None:
    config = TrainConfig(lr=0.01, model="mf")
    (found, reasons) = decide_round({}, config, epochs=13, known=1)
    assert found == (3, 0.5, 0.447, 0.7) and set(reasons) == {"epochs", "lr", "lr_decay"}
    assert decide_round({}, config, epochs=13, known=0.5)[0] == (3, 1.0, 0.447, 0.85)
    assert decide_round({}, config, epochs=13, known=0)[0] == (3, 1.5, 0.447, 1)
    epochs = (1, 4, 7, 8)
    assert [decide_round({}, config, epochs=count, known=1)[0].epochs for count in epochs] == [1, 1, 1, 2]
    (found, reasons) = decide_round({"epochs": 4, "lr": 0.02, "lr_decay": 0.9}, config, epochs=13, known=1)
    assert found == (4, 2.0, 0.9, 0.7) and not reasons
    # Elsewhere shorter rows do not mean smaller scores alone.
    sasrec = TrainConfig(model="sasrec", loss="softmax")
    for other in (replace(config, loss="ccl"), replace(config, model="neumf", loss="bce"), sasrec):
        assert decide_round({}, other, epochs=13, known=1)[0].row_scale == 1
    assert decide_round({}, sasrec, epochs=13, known=0)[0].lr_scale == 0.5  # no rows of users
