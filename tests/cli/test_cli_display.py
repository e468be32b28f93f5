"""What a person sees while a model trains, and the picture afterwards."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from bunkbed.train.output.display import LineDisplay, LiveDisplay, open_display
from bunkbed.train.output.events import EpochReport, EvalReport, StepReport

MIB = 2**20


def step_report(epoch: int, step: int) -> StepReport:
    done = (epoch - 1) * 100 + step
    return StepReport(
        epoch=epoch,
        epochs=3,
        step=step,
        steps_per_epoch=100,
        global_step=done,
        loss=1.0 / done,
        samples_per_s=412_345.0,
        eta_s=75.0,
        unique_hit_rate=0.934,
        ram_bytes=14 * MIB,
        ram_budget_bytes=16 * MIB,
        ssd_read_bytes_per_s=12.5 * MIB,
        ssd_write_bytes_per_s=4.0 * MIB,
        stall_share=0.034,
        disk_share=0.065,
        time_s=done / 10,
    )


def epoch_report(epoch: int, *, is_best: bool = True, evaluated: bool = True) -> EpochReport:
    metrics = {"hr@10": 0.7, "ndcg@10": 0.4, "recall@10": 0.7, "hr@20": 0.8, "ndcg@20": 0.5, "mrr": 0.3}
    return EpochReport(
        epoch=epoch,
        epochs=3,
        global_step=epoch * 100,
        loss=0.5 / epoch,
        metrics=metrics if evaluated else {},
        is_best=is_best,
        ranking="full ranking of 3,706 items" if evaluated else "",
        seconds=20.4,
        eval_seconds=1.0,
        unique_hit_rate=0.93,
        ram_bytes=15 * MIB,
        ram_budget_bytes=16 * MIB,
        disk_read_bytes=10**9,
        disk_written_bytes=10**8,
        time_s=epoch * 21.0,
    )


def rendered(display: LiveDisplay) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(display.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_panel_shows_every_figure() -> None:
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True), title="ml-1m", metric="ndcg@10")
    assert "starting" in rendered(display)
    display(step_report(1, 50))
    display(epoch_report(1))
    display(step_report(2, 40))
    text = rendered(display)
    for shown in (
        "ml-1m",
        "2 of 3, step 40 of 100",
        "ETA 1:15",
        "0.00714",
        "412,345 samples/s",
        "93.4% of unique rows in RAM, 6.5% from disk",
        "14.0 MiB of 16.0 MiB",
        "read 12.5 MiB/s  write 4.0 MiB/s  waits 3.4%",
        "full ranking of 3,706 items",
        "best so far",
    ):
        assert shown in text
    # One cut-off, and no recall, because the hit rate is equal.
    assert "ndcg@10" in text and "ndcg@20" not in text and "recall" not in text
    assert max(map(len, text.splitlines())) <= 100
    display(EvalReport(600, 6040))
    assert "600 of 6,040 users ranked" in rendered(display)
    display.note("stopping")
    assert "stopping" in rendered(display)


def test_a_long_run_keeps_the_panel_short() -> None:
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True), title="ml-1m")
    display(step_report(1, 1))
    for epoch in range(1, 100):
        display(epoch_report(epoch, is_best=epoch < 10, evaluated=epoch % 2 == 1))
    assert len(rendered(display).splitlines()) <= 24


def test_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    with open_display(Console(file=file, width=40), title="ml-1m", metric="ndcg@10") as display:
        assert isinstance(display, LineDisplay)
        for step in range(1, 100):
            display(step_report(1, step))
        display(epoch_report(1))
        display(epoch_report(2, evaluated=False, is_best=False))
        display.note("stopping")
    assert file.getvalue().splitlines() == [
        "ml-1m",
        "epoch 1/3 step 1/100 loss 1.00000 412,345 samples/s ETA 1:15 hits 93.4% from disk 6.5% "
        "RAM 14.0 MiB of 16.0 MiB "
        "SSD read 12.5 MiB/s write 4.0 MiB/s waits 3.4%",
        "epoch 1/3 done loss 0.50000 hr@10 0.7000 ndcg@10 0.4000 mrr 0.3000 (full ranking of 3,706 items) "
        "best hits 93.0% RAM 15.0 MiB of 16.0 MiB in 20.4 s",
        "epoch 2/3 done loss 0.25000 hits 93.0% RAM 15.0 MiB of 16.0 MiB in 20.4 s",
        "stopping",
    ]


def test_a_terminal_gets_the_panel_and_keeps_the_epochs() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None, legacy_windows=False)
    with open_display(console, title="ml-1m") as display:
        assert isinstance(display, LiveDisplay)
        display(step_report(1, 50))
        display(epoch_report(1))
    end = file.getvalue().split("ml-1m")[-1]
    assert "0.50000" in end and "best so far" in end and "samples/s" not in end


def write_metrics(folder: Path, *, evaluated: bool = True) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        for epoch in (1, 2, 3):
            for step in (20, 60, 100):
                file.write(json.dumps({"kind": "step", **asdict(step_report(epoch, step))}) + "\n")
            report = epoch_report(epoch, is_best=epoch < 3, evaluated=evaluated)
            file.write(json.dumps({"kind": "epoch", **asdict(report)}) + "\n")


@pytest.mark.parametrize("evaluated", [True, False])
def test_the_picture_is_drawn(evaluated: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bunkbed.train.output.plots import plot_run

    write_metrics(tmp_path, evaluated=evaluated)
    picture = plot_run(tmp_path, title="ml-1m", metric="ndcg@10")
    assert picture == tmp_path / "training.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "training.png"]


def test_the_picture_of_a_run_without_metrics(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bunkbed.train.output.plots import plot_run

    (tmp_path / "metrics.jsonl").write_text("")
    assert plot_run(tmp_path).exists()


def test_metrics_survive_a_torn_last_line(tmp_path: Path) -> None:
    from bunkbed.train.output.plots import read_metrics

    write_metrics(tmp_path)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "st')
    metrics = read_metrics(path)
    assert (len(metrics.steps), len(metrics.epochs)) == (9, 3)
    path.write_text("{broken}\n" + path.read_text())
    with pytest.raises(ValueError, match=r"metrics.jsonl line 1: is not JSON"):
        read_metrics(path)
