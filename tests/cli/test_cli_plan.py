"""`bunkbed plan`, and `bunkbed.planning` behind it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bunkbed as bb
from bunkbed import planning
from bunkbed.cli import main
from bunkbed.core.budget import format_bytes, format_least, parse_bytes
from bunkbed.machine import Machine, limits
from bunkbed.machine import rates as machine
from bunkbed.window import MAX_BATCHES

Run = Callable[..., tuple[int, str, str]]
MACHINE = Machine(memory_bytes_per_s=2e10, read_iops=90_000, write_bytes_per_s=2e9, read_unit=512)
FIGURES = ("--ssd-iops", "90000", "--ssd-write", "2GB", "--memory-bandwidth", "20GB")
BIG = ("--rows", "10000000", "--dim", "64", "--ram", "640MiB")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["plan", *arguments])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def big(**changes: Any) -> planning.Plan:
    options: dict[str, Any] = {"rows": 10_000_000, "dim": 64, "batch": 65_536, "machine": MACHINE, "ram": "640MiB"}
    return planning.plan(**{**options, **changes})


# ---- The plan


def test_a_plan_by_hand() -> None:
    plan = big()
    assert plan.record_bytes == 768
    used = plan.frames_bytes + plan.directory_bytes + plan.buffers_bytes + plan.window_bytes
    assert (639 << 20) < used <= 640 << 20
    assert plan.window == 32 and plan.window_bytes > 0
    assert plan.times.disk_reads == pytest.approx(plan.reads / 90_000)
    assert 0.97 * plan.misses < plan.reads < plan.misses and plan.read_path == "single reads"
    assert plan.written_bytes == pytest.approx(plan.evicted_rows * 768 * plan.write_amplification)
    assert plan.times.disk_writes == pytest.approx(plan.written_bytes / 2e9)
    assert plan.times.memory == pytest.approx((65_536 * 256 + plan.unique_rows * (2 * 768 + 256)) / 2e10)
    assert plan.steps_per_s == pytest.approx(1 / (plan.times.disk_reads + plan.times.disk_writes))
    assert plan.written_bytes_per_day == pytest.approx(plan.written_bytes * plan.steps_per_s * 86_400)
    assert plan.days_to_write(plan.written_bytes_per_day * 3) == pytest.approx(3)
    alone = big(lookahead=0)
    assert alone.misses > plan.misses
    assert 1 / alone.steps_per_s == pytest.approx(sum(alone.times.resources.values()))


def test_each_resource_can_bind() -> None:
    assert big().binds == "disk"
    assert big(ram="10GiB").binds == "memory"
    assert big(compute_s=1.0).binds == "model"
    everything = big(ram="10GiB")
    assert (everything.misses, everything.written_bytes_per_day) == (0, 0)
    assert everything.days_to_write(1e12) == math.inf


def test_what_would_change() -> None:
    base = big()
    found = dict(planning.changes(base))
    assert list(found) == [
        "twice the RAM", "all in RAM", "bfloat16 rows", "row-wise Adagrad", "both of these", "without lookahead",
    ]  # fmt: skip
    assert found["twice the RAM"].question.ram == 2 * base.question.ram
    assert found["all in RAM"].misses == 0
    assert found["bfloat16 rows"].record_bytes == 768 - 128
    assert found["row-wise Adagrad"].record_bytes == 260
    assert found["both of these"].steps_per_s > found["row-wise Adagrad"].steps_per_s > base.steps_per_s
    assert found["without lookahead"].steps_per_s < base.steps_per_s
    small = big(optimizer=bb.RowwiseAdagrad(), dtype="bfloat16", ram="10GiB", lookahead=0)
    assert list(dict(planning.changes(small))) == ["lookahead of 32"]


def test_all_in_ram_is_just_enough() -> None:
    """One frame for each row, as the core itself divides that budget."""
    enough = dict(planning.changes(big()))["all in RAM"]
    assert enough.frames == 10_000_000
    assert planning.answer(replace(enough.question, ram=enough.question.ram * 99 // 100), MACHINE).misses > 0


def test_a_window_leaves_room_for_the_cache() -> None:
    tight = big(rows=300_000, ram="48MiB")
    assert 3 <= tight.window < 32
    assert tight.window_bytes <= 48 << 20 >> 2
    assert big(ram="10GiB").window == big(lookahead=0).window == 0


def hits_of_two_steps(rows: int) -> float:
    popularity = limits.zipf(rows, 1.05)
    return float(popularity.rows @ popularity.wanted(65_536) ** 2)


def test_a_batch_that_does_not_fit() -> None:
    plan = big(rows=100_000, ram="8MiB")
    assert not plan.fits_batch
    # The last step left its last rows in the cache, and the lookup those that the update uses first.
    hits = plan.frames / plan.unique_rows * hits_of_two_steps(100_000)
    assert plan.misses == pytest.approx(2 * plan.unique_rows - hits - plan.frames)
    assert plan.evicted_rows == pytest.approx(plan.unique_rows)


def test_the_cheapest_access_path() -> None:
    """A tenth of the rows in RAM, uniform ids."""
    disk = replace(MACHINE, read_iops=100_000, read_bytes_per_s=2e9)  # reads 20 kB in the time of one more read

    def found(batch: int, machine: Machine = disk) -> planning.Plan:
        return big(rows=1_000_000, ram="96MiB", zipf=0.0, batch=batch, machine=machine)

    rare, some, many = found(1000), found(30_000), found(400_000)
    assert [plan.read_path for plan in (rare, some, many)] == ["single reads", "merged reads", "sweep"]
    assert rare.reads > 0.9 * rare.misses and some.reads < 0.75 * some.misses
    for plan in (rare, some, many):
        assert plan.times.disk_reads == pytest.approx(max(plan.reads / 1e5, plan.read_bytes / 2e9))
    # Lookup and update read the log once each at most, and less where rows stay in the cache.
    assert not many.fits_batch
    assert 1.2 * many.disk_bytes < many.read_bytes < 2 * many.disk_bytes
    assert many.times.disk_reads < many.misses / 1e5 / 4
    # The bandwidth of the core's default gap, where it is unknown.
    unknown = found(400_000, replace(disk, read_bytes_per_s=None))
    assert unknown.times.disk_reads == pytest.approx(unknown.read_bytes / (1e5 * 16_384))
    assert (found(2000, replace(disk, read_bytes_per_s=1e12)).read_path, big(ram="10GiB").read_path) == ("sweep", None)


# ---- Several ranks


def test_the_exchange_by_hand() -> None:
    """8 ranks, 4 of which share a link of 10 Gbit/s; with uniform ids a batch has R (1 - (1 - 1/R)^N) unique rows."""
    plan = big(zipf=0.0, batch=1000, ram="1GiB", ranks=8, ranks_per_host=4, link="10Gbit", latency_s=0.001)
    unique = 1e7 * (1 - (1 - 1e-7) ** 1000)
    rate = 10e9 / 8 / 4
    assert plan.exchanged.forward_bytes == pytest.approx(unique * 7 / 8 * 256 + 8 * unique)
    assert plan.exchanged.backward_bytes == pytest.approx(1000 * 7 / 8 * (256 + 8)) == 231_000
    assert plan.times.link_forward == pytest.approx(0.001 + unique * 7 / 8 * 256 / rate)
    assert plan.times.link_backward == pytest.approx(0.002 + 231_000 / rate)
    late = big(zipf=0.0, batch=1000, ram="1GiB", ranks=8, ranks_per_host=4, link="10Gbit", latency_s=0.001, lookahead=0)
    assert late.times.link_forward == pytest.approx(plan.times.link_forward + 0.002 + 8 * unique / rate)
    assert late.exchanged.forward_bytes == plan.exchanged.forward_bytes
    assert late.step_s == pytest.approx(sum(late.times.resources.values()))


def test_an_owner_gets_the_requests_of_all_ranks() -> None:
    """Uniform ids, rows of a fixed size: a quarter of the rows, of four batches."""
    plan = big(zipf=0.0, batch=1000, ram="640MiB", ranks=4, lookahead=0)
    wanted = 1 - (1 - 1e-7) ** 4000  # the probability that some rank wants a row
    assert plan.unique_rows == pytest.approx(2_500_000 * wanted)
    assert plan.question.rank_ram == 160 << 20 and plan.question.ranks_per_host == 4
    # Nothing is hotter, so the cache holds any row with equal probability.
    assert plan.misses == pytest.approx(plan.unique_rows * (1 - plan.frames / 2_500_000), rel=0.002)
    assert plan.disk_bytes == pytest.approx(big().disk_bytes / 4)
    # The four ranks of the host share its disk and memory.
    assert plan.times.disk_reads == pytest.approx(4 * plan.reads / 90_000)
    assert plan.times.disk_writes == pytest.approx(4 * plan.written_bytes / 2e9)
    assert plan.times.memory == pytest.approx(4 * (1000 * 256 + plan.unique_rows * (2 * 768 + 256)) / 2e10)
    assert plan.written_bytes_per_day == pytest.approx(4 * plan.written_bytes * plan.steps_per_s * 86_400)
    # On one host without a link, at the assumed rate.
    assert plan.times.link_backward == pytest.approx(2 * 0.22e-3 + 1000 * 3 / 4 * 264 / 1.2e9)


def test_one_rank_exchanges_nothing() -> None:
    alone, ranked = big(), big(ranks=1, link="10Gbit")
    assert replace(ranked, question=alone.question) == alone
    assert alone.exchanged.backward_bytes == 0 and "link" not in alone.times.resources


def test_what_can_bind_among_ranks() -> None:
    assert big(ranks=4, ram="10GiB", link="1Gbit").binds == "link"
    assert big(ranks=4, ram="1GiB", link="1000Gbit").binds == "disk"
    # The model waits for rows, and its gradients wait for it.
    both = big(ranks=4, ram="10GiB", link="10Gbit", compute_s=0.1)
    assert both.binds == "model"
    assert both.step_s == pytest.approx(0.1 + both.times.link_forward + both.times.link_backward)
    assert "all in RAM" not in dict(planning.changes(both))


def test_ten_trillion_parameters() -> None:
    plan = big(rows=10**11, dim=100, optimizer=bb.RowwiseAdagrad(), ram="64GiB", ranks=512, link="100Gbit")
    assert plan.question.stored == 195_312_500
    assert plan.exchanged.backward_bytes == pytest.approx(65_536 * 511 / 512 * 408)
    assert 0 < plan.misses < plan.unique_rows and plan.steps_per_s > 1


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10Gbit", 1.25e9), ("1.25GB", 1.25e9), (" 800 bit ", 100.0), ("1Tbit/s", 1.25e11), ("5kbit", 625.0),
        ("2Mbit", 250_000.0), ("1GiB/s", 2.0**30), ("64B", 64.0),
    ],
)  # fmt: skip
def test_rates_of_links(text: str, rate: float) -> None:
    assert planning.parse_rate(text) == rate


@pytest.mark.parametrize("text", ["10Gb/s?", "10Gb", "10gbit", "fast", "", "-1Gbit", "1e9B", "10"])
def test_rates_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot read the rate {text!r}; write bits or bytes a second")):
        planning.parse_rate(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
        ({"ranks": 1 << 21}, "ranks must be at most 1048576, got 2097152"),
        ({"ranks": 8, "ranks_per_host": 0}, "ranks_per_host must be at least 1, got 0"),
        ({"ranks": 8, "ranks_per_host": 3}, "a multiple of ranks_per_host, got ranks=8 and ranks_per_host=3"),
        ({"ranks": 8, "ranks_per_host": 4}, "link is needed: 8 ranks are on 2 hosts"),
        ({"ranks": 8, "rows": 7}, "rows must be at least ranks, got rows=7 and ranks=8"),
        ({"ranks": 8, "link": "0Gbit"}, "link must be above 0 bytes a second, got 0"),
        ({"ranks": 8, "link": "1Gbit", "latency_s": math.nan}, "latency_s must be at least 0 seconds, got nan"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"zipf": -1.0}, "the Zipf exponent must be at least 0, got -1"),
        ({"lookahead": -1}, "lookahead must be at least 0, got -1"),
        ({"lookahead": MAX_BATCHES + 1}, f"lookahead must be at most {MAX_BATCHES}, got {MAX_BATCHES + 1}"),
        ({"compute_s": -1.0}, "compute_s must be at least 0 seconds"),
        ({"dim": 0}, r"dim must be in \[1, "),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"machine": replace(MACHINE, read_iops=None)}, "random reads a second .* is unknown; measure it with"),
        ({"machine": replace(MACHINE, write_bytes_per_s=0.0)}, "write bandwidth .* must be above 0, got 0"),
    ],
)
def test_bad_questions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        big(**changes)
    with pytest.raises(TypeError, match=r"batch must be an int, got 2\.5"):
        big(batch=2.5)


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_budget_below_the_minimum_is_planned_with_the_minimum(ranks: int) -> None:
    enough = big(ranks=ranks)
    assert enough.asked_ram == enough.question.ram > enough.minimum_ram
    least = big(ram=enough.minimum_ram, ranks=ranks)
    assert least.frames >= 16
    assert least.question.ram == least.asked_ram == least.minimum_ram
    for ram in (1, "1MiB", enough.minimum_ram - 1):
        found = big(ram=ram, ranks=ranks)
        assert found.asked_ram == parse_bytes(ram)
        assert replace(found, asked_ram=least.asked_ram) == least
    if ranks == 1:
        assert enough.minimum_ram == bb.minimum_ram(10_000_000, 64)


def test_the_text_says_the_minimum(cli: Run) -> None:
    least = format_least(bb.minimum_ram(10_000_000, 64))
    assert parse_bytes(least) >= bb.minimum_ram(10_000_000, 64) > parse_bytes(least) - 0.1 * 2**20
    assert f"the minimum for these rows is {least} " in cli(*BIG, *FIGURES)[1]
    facts = json.loads(cli(*BIG, *FIGURES, "--json")[1])["ram"]
    assert (facts["minimum_bytes"], facts["asked_bytes"]) == (bb.minimum_ram(10_000_000, 64), 640 << 20)
    assert re.search(r"^as asked  ", cli(*BIG, *FIGURES)[1], re.MULTILINE)
    code, out, _ = cli("--rows", "1e7", "--dim", "64", "--batch", "6.4e4", "--ram", "2e6", *FIGURES)
    assert code == 0 and re.search(r"^the minimum  ", out, re.MULTILINE) and "as asked" not in out
    assert "10,000,000 rows x 64" in out and "64,000 ids" in out
    assert f"1.9 MiB is too little for the rows: planned with the minimum, {least}" in out
    least, nearest = (form(bb.minimum_ram(10**9, 64)) for form in (format_least, format_bytes))
    assert least != nearest
    out = cli("--rows", "1e9", "--dim", "64", "--batch", "6.4e4", "--ram", "1GiB", *FIGURES)[1]
    assert f"with the minimum, {least}" in out and re.search(rf"^the minimum +{least}", out, re.MULTILINE)


# ---- The command


def test_text_within_80_columns(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = cli(*BIG, *FIGURES)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    asked = big(machine=replace(MACHINE, read_unit=4096))
    for part in (
        "10,000,000 rows x 64 float32, Adam: 768 B a row, 7.2 GiB",
        "65,536 ids, Zipf 1.05: 26,072 unique rows, ",
        f"{asked.misses:,.0f} missed ({asked.misses / asked.unique_rows:.1%})",
        f"mostly single reads: {asked.reads:,.0f} a step of {format_bytes(asked.read_bytes)} in all",
        "memory 20.0 GB/s, 90,000 random reads/s, writes 2.00 GB/s",
        "as given",
        "each snapshot or saved file: up to as much again",
        "every rate is given: not compared with a disk",
        "disk binds (with lookahead, all at once)",
        "as many ids as there are rows take ",
        "written in a day of this; a drive rated for 600 TB of writes",
        "twice the RAM",
        "all in RAM",
        "row-wise Adagrad",
        "without lookahead",
    ):
        assert part in " ".join(out.split()), out


@pytest.mark.parametrize(
    ("free", "text"),
    [
        (2**30, "too little room: 1.0 GiB are free on ext4 on /ssd"),
        (2 * 10_000_000 * 768, "fits: 14.3 GiB are free on ext4 on /ssd\n         3 x the rows is advised, 21.5 GiB"),
        (2**40, "fits: 1.0 TiB are free on ext4 on /ssd\nfiles"),
    ],
)
def test_free_space_is_compared_where_the_disk_is_measured(
    cli: Run, monkeypatch: pytest.MonkeyPatch, free: int, text: str
) -> None:
    monkeypatch.setattr("bunkbed.cli.commands.plan.measure", lambda *_, **__: replace(MACHINE, disk="ext4 on /ssd"))
    monkeypatch.setattr("shutil.disk_usage", lambda place: shutil._ntuple_diskusage(2**42, 2**42 - free, free))
    code, out, _err = cli(*BIG, "--dir", "not-yet")
    assert code == 0 and text in re.sub(" +\n", "\n", out) and "ext4 on /ssd" in out
    assert ("too little" in out) == (free < big().disk_bytes)
    _code, out, _err = cli(*BIG, "--json")
    found = json.loads(out)
    assert found["machine"]["free_bytes"] == free
    assert found["disk"]["fits"] == (free >= big().disk_bytes)


@pytest.mark.parametrize(("memory", "is_short"), [(2**20, True), (2**50, False)])
def test_the_memory_of_this_machine_is_compared_where_the_disk_is_measured(
    cli: Run, monkeypatch: pytest.MonkeyPatch, memory: int, is_short: bool
) -> None:
    monkeypatch.setattr("bunkbed.cli.commands.plan.memory_bytes", lambda: memory)
    assert "this machine has" not in cli(*BIG, *FIGURES)[1]
    monkeypatch.setattr("bunkbed.cli.commands.plan.measure", lambda *_, **__: replace(MACHINE, disk="ext4 on /ssd"))
    assert ("too little memory: this machine has 1.0 MiB" in cli(*BIG)[1]) == is_short


def test_json_says_the_same(cli: Run) -> None:
    code, out, err = cli(*BIG, *FIGURES, "--json", "--compute-ms", "20", "--endurance", "100TB")
    assert (code, err) == (0, "")
    found = json.loads(out)
    plan = big(machine=replace(MACHINE, read_unit=4096), compute_s=0.02)
    assert found["machine"]["free_bytes"] is None and found["disk"]["fits"] is None  # no disk was measured
    assert set(found) == {
        "machine", "table", "step", "ram", "disk", "seconds", "steps_per_s", "binds", "written_bytes_per_day",
        "days_to_endurance", "changes",
    }  # fmt: skip
    assert found["table"] == {
        "rows": 10_000_000, "dim": 64, "dtype": "float32", "optimizer": "adam", "record_bytes": 768,
    }  # fmt: skip
    assert found["step"]["misses"] == pytest.approx(plan.misses)
    assert found["step"]["reads"] == pytest.approx(plan.reads)
    assert found["step"]["read_bytes"] == pytest.approx(plan.read_bytes)
    assert found["step"]["read_path"] == "single reads"
    assert found["seconds"]["compute"] == 0.02
    assert found["steps_per_s"] == pytest.approx(plan.steps_per_s)
    assert found["days_to_endurance"] == pytest.approx(plan.days_to_write(1e14))
    assert [entry["change"] for entry in found["changes"]] == [name for name, _ in planning.changes(plan)]
    assert all(set(entry) == {"change", *set(found) - {"machine", "changes"}} for entry in found["changes"])
    in_ram = next(entry for entry in found["changes"] if entry["change"] == "all in RAM")
    assert in_ram["days_to_endurance"] is None and in_ram["step"]["misses"] == 0


def test_ranks_in_text_and_json(cli: Run) -> None:
    ranks = (*BIG, *FIGURES, "--ranks", "4", "--ranks-per-host", "2", "--link", "10Gbit", "--link-latency-ms", "1")
    code, out, err = cli(*ranks)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    plan = big(machine=replace(MACHINE, read_unit=4096), ranks=4, ranks_per_host=2, link="10Gbit", latency_s=1e-3)
    for part in (
        "4, 2 on each of 2 hosts; 2,500,000 rows a rank",
        f"65,536 ids of each rank, Zipf 1.05: {plan.unique_rows:,.0f} unique rows of all ranks",
        "320.0 MiB of a host's 640.0 MiB: ",
        f"{format_bytes(plan.exchanged.backward_bytes)} backward",
        "as given: 1.25 GB/s a host, 0.625 GB/s a rank",
        "as given: 1 ms a collective",
        f"{plan.steps_per_s * 65_536 * 4 / 1e6:,.2f} million ids/s",
        "Predicted; no link between processes was measured.",
        "Rates of memory and disk: as given. The rest is computed by a cost model.",
    ):
        assert part in " ".join(out.split()), out
    found = json.loads(cli(*ranks, "--json")[1])
    assert found["ranks"] == {
        "ranks": 4, "per_host": 2, "rows": 2_500_000, "ram_bytes": 320 << 20, "link_bytes_per_s": 625e6,
        "latency_s": 1e-3, "forward_bytes": pytest.approx(plan.exchanged.forward_bytes),
        "backward_bytes": pytest.approx(plan.exchanged.backward_bytes), "is_predicted": True,
    }  # fmt: skip
    assert found["steps_per_s"] == pytest.approx(plan.steps_per_s)


def test_large_reads_may_be_given(cli: Run) -> None:
    dense = ("--rows", "100000", "--dim", "64", "--ram", "32MiB", "--zipf", "0", *FIGURES, "--ssd-read", "1GB")
    assert json.loads(cli(*dense, "--json")[1])["machine"]["read_bytes_per_s"] == 1e9
    out = cli(*dense)[1]
    assert "mostly sweep: " in out and "90,000 random reads/s, reads 1.00, writes 2.00 GB/s" in out
    assert max(map(len, out.splitlines())) <= 80


def test_options_from_yaml_and_flags_win(cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    lines = ["rows: 1000000", "dim: 16", "optimizer: sgd", "ram: 32MiB", "ssd-iops: 50000", "ssd_write: 1GB"]
    (tmp_path / "plan.yaml").write_text("\n".join([*lines, "memory_bandwidth: 10GB", "batch: 1000", "zipf: 0.8"]))
    found = json.loads(cli("--config", "plan.yaml", "--batch", "2000", "--json")[1])
    assert (found["table"]["optimizer"], found["table"]["record_bytes"], found["step"]["zipf"]) == ("sgd", 64, 0.8)
    assert (found["step"]["ids"], found["machine"]["read_iops"]) == (2000, 50_000)


def test_a_measurement_is_remembered(cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def measure_disk(place: Path) -> tuple[float, float, float, int]:
        calls.append(place)
        return 90_000.0, 3e9, 2e9, 512

    monkeypatch.setattr(machine, "_measure_disk", measure_disk)
    monkeypatch.setattr(machine._native, "probe_memory", lambda *_: 2e10)
    code, out, err = cli(*BIG)
    assert (code, err) == (0, "") and "measured; --remeasure" in out
    assert calls == [tmp_path]
    cli(*BIG)
    assert len(calls) == 1
    cli(*BIG, "--remeasure")
    assert len(calls) == 2
    # A figure that is given is not the measured one, the others are.
    found = json.loads(cli(*BIG, "--ssd-iops", "1000", "--json")[1])
    assert (found["machine"]["read_iops"], found["machine"]["write_bytes_per_s"]) == (1000, 2e9)
    assert found["machine"]["read_bytes_per_s"] == 3e9
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--zipf", "-1"), "the Zipf exponent must be at least 0, got -1.0"),
        (("--batch", "0"), "batch must be at least 1, got 0"),
        (("--batch", "1.5e0"), "'1.5e0' is not a valid integer"),
        (("--rows", "1e30"), "'1e30' is not a valid integer"),
        (("--ram", "lots"), "cannot read the size 'lots'"),
        (("--dtype", "int8"), "'int8' is not one of"),
        (("--optimizer", "lion"), "'lion' is not one of"),
        (("--ssd-iops", "0"), "--ssd-iops must be above 0"),
        (("--ssd-read", "fast"), "--ssd-read: cannot read the size 'fast'"),
        (("--ssd-write", "fast"), "--ssd-write: cannot read the size 'fast'"),
        (("--compute-ms", "-3"), "--compute-ms must be at least 0"),
        (("--ranks", "0"), "ranks must be at least 1, got 0"),
        (("--ranks", "2", "--link", "10Gb/s?"), "cannot read the rate '10Gb/s?'; write bits or bytes a second, like"),
        (("--ranks", "2", "--link-latency-ms", "-1"), "--link-latency-ms must be at least 0"),
        (("--lookahead", "-3"), "lookahead must be at least 0, got -3"),
    ],
)
def test_mistakes_cost_no_measurement(
    arguments: tuple[str, ...], message: str, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_measure_disk", lambda place: pytest.fail("measured"))
    code, out, err = cli(*BIG, *arguments)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_rows_and_dim_are_needed(cli: Run) -> None:
    code, _, err = cli("--rows", "10")
    assert code == 2 and "missing option '--dim'" in err


def test_a_directory_that_cannot_be_written(cli: Run) -> None:
    code, out, err = cli(*BIG, "--dir", "/proc/self")
    assert (code, out) == (1, "")
    assert err == (
        "error: /proc/self: cannot write here to measure the disk (no such file or directory); name another directory\n"
    )


def test_warnings_in_the_text(cli: Run) -> None:
    assert "some are read twice" in cli("--rows", "100000", "--dim", "64", "--ram", "8MiB", *FIGURES)[1]
    small = cli("--rows", "100000", "--dim", "64", "--ram", "32MiB", *FIGURES)[1]
    assert "less than four steps" in small
    every = cli("--rows", "1000", "--dim", "64", "--ram", "1GiB", *FIGURES)[1]
    assert "written by commits only" in every and "memory binds" in every
