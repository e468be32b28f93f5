"""``bunkbed train --stream``: the run of interactions in memory, and what becomes of malformed rows and of failures."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("duckdb")

import bunkbed as bb
from bunkbed.cli.commands import train as train_command
from bunkbed.train.data import prepare as stream_prepare

Run = Callable[..., tuple[int, str, str]]
SMALL = (
    "--dim",
    "8",
    "--ram",
    "256MiB",
    "--threads",
    "1",
    "--batch-size",
    "256",
    "--epochs",
    "2",
    "--eval-users",
    "40",
)


@pytest.fixture
def likes(tmp_path: Path) -> Path:
    """Users and items by name, in a file of 1,500 rows of which three are malformed."""
    rng = np.random.default_rng(0)
    pairs = zip(rng.integers(0, 90, 1_500), rng.integers(0, 120, 1_500), strict=True)
    lines = [f"u{user},i{item},5\n" for user, item in pairs]
    lines[700:700] = ["u7,i8\n", ",i9,5\n", "u7,,4\n"]
    path = tmp_path / "likes.csv"
    path.write_text("user,item,rating\n" + "".join(lines))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Weights of every table, and what the log says of the epochs."""
    with bb.Run(folder, mode="r", ram="64MiB") as run:
        result = {
            name: run.table(name).lookup(np.arange(run.table(name).num_rows)).tobytes() for name in run.table_names
        }
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [(line["loss"], line["metrics"]) for line in lines if line["kind"] == "epoch"]
    return {**result, "epochs": json.dumps(epochs).encode()}


def test_a_streamed_run_is_the_one_in_memory(cli: Run, likes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = cli("train", "likes.csv", *SMALL, "--out", "memory")
    assert (code, err) == (0, "")
    code, streamed, err = cli("train", "likes.csv", *SMALL, "--stream", "--out", "disk")
    assert (code, err) == (0, "")
    for text in (out, streamed):
        assert "3 malformed rows of likes.csv left out, the first: line 702: " in text
        assert "line 702: expected 3 columns, found 2: 'u7, i8'; --strict stops there" in text
    assert "RAM budget 256.0 MiB" in out and "192.0 MiB" in streamed
    assert contents(Path("disk")) == contents(Path("memory"))
    assert not (Path("disk") / "data" / "preparing").exists()

    best = [json.loads(cli("recommend", run, "--user", "u7", "--json")[1])["items"] for run in ("memory", "disk")]
    assert best[0] == best[1] and len(best[0]) == 10
    judged = json.loads(cli("eval", "disk", "--json")[1])
    assert judged["num_users"] == 40 and judged["split"] == "validation"
    expected = [json.loads(line) for line in Path("disk/metrics.jsonl").read_text().splitlines()]
    assert judged["metrics"] in [line["metrics"] for line in expected if line["kind"] == "epoch"]


def test_users_without_items_are_told(cli: Run, tmp_path: Path) -> None:
    lines = [f"u{user} " + " ".join(f"i{(user + at) % 50}" for at in range(3 + user % 9)) for user in range(60)]
    (tmp_path / "lines.txt").write_text("\n".join([*lines, "u60", "u61"]) + "\n")
    for stream in ([], ["--stream"]):
        code, out, err = cli("train", "lines.txt", *SMALL, "--strict", "--out", "a" + "".join(stream), *stream)
        assert (code, err) == (0, "")
        assert "2 users without items left out of lines.txt: their lines hold no pair" in out
    descriptions = [json.loads(Path(run, "data", "dataset.json").read_text()) for run in ("a", "a--stream")]
    assert descriptions[0] == descriptions[1] and descriptions[0]["train"]["empty_users"] == 2


def test_strict_stops_at_the_first_malformed_row(cli: Run, likes: Path) -> None:
    for stream in ([], ["--stream"]):
        code, _, err = cli("train", "likes.csv", *SMALL, "--strict", "--out", "a", *stream)
        assert (code, err) == (1, "error: likes.csv line 702: expected 3 columns, found 2: 'u7, i8'\n")
        assert not Path("a").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eval-users", "0"], "option stream needs to know how many users an evaluation asks: give eval_users"),
        (["--test-negatives", "likes.csv"], "--stream cannot keep --test-negatives on disk"),
        (
            ["--eval-users", "0", "--valid", "none", "--test", "likes.csv"],
            "--stream with --test needs to know how many",
        ),
    ],
)
def test_what_cannot_stream_is_refused_at_once(
    options: list[str], message: str, cli: Run, likes: Path, tmp_path: Path
) -> None:
    code, _, err = cli("train", "likes.csv", *SMALL, "--stream", "--out", "a", *options)
    assert code == 2 and message in err
    assert not Path("a").exists()


def test_a_test_file_is_judged_by_the_users_asked(cli: Run, likes: Path, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("user,item\nu1,i119\nu2,i50\nu3,brand new\nstranger,i3\n")
    code, out, err = cli(
        "train", "likes.csv", *SMALL, "--stream", "--eval-users", "3", "--test", "test.csv", "--out", "a"
    )
    assert (code, err) == (0, "")
    assert "1 users and 1 items stand only in the test files" in out
    assert json.loads(cli("eval", "a", "--json")[1])["num_users"] == 3


def test_a_preparation_that_fails_leaves_nothing_and_one_that_was_killed_is_begun_again(
    cli: Run, likes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "here")

    with monkeypatch.context() as patched:
        patched.setattr(stream_prepare, "write_description", fail)
        assert cli("train", "likes.csv", *SMALL, "--stream", "--out", "a")[0] == 1
        assert not Path("a").exists()
        patched.setattr(train_command.shutil, "rmtree", lambda *_, **__: None)  # killed: no cleanup
        assert cli("train", "likes.csv", *SMALL, "--stream", "--out", "a")[0] == 1
        assert (Path("a") / "data" / "train.parquet").exists()
    assert cli("eval", "a")[0] == 1
    with monkeypatch.context() as patched:
        patched.setattr(stream_prepare, "write_description", fail)
        assert cli("train", "--resume", "a")[0] == 1
        assert not (Path("a") / "data").exists()
    code, out, err = cli("train", "--resume", "a")
    assert (code, err) == (0, "") and "reading them again" in out
    assert "epochs" in contents(Path("a"))
