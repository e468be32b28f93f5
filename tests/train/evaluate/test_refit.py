"""`bunkbed train --refit`: the second training, on all pairs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
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
from bunkbed.train.data.store import open_dataset
from bunkbed.train.evaluate.comparison import summarize_run
from bunkbed.train.evaluate.evaluator import open_parts
from bunkbed.train.features.features import load_features
from bunkbed.train.loop import Trainer
from bunkbed.train.output.plots import read_metrics, read_run
from bunkbed.train.settings.auto import decide
from bunkbed.train.settings.config import TrainConfig

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--dim", "8", "--threads", "1", "--batch-size", "64", "--lr", "0.04", "--lr-decay", "0.9", "--negatives", "4")
FIRST = (*SMALL, "--epochs", "6", "--refit", "--out", "run")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``pairs.csv``, which has times, and ``items.csv`` with features."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    users, items = rng.integers(0, 40, 700), (40 * rng.random(700) ** 2).astype(int)
    lines = [f"u{user},{item},{at}" for at, (user, item) in enumerate(zip(users, items, strict=True))]
    (tmp_path / "pairs.csv").write_text("user,item,at\n" + "\n".join(lines) + "\n")
    features = [f"{item},{'abc'[item % 3]}" for item in range(45)]
    (tmp_path / "items.csv").write_text("item,kind\n" + "\n".join(features) + "\n")
    return tmp_path


def rows_of(folder: str) -> dict[str, bytes]:
    with bb.Run(folder, ram="64MiB", mode="r") as run:
        return {
            f"{name}.{slot}": run.table(name).get(np.arange(run.table(name).num_rows), slot).tobytes()
            for name in run.table_names
            for slot in ("weight", *run.table(name).slots)
        }


def losses_of(log: str) -> list[tuple[int, float, dict[str, float]]]:
    return [(epoch["epoch"], epoch["loss"], epoch["metrics"]) for epoch in read_metrics(log).epochs]


def outcome_of(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


WAYS: dict[str, tuple[str, ...]] = {
    "random": (),
    "after a time": ("--time-col", "at", "--split", "time:0.9"),
    "stream by time, 2 MiB": ("--stream", "--time-col", "at", "--ram", "2MiB"),
    "stream, features": ("--item-features", "items.csv", "--stream"),
    "blocks, bias": ("--order", "blocks:2x2", "--bias"),
    "sequences": ("--model", "sasrec", "--length", "5"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_a_run_that_holds_nothing_out(way: str, cli: Run, files: Path) -> None:
    options = WAYS[way]
    if way == "sequences":
        options = (*options, "--share-negatives", "--negatives", "8")
    code, out, err = cli("train", "pairs.csv", *FIRST, *options, "--json")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    again = next(line for line in lines if line["kind"] == "refit")
    epochs = again["epochs"]
    assert epochs < 6 or way != "random"  # else it is as many as the options say
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [*range(1, 7), *range(1, epochs + 1)]
    plain = (*SMALL, "--epochs", f"{epochs}", "--valid", "none", "--out", "plain")
    code, _, err = cli("train", "pairs.csv", *plain, *options)
    assert code == 0, err
    assert rows_of("run") == rows_of("plain")
    assert losses_of("run/metrics.jsonl") == losses_of("plain/metrics.jsonl")
    judged = losses_of("run/choice.jsonl")
    best = max(judged, key=lambda one: one[2]["ndcg@10"])
    assert len(judged) == 6 and (best[0], best[2]) == (epochs, again["best"])
    assert {"epoch": epochs, "best_epoch": epochs, "best": best[2]}.items() <= outcome_of(out).items()
    config = TrainConfig(**json.loads(Path("run/config.json").read_text())["train"])
    assert config == TrainConfig(**json.loads(Path("plain/config.json").read_text())["train"])
    data = open_dataset(Path("run/data"))
    assert len(open_parts(data, config, Path("run")).train) == len(data.train) == again["pairs"]
    for side, features in load_features(Path("run/data")).items():
        assert features.has_row.tobytes() == load_features(Path("plain/data"))[side].has_row.tobytes()
    assert not Path(".run.refit").exists() and list(bb.snapshots("run")) == ["best"]
    assert bb.check("run") == [] and cli("recommend", "run", "--all", "--out", "top.csv")[0] == 0


def test_two_budgets_have_the_same_bits(cli: Run, files: Path) -> None:
    assert cli("train", "pairs.csv", *FIRST)[0] == 0
    expected = rows_of("run"), losses_of("run/metrics.jsonl"), losses_of("run/choice.jsonl")
    shutil.rmtree("run")
    assert cli("train", "pairs.csv", *FIRST, "--ram", "1MiB", "--order", "uniform")[0] == 0
    assert (rows_of("run"), losses_of("run/metrics.jsonl"), losses_of("run/choice.jsonl")) == expected


@pytest.mark.parametrize("events", [(3,), (1, 1, 2), (4, 3), (6, 1, 1)])
def test_an_interrupted_run_goes_on_with_the_same_bits(
    events: tuple[int, ...], cli: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after so many epochs of each call, in the first and in the second training."""
    assert cli("train", "pairs.csv", *FIRST)[0] == 0
    expected = rows_of("run"), losses_of("run/metrics.jsonl"), losses_of("run/choice.jsonl")
    shutil.rmtree("run")
    fit, left = Trainer.fit, [0]

    def stopped(trainer: Trainer, on_event: Any = None) -> Any:
        def stop(event: Any) -> None:
            if hasattr(event, "eval_seconds"):
                left[0] -= 1
            if left[0] <= 0:
                trainer.request_stop()

        return fit(trainer, stop)

    arguments: tuple[str, ...] = ("train", "pairs.csv", *FIRST)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", stopped)
        for number in events:
            left[0] = number
            assert cli(*arguments)[0] == 130
            assert cli("recommend", "run", "--user", "u1", "-k", "3")[0] == 0
            arguments = ("train", "--resume", "run")
    code, _, err = cli(*arguments)
    assert code == 0, err
    assert (rows_of("run"), losses_of("run/metrics.jsonl"), losses_of("run/choice.jsonl")) == expected
    assert not Path(".run.refit").exists()


