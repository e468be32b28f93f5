"""`bunkbed plan`, and `bunkbed.planning` behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bunkbed as bb
from bunkbed import planning
from bunkbed.cli import main
from bunkbed.core.budget import format_bytes
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"zipf": -1.0}, "the Zipf exponent must be at least 0, got -1"),
        ({"lookahead": -1}, "lookahead must be at least 0, got -1"),
        ({"lookahead": MAX_BATCHES + 1}, f"lookahead must be at most {MAX_BATCHES}, got {MAX_BATCHES + 1}"),
        ({"compute_s": -1.0}, "compute_s must be at least 0 seconds"),
        ({"dim": 0}, r"dim must be in \[1, "),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"ram": "1MiB"}, r"ram=1048576 \(1\.0 MiB\) is too small for 10000000 rows; it needs at least ram=\d+"),
        ({"machine": replace(MACHINE, read_iops=None)}, "random reads a second .* is unknown; measure it with"),
        ({"machine": replace(MACHINE, write_bytes_per_s=0.0)}, "write bandwidth .* must be above 0, got 0"),
    ],
)
def test_bad_questions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        big(**changes)
    with pytest.raises(TypeError, match=r"batch must be an int, got 2\.5"):
        big(batch=2.5)


def test_the_needed_ram_is_enough() -> None:
    with pytest.raises(ValueError, match="it needs at least ram=") as caught:
        big(ram="1MiB")
    needed = int(str(caught.value).split("ram=")[2].split()[0])
    assert big(ram=needed).frames >= 1


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
        "disk binds (with lookahead, all at once)",
        "written in a day of this; a drive rated for 600 TB of writes",
        "twice the RAM",
        "all in RAM",
        "row-wise Adagrad",
        "without lookahead",
    ):
        assert part in " ".join(out.split()), out


def test_json_says_the_same(cli: Run) -> None:
    code, out, err = cli(*BIG, *FIGURES, "--json", "--compute-ms", "20", "--endurance", "100TB")
    assert (code, err) == (0, "")
    found = json.loads(out)
    plan = big(machine=replace(MACHINE, read_unit=4096), compute_s=0.02)
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
        (("--ram", "1MiB"), "ram=1048576 (1.0 MiB) is too small for 10000000 rows; it needs at least ram="),
        (("--ram", "lots"), "cannot read the size 'lots'"),
        (("--dtype", "int8"), "'int8' is not one of"),
        (("--optimizer", "lion"), "'lion' is not one of"),
        (("--ssd-iops", "0"), "--ssd-iops must be above 0"),
        (("--ssd-read", "fast"), "--ssd-read: cannot read the size 'fast'"),
        (("--ssd-write", "fast"), "--ssd-write: cannot read the size 'fast'"),
        (("--compute-ms", "-3"), "--compute-ms must be at least 0"),
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
