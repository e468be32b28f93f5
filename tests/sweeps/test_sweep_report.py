"""The ages on the page of ``bunkbed report``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import bunkbed as bb
from bunkbed.core.budget import format_bytes
from bunkbed.table import deletes
from bunkbed.table.sweeps import Bin, Swept, expired_by_age
from bunkbed.train.report import write_report
from report_setup import Page


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train(table: bb.Table) -> None:
    for day in range(40):
        if table.retention.clock == "event":
            table.clock = day
        table.update(np.arange(4 * day, 4 * day + 8), np.ones((8, 2), np.float32))
    if table.retention.removes:
        table.set([1000, 1001, 1002], np.ones((3, 2), np.float32))


def report(path: Path) -> tuple[Page, str]:
    html = write_report(path, overwrite=True, ram="64MiB").read_text(encoding="utf-8")
    return Page(html), html


def bars(html: str) -> list[dict[str, list[float]]]:
    """Return the heights of the bars of each picture of the section, by colour."""
    section = html[html.index('<section id="ages">') : html.index('<section id="disk">')]
    found = []
    for svg in re.findall(r"<svg.*?</svg>", section, re.DOTALL):
        heights: dict[str, list[float]] = {}
        for path in re.findall(r"<path [^>]*>", svg):
            color = re.search(r"fill: var\(--([a-f])\)", path)
            drawn = re.search(r' d="([^"]*)"', path)
            if color and drawn:
                y = [float(number) for number in re.findall(r"[ML] ?[-\d.]+ ([-\d.]+)", drawn[1])]
                heights.setdefault(color[1], []).append(max(y) - min(y))
        found.append(heights)
    return found


def assert_drawn(heights: list[float], rows: list[int], unit: float) -> None:
    assert [height / unit for height in heights] == pytest.approx(rows, abs=0.02 / unit)


def assert_told(section: str, html: str, swept: Swept, rules: bb.Retention, picture: int = 0) -> None:
    """The page says the figures of a dry run, and draws them."""
    expired = expired_by_age(swept, rules.expire)
    assert sum(expired) == swept.expired + swept.spared
    assert f"would go {swept.expired:,} that expired" in section
    assert (
        f"after a sweep {swept.rows - swept.removed:,} rows; the others take {format_bytes(swept.freed_bytes)}"
        in section
    )
    assert f"rows stored {swept.rows:,} " in section
    assert f"have not expired {swept.rows - sum(expired):,} expired {sum(expired):,}" in section
    for one, gone in zip(swept.ages, expired, strict=True):
        span = f"{one.low}" if one.low == one.high else f"{one.low} to {one.high}"
        assert f" {span} {one.rows} {gone} " in section
    for one in swept.counts:
        span = f"{one.low}" if one.low == one.high else f"{one.low} to {one.high}"
        assert f" {span} {one.rows} " in section.split("updates rows")[1]
    ages, counts = bars(html)[picture : picture + 2]
    unit = max(ages["b"]) / max(expired)
    assert_drawn(ages["b"], expired, unit)
    assert_drawn(ages["a"], [one.rows - gone for one, gone in zip(swept.ages, expired, strict=True)], unit)
    unit = max(counts["c"]) / max(one.rows for one in swept.counts)
    assert_drawn(counts["c"], [one.rows for one in swept.counts], unit)


@pytest.mark.parametrize("shards", [None, 2])
def test_a_table(shards: int | None, tmp_path: Path) -> None:
    rules = bb.Retention(expire=12, clock="event", max_rows=40, evict="rarest", keep=30)
    if shards is None:
        table: bb.Table = bb.create(tmp_path / "item", dim=2, ram="32MiB", **vars(rules))
    else:
        table = bb.ShardedTable.create(tmp_path / "item", dim=2, shards=shards, ram="32MiB", **vars(rules))
    with table:
        train(table)
        table.commit()
        table.update(np.arange(5000, 5100), np.ones((100, 2), np.float32))  # not committed, so not on the page
        page, html = report(tmp_path / "item")
        table.close(commit=False)
    with bb.open(tmp_path / "item", mode="r", ram="32MiB") as reader:
        swept = reader.sweep(dry_run=True)
    section = page.sections["ages"]
    assert (swept.rows, swept.expired, swept.evicted, swept.cut) == (167, 112, 15, 2)
    assert "expire after 12 (event), at most 40 rows, rarest go first, keep 30 clock 39, as it was last set" in section
    assert "would go 15 beyond the most rows, the last one named 2 times" in section
    assert "spared" not in section and "ids counted" not in section
    assert "Stored rows by the units of the clock since" in section
    assert_told(section, html, swept, rules)
    assert page.charts() == 2


def test_a_run_of_which_some_tables_have_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"item": bb.Retention(expire=12, keep=100, admit=2), "user": bb.Retention(expire=20)}
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        for name, rule in rules.items():
            train(run.table(name, create={"dim": 2, **vars(rule)}))
        train(run.table("plain", create={"dim": 2, "num_rows": 1000}))
        train(run.table("some", create={"dim": 2, "admit": 0.5}))
        run.commit()
    read, real = [], deletes.sweep

    def sweep(core: Any, name: str, *arguments: Any, **options: Any) -> Swept:
        assert options["dry_run"]
        read.append(name)
        return real(core, name, *arguments, **options)

    monkeypatch.setattr(deletes, "sweep", sweep)
    page, html = report(tmp_path / "run")
    assert read == ["item", "user"]  # only the tables with ages are read
    item, some, user = re.split(r" some | user ", page.sections["ages"])
    with bb.Run(tmp_path / "run", mode="r", ram="64MiB") as reader:
        found = {name: reader.table(name).sweep(dry_run=True) for name in rules}
        counted = int(reader.table("item").stats()["counted_ids"])
    assert found["item"].spared > 0 and counted > 0
    assert "clock 40, its step" in item and f"spared {found['item'].spared} that expired, because of keep" in item
    assert f"ids counted {counted} that steps have named and not stored" in item
    assert "Stored rows by the steps since" in item
    assert "rules admit 0.5 rows stored " in some and "No rule removes rows" in some and "would go" not in some
    assert "plain" not in page.sections["ages"]
    assert_told(item, html, found["item"], rules["item"])
    assert_told(user, html, found["user"], rules["user"], picture=2)
    assert len(bars(html)) == 4


def test_admission_alone_has_no_ages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletes, "sweep", None)
    with bb.create(tmp_path / "item", dim=2, admit=2, ram="16MiB") as table:
        for ids in ([1, 2, 3], [1, 4]):
            table.update(ids, np.ones((len(ids), 2), np.float32))
    page, _ = report(tmp_path / "item")
    assert page.sections["ages"].endswith(
        "rules store a row at 2 steps that name it rows stored 1 ids counted 3 that steps have named and not stored "
    )
    assert page.charts() == 0


def test_a_table_without_rules_has_no_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletes, "sweep", None)
    with bb.create(tmp_path / "item", dim=2, ram="16MiB") as table:
        train(table)
    assert "ages" not in report(tmp_path / "item")[0].sections


def test_a_table_whose_clock_was_not_set(tmp_path: Path) -> None:
    bb.create(tmp_path / "item", dim=2, expire=2, clock="event", ram="16MiB").close()
    page, html = report(tmp_path / "item")
    assert "clock not set yet rows stored 0 would go 0 that expired" in page.sections["ages"]
    assert page.sections["ages"].count("No row with an age is stored.") == 2 and bars(html) == []


def test_the_largest_ages_and_a_name_are_drawn_as_text(tmp_path: Path) -> None:
    name = '<img src=x onerror=alert(1)>"&amp;'
    with bb.create(tmp_path / name, dim=2, expire=2**61, clock="event", max_rows=9, ram="16MiB") as table:
        for clock in (0, 2**62):
            table.clock = clock
            table.update([clock % 7], np.ones((1, 2), np.float32))
    page, html = report(tmp_path / name)
    assert "img" not in {tag for tag, _ in page.tags} and f" {name} " in page.sections["ages"]
    assert "4,611,686,018,427,387,904 to 9,223,372,036,854,775,807 1 1 " in page.sections["ages"]
    assert "9.22E" in html
    ages = bars(html)[0]
    assert [height > 0 for height in ages["a"]] == [True, False] and [height > 0 for height in ages["b"]] == [
        False,
        True,
    ]


def test_expired_by_age() -> None:
    ages = (Bin(0, 0, 3), Bin(8, 15, 10), Bin(16, 31, 5))
    swept = Swept(18, 9, 0, 3, 0, 40, None, ages, (), True)
    assert expired_by_age(swept, 12) == [0, 7, 5]
    assert expired_by_age(swept, None) == [0, 0, 0]
