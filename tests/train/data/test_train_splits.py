"""`bunkbed train` with a split: what it says, stores and does again; recommendations and comparisons of its runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("matplotlib")

import bunkbed as bb
from bunkbed.cli.commands import train as train_command
from bunkbed.train import Recommender
from bunkbed.train.data import prepare
from bunkbed.train.data.interactions import read_dataset
from bunkbed.train.data.store import load_dataset
from bunkbed.train.evaluate.comparison import summarize_run
from bunkbed.train.loop import Trainer
from bunkbed.train.settings.config import TrainConfig

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--dim", "8", "--ram", "256MiB", "--threads", "1", "--batch-size", "128", "--epochs", "2", "--lr", "0.02")
BY_TIME = ("likes.csv", "--time-col", "at")


@pytest.fixture
def likes(tmp_path: Path) -> Path:
    """Sixty users of two kinds, and a user and an item that come last."""
    rng = np.random.default_rng(0)
    users = rng.integers(0, 60, 2_000)
    items = rng.integers(0, 40, 2_000) + 40 * (users % 2)
    days = rng.integers(1, 29, 2_000)
    lines = [
        f"u{u},i{i},2024-02-{d:02}\n" for u, i, d in zip(users.tolist(), items.tolist(), days.tolist(), strict=True)
    ]
    late = "late,i3,2024-03-01\nu1,new,2024-03-02\n"
    (tmp_path / "likes.csv").write_text("user,item,at\n" + late + "".join(lines))
    return tmp_path / "likes.csv"


def rows_of(folder: str) -> dict[str, bytes]:
    with bb.Run(folder, ram="64MiB", mode="r") as run:
        return {name: run.table(name).lookup(np.arange(run.table(name).num_rows)).tobytes() for name in run.table_names}


def metrics_of(folder: str) -> list[tuple[float, dict[str, float], str]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["metrics"], line["ranking"]) for line in lines if line["kind"] == "epoch"]


@pytest.mark.parametrize("split", ["last", "time:0.8"])
def test_every_line_of_results_says_the_split(split: str, cli: Run, likes: Path) -> None:
    by = () if split == "last" else ("--split", split)  # with times, last is the default
    code, out, err = cli("train", *BY_TIME, *by, *SMALL, "--out", "a")
    assert (code, err) == (0, "")
    assert "times from column 'at'" in out and f"split {split}  " in out
    assert f"{int(split != 'last')} users and 1 items stand only in the test; they are ranked too, untrained" in out
    results = [line for line in out.splitlines() if "ndcg@10" in line]
    assert len(results) == 4 and all(f"split {split}" in line for line in results)
    test = next(line for line in results if line.startswith("test "))
    assert json.loads(Path("a/config.json").read_text())["train"]["split"] == split
    data = load_dataset("a/data")
    assert data.split == split and data.test is not None

    code, out, _ = cli("eval", "a")
    assert code == 0 and out.splitlines()[0].endswith(f"test, {test.partition('test, ')[2]}")
    stored = json.loads(Path("a/test.json").read_text())
    judged = json.loads(cli("eval", "a", "--json")[1])
    assert (judged["metrics"], judged["ranking"]) == (stored["metrics"], stored["ranking"])
    assert judged["num_users"] == len(np.unique(data.test.users))
    assert cli("report", "a")[0] == 0
    page = Path("a/report.html").read_text()
    assert f"split {split}" in page and page.count(split) > 2  # the options that differ from the defaults

    # Without a split: as ever, and not comparable.
    code, out, _ = cli("train", "likes.csv", *SMALL, "--out", "b")
    assert code == 0 and "split random" in out and "test" not in out.replace("test.", "")
    found = json.loads(cli("compare", "a", "b", "--json")[1])
    assert not found["comparable"] and found["options"] == ["split", "valid"]
    assert summarize_run(Path("a")).judged_by[1:3] == (split, split)  # and the validation
    out = cli("compare", "a", "b")[1]
    assert "split" in out.splitlines()[0].split()
    assert {row.split()[0]: split in row.split() for row in out.splitlines()[1:3]} == {"a": True, "b": False}


@pytest.mark.parametrize("split", ["last", "time:0.8"])
def test_a_run_from_disk_and_a_resumed_run_have_the_bits_of_one_in_memory(
    split: str, cli: Run, likes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*BY_TIME, "--split", split, *SMALL)
    assert cli("train", *options, "--out", "memory")[0] == 0
    assert cli("train", *options, "--stream", "--out", "disk")[0] == 0
    fit, steps = Trainer.fit, []

    def stopped(self: Trainer, on_event: Any = None) -> Any:
        step = self.optimizer.step

        def once(*args: Any) -> None:
            step(*args)
            steps.append(None)
            if len(steps) == 14:
                self.request_stop()

        self.optimizer.step = once  # type: ignore[method-assign]
        return fit(self, on_event)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", stopped)
        code, out, _ = cli("train", *options, "--out", "parts")
        assert code == 130 and "interrupted" in out
    likes.unlink()  # the run has its own copy
    assert cli("train", "--resume", "parts", "--stream")[0] == 0
    for other in ("disk", "parts"):
        assert rows_of(other) == rows_of("memory")
        assert metrics_of(other) == metrics_of("memory")
        assert json.loads(Path(other, "test.json").read_text()) == json.loads(Path("memory/test.json").read_text())
    code, _, err = cli("train", "--resume", "parts", "--split", "time:0.7")
    assert code == 2 and f"--split time:0.7 cannot change on resuming: parts was started with {split}" in err
    code, _, err = cli("train", "--resume", "parts", "--time-col", "at")
    assert code == 2 and "--time-col cannot change on resuming: parts keeps its own copy of the data" in err


def test_a_preparation_that_was_killed_is_done_again_with_its_times_and_ratings(
    cli: Run, likes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = likes.read_text().splitlines()
    likes.write_text("".join(f"{line},{at % 5 if at else 'rating'}\n" for at, line in enumerate(lines)))
    options = (*BY_TIME, "--split", "time:0.8", "--rating-col", "rating", *SMALL, "--stream")
    assert cli("train", *options, "--out", "whole")[0] == 0

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "here")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_description", fail)
        patch.setattr(train_command.shutil, "rmtree", lambda *_, **__: None)  # killed: the files stay
        assert cli("train", *options, "--out", "killed")[0] == 1
    code, out, err = cli("train", "--resume", "killed")
    assert (code, err) == (0, "") and "reading them again" in out
    assert rows_of("killed") == rows_of("whole")
    assert metrics_of("killed") == metrics_of("whole")


def test_nothing_of_the_file_is_recommended_again(cli: Run, likes: Path) -> None:
    rows = [line.split(",")[:2] for line in likes.read_text().splitlines()[1:]]
    for split in ("last", "time:0.5"):
        assert cli("train", *BY_TIME, "--split", split, *SMALL, "--out", split[:4])[0] == 0
        with Recommender.load(split[:4], ram="64MiB") as model:
            everyone = {
                (user, item)
                for batch in model.recommend_many(81)
                for user, item in zip(batch["user"].to_pylist(), batch["item"].to_pylist(), strict=True)
            }
            for user in ("u1", "u2"):
                alone = {(user, item) for item, _ in model.recommend(user=user, k=81)}
                assert alone == {pair for pair in everyone if pair[0] == user}
            assert model.num_seen("u1") == len({item for user, item in rows if user == "u1"})
        assert not everyone & {(user, item) for user, item in rows}
        users = {user for user, _ in everyone}
        # Not to users whose row no step has trained.
        data = load_dataset(Path(split[:4], "data"))
        trained = data.train.users[: round(len(data.train) * 0.5)] if split == "time:0.5" else data.train.users
        assert users == set(data.train.user_vocab.decode(np.unique(trained)))
        assert ("late" in users) == (split == "last")


def test_times_order_a_training_with_a_test_file_too(cli: Run, likes: Path) -> None:
    Path("test.csv").write_text("user,item\nu1,i2\nu3,i4\n")
    code, out, err = cli("train", *BY_TIME, "--test", "test.csv", "--valid", "last", *SMALL, "--out", "a")
    assert (code, err) == (0, "")
    assert "split given" in out and "split last" in out
    data = load_dataset("a/data")
    assert data.split == "random" and len(data.train) == len(read_dataset(likes).train)
    assert data.train.user_vocab.decode(data.train.users[-2:]) == ["late", "u1"]


@pytest.mark.parametrize("stream", [[], ["--stream"]])
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--split", "first"], 2, "option split must be last, random or a share of the time such as time:0.9, got"),
        (
            ["--split", "time:1.5"],
            2,
            "option split must have a share between 0 and 1 after time: such as 0.9, got 'tim",
        ),
        (
            ["--split", "time:0.9"],
            1,
            "option split='time:0.9' needs times: give the column that holds them with --time-col",
        ),
        (["--time-col", "at", "--split", "last", "--valid", "random"], 2, "option valid='random' would train on what"),
        (
            ["--split", "last", "--test", "likes.csv"],
            1,
            "takes the test out of likes.csv; leave it out, or the test file",
        ),
        (["--time-col", "when"], 1, "likes.csv: has no column 'when'; it has: user, item, at"),
        (["--time-col", "item"], 1, "column 'item' cannot hold both the items and the times"),
        (["--time-col", "at", "--split", "time:0.999999"], 1, "split time:0.999999 leaves no test: it has 1,"),
    ],
)
def test_what_goes_wrong_leaves_no_folder(
    stream: list[str], options: list[str], code: int, message: str, cli: Run, likes: Path
) -> None:
    found, _, err = cli("train", "likes.csv", *SMALL, "--out", "a", *stream, *options)
    assert found == code and message in err and err.count("\n") == 1
    assert not Path("a").exists()


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_a_time_that_cannot_be_read_leaves_no_folder(stream: list[str], cli: Run, likes: Path) -> None:
    with likes.open("a") as file:
        file.write("u1,i1,yesterday\n")
    code, _, err = cli("train", *BY_TIME, *SMALL, "--out", "a", *stream)
    assert (code, err) == (
        1,
        "error: likes.csv line 2004: the time is not a date, as those above are (found 'yesterday'); correct or drop "
        "such rows, or give another --time-col\n",
    )
    assert not Path("a").exists()


def test_a_stream_with_a_split_needs_the_number_of_users(cli: Run, likes: Path) -> None:
    options = ("--stream", "--valid", "none", "--eval-users", "0")
    code, _, err = cli("train", *BY_TIME, *SMALL, *options, "--out", "a")
    assert code == 2 and "--stream with --split last needs to know how many users to ask" in err
    assert not Path("a").exists()


def test_a_trainer_is_told_of_another_split(likes: Path, tmp_path: Path) -> None:
    data = read_dataset(likes, time_col="at", split="last")
    with bb.Run(tmp_path / "run", ram="16MiB") as run:
        with pytest.raises(ValueError, match="option split='random' differs from 'last', by which the data were split"):
            Trainer(TrainConfig(dim=4, ram="16MiB"), data, run)
        Trainer(TrainConfig(dim=4, ram="16MiB", split="last"), data, run)
