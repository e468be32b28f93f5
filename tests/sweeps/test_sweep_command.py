"""``bunkbed sweep``, and what ``bunkbed info`` says of rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.core.budget import format_bytes
from bunkbed.maintenance.snapshots import held_bytes

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
        "after 20 rows; the others take",
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


def test_the_command_says_what_snapshots_hold(cli: Cli, tmp_path: Path) -> None:
    with bb.create(tmp_path / "item", dim=64, expire=1, ram="8MiB") as table:
        table.update(np.arange(4000), np.ones((4000, 64), np.float32))
        table.commit(keep="best")
        table.update(np.arange(10), np.ones((10, 64), np.float32))
        table.commit()
    assert "snapshots hold" not in cli("sweep", "item", "--dry-run")[1]
    code, out, _ = cli("sweep", "item")
    held = format_bytes(held_bytes(tmp_path / "item"))
    assert code == 0 and f"snapshots hold {held} more, with rows that went; bunkbed snapshots lists" in out, out
    assert "snapshots hold" not in cli("sweep", "item")[1]  # no row went
    bb.drop_snapshot(tmp_path / "item", "best")
    with bb.open(tmp_path / "item", ram="8MiB") as table:
        table.update(np.arange(20, 30), np.ones((10, 64), np.float32))
        table.commit()
    assert "snapshots hold" not in cli("sweep", "item")[1]


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


def test_the_sample_of_the_page(cli: Cli, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/sweeps.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0], names)
    names["table"].close()
    samples = re.findall(r"^```sh\nbunkbed (sweep [^\n]*)\n```\n\n```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(samples) == 1
    for arguments, sample in samples:
        code, out, _ = cli(*arguments.split())
        assert code == 0 and [line.rstrip() for line in out.splitlines()] == sample.splitlines()


def make_run(place: Path, **tables: dict[str, Any]) -> None:
    with bb.Run(place, ram="64MiB") as run:
        for name, options in tables.items():
            make(run.table(name, create={"dim": 2, **options}))
        run.commit(files={"dense": b"weights"}, meta={"progress": 7})


def rows_of(place: Path) -> dict[str, tuple[int, int]]:
    """Rows and clock of each table of a run."""
    with bb.Run(place, mode="r", ram="64MiB") as run:
        assert (run.read("dense"), run.meta) == (b"weights", {"progress": 7})
        return {name: (len(run.table(name)), run.table(name).clock) for name in run.table_names}


def version_of(place: Path) -> int:
    with bb.Run(place, mode="r", ram="64MiB") as run:
        return run.version


ITEM: dict[str, Any] = {"expire": 3, "shards": 2}
USER: dict[str, Any] = {"expire": 5, "clock": "event", "max_rows": 20, "evict": "rarest"}


def test_all_tables_of_a_run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", item=ITEM, plain={"num_rows": 100}, some={"admit": 0.5}, user=USER)
    opened, real = [], bb.Run.table
    with monkeypatch.context() as patch:
        patch.setattr(bb.Run, "table", lambda run, name, **more: [opened.append(name), real(run, name, **more)][1])
        code, out, _ = cli("sweep", "run")
    assert opened == ["item", "user"]  # the others may be larger than the budget
    item, user = out.split("\n\ntable user of run\n")
    shown = " ".join(item.split())
    assert code == 0 and shown.startswith("table item of run before 44 rows, clock 10 "), out
    assert "went 28 that expired after 16 rows" in shown and "commit 4, made now" in shown, out
    shown = " ".join(user.split())
    assert "went 20 that expired went 4 beyond the most rows, the last one named 1 times after 20 rows" in shown, out
    assert "commit 4, made now" in shown and "plain" not in out and "some" not in out, out
    assert version_of(tmp_path / "run") == 4  # one commit of the sweeps, two that free the disk
    rows = rows_of(tmp_path / "run")
    assert (rows["item"], rows["user"], rows["plain"][0]) == ((16, 10), (20, 9), 44)
    code, out, _ = cli("sweep", "run")
    assert code == 0 and " ".join(out.split()).count("commit 4, the last one") == 2, out
    assert version_of(tmp_path / "run") == 4


def test_all_tables_of_a_run_as_json(cli: Cli, tmp_path: Path) -> None:
    make_run(tmp_path / "run", item=ITEM, plain={}, user=USER)
    with bb.Run(tmp_path / "run", ram="64MiB"):  # a dry run works while a trainer has the run
        code, out, _ = cli("sweep", "run", "--dry-run", "--json", "--max-rows", "10")
    found = json.loads(out)
    assert code == 0 and list(found) == ["path", "version", "removed", "disk_bytes", "tables"]
    assert (found["path"], found["version"], found["removed"]) == ("run", 1, 68)
    assert [(one["name"], one["expired"], one["evicted"], one["dry_run"]) for one in found["tables"]] == [
        ("item", 28, 6, True),
        ("user", 20, 14, True),
    ]
    assert version_of(tmp_path / "run") == 1
    found = json.loads(cli("sweep", "run", "--json")[1])
    item, user = found["tables"]
    assert (found["version"], found["removed"], item["removed"], user["removed"]) == (4, 52, 28, 24)
    assert item["rules"]["expire"] == 3 and {"low": 4, "high": 7, "rows": 16} in user["ages"]
    for when in ("before", "after"):
        assert found["disk_bytes"][when] == item["disk_bytes"][when] + user["disk_bytes"][when] > 0
    one = json.loads(cli("sweep", "run", "--json", "--table", "user")[1])
    assert (one["path"], one["version"], one["rows"]) == ("table user of run", 4, 20) and "tables" not in one
    make_run(tmp_path / "one", item=ITEM, plain={})
    assert [one["name"] for one in json.loads(cli("sweep", "one", "--json")[1])["tables"]] == ["item"]


def test_the_clock_of_a_run(cli: Cli, tmp_path: Path) -> None:
    event: dict[str, Any] = {"expire": 100, "clock": "event"}
    make_run(tmp_path / "run", plain={}, query=event, user=event)
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        run.table("user").clock = 12
    before = rows_of(tmp_path / "run")
    for more in ((), ("--dry-run",)):
        code, _, err = cli("sweep", "run", "--clock", "11", *more)
        assert code != 0 and "table user: its clock is at 12, and --clock 11 is before that" in " ".join(err.split())
    assert (rows_of(tmp_path / "run"), version_of(tmp_path / "run")) == (before, 2)
    assert cli("sweep", "run", "--clock", "13")[0] == 0  # nothing goes, but the clock is committed
    rows = rows_of(tmp_path / "run")
    assert (rows["query"], rows["user"], version_of(tmp_path / "run")) == ((44, 13), (44, 13), 3)
    shown = " ".join(cli("sweep", "run", "--clock", "108", "--dry-run")[1].split())
    assert shown.count("before 44 rows, clock 108") == shown.count("would go 36 that expired") == 2, shown
    make_run(tmp_path / "mixed", query=event, steps={"expire": 3})
    code, _, err = cli("sweep", "mixed", "--clock", "30")
    assert code != 0 and "table steps: its clock is its step, which --clock cannot set" in " ".join(err.split())
    assert rows_of(tmp_path / "mixed") == {"query": (44, 9), "steps": (44, 10)}
    assert cli("sweep", "mixed", "--clock", "30", "--table", "query")[0] == 0
    assert rows_of(tmp_path / "mixed") == {"query": (44, 30), "steps": (44, 10)}


def test_forgotten_counts_of_a_run_are_committed(cli: Cli, tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        table = run.table("item", create={"dim": 2, "expire": 2, "clock": "event", "admit": 3})
        table.clock = 0
        table.update([1, 2], np.ones((2, 2), np.float32))
        table.clock = 9
    assert "went 0 that expired" in " ".join(cli("sweep", "run")[1].split())
    with bb.Run(tmp_path / "run", mode="r", ram="64MiB") as run:
        assert (run.table("item").stats()["counted_ids"], run.version) == (0, 2)


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", ["sweep", "commit"])
@pytest.mark.parametrize("name", [None, "user"])
def test_an_interrupted_sweep_leaves_the_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, name: str | None
) -> None:
    make_run(tmp_path / "run", item={"expire": 3}, user=USER)
    before, swept, real = rows_of(tmp_path / "run"), [], bb.Table.sweep

    def sweep(table: bb.Table) -> Any:
        found = real(table)
        swept.append(found.removed)
        return interrupt() if table.name == "user" and at == "sweep" else found

    with monkeypatch.context() as patch:
        patch.setattr(bb.Table, "sweep", sweep)
        if at == "commit":
            patch.setattr(bb.Run, "_finish", interrupt)  # the tables have committed, the run has not
        code, out, err = cli("sweep", "run", *(() if name is None else ("--table", name)))
    assert (code, out) == (130, "") and "interrupted; the run is as it was" in err, err
    assert swept == ([28, 24] if name is None else [24])
    assert (rows_of(tmp_path / "run"), version_of(tmp_path / "run")) == (before, 1)
    assert cli("sweep", "run")[0] == 0
    assert rows_of(tmp_path / "run") == {"item": (16, 10), "user": (20, 9)}


def test_an_interrupted_sweep_leaves_the_table(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "item", expire=5, clock="event")
    real = bb.Table.sweep
    monkeypatch.setattr(bb.Table, "sweep", lambda table: interrupt(real(table)))
    code, out, err = cli("sweep", "item", "--clock", "30")
    assert (code, out) == (130, "") and "interrupted; the table is as it was" in err, err
    with bb.open(tmp_path / "item", mode="r") as reader:
        assert (len(reader), reader.clock, reader.version) == (44, 9, 1)


def test_a_sweep_that_is_interrupted_after_its_commit(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", item={"expire": 3}, user=USER)
    monkeypatch.setattr(bb.Table, "compact", interrupt)
    code, out, err = cli("sweep", "run")
    assert (code, out) == (130, "") and "interrupted; the sweep is committed, but its disk may not be free" in err, err
    assert rows_of(tmp_path / "run") == {"item": (16, 10), "user": (20, 9)} and version_of(tmp_path / "run") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("item", "--clock", "3"), "its clock is at 9, and --clock 3 is before that"),
        (("item", "--clock", "3", "--dry-run"), "its clock is at 9, and --clock 3 is before that"),
        (("steps", "--clock", "3", "--dry-run"), "its clock is its step"),
        (("plain", "--dry-run", "--expire", "3"), "has no rule by which rows go"),
        (("item", "--expire", "3"), "give --dry-run with them"),
        (("item", "--table", "user"), "is one table; leave --table out"),
        (("plain",), "has no rule by which rows go: it was made without"),
        (("plain", "--clock", "30"), "has no rule by which rows go: it was made without"),
        (("steps", "--clock", "30"), "its clock is its step"),
        (("run", "--table", "none"), "run run has no table 'none'; give --table as one of item"),
        (("none",), "no such table"),
        (("unruled",), "run unruled has no table with a rule by which rows go: its tables were made without expire="),
        (("unruled", "--table", "plain"), "table 'plain' has no rule by which rows go: it was made without"),
    ],
)
def test_refusals(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    make(tmp_path / "item", expire=5, clock="event")
    make(tmp_path / "steps", expire=5)
    make(tmp_path / "plain")
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        run.table("item", create={"dim": 2, "expire": 3})
        run.commit()
    make_run(tmp_path / "unruled", plain={}, some={"admit": 3})
    code, out, err = cli("sweep", *arguments)
    assert code != 0 and message in " ".join(err.split()), (out, err)
    with bb.open(tmp_path / "item", mode="r") as reader:
        assert (len(reader), reader.clock, reader.version) == (44, 9, 1)