KILLED = """
import os, sys
from bunkbed.cli.main import main
from bunkbed.files import durable
from bunkbed.train import refit
exchange, write_config, point = durable.exchange, refit.write_config, {point!r}
def killed(*arguments):
    if point == "exchanged":
        exchange(*arguments)
    if point == "ready":
        write_config(*arguments)
    os.kill(os.getpid(), 9)
if point in ("made", "ready"):
    refit.write_config = killed
else:
    durable.exchange = killed
sys.argv = ["bunkbed", "train", "pairs.csv", *{options!r}]
main()
"""


@pytest.mark.parametrize("point", ["made", "ready", "trained", "exchanged"])
def test_a_kill_leaves_the_first_run_or_the_second(point: str, cli: Run, files: Path) -> None:
    assert cli("train", "pairs.csv", *FIRST)[0] == 0
    expected = rows_of("run"), losses_of("run/metrics.jsonl"), losses_of("run/choice.jsonl")
    shutil.rmtree("run")
    program = KILLED.format(point=point, options=FIRST)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -9 and not done.stderr, done.stderr
    assert Path(".run.refit").exists() and bb.check("run") == []
    assert cli("recommend", "run", "--user", "u1", "-k", "3")[0] == 0
    assert Path("run/choice.jsonl").exists() == (point == "exchanged")
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    epochs = [json.loads(line) for line in out.splitlines() if json.loads(line)["kind"] == "epoch"]
    assert len(epochs) == (len(expected[1]) if point in ("made", "ready") else 0)
    assert (rows_of("run"), losses_of("run/metrics.jsonl"), losses_of("run/choice.jsonl")) == expected
    assert not Path(".run.refit").exists()


