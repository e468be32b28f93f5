"""`Table.explain`: what a table did, compared with what its machine allows."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.machine import rates as machine
from bunkbed.table.explain import Explanation
from bunkbed.window import Window

DIM = 8


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def measured(tmp_path: Path, unmeasured: None) -> machine.Machine:
    """Rates as if this machine had been measured."""
    found = machine.Machine(1e10, 1e5, 1e9, 512, "/dev/ssd (ext4)", 2, 1.0)
    machine._save({machine._key(tmp_path): found})
    return found


def make(path: Path | None, rows: int = 30_000) -> bb.Table:
    table = bb.create(path, dim=DIM, num_rows=rows, optimizer=bb.Adam(), ram=None if path is None else "64MiB")
    for begin in range(0, rows, 10_000):
        ids = np.arange(begin, min(rows, begin + 10_000))
        table.set(ids, np.ones((ids.size, DIM), np.float32))
    return table


def train(table: bb.Table, steps: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = rng.integers(0, table.num_rows, 500)
        table.lookup(ids)
        table.update(ids, np.ones((500, DIM), np.float32))


def check_width(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80, text


def test_a_table_on_disk(tmp_path: Path, measured: machine.Machine) -> None:
    make(tmp_path / "user").close()
    with bb.open(tmp_path / "user", ram="1MiB") as table:
        train(table, 60)
        first = table.explain()
        train(table, 40, seed=1)
        found = table.explain(since=first)
        counts = {key: table.stats()[key] - first.stats[key] for key in ("misses", "reads", "written_bytes")}
    assert isinstance(found, Explanation)
    assert (found.table, found.steps, found.machine, found.on_disk) == ("user", 40, measured, True)
    assert (first.steps, first.counts["updates"]) == (60, 60)
    assert {key: found.counts[key] for key in counts} == counts
    assert found.per_step("misses") == counts["misses"] / 40
    # Times from counts and rates, by hand.
    assert found.times is not None
    assert found.times.disk_reads == pytest.approx(counts["reads"] / 40 / 1e5)
    assert found.times.disk_writes == pytest.approx(counts["written_bytes"] / 40 / 1e9)
    moved = 500 * 4 * DIM + found.per_step("unique_rows") * (2 * 12 * DIM + 4 * DIM)
    assert found.times.memory == pytest.approx(moved / 1e10)
    assert found.binds == "disk"
    assert found.limit_steps_per_s == pytest.approx(1 / (found.times.disk_reads + found.times.disk_writes))
    assert found.share_of_limit == pytest.approx(40 / found.seconds / found.limit_steps_per_s)
    assert found.write_amplification == pytest.approx(
        counts["written_bytes"] / (found.counts["written_back"] * 12 * DIM)
    )
    assert found.hit_rate == pytest.approx(1 - counts["misses"] / found.counts["unique_rows"])
    text = str(found)
    check_width(text)
    for part in (
        "user",
        "steps a second: 40 in",
        "disk binds",
        "in RAM",
        "times the",
        "rows written back",
        "100,000 random",
    ):
        assert part in text, text


def test_a_window_shows(tmp_path: Path, measured: machine.Machine) -> None:
    make(tmp_path / "t").close()
    rng = np.random.default_rng(0)
    with bb.open(tmp_path / "t", ram="1MiB") as table, Window(table, depth=2, batches=4) as window:
        batches = [rng.integers(0, 30_000, 500) for _ in range(30)]
        for ids in batches[:3]:
            window.push(ids)
        for now, ids in enumerate(batches):
            if now + 3 < len(batches):
                window.push(batches[now + 3])
            window.advance()
            table.lookup(ids)
            table.update(ids, np.ones((500, DIM), np.float32))
            if now == 20:
                found = table.explain()
    assert found.counts["staged_rows"] > 0 and found.counts["stall_s"] >= 0
    text = str(found)
    check_width(text)
    assert "batches in" in text and "2 staged" in text and "rows staged; waited for" in text


def test_since_also_takes_stats(tmp_path: Path) -> None:
    with make(tmp_path / "t") as table:
        before = table.stats()
        train(table, 3)
        assert table.explain(since=before).steps == 3
        after = table.explain()
    with bb.open(tmp_path / "t", ram="64MiB") as table:
        with pytest.raises(ValueError, match="table 't': since was taken after this, or of another opening"):
            table.explain(since=after)
        with pytest.raises(ValueError, match=r"since must be an earlier explain\(\) or stats\(\) of this table"):
            table.explain(since={"misses": 3})


def test_unmeasured(tmp_path: Path) -> None:
    with make(tmp_path / "t") as table:
        train(table, 5)
        found = table.explain()
    assert (found.machine, found.times, found.limit_steps_per_s, found.share_of_limit, found.binds) == (None,) * 5
    assert found.steps == 5 and found.steps_per_s > 0
    text = " ".join(str(found).split())
    assert "unknown: measure this table's disk once with bunkbed.machine.measure(table.path)" in text


def test_a_disk_that_was_not_measured_beside_a_memory_that_was(
    tmp_path: Path, measured: machine.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "t").close()
    monkeypatch.setattr(machine, "_key", lambda place: "another disk")
    with bb.open(tmp_path / "t", ram="1MiB") as table:
        train(table, 30)
        found = table.explain()
    assert found.counts["reads"] > 0
    assert found.machine is not None and found.times is None
    assert "unknown" in str(found)


def test_a_table_in_ram(measured: machine.Machine) -> None:
    with make(None) as table:
        train(table, 5)
        found = table.explain()
    assert found.binds == "memory" and found.share_of_limit is not None
    assert found.write_amplification is None
    text = str(found)
    check_width(text)
    assert "memory binds" in text and "in RAM" in text
    assert "disk" not in text and "files" not in text


def test_a_reader(tmp_path: Path, measured: machine.Machine) -> None:
    make(tmp_path / "t").close()
    with bb.open(tmp_path / "t", mode="r", ram="1MiB") as reader:
        for seed in range(4):
            reader.lookup(np.random.default_rng(seed).integers(0, 30_000, 500))
        found = reader.explain()
    assert found.steps == 4
    assert found.counts["misses"] > 0 and found.hit_rate is None
    assert found.times is not None and found.times.disk_writes == 0 and found.binds == "disk"
    text = str(found)
    check_width(text)
    assert "lookups (there was no update) a second: 4 in" in text and "read from disk a lookup" in text


def test_without_steps(tmp_path: Path, measured: machine.Machine) -> None:
    with bb.create(tmp_path / "t", dim=2, num_rows=10, ram="1MiB") as table:
        found = table.explain()
    assert (found.steps, found.steps_per_s, found.binds, found.limit_steps_per_s) == (0, 0.0, None, None)
    assert "nothing to explain yet" in str(found)
    with pytest.raises(bb.TableClosedError):
        table.explain()


def test_every_counter_is_known_to_count_or_to_stand(tmp_path: Path) -> None:
    """A new figure in stats() that may fall must be named in explain._NOW, or explain(since=) would refuse."""
    from bunkbed.table.explain import _NOW

    with make(tmp_path / "t") as table:
        keys = set(table.stats())
    counters = {
        "lookups", "updates", "ids", "unique_rows", "hits", "misses", "first_touches", "evictions", "written_back",
        "reads", "read_records", "single_records", "merged_records", "swept_records", "read_bytes", "written_bytes",
        "written_records", "read_wait_s", "compactions", "compacted_records", "commits", "open_s", "stall_s",
        "staged_rows", "indexed_records", "admitted_rows", "refused_rows", "written_counts",
    }  # fmt: skip
    assert keys <= counters | _NOW, sorted(keys - counters - _NOW)


def test_faster_than_its_limit(tmp_path: Path) -> None:
    machine._save({machine._key(tmp_path): machine.Machine(1e3, 1e5, 1e9, 512, "/dev/ssd (ext4)", 2, 1.0)})
    with make(tmp_path / "t") as table:
        train(table, 5)
        found = table.explain()
    assert found.share_of_limit is not None and found.share_of_limit > 1.1
    assert "so the machine was busy when it was measured" in str(found)


def test_rich_shows_it(tmp_path: Path, measured: machine.Machine) -> None:
    from rich.console import Console

    with make(tmp_path / "t[b]") as table:
        train(table, 2)
        console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
        console.print(table.explain())
    text = console.export_text()
    assert "t[b]" in text and "steps a second" in text
