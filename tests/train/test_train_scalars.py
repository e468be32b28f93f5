"""`bunkbed train --tensorboard`: what TensorBoard shows of a run, also of one that was resumed or killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")

import contextlib

from tensorboard.summary.writer import event_file_writer

import bunkbed as bb
from bunkbed.train import loop
from bunkbed.train.data.interactions import Dataset, Interactions
from bunkbed.train.data.vocab import Vocab
from bunkbed.train.loop import Trainer
from bunkbed.train.report import write_report
from bunkbed.train.scalars import Scalars
from bunkbed.train.settings.config import TrainConfig

Run = Callable[..., tuple[int, str, str]]
CONFIG = TrainConfig(dim=4, batch_size=64, epochs=3, ram="8MiB", negatives=2, threads=1)


@pytest.fixture(autouse=True)
def every_step_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loop, "_REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(loop, "_REPORTS_PER_EPOCH", 10**9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Files are read in the order of their names: second, host, process, number. Sessions of one second in one process
    # are in order while the number has one digit: the 10th file would come before the 9th.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture
def data() -> Dataset:
    rng = np.random.default_rng(0)
    pairs = np.unique(rng.integers(0, 40, (600, 2)), axis=0)
    rng.shuffle(pairs)
    labels = Vocab.of(list(range(40)))
    return Dataset(Interactions(pairs[:, 0].copy(), pairs[:, 1].copy(), labels, labels))


def session(
    folder: Path, data: Dataset, config: TrainConfig = CONFIG, *, stop: tuple[str, int] | None = None
) -> Trainer:
    """Trains with scalars; `stop`: ("step", 7) asks it to stop there, ("kill", 7) leaves without a commit."""

    class Killed(Exception):
        pass

    run = bb.Run(folder, ram=config.ram)
    try:
        trainer = Trainer(config, data, run)
        with Scalars(trainer) as scalars:

            def on_event(event: loop.Event) -> None:
                scalars(event)
                if stop is not None and trainer.step == stop[1]:
                    if stop[0] == "kill":
                        raise Killed
                    trainer.request_stop()

            with contextlib.suppress(Killed):
                trainer.fit(on_event)
    finally:
        run.close(commit=False)
    return trainer


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from a run's folder: points of every scalar, in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [(point.step, point.value) for point in found.Scalars(name)] for name in found.Tags()["scalars"]}


def expected(folder: Path, kind: str, key: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(entry["global_step"], pytest.approx(entry[key])) for entry in lines if entry["kind"] == kind]


def check(folder: Path, trainer: Trainer) -> None:
    found = shown(folder)
    steps = list(range(1, 3 * trainer.steps_per_epoch + 1))
    names = {
        "train/loss": "loss",
        "speed/samples_per_s": "samples_per_s",
        "speed/stall_share": "stall_share",
        "rows/unique_hit_rate": "unique_hit_rate",
        "bytes/ram": "ram_bytes",
    }
    for name, key in names.items():
        assert [step for step, _ in found[name]] == steps, name
        assert found[name] == expected(folder, "step", key)
    ends = [trainer.steps_per_epoch * epoch for epoch in (1, 2, 3)]
    assert [step for step, _ in found["validation/ndcg@10"]] == ends
    assert found["train/epoch_loss"] == expected(folder, "epoch", "loss")
    assert "rows/device_hit_rate" not in found


def test_a_run(tmp_path: Path, data: Dataset) -> None:
    trainer = session(tmp_path, data)
    assert trainer.steps_per_epoch > 4
    check(tmp_path, trainer)
    # The same reports tell the page what the limit was held against.
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "were never measured: bunkbed plan does so once" in page
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(last["records_by_path"]) == {"single reads", "merged reads", "sweep"} and last["wanted_bytes"] >= 0
    assert last["disk_reads"] >= 0 and last["moved_bytes"] > trainer.steps_per_epoch * 64 * 4 * 4


@pytest.mark.parametrize("stop", [("step", 7), ("kill", 7), ("kill", 17)])
def test_each_step_stands_once_after_going_on(stop: tuple[str, int], tmp_path: Path, data: Dataset) -> None:
    trainer = session(tmp_path, data, stop=stop)
    assert trainer.step == stop[1]
    check(tmp_path, session(tmp_path, data))


def test_an_epoch_stands_once_where_only_its_evaluation_was_left(tmp_path: Path, data: Dataset) -> None:
    steps = steps_of_an_epoch(tmp_path / "other", data)
    folder = tmp_path / "run"
    session(folder, data, stop=("step", steps))  # the last step of epoch 1: its evaluation is interrupted
    with bb.Run(folder, ram="8MiB", mode="r") as run:
        progress = run.meta["progress"]
    assert (progress["epoch"], progress["step"]) == (0, steps)
    # The next session makes and reports the evaluation, but does not commit it.
    one = TrainConfig.from_dict({**CONFIG.to_dict(), "commit_every": 99})
    run = bb.Run(folder, ram="8MiB")
    trainer = Trainer(one, data, run)
    trainer._commit = lambda keep=None: None
    with Scalars(trainer) as scalars:

        def on_event(event: loop.Event) -> None:
            scalars(event)
            if isinstance(event, loop.EpochReport):
                trainer.request_stop()

        trainer.fit(on_event)
    run.close(commit=False)
    assert [step for step, _ in shown(folder)["train/epoch_loss"]] == [steps]
    trainer = session(folder, data)
    found = shown(folder)["train/epoch_loss"]
    assert found == expected(folder, "epoch", "loss")
    assert [step for step, _ in found] == [steps, 2 * steps, 3 * steps] and trainer.epoch == 3


def steps_of_an_epoch(folder: Path, data: Dataset) -> int:
    run = bb.Run(folder, ram="8MiB")
    trainer = Trainer(CONFIG, data, run)
    run.close(commit=False)
    return trainer.steps_per_epoch


def test_the_flag(cli: Run, tmp_path: Path) -> None:
    lines = [f"{user},{(user * 7 + step) % 50}\n" for user in range(60) for step in range(6)]
    (tmp_path / "pairs.csv").write_text("".join(lines))
    options = ("--dim", "4", "--ram", "4MiB", "--threads", "1", "--batch-size", "64", "--negatives", "2")
    assert cli("train", "pairs.csv", *options, "--epochs", "1", "--out", "a")[0] == 0
    assert not Path("a/tensorboard").exists()
    code, _, err = cli("train", "--resume", "a", "--epochs", "2", "--tensorboard")
    assert (code, err) == (0, "")
    assert "tensorboard" not in json.loads(Path("a/config.json").read_text())["train"]
    found = shown(Path("a"))
    assert found["train/loss"] == expected(Path("a"), "step", "loss")[5:]  # from then on
    assert [step for step, _ in found["validation/hr@10"]] == [10]


def test_without_the_package_nothing_is_begun(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pairs.csv").write_text("1,2\n1,3\n2,3\n")
    real = __import__("importlib").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "tensorboard" else real(name, *rest)
    )
    assert cli("train", "pairs.csv", "--out", "a", "--tensorboard") == (
        1,
        "",
        'error: bunkbed train --tensorboard needs tensorboard; install with: pip install "bunkbed[tensorboard]"\n',
    )
    assert not Path("a").exists()