def test_a_run_that_owes_its_second_training(cli: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bunkbed.train import refit

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(refit, "store_features", is_full)
        code, _, err = cli("train", "pairs.csv", *FIRST)
        assert code != 0 and "no space left" in err and not Path(".run.refit").exists()
    first = rows_of("run")
    code, _, err = cli("train", "--resume", "run", "--more", "pairs.csv")
    assert code != 0 and "its training on all pairs (--refit) is not finished" in err
    assert rows_of("run") == first
    Path(".run.refit").mkdir()
    code, _, err = cli("train", "--resume", "run", "--no-refit")
    assert code == 0, err
    assert rows_of("run") == first and not Path("run/choice.jsonl").exists() and not Path(".run.refit").exists()
    Path("run/notes.txt").write_text("mine")
    code, out, err = cli("train", "--resume", "run", "--refit")
    assert code == 0, err
    assert "again   on all 494 pairs, from new rows, for" in out
    assert rows_of("run") != first and Path("run/notes.txt").read_text() == "mine"
    code, _, err = cli("train", "--resume", "run", "--refit")
    assert code == 2 and "option refit needs held-out pairs" in err


def fails(*_: object) -> None:
    raise OSError(22, "Invalid argument")


def test_files_of_the_user_are_those_of_the_end(cli: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier call had linked some already."""
    from bunkbed.train import refit

    options = ("train", "pairs.csv", *SMALL, "--epochs", "2", "--out", "run")
    assert cli(*options)[0] == 0
    Path("run/mine").mkdir()
    for name in "abc":
        Path("run/mine", name).write_text("old")
    Path("run/link").symlink_to("mine/a")
    with monkeypatch.context() as patched:
        patched.setattr(refit, "take_place", fails)
        assert cli("train", "--resume", "run", "--refit")[0] != 0
    assert Path(".run.refit/mine/a").exists()
    Path(".run.refit/mine/c").unlink()
    Path("run/mine/a").unlink()
    Path("run/mine/a").write_text("new")
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert [Path("run/mine", name).read_text() for name in "abc"] == ["new", "old", "old"]
    assert Path("run/link").is_symlink() and Path("run/training.png").exists()


def test_kept_snapshots_are_not_lost(cli: Run, files: Path) -> None:
    assert cli("train", "pairs.csv", *SMALL, "--epochs", "2", "--out", "run")[0] == 0
    with bb.Run("run") as run:
        run.commit(run.meta and {name: run.read(name) for name in run.files}, run.meta, keep="mine")
    code, _, err = cli("train", "--resume", "run", "--refit")
    assert code != 0 and "run: has the kept snapshot 'mine', which would be lost" in err
    assert "mine" in bb.snapshots("run") and not Path(".run.refit").exists()


def test_not_after_more_pairs(cli: Run, files: Path) -> None:
    assert cli("train", "pairs.csv", *SMALL, "--epochs", "2", "--out", "run")[0] == 0
    Path("new.csv").write_text("user,item,at\nlate,3,900\nlate,99,901\n")
    assert cli("train", "--resume", "run", "--more", "new.csv")[0] == 0
    code, _, err = cli("train", "--resume", "run", "--refit")
    assert code != 0 and "option refit is not for a run with rounds of --more" in err


def test_in_the_folder_of_the_run(cli: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("train", "pairs.csv", *SMALL, "--epochs", "2", "--out", "run")[0] == 0
    monkeypatch.chdir("run")
    code, _, err = cli("train", "--resume", ".", "--refit")
    assert code == 0, err
    assert Path("choice.jsonl").exists() and Path("training.png").exists() and not (files / ".run.refit").exists()


def test_changed_options_are_those_of_the_second_training(
    cli: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bunkbed.train import refit

    with monkeypatch.context() as patched:
        patched.setattr(refit, "take_place", fails)
        assert cli("train", "pairs.csv", *FIRST)[0] != 0
    done = rows_of(".run.refit")
    assert cli("train", "--resume", "run", "--ram", "32MiB", "--commit-every", "2", "--stream")[0] == 0
    options = json.loads(Path("run/config.json").read_text())["train"]
    assert (options["ram"], options["commit_every"], options["stream"]) == ("32MiB", 2, True)
    assert rows_of("run") == done


def test_what_the_folder_cannot_do_is_said_before(cli: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bunkbed.train import refit

    monkeypatch.setattr(refit, "exchange", fails)
    code, _, err = cli("train", "pairs.csv", *FIRST)
    assert code != 0 and "--no-refit leaves it out" in err and "invalid argument" in err.lower()
    assert sorted(path.name for path in files.iterdir()) == ["items.csv", "pairs.csv"]


def test_a_signal_after_the_last_step_of_the_first_training(
    cli: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("train", "pairs.csv", *FIRST)[0] == 0
    expected = rows_of("run"), losses_of("run/metrics.jsonl"), losses_of("run/choice.jsonl")
    shutil.rmtree("run")
    fit = Trainer.fit

    def signalled(trainer: Trainer, on_event: Any = None) -> Any:
        def on_last(event: Any) -> None:
            on_event(event)
            if hasattr(event, "eval_seconds") and event.epoch == event.epochs:
                signal.raise_signal(signal.SIGTERM)

        return fit(trainer, on_last)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", signalled)
        code, out, err = cli("train", "pairs.csv", *FIRST)
        assert code == 130 and "bunkbed train --resume run" in out and "from new rows" not in out, out + err
    assert cli("train", "--resume", "run")[0] == 0
    assert (rows_of("run"), losses_of("run/metrics.jsonl"), losses_of("run/choice.jsonl")) == expected


def test_scalars_of_both_trainings_stay(cli: Run, files: Path) -> None:
    pytest.importorskip("tensorboard")
    assert cli("train", "pairs.csv", *FIRST, "--tensorboard")[0] == 0
    assert len(list(Path("run/tensorboard").glob("events*"))) == 1
    assert len(list(Path("run/tensorboard/choice").glob("events*"))) == 1


def test_a_leftover_of_another_run_is_not_continued(cli: Run, files: Path) -> None:
    assert cli("train", "pairs.csv", *SMALL, "--epochs", "2", "--out", "run")[0] == 0
    shutil.copytree("run", ".run.refit")
    code, _, err = cli("train", "--resume", "run", "--refit")
    assert code == 0, err
    assert Path("run/choice.jsonl").exists() and not Path(".run.refit").exists()


def test_no_best_epoch(cli: Run, files: Path) -> None:
    assert cli("train", "pairs.csv", *SMALL, "--epochs", "2", "--valid", "none", "--out", "run")[0] == 0
    code, _, err = cli("train", "--resume", "run", "--refit")
    assert code == 2 and "option refit needs held-out pairs" in err


def test_another_choice_is_trained_from_its_start(cli: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed second training left is not continued where the first one went on since."""
    from bunkbed.train import refit

    options = (*SMALL, "--epochs", "1", "--refit", "--out", "run")
    with monkeypatch.context() as patched:
        patched.setattr(refit, "take_place", fails)
        assert cli("train", "pairs.csv", *options)[0] != 0
    assert Path(".run.refit/config.json").exists()
    assert cli("train", "--resume", "run", "--epochs", "6")[0] == 0
    got = rows_of("run"), losses_of("run/choice.jsonl")
    shutil.rmtree("run")
    assert cli("train", "pairs.csv", *FIRST)[0] == 0
    assert got == (rows_of("run"), losses_of("run/choice.jsonl"))


def test_more_pairs_after_a_second_training(cli: Run, files: Path) -> None:
    assert cli("train", "pairs.csv", *FIRST)[0] == 0
    before = summarize_run(Path("run"))
    Path("new.csv").write_text("user,item,at\nlate,3,900\nlate,99,901\nu1,99,902\n")
    code, _, err = cli("train", "--resume", "run", "--more", "new.csv")
    assert code == 0, err
    assert summarize_run(Path("run")).epochs == before.epochs + -(-before.epochs // 4)
    assert cli("recommend", "run", "--user", "late", "-k", "3")[0] == 0


def test_compared_with_its_first_training(cli: Run, files: Path) -> None:
    """The figures of the choice are judged as those of a run without a second training."""
    assert cli("train", "pairs.csv", *FIRST)[0] == 0
    assert cli("train", "pairs.csv", *FIRST[:-3], "--out", "first")[0] == 0
    second, first = summarize_run(Path("run")), summarize_run(Path("first"))
    assert second.judged_by == first.judged_by and second.best == first.best
    assert (second.best_epoch, second.valid) == (first.best_epoch, "random")
    assert second.seconds is not None and first.seconds is not None
    logs = [read_metrics(f"run/{name}.jsonl").epochs for name in ("choice", "metrics")]
    assert second.seconds == pytest.approx(sum(epoch["seconds"] for log in logs for epoch in log))
    metrics = read_run("run")
    assert metrics.judged == logs[0] and metrics.end == logs[0][-1]["global_step"]
    code, _, err = cli("eval", "run")
    assert code != 0 and "nothing is held out" in err
    assert cli("report", "run")[0] == 0
    page = Path("run/report.html").read_text()
    assert "before this one on all pairs" in page and "No epoch was evaluated" not in page


def test_a_test_file_judges_the_second_training(cli: Run, files: Path) -> None:
    Path("test.csv").write_text("user,item\nu1,41\nu2,3\n")
    code, out, err = cli("train", "pairs.csv", *FIRST, "--test", "test.csv", "--json")
    assert code == 0, err
    code, other, err = cli("eval", "run", "--json")
    assert code == 0, err
    assert outcome_of(out)["test"]["metrics"] == outcome_of(other)["metrics"]
    assert summarize_run(Path("run")).test is not None


def test_nothing_held_out_is_an_error(cli: Run, files: Path) -> None:
    code, _, err = cli("train", "pairs.csv", *SMALL, "--refit", "--valid", "none", "--out", "run")
    assert code == 2 and "option refit needs held-out pairs" in err and not Path("run").exists()


def test_rule_of_the_recipe() -> None:
    config, reasons = decide({}, "best", pairs=800_000, items=40_000)
    assert config.refit and "refit" in reasons
    assert not decide({"valid": "none"}, "best", pairs=800_000, items=40_000)[0].refit
    assert not decide({"refit": False}, "best", pairs=800_000, items=40_000)[0].refit
    assert not decide({}, "default", pairs=800_000, items=40_000)[0].refit
