"""`train`, `eval`, `recommend` end to end, on generated interactions and on the real data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("matplotlib")

import bunkbed as bb
from bunkbed.cli.shared.train_fit import graceful
from bunkbed.train.processes.team import ALONE, Team
from bunkbed.train.settings.auto import decide

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data is not at {DATA}")

Run = Callable[..., tuple[int, str, str]]
# Small enough to evict, and the same threads everywhere: torch's sums depend on their number.
SMALL = ("--dim", "8", "--ram", "4MiB", "--threads", "1", "--batch-size", "256", "--negatives", "2")


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    """Users of two kinds, who like the items of their half."""
    rng = np.random.default_rng(0)
    users = rng.integers(0, 300, 12_000)
    items = rng.integers(0, 100, 12_000) + 100 * (users % 2)
    path = tmp_path / "ratings.csv"
    lines = [f"u{user},i{item},5\n" for user, item in zip(users.tolist(), items.tolist(), strict=True)]
    path.write_text("user,item,rating\n" + "".join(lines))
    return path


def rows_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Steps, weights and optimizer state of every table of a run."""
    result = {}
    run = bb.Run(folder, ram="64MiB")
    for name in run.table_names:
        table = run.table(name)
        ids = np.arange(table.num_rows)
        bits = b"".join(table.get(ids, slot=slot).tobytes() for slot in ("weight", *table.slots))
        result[name] = (table.step, bits)
    run.close(commit=False)
    assert {"item", "user"} <= set(result)
    return result


def metric_lines(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: entry[key] for key in ("epoch", "loss", "metrics")} for entry in entries if entry["kind"] == "epoch"]


