"""``bunkbed sweep``, and what ``bunkbed info`` says of rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

pytest.importorskip("typer")
Cli = Callable[..., tuple[int, str, str]]


def make(place: Any, **rules: Any) -> None:
    table = bb.create(place, dim=2, ram="16MiB", **rules) if isinstance(place, Path) else place
    for day in range(10):
        if table.retention.clock == "event":
            table.clock = day
        table.update(np.arange(4 * day, 4 * day + 8), np.ones((8, 2), np.float32))
    if table.run is None:
        table.close()


def test_a_table(cli: Cli, tmp_path: Path) -> None:
    make(tmp_path / "item", expire=5, clock="event", max_rows=20, evict="rarest", keep=10)
    code, out, _ = cli("sweep", "item", "--dry-run")
    assert code == 0
    shown = " ".join(out.split())
    for line in (
        "item before 44 rows, clock 9",
        "rules expire after 5 (event), at most 20 rows, rarest go first, keep 10",
        "would go 20 that expired",
        "would go 4 beyond the most rows, the last one named 1 times",
        "after 20 rows; the others took",
        "commit 1, the last one",
        f"4 to 7 16 {'━' * 10}{'╌' * 30}",
    ):
        assert line in shown, out
    code, out, _ = cli("sweep", "item", "--dry-run", "--clock", "12", "--expire", "7", "--max-rows", "1000")
    assert code == 0 and "would go 24 that expired would go 0 beyond" in " ".join(out.split()), out
    assert "expire after 5 (event)" in cli("info", "item")[1]
    code, out, _ = cli("sweep", "item", "--json")
    found = json.loads(out)
    assert (code, found["expired"], found["evicted"], found["removed"]) == (0, 20, 4, 24)
    assert found["version"] == 4  # two commits more, which free the disk
    assert found["rules"]["keep"] == 10 and {"low": 4, "high": 7, "rows": 16} in found["ages"]
    with bb.open(tmp_path / "item", mode="r") as reader:
        assert len(reader) == 20 and reader.version == 4
    code, out, _ = cli("sweep", "item", "--clock", "30")
    shown = " ".join(out.split())
    assert code == 0 and "went 10 that expired went 0 beyond the most rows spared 10 that expired" in shown, out
    assert "commit 7, made now" in shown and "commit 7, the last one" in " ".join(cli("sweep", "item")[1].split())
    assert json.loads(cli("info", "item", "--json")[1])["clock"] == 30


def test_the_command_frees_the_disk(cli: Cli, tmp_path: Path) -> None:
    with bb.create(tmp_path / "item", dim=64, ram="48MiB", expire=1, clock="event") as table:
        for day in range(2):
            table.clock = day
            for first in range(40_000 * day, 40_000 * (day + 1), 8_000):
                table.set(np.arange(first, first + 8_000), np.ones((8_000, 64), np.float32))
            table.commit()
        before = table.stats()["disk_bytes"]
    found = json.loads(cli("sweep", "item", "--json")[1])
    assert found["removed"] == 40_000
    with bb.open(tmp_path / "item", mode="r") as reader:
        now = reader.stats()
        assert np.all(reader.lookup(np.arange(40_000, 80_000)) == 1)
    on_disk = sum(file.stat().st_size for file in (tmp_path / "item").iterdir() if file.name.startswith("segment"))
    assert found["disk_bytes"]["before"] >= before and found["disk_bytes"]["after"] == pytest.approx(on_disk, rel=0.01)
    assert now["live_bytes"] <= on_disk <= 0.6 * before
    code, out, _ = cli("sweep", "item", "--clock", "9")
    assert code == 0 and " MiB before, " in out and " now" in out, out


def test_a_table_of_a_run(cli: Cli, tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        make(run.table("user", create={"dim": 2, "num_rows": 100}))
        make(run.table("item", create={"dim": 2, "expire": 3, "shards": 2}))
        run.commit(files={"dense": b"weights"})
    code, out, _ = cli("sweep", "run", "--table", "item")
    assert code == 0 and "table item of run" in out and "went 28 that expired after 16 rows" in " ".join(out.split())
    with bb.Run(tmp_path / "run", mode="r", ram="64MiB") as run:
        assert (len(run.table("item")), len(run.table("user")), run.read("dense")) == (16, 44, b"weights")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("item", "--clock", "3"), "the clock cannot go back from 9 to 3"),
        (("item", "--clock", "3", "--dry-run"), "its clock is at 9, and --clock 3 is before that"),
        (("steps", "--clock", "3", "--dry-run"), "its clock is its step"),
        (("plain", "--dry-run", "--expire", "3"), "has no rule by which rows go"),
        (("item", "--expire", "3"), "give --dry-run with them"),
        (("item", "--table", "user"), "is one table; leave --table out"),
        (("plain",), "has no rule by which rows go: it was made without"),
        (("steps", "--clock", "30"), "its clock is its step"),
        (("run",), "give --table as one of item"),
        (("none",), "no such table"),
    ],
)
def test_refusals(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    make(tmp_path / "item", expire=5, clock="event")
    make(tmp_path / "steps", expire=5)
    make(tmp_path / "plain")
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        run.table("item", create={"dim": 2, "expire": 3})
        run.commit()
    code, out, err = cli("sweep", *arguments)
    assert code != 0 and message in " ".join(err.split()), (out, err)
    with bb.open(tmp_path / "item", mode="r") as reader:
        assert (len(reader), reader.clock, reader.version) == (44, 9, 1)
