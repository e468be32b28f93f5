"""`write_report` and ``bunkbed report``: what the page says, and that names on it are only text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import bunkbed as bb
from bunkbed.core.budget import format_bytes
from bunkbed.machine import rates as machine
from bunkbed.train.output.progress import MetricsLog
from bunkbed.train.report import write_report
from bunkbed.train.report.charts import hot_rows
from bunkbed.train.report.hot_rows import count_uses, curve
from bunkbed.train.settings.config import TrainConfig
from report_setup import ITEMS, STEPS, USERS, Page, make_run, make_table, pairs, step_report

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refuse(*arguments: Any, **more: Any) -> None:
        raise AssertionError("a report measures nothing")

    monkeypatch.setattr(machine, "measure", refuse)


def page_of(path: Path, **options: Any) -> Page:
    return Page(write_report(path, overwrite=True, **options).read_text(encoding="utf-8"))


def test_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    machine._save({machine._key(tmp_path): machine.Machine(1e10, 1e5, 1e9, 512, "/dev/ssd (ext4)", 2, 1.0)})
    written = write_report(folder)
    assert written == folder / "report.html"
    page = Page(written.read_text(encoding="utf-8"))
    assert page.charts() == 6  # loss, quality, found in RAM, waiting, speed, hot rows
    assert page.text.startswith("first · Bunkbed report run first mf, bpr, dim 4, adam · 8.0 MiB of RAM")
    assert "2 epochs, 20 steps committed" in page.text and "reported until" not in page.text
    assert "trained on ratings.csv" in page.text
    for card in (
        "best ndcg@10 0.2000 epoch 2",
        "loss 0.2500 mean of epoch 2",
        "found in RAM 75.0% of the unique rows, last epoch",
        "waited for reads 25% of the last epoch's steps",
        "pairs a second 20k mean of all reports",
    ):
        assert card in page.text, card
    learning, rows = page.sections["learning"], page.sections["rows"]
    assert "mean of the last epoch 0.2500" in learning
    assert "after each epoch (full ranking of 30 items); dashed is the epoch kept as best" in learning
    assert "hr@10 0.4000 ndcg@10 0.2000" in learning
    assert "2 ★ 0.2500 hr@10 0.4000, ndcg@10 0.2000, hr@20 0.5000 75.0% 2.0 0.5 5.0 MiB 953.7 MiB" in learning
    assert "found in RAM, last epoch 75.0%" in rows and "waited for reads, last report 25.0%" in rows
    assert "device" not in rows
    # 100,000 reads at 100,000 a second, 2 GB at 1 GB/s and 10 GB/s, in two epochs of 2 s each.
    tiers = page.sections["tiers"]
    assert "disk, reads 1.0 s at least disk, writes 2.0 s at least memory 200.0 ms at least measured 4.0 s" in tiers
    assert "the training ran at 75% of that limit, and disk binds" in tiers and "/dev/ssd (ext4)" in tiers
    assert "of the limit 75% disk binds" in page.text
    assert "by access path: 60% sweep, 30% merged reads, 10% single reads; 1.2 x the wanted bytes." in tiers
    assert "RAM 2.0 MiB of a budget of 8.0 MiB, as last reported" in tiers
    # Of both tables 70 rows of 4 weights and their Adam state, 48 bytes each.
    assert "all rows 3.3 KiB with optimizer state" in tiers
    tables = page.sections["tables"]
    assert "user 20 40 4 float32 48" in tables and "item 20 30 4 float32 48" in tables
    assert "Adam(lr=0.02)" in tables
    disk = page.sections["disk"]
    assert "best 2 " in disk and "first 1 " in disk and "newest commit is number 2, of 2" in disk
    total = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and path != written)
    assert f"Disk use: {format_bytes(total)}" in disk
    assert "interactions" in disk and "dense weights 10 B" in disk


def test_a_lone_table(tmp_path: Path) -> None:
    folder = make_table(tmp_path / "user")
    written = write_report(folder)
    assert written == tmp_path / "user.html"
    page = Page(written.read_text(encoding="utf-8"))
    assert page.charts() == 0
    assert "table user commit 2" in page.text
    assert "rows stored 200 of 1,000" in page.text and "Adagrad(lr=0.5)" in page.text
    assert "A table keeps no history" in page.sections["learning"]
    assert "A table does not know how often its rows were looked up" in page.sections["rows"]
    assert "print(table.explain()) reports" in page.sections["tiers"]
    assert "all rows 31.2 KiB" in page.sections["tiers"]  # 1,000 of 32 bytes
    assert "epoch-1 1 " in page.sections["disk"] and " 100 " in page.sections["disk"]
    assert "configuration" not in page.sections


def test_a_sharded_table(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    with bb.ShardedTable.create(tmp_path / "item", dim=2, directories=places, ram="16MiB") as table:
        table.update(np.arange(50), np.ones((50, 2), np.float32))
        table.commit(keep="whole")
    page = page_of(tmp_path / "item", ram="16MiB")
    assert "sharded table item" in page.text and "rows stored 50 of any id" in page.text
    assert "item, 2 shards 50 any id 2" in page.sections["tables"]
    assert "whole 1 " in page.sections["disk"]


def test_a_table_of_a_run_and_the_run_of_a_table(tmp_path: Path) -> None:
    make_run(tmp_path / "first")
    page = page_of(tmp_path / "first" / "tables" / "user", out=tmp_path / "user.html")
    assert "rows stored 20 of 40" in page.text


def test_a_run_that_was_never_evaluated(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "first", metrics={}, is_best=False, ranking=""))
    assert page.charts() == 5
    assert "No epoch was evaluated" in page.sections["learning"]
    assert "best ndcg@10" not in page.text


def test_a_run_of_another_hand(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "mine", ram="8MiB") as run:
        run.table("anything", create={"dim": 2}).update([5], np.ones((1, 2), np.float32))
        run.commit(meta={"progress": "half"})
    page = page_of(tmp_path / "mine")
    assert "This run was not made by bunkbed train" in page.sections["learning"]
    assert "no copy of the pairs" in page.sections["rows"] or "no committed tables of users" in page.sections["rows"]
    assert "anything 1 any id 2" in page.sections["tables"]
    assert "configuration" not in page.sections


def test_a_training_before_its_first_commit(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first", epochs=0)
    with bb.Run(folder, ram="8MiB") as run:  # as the trainer has it open
        run.table("user", create={"dim": 4})
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "step", "global_step": 3, "loss": 0.5, "samples_per_s": 7.0}) + "\n")
            file.write('{"kind": "step", "global_st')  # torn: it is being written
        page = page_of(folder)
        run.close(commit=False)
    assert "reported until step 3" in page.text
    assert "Nothing is committed yet" in page.sections["tables"]
    waiting = sum(path.stat().st_size for path in (folder / "tables").rglob("*") if path.is_file())
    assert f"older records {format_bytes(waiting)}" in page.sections["disk"]
    assert "last report 0.5000" in page.sections["learning"]


def test_beside_a_writer_nothing_changes_but_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    with bb.Run(folder, ram="8MiB") as run:
        user = run.table("user")
        user.update([30], np.ones((1, 4), np.float32))
        before = {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files_of(folder)}
        page = page_of(folder)
        after = {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files_of(folder)}
        assert after.pop(folder / "report.html")
        assert after == before
        # What is not committed is not on the page, and the writer goes on.
        assert "user 20 40 4" in page.sections["tables"]
        run.commit()
        assert "user 21 40 4" in page_of(folder).sections["tables"]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_differs_from_the_defaults(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path / "first", options={"colour": "blue"})).sections["configuration"]
    changed, same = text.split("options at their default")
    assert (
        "dim 4 64 ram 8MiB 1GiB lr 0.02 0.001 epochs 3 20 negatives 3 4 colour blue not known to this release"
        in changed
    )
    assert "bunkbed train 0.0.9" in changed
    defaults = TrainConfig()
    assert f"optimizer {defaults.optimizer} " in same and "lookahead by itself" in same and " dim " not in same


NASTY = '<script>alert(1)</script>"><img src=x onerror=alert(1)>&amp;$x^{'


def test_names_are_only_text(tmp_path: Path) -> None:
    name = NASTY.replace("/", "_")
    folder = make_run(
        tmp_path / name,
        options={NASTY: NASTY, "model": NASTY, "metric": NASTY},
        metrics={NASTY: 0.5, "ndcg@10": 0.25},
        ranking=NASTY,
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "source": NASTY, "bunkbed": NASTY}))
    with bb.Run(folder, ram="8MiB") as run:
        run.commit(keep=NASTY)
    page = page_of(folder)
    assert {tag for tag, _ in page.tags} & {"script", "img"} == set()
    assert not [attributes for _, attributes in page.tags if "onerror" in attributes]
    seen = " ".join(NASTY.split())
    assert f"trained on {seen}" in page.text
    assert f"{seen} 0.5000" in page.sections["learning"] and f"({seen})" in page.sections["learning"]
    assert f"{seen} 3 " in page.sections["disk"]
    assert f"{seen} {seen} not known to this release" in page.sections["configuration"]
    assert f"bunkbed train {seen}" in page.sections["configuration"]
    assert f"run {' '.join(name.split())}" in page.text


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    html = write_report(folder).read_text(encoding="utf-8")
    page = Page(html)
    loading = {"script", "link", "img", "iframe", "object", "embed", "base", "image", "audio", "video"}
    assert {tag for tag, _ in page.tags} & loading == set()
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "data", "action", "xlink:href"} & set(attributes), tag
        assert str(attributes.get("href", "#")).startswith("#")
    assert "http:" not in html and "https:" not in html and "@import" not in html
    assert html.count("url(") == html.count("url(#")
    assert "#0f1e0" not in html  # the placeholders of colours while a chart is drawn
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html
    policy = next(attributes for tag, attributes in page.tags if attributes.get("http-equiv"))
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_hot_rows_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    made = pairs()
    for column, rows, indices in (("user", USERS, made.users), ("item", ITEMS, made.items)):
        counts = count_uses(folder / "data", column, rows)
        assert counts.tolist() == np.bincount(indices, minlength=rows).tolist()
    one = curve("item", counts)
    assert one is not None
    # Item 0 has all 40 users, items 10 and up have no user: of 220 pairs the hottest 3 of 30 have 40 + 36 + 32.
    assert (one.pairs, one.rows, one.unused) == (220, 30, 20)
    assert one.share_of(0.1) == pytest.approx(108 / 220)
    assert one.rows_for(40 / 220) == pytest.approx(1 / 30)
    assert one.share[-1] == 1.0 and one.part[-1] == 1.0 and (np.diff(one.share) >= 0).all()
    assert [line.name for line in hot_rows([one]).lines] == ["item: the hottest 1 % of the rows take"]
    text = page_of(folder).sections["rows"]
    assert "What share of the 220 saved pairs, held-out ones included, the hottest rows take" in text
    assert "The 3 negatives sampled for each pair" in text
    shared = page_of(make_run(tmp_path / "shared", options={"share_negatives": True})).sections["rows"]
    assert "The 3 negatives sampled for each step" in shared
    assert curve("item", np.zeros(3, np.int64)) is None
    with pytest.raises(ValueError, match="column 'item' names rows outside"):
        count_uses(folder / "data", "item", 9)


def test_without_pairs_there_is_no_curve_but_a_reason(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    (folder / "data" / "train.parquet").write_bytes(b"PAR1 is what it begins with")
    assert "could not be counted" in page_of(folder).sections["rows"]
    (folder / "data" / "train.parquet").unlink()
    page = page_of(folder)
    assert "keeps no copy of the pairs" in page.sections["rows"] and page.charts() == 5


def test_an_unmeasured_machine_is_not_measured(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "first"))
    assert "were never measured: bunkbed plan does so once" in page.sections["tiers"]
    old = make_run(tmp_path / "old", disk_reads=None, moved_bytes=None)
    assert "No finished epoch has counted its reads" in page_of(old).sections["tiers"]


@pytest.mark.parametrize("records", [None, 7, {}, {"sweep": 5}, {"single reads": -1, "merged reads": 2, "sweep": 3}])
def test_epochs_without_counts_of_access_paths(records: object, tmp_path: Path) -> None:
    assert "access path" not in page_of(make_run(tmp_path / "first", records_by_path=records)).text
    page_of(make_run(tmp_path / "second", wanted_bytes=0))


def test_the_bandwidth_of_reads_can_set_the_limit(tmp_path: Path) -> None:
    slow = machine.Machine(1e10, 1e5, 1e9, 512, "/dev/ssd (ext4)", 2, 1.0, read_bytes_per_s=1 << 20)
    machine._save({machine._key(tmp_path): slow})
    # 10 MiB in two epochs
    assert "disk, reads 10.0 s at least" in page_of(make_run(tmp_path / "first")).sections["tiers"]


def test_a_device_cache_is_a_tier(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first", device_hit_rate=0.875, options={"device_cache": "2GiB", "device": "cuda"})
    log = MetricsLog(folder / "metrics.jsonl", global_step=99, epoch=9)
    log.write(step_report(2 * STEPS + 1, device_hit_rate=0.9))
    log.close()
    page = page_of(folder)
    assert "device 2.0 GiB at most, for hot rows on cuda" in page.sections["tiers"]
    assert "found on the device, last epoch 87.5%" in page.sections["rows"]
    assert "reported until step 21" in page.text


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    out = tmp_path / "page.html"
    out.write_text("mine")
    with pytest.raises(FileExistsError, match=r"page\.html exists already and is as it was; give another name"):
        write_report(folder, out)
    assert out.read_text() == "mine"
    with pytest.raises(FileExistsError, match="is a folder; name a file"):
        write_report(folder, tmp_path, overwrite=True)
    with pytest.raises(FileNotFoundError):
        write_report(folder, tmp_path / "nowhere" / "page.html")
    assert write_report(folder, out, overwrite=True) == out
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert not list(tmp_path.glob(".*.part"))


def test_a_file_that_comes_meanwhile_stays_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = make_table(tmp_path / "user"), tmp_path / "page.html"

    def render(facts: Any) -> str:
        out.write_text("another's")
        return "page"

    monkeypatch.setattr("bunkbed.train.report.render", render)
    with pytest.raises(FileExistsError, match="exists already"):
        write_report(folder, out)
    assert out.read_text() == "another's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "user"]


def test_a_commit_removed_while_it_is_read_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bunkbed.train.report import facts

    folder = make_run(tmp_path / "first")
    writer = bb.Run(folder, ram="8MiB")
    real, failures = facts._about, []

    def about(name: str, table: bb.Table) -> facts.AboutTable:
        if not failures:
            failures.append(name)
            writer.table("user").update([30], np.ones((1, 4), np.float32))
            writer.commit()
            raise bb.CorruptionError("its file is gone")
        return real(name, table)

    monkeypatch.setattr(facts, "_about", about)
    assert "user 21 40 4" in page_of(folder).sections["tables"]
    monkeypatch.setattr(facts, "_about", lambda name, table: (_ for _ in ()).throw(bb.CorruptionError("damaged")))
    with pytest.raises(bb.CorruptionError, match="damaged"):
        page_of(folder)
    writer.close()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nothing", FileNotFoundError, "no such table or run"),
        ("file", bb.FormatError, "is a file; give the folder of a table or of a run"),
        ("empty", FileNotFoundError, "no table at"),
    ],
)
def test_a_path_that_is_neither(name: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=message):
        write_report(tmp_path / name, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{torn\n{}", "line 1: is not JSON"),
        ("[1]\n", "line 1: is not a report"),
        ('{"kind": "step", "global_step": "3"}\n', "line 1: is not a report, it tells no number as its global_step"),
        ('{"kind": "step", "global_step": Infinity}\n', "line 1: is not a report"),
    ],
)
def test_damaged_metrics(line: str, message: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    (folder / "metrics.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_metrics_of_any_kind_are_drawn_as_far_as_they_are_numbers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first", with_metrics=False)
    odd = [
        {"kind": "step", "global_step": 1, "loss": "low", "unique_hit_rate": None, "samples_per_s": True},
        {"kind": "step", "global_step": 2, "loss": 0.25, "ram_bytes": 5},
        {"kind": "epoch", "global_step": 2, "metrics": [1], "loss": float("nan")},
        {"kind": "epoch", "global_step": 2, "metrics": {"ndcg@10": "good"}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in odd))
    page = page_of(folder)
    assert "last report 0.2500" in page.sections["learning"]
    assert page.charts() == 2  # loss and hot rows


@pytest.mark.parametrize("text", ["{", '{"train": 3}', "[]"])
def test_a_damaged_configuration(text: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    (folder / "config.json").write_text(text)
    with pytest.raises(bb.CorruptionError, match=r"config\.json: is damaged"):
        write_report(folder)


def test_the_command(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "first")
    code, out, err = cli("report", "first")
    assert (code, err) == (0, "") and out.startswith(f"report  {tmp_path}/first/report.html  (")
    code, out, err = cli("report", "first")
    assert (code, out) == (1, "") and "exists already and is as it was" in err and err.count("\n") == 1
    code, out, _ = cli("report", "first", "--out", "page.html", "--json")
    assert code == 0 and json.loads(out)["bytes"] == (tmp_path / "page.html").stat().st_size
    assert cli("report", "first", "--out", "page.html", "--overwrite")[0] == 0
    assert cli("report", "nothing")[2] == "error: nothing: no such table or run\n"
    real = __import__("importlib").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "jinja2" else real(name, *rest))
    assert cli("report", "first", "--overwrite") == (
        1,
        "",
        'error: bunkbed report needs jinja2; install with: pip install "bunkbed[train]"\n',
    )