def test_from_a_file_to_recommendations(cli: Run, ratings: Path) -> None:
    code, out, err = cli("train", "ratings.csv", *SMALL, "--epochs", "8", "--lr", "0.02", "--out", "runs/a")
    assert (code, err) == (0, "")
    for shown in (
        "users from column 'user', items from column 'item'",
        "repeated pairs dropped: a pair counts once",
        "epoch 8/8 done",
        "full ranking of 200 items",
        "picture runs/a/training.png",
        "bunkbed recommend runs/a --user u",
    ):
        assert shown in out
    folder = Path("runs/a")
    present = {path.name for path in folder.iterdir()}
    assert {"config.json", "data", "metrics.jsonl", "tables", "training.png"} <= present
    assert json.loads((folder / "config.json").read_text())["train"]["dim"] == 8
    assert [entry["epoch"] for entry in metric_lines(folder)] == list(range(1, 9))

    code, out, err = cli("recommend", "runs/a", "--user", "u7", "-k", "5", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["user"] == "u7" and len(found["items"]) == 5 and found["seen"] > 0
    seen = {line.split(",")[1] for line in ratings.read_text().splitlines() if line.startswith("u7,")}
    names = [entry["item"] for entry in found["items"]]
    assert not seen & set(names)
    assert all(int(name[1:]) >= 100 for name in names), "u7 likes the second half"
    scores = [entry["score"] for entry in found["items"]]
    assert scores == sorted(scores, reverse=True)
    code, out, _ = cli("recommend", "runs/a", "--user", "u7", "-k", "5")
    assert code == 0 and f"user u7, {len(seen)} seen items left out" in out
    both = json.loads(cli("recommend", "runs/a", "--user", "u7", "-k", "200", "--include-seen", "--json")[1])
    assert len(both["items"]) == 200

    code, _, err = cli("recommend", "runs/a", "--user", "u7000")
    assert code == 1
    assert err.startswith("error: user 'u7000' is not among the 300 known; the nearest are u")

    code, out, err = cli("eval", "runs/a", "--json")
    assert (code, err) == (0, "")
    judged = json.loads(out)
    best = max(metric_lines(folder), key=lambda entry: entry["metrics"]["ndcg@10"])
    assert judged["split"] == "validation" and judged["num_users"] == 300
    assert judged["metrics"] == pytest.approx(best["metrics"])
    assert "hr@5" in json.loads(cli("eval", "runs/a", "--ks", "5", "--ranking", "sampled", "--json")[1])["metrics"]
    assert "ndcg@10" in cli("eval", "runs/a")[1]

    code, out, _ = cli("info", "runs/a", "--json")
    assert code == 0 and set(json.loads(out)["tables"]) == {"user", "item"}
    assert cli("check", "runs/a")[0] == 0


def test_json_lines(cli: Run, ratings: Path) -> None:
    ratings.rename("likes.csv")
    code, out, _ = cli("train", "likes.csv", *SMALL, "--epochs", "2", "--json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["kind"] for line in lines] == ["auto", "epoch", "epoch", "outcome"]
    assert lines[0]["recipe"] == "default" and "dim" not in lines[0]["options"]
    assert lines[0]["options"]["lr"] == {"value": 0.005, "reason": "optimizer adam"}
    assert lines[-1]["run"] == "runs/likes"
    assert lines[-1]["interrupted"] is False and lines[-1]["epoch"] == 2
    again = cli("train", "likes.csv", *SMALL, "--epochs", "1", "--json")[1]
    assert json.loads(again.splitlines()[-1])["run"] == "runs/likes-2"


def test_the_data_decide_what_is_not_given(cli: Run, ratings: Path, tmp_path: Path) -> None:
    code, out, err = cli("train", "ratings.csv", "--threads", "1", "--dim", "8", "--recipe", "fast", "--out", "a")
    assert (code, err) == (0, "")
    decided = next(line for line in out.splitlines() if line.startswith("auto "))
    assert "batch-size 128 (78 steps an epoch), share-negatives True" in decided
    assert "negatives 50 (a quarter of the items), hardness 3.0" in decided and "dim" not in decided
    stored = json.loads((tmp_path / "a" / "config.json").read_text())
    config, _ = decide({"dim": 8, "threads": 1}, "fast", pairs=9_900, items=200)
    assert stored["recipe"] == "fast" and "undecided" not in stored
    assert stored["train"] == {**config.to_dict(), "order": "uniform"}
    code, out, err = cli("train", "--resume", "a", "--recipe", "best")
    assert (code, out) == (2, "") and "--recipe cannot change on resuming" in err


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_a_run_that_ended_before_its_options_were_decided(
    stream: tuple[str, ...], cli: Run, ratings: Path, tmp_path: Path
) -> None:
    script = """
import os, sys
from bunkbed.cli import main
from bunkbed.cli.commands import train

train._decided = lambda *_, **__: os._exit(9)
main(sys.argv[1:])
"""
    options = ("--threads", "1", "--dim", "8", "--eval-users", "50", "--ram", "96MiB", *stream)
    assert cli("train", "ratings.csv", *options, "--epochs", "2", "--out", "whole")[0] == 0

    done = subprocess.run(
        [sys.executable, "-c", script, "train", "ratings.csv", *options, "--out", "cut"],  # without --epochs
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 9, done.stderr
    assert "undecided" in json.loads((tmp_path / "cut" / "config.json").read_text())
    code, out, err = cli("train", "--resume", "cut", "--epochs", "2")
    assert (code, err) == (0, "") and "auto " in out
    trained = [json.loads((tmp_path / name / "config.json").read_text())["train"] for name in ("whole", "cut")]
    assert trained[0] == trained[1]
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "cut")


def test_a_test_file_is_judged_at_the_end(cli: Run, ratings: Path, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("user,item\nu1,i150\nu2,i50\nu3,brand new\nstranger,i3\n")
    arguments = ("train", "ratings.csv", "--test", "test.csv", *SMALL, "--epochs", "1", "--out", "a")
    code, out, err = cli(*arguments)
    assert (code, err) == (0, "")
    assert "1 users and 1 items stand only in the test files; they are ranked too, untrained" in out
    assert "test    hr@10" in out and "test, full ranking of 201 items" in out
    assert json.loads(cli("eval", "a", "--json")[1])["split"] == "test"


def test_training_evaluates_a_sample_of_the_users_and_the_end_all(cli: Run, ratings: Path) -> None:
    arguments = ("train", "ratings.csv", *SMALL, "--epochs", "2", "--lr", "0.02", "--eval-users")
    code, out, err = cli(*arguments, "20", "--out", "a")
    assert (code, err) == (0, "")
    ranking = "full ranking of 200 items, less those trained on"
    assert f"({ranking}; 20 of 300 users; split random)" in out
    lines = {line.split(" ")[0]: line for line in out.splitlines() if "validation, " in line}
    assert lines["best"].endswith(f"validation, {ranking}; 20 of 300 users; split random; chosen by ndcg@10")
    assert lines["valid"].endswith(f"validation, {ranking}; 300 users; split random")
    assert not Path("a", "test.json").exists()
    # The last figures are of the best epoch and all users, as those of `eval`.
    outcome = json.loads(cli(*arguments, "20", "--out", "b", "--json")[1].splitlines()[-1])
    judged = json.loads(cli("eval", "b", "--json")[1])
    assert outcome["test"] is None
    assert outcome["validation"] == {name: value for name, value in judged.items() if name != "run"}
    assert judged["num_users"] == 300
    best = metric_lines(Path("b"))[outcome["best_epoch"] - 1]["metrics"]
    assert outcome["best"] == best != judged["metrics"]
    assert metric_lines(Path("a")) == metric_lines(Path("b"))
    # All users are evaluated once.
    for users in ("0", "300"):
        code, out, _ = cli(*arguments, users, "--out", f"all-{users}")
        assert code == 0 and f"{ranking}; 300 users" in out and "valid   " not in out
        assert metric_lines(Path(f"all-{users}")) != metric_lines(Path("a"))
    code, _, err = cli("train", "--resume", "a", "--epochs", "3", "--eval-users", "30")
    assert code == 2 and "--eval-users 30 cannot change on resuming: a was started with 20" in err


def test_resuming_a_finished_run(cli: Run, ratings: Path) -> None:
    assert cli("train", "ratings.csv", *SMALL, "--epochs", "2", "--out", "a")[0] == 0
    assert cli("train", "ratings.csv", *SMALL, "--epochs", "3", "--out", "b")[0] == 0
    code, out, err = cli("train", "--resume", "a", "--epochs", "3", "--ram", "8MiB")
    assert (code, err) == (0, "")
    assert "resuming a after epoch 2" in out
    assert rows_of(Path("a")) == rows_of(Path("b"))
    assert metric_lines(Path("a")) == metric_lines(Path("b"))
    assert json.loads(Path("a/config.json").read_text())["train"]["epochs"] == 3
    code, out, _ = cli("train", "--resume", "a")
    assert code == 0 and "nothing left to do" in out


def test_resuming_a_run_that_stopped_early(cli: Run, ratings: Path) -> None:
    early = ("--epochs", "30", "--lr", "0.3", "--patience", "1")
    code, out, _ = cli("train", "ratings.csv", *SMALL, *early, "--out", "a")
    assert code == 0 and "no better epoch within the patience" in out
    code, out, _ = cli("train", "--resume", "a")
    assert code == 0 and "it stopped early, --patience more than 1 goes on, or 0 for never" in out
    before = len(metric_lines(Path("a")))
    assert cli("train", "--resume", "a", "--patience", "0", "--epochs", str(before + 1))[0] == 0
    assert len(metric_lines(Path("a"))) == before + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dim", "16"], "--dim 16 cannot change on resuming: a was started with 8; start a new run for it"),
        (["--user-col", "x"], "--user-col cannot change on resuming: a keeps its own copy of the data"),
    ],
)
def test_what_may_not_change_on_resuming(arguments: list[str], message: str, cli: Run, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    config = {"dim": 8, "epochs": 1}
    (tmp_path / "a" / "config.json").write_text(json.dumps({"train": config}))
    assert cli("train", "--resume", "a", *arguments) == (2, "", f"error: {message}\n")


def test_failures_leave_no_folder(cli: Run, ratings: Path) -> None:
    code, _, err = cli("train", "ratings.csv", "--ram", "1KiB", "--out", "a")
    assert code == 1 and err.count("\n") == 1 and "need" in err
    assert not Path("a").exists()
    code, _, err = cli("train", "ratings.csv", "--user-col", "who", "--out", "a")
    assert code == 1
    assert err == "error: ratings.csv: has no column 'who'; it has: user, item, rating\n"
    assert not Path("a").exists()


def test_existing_folders_are_left_alone(cli: Run, ratings: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious.txt").write_text("mine")
    code, _, err = cli("train", "ratings.csv", "--out", "a")
    assert (code, err) == (2, "error: a exists and is not empty; give another --out\n")
    assert (tmp_path / "a" / "precious.txt").read_text() == "mine"
    code, _, err = cli("train", "--resume", "a")
    assert (code, err) == (1, "error: a is not a training run: it has no config.json\n")


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["ctrl-c", "sigterm"])
def test_a_signal_commits_and_a_resumed_run_ends_the_same(
    signals: list[signal.Signals], cli: Run, ratings: Path, tmp_path: Path
) -> None:
    options = ["train", "ratings.csv", *SMALL, "--batch-size", "64", "--epochs", "12"]
    assert cli(*options, "--out", "whole")[0] == 0
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "bunkbed", *options, "--out", "parts"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert process.stdout is not None
    said, left = "", list(signals)
    for line in process.stdout:
        said += line
        if "epoch 1/12 done" in line and left == signals:
            process.send_signal(left.pop(0))
        if "stopping: " in line:
            break
    for signal_again in left:
        process.send_signal(signal_again)
    said += process.stdout.read()
    process.stdout.close()
    assert process.wait(timeout=60) == 130, said
    assert "stopping: the step ends, then everything is committed" in said
    assert "everything is committed" in said and "bunkbed train --resume parts" in said
    assert cli("check", "parts")[0] == 0

    code, out, err = cli("train", "--resume", "parts")
    assert (code, err) == (0, "")
    assert "resuming parts after epoch" in out
    assert rows_of(Path("parts")) == rows_of(Path("whole"))
    assert metric_lines(Path("parts")) == metric_lines(Path("whole"))


def test_sigterm_before_training_ends_as_ctrl_c_does(cli: Run, ratings: Path, tmp_path: Path) -> None:
    script = """
import os, signal, sys
from bunkbed.cli import main
from bunkbed.train.data import store

def end(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()

store.save_dataset = end
main(sys.argv[1:])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "train", "ratings.csv", *SMALL, "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr  # not ended by the signal


class _Stopped:
    """A trainer that counts requests to stop, and a display that shows what was said last."""

    def __init__(self, team: Team) -> None:
        self.team, self.stops, self.said = team, 0, ""

    def request_stop(self) -> None:
        self.stops += 1

    def note(self, message: str) -> None:
        self.said = message


def test_a_second_ctrl_c_aborts() -> None:
    # Where a shell runs the tests in its background, Ctrl-C is ignored from the start, and pause() would never return.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    both: Any = _Stopped(ALONE)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), graceful(both, both):
        os.kill(os.getpid(), signal.SIGINT)
        assert both.stops == 1 and "Ctrl-C again aborts" in both.said
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_of_torchrun_is_that_of_the_terminal() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    team = Team()
    team.world = 2
    both: Any = _Stopped(team)
    with graceful(both, both):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        assert both.stops == 1 and "everything is committed" in both.said and "again" not in both.said


@needs_data
def test_movielens_with_its_candidates(cli: Run) -> None:
    folder = DATA / "ncf-ml1m"
    code, out, err = cli(
        "train",
        str(folder / "train.tsv.gz"),
        *("--test", str(folder / "ml-1m.test.rating.gz")),
        *("--test-negatives", str(folder / "ml-1m.test.negative.gz")),
        *("--model", "gmf", "--dim", "8", "--ram", "2MiB", "--epochs", "1", "--lr", "0.01"),
        *("--eval-users", "100", "--out", "a", "--json"),
    )
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    decided = next(event for event in events if event["kind"] == "auto")["options"]
    assert decided["loss"] == {"value": "bce", "reason": "few items are ranked"}
    assert decided["ranking"] == {"value": "sampled", "reason": "as the test"}
    outcome = events[-1]
    epoch = next(event for event in events if event["kind"] == "epoch")
    assert epoch["ranking"].startswith("sampled ranking: 99 negatives")
    assert outcome["test"]["split"] == "test candidates" and outcome["test"]["num_users"] == 6040
    assert outcome["test"]["metrics"]["hr@10"] > 0.3
    found = json.loads(cli("recommend", "a", "--user", "17", "--json")[1])
    assert len(found["items"]) == 10


@needs_data
def test_gowalla_slice(cli: Run, tmp_path: Path) -> None:
    import gzip

    for name in ("train", "test"):
        with gzip.open(DATA / "gowalla" / f"{name}.txt.gz", "rt") as file:
            (tmp_path / f"{name}.txt").write_text("".join(line for line, _ in zip(file, range(800), strict=False)))
    options = ("--dim", "16", "--ram", "4MiB", "--epochs", "1", "--ks", "20", "--metric", "recall@20")
    code, out, err = cli("train", "train.txt", "--test", "test.txt", *options, "--out", "a")
    assert (code, err) == (0, "")
    assert "adjacency lines" in out and "recall@20" in out


def test_runs_are_compared_in_one_table(
    cli: Run, ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held-out.csv").write_text("user,item\n" + "".join(f"u{n},i{100 * (n % 2)}\n" for n in range(40)))
    fast = ("--epochs", "2", "--lr", "0.02", "--metric", "hr@10")
    assert cli("train", "ratings.csv", *SMALL, *fast, "--out", "a", "--test", "held-out.csv")[0] == 0
    assert cli("train", "ratings.csv", *SMALL, *fast, "--out", "b", "--model", "neumf", "--l2", "0.01")[0] == 0
    code, out, err = cli("compare", "a", "b", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["options"] == ["model", "l2"] and found["comparable"]
    runs = {run["folder"]: run for run in found["runs"]}
    for name, run in runs.items():
        lines = metric_lines(tmp_path / name)
        assert (run["epochs"], run["is_done"], run["loss"]) == (2, True, lines[-1]["loss"])
        assert run["best"] == lines[run["best_epoch"] - 1]["metrics"]
        assert run["best"]["hr@10"] == max(line["metrics"]["hr@10"] for line in lines)
        assert run["pairs_per_s"] > 0 and 0 < run["hit_rate"] <= 1
        assert run["data"] == {"users": 300, "items": 200, "pairs": len(set(ratings.read_text().split("\n"))) - 2}
    values = [run["best"]["hr@10"] for run in found["runs"]]
    assert values == sorted(values, reverse=True)
    assert runs["b"]["test"] is None
    judged = json.loads(cli("eval", "a", "--json")[1])
    assert runs["a"]["test"]["metrics"] == judged["metrics"]

    code, out, err = cli("compare", "b", "a")
    assert (code, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.split()[:2] == ["run", "options"] and "test hr@10" in header
    assert [row.split()[0] for row in rows] == [run["folder"] for run in found["runs"]]
    assert f"{values[0]:.4f}" in rows[0]
    shown = {row.split()[0]: row for row in rows}
    assert "model mf, l2 0.02 " in shown["a"] and "model neumf, l2 0.01 " in shown["b"]

    # A narrow terminal has a column for each run, and cuts nothing.
    narrow = lambda: Console(file=sys.stdout, force_terminal=True, no_color=True, width=50)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr("bunkbed.cli.commands.compare.stdout", narrow)
        lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", cli("compare", "b", "a")[1]).splitlines()]
    assert lines[0] == [run["folder"] for run in found["runs"]] and max(map(len, lines)) < 6
    assert next(line for line in lines if line[0] == "hr@10")[1:] == [f"{value:.4f}" for value in values]
    options = {run["folder"]: run["config"] for run in found["runs"]}
    assert [word for name in lines[0] for word in ("model", options[name]["model"])] == lines[1][1:]
    assert [word for name in lines[0] for word in ("l2", f"{options[name]['l2']:g}")] == lines[2]

    # A run that went on has no figures on the test pairs until it has them again.
    kept = json.loads((tmp_path / "a" / "test.json").read_text())
    (tmp_path / "a" / "test.json").write_text(json.dumps({**kept, "step": kept["step"] - 1}))
    assert json.loads(cli("compare", "a", "--json")[1])["runs"][0]["test"] is None


def test_comparing_says_what_does_not_compare(cli: Run, ratings: Path, tmp_path: Path) -> None:
    for name, seed in (("a", "0"), ("b", "1")):
        assert cli("train", "ratings.csv", *SMALL, "--epochs", "1", "--seed", seed, "--out", name)[0] == 0
    code, out, err = cli("compare", "a", "b")
    assert code == 0 and "seed 1" in out
    assert "not judged alike" in err
    code, _, err = cli("compare", "a", "./a")
    assert code == 2 and "given twice" in err
    code, _, err = cli("compare", "a", "nowhere")
    assert code == 1 and "no such run" in err
    (tmp_path / "empty").mkdir()
    code, _, err = cli("compare", "empty")
    assert code == 1 and "is not a training run" in err
    (tmp_path / "a" / "test.json").write_text("{")
    code, _, err = cli("compare", "a")
    assert code == 1 and "test.json: is damaged" in err
