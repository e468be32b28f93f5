"""Runs and tables to report about, made without training, and a reader of the page's HTML."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed.train.data.interactions import Dataset, Interactions
from bunkbed.train.data.store import save_dataset
from bunkbed.train.data.vocab import Vocab
from bunkbed.train.output.events import EpochReport, StepReport
from bunkbed.train.output.progress import MetricsLog, Progress
from bunkbed.train.settings.config import TrainConfig

USERS, ITEMS, STEPS = 40, 30, 10
CONFIG = TrainConfig(dim=4, lr=0.02, ram="8MiB", negatives=3, metric="ndcg@10", epochs=3)
_EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


def pairs() -> Interactions:
    """User u has the items 0 ... u % 10, so that few items take most of the pairs."""
    users = np.repeat(np.arange(USERS), np.arange(USERS) % 10 + 1)
    items = np.concatenate([np.arange(user % 10 + 1) for user in range(USERS)])
    return Interactions(users, items, Vocab.of(list(range(USERS))), Vocab.of(list(range(ITEMS))), "pairs.csv")


def step_report(step: int, **changes: Any) -> StepReport:
    values: dict[str, Any] = {
        "epoch": 1 + (step - 1) // STEPS,
        "epochs": 3,
        "step": 1 + (step - 1) % STEPS,
        "steps_per_epoch": STEPS,
        "global_step": step,
        "loss": 1.0 / step,
        "samples_per_s": 20_000.0 + step,
        "eta_s": 1.0,
        "unique_hit_rate": 0.5 + step / 100,
        "ram_bytes": 3 << 20,
        "ram_budget_bytes": 8 << 20,
        "ssd_read_bytes_per_s": 1e6,
        "ssd_write_bytes_per_s": 1e6,
        "time_s": float(step),
        "stall_share": 0.25,
    }
    return StepReport(**{**values, **changes})


def epoch_report(epoch: int, **changes: Any) -> EpochReport:
    values: dict[str, Any] = {
        "epoch": epoch,
        "epochs": 3,
        "global_step": STEPS * epoch,
        "loss": 0.5 / epoch,
        "metrics": {"hr@10": 0.2 * epoch, "ndcg@10": 0.1 * epoch, "hr@20": 0.25 * epoch},
        "is_best": True,
        "ranking": "full ranking of 30 items",
        "seconds": 2.0,
        "unique_hit_rate": 0.75,
        "ram_bytes": 2 << 20,
        "ram_budget_bytes": 8 << 20,
        "disk_read_bytes": 5 << 20,
        "disk_written_bytes": 10**9,
        "time_s": 9.0,
        "stall_s": 0.5,
        "disk_reads": 50_000,
        "moved_bytes": 10**9,
        "records_by_path": {"single reads": 10_000, "merged reads": 30_000, "sweep": 60_000},
        "wanted_bytes": 4 << 20,
    }
    return EpochReport(**{**values, **changes})


def make_run(
    folder: Path, *, epochs: int = 2, with_metrics: bool = True, options: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A run as `bunkbed train` leaves it, with snapshots "first" and "best". `changes`: of every epoch's report."""
    with bb.Run(folder, ram="8MiB") as run:
        tables = {
            name: run.table(name, create={"dim": 4, "num_rows": rows, "optimizer": bb.Adam(lr=0.02)})
            for name, rows in (("user", USERS), ("item", ITEMS))
        }
        for epoch in range(1, epochs + 1):
            for table in tables.values():
                table.update(np.arange(20), np.full((20, 4), 0.1, np.float32))
            report = epoch_report(epoch, **changes)
            progress = Progress(epoch, 0, STEPS * epoch, 0.0, epoch if report.metrics else 0, report.metrics)
            keep = "first" if epoch == 1 else "best"
            run.commit(files={"dense.pt": b"dense"}, meta=progress.to_meta(CONFIG), keep=keep)
    config = {"bunkbed": "0.0.9", "source": "ratings.csv", "train": {**CONFIG.to_dict(), **(options or {})}}
    (folder / "config.json").write_text(json.dumps(config))
    save_dataset(folder / "data", Dataset(train=pairs()))
    if with_metrics:
        log = MetricsLog(folder / "metrics.jsonl", global_step=0, epoch=0)
        for epoch in range(1, epochs + 1):
            for step in range(STEPS * (epoch - 1) + 1, STEPS * epoch + 1):
                log.write(step_report(step))
            log.write(epoch_report(epoch, **changes))
        log.close()
    return folder


def make_table(folder: Path) -> Path:
    with bb.create(folder, dim=4, num_rows=1_000, optimizer=bb.Adagrad(lr=0.5), ram="8MiB") as table:
        table.update(np.arange(100), np.ones((100, 4), np.float32))
        table.commit(keep="epoch-1")
        table.update(np.arange(200), np.ones((200, 4), np.float32))
    return folder


class Page(HTMLParser):
    """What a page holds: its text, its tags with their attributes, and whether every tag is closed where it should."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.text = ""
        self._open: list[str] = []
        self._section = ""
        self.feed(html)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self._open.append(tag)
        if tag == "section":
            self._section = str(dict(attrs)["id"])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "li", "td", "tr", "th") and self._open[-1] != tag:
            raise AssertionError(f"</{tag}> closes {self._open[-1]}")
        assert self._open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["style"]:
            return
        text = " ".join(data.split())
        if text:
            self.text += text + " "
            self.sections[self._section] = self.sections.get(self._section, "") + text + " "

    def charts(self) -> int:
        return sum(tag == "svg" for tag, _ in self.tags)
