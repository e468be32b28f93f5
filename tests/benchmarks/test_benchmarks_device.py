"""`benchmarks.device`: that it runs with nothing but torch and NumPy, keeps its time, and that its check can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

torch = pytest.importorskip("torch")
from benchmarks.device import check, experiment, report, sides  # noqa: E402
from benchmarks.device.limits import Limits  # noqa: E402
from benchmarks.device.report import Key, Results  # noqa: E402
from benchmarks.device.sides import Device, Ids, Pace, Sample  # noqa: E402
from benchmarks.harness import common  # noqa: E402

from bunkbed.torch.device.records import DeviceRecords  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

#: Runs the command where nothing but torch, NumPy and what they need themselves can be imported.
BARE = """
import sys, runpy
absent = {"matplotlib", "scipy", "pandas", "tensorflow", "keras", "pyarrow", "rich", "yaml", "pytest", "fbgemm_gpu"}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in absent else self.finder.find_spec(name, path, target)
sys.meta_path = [Without(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]
sys.argv[0] = "benchmarks.device.experiment"
runpy.run_module("benchmarks.device.experiment", run_name="__main__")
"""


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is large, and in a process with many modules each collection takes long."""
    monkeypatch.setattr("gc.collect", lambda generation=2: 0)


def command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = ["--out", str(tmp_path / "out"), "--dir", str(tmp_path / "space"), "--device", "cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", BARE, "--tiny", *paths, *arguments], cwd=ROOT, capture_output=True, text=True, env=env
    )


def test_runs_with_only_torch_and_numpy(tmp_path: Path) -> None:
    done = command(tmp_path, "--minutes", "4")
    assert done.returncode == 0, done.stderr
    assert "NO ACCELERATOR" in done.stdout and "no plot: No module named 'matplotlib'" in done.stdout
    assert "not measured" not in done.stdout
    assert "kernels: none was tried" in done.stdout
    assert not (tmp_path / "space").exists(), "temporary files stayed behind"
    found = json.loads((tmp_path / "out" / "device.json").read_text())
    assert found["check"]["differing"] == 0 and found["check"]["evictions"] > 100
    measured = {(one["side"], one["place"], one["share"], one["ahead"]) for one in found["measured"]}
    for place in ("RAM", "SSD"):
        for share in (1.0, 0.2, 0.05, 0.01, 0.0):
            assert {("d", place, share, False), ("d", place, share, True)} <= measured
    assert {("a", "RAM", None, False), ("b", "RAM", None, False), ("c", "RAM", None, False)} <= measured
    by_share = {one["share"]: one for one in found["measured"] if one["side"] == "d" and one["place"] == "RAM"}
    whole, least, none = (by_share[share]["rounds"][0] for share in (1.0, 0.01, 0.0))
    assert whole["misses"] == 0 < least["misses"] < none["misses"] == none["unique"]
    assert whole["cache_bytes"] > 20 * least["cache_bytes"] > none["cache_bytes"] == 0
    assert {one["times"] for one in found["measured"] if one["place"] == "growth"} == {1, 4}


def test_says_what_it_had_no_time_for(tmp_path: Path) -> None:
    """As a script this time, from another folder."""
    paths = ["--out", str(tmp_path / "out"), "--dir", str(tmp_path / "space"), "--device", "cpu"]
    script = [sys.executable, str(ROOT / "benchmarks/device/experiment.py"), "--tiny", *paths, "--minutes", "0.001"]
    done = subprocess.run(
        script, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "not measured: cell SSD: no time left" in done.stdout
    assert json.loads((tmp_path / "out" / "device.json").read_text())["skipped"]


def test_the_check_notices_a_cache_that_changes_what_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    write = DeviceRecords.write

    def flipped(self: DeviceRecords, frames: Any, records: Any) -> None:
        write(self, frames, records ^ 1)  # the last bit of every value

    monkeypatch.setattr(DeviceRecords, "write", flipped)
    assert check.check(Device("cpu"), 0).differing > 0


def bench(tmp_path: Path, **changes: Any) -> experiment.Bench:
    plan = experiment.Plan(60.0, (144 * 8, 112 * 8), 8, **{"dims": (8,), "rounds": 2, **changes})
    return experiment.Bench(Device("cpu"), plan, tmp_path)


@pytest.mark.parametrize("error", [TypeError("no float64"), bb.BunkbedError("gone"), torch.OutOfMemoryError("full")])
def test_a_side_that_fails_is_said_and_the_others_are_measured(tmp_path: Path, error: Exception) -> None:
    here = bench(tmp_path)
    bad, good = Key("d", 8, 1.05, "RAM", 0.05), Key("a", 8, 1.05, "RAM")
    calls = []

    def fail(*args: Any) -> Any:
        calls.append(1)
        raise error

    sides = {str(bad): fail, str(good): lambda *args: {good: Sample(1.0, 5, 10)}}
    here._rounds(sides, here._data(here.plan.sizes, 1.05), here.ends)
    assert len(here.results.measured[good].rounds) == 2
    assert len(calls) == 1, "not again"
    assert here.results.skipped == [f"{bad}: {error}"]
    assert bool(here.results.failures) == (not isinstance(error, torch.OutOfMemoryError))


def test_a_device_that_ours_does_not_work_on_still_has_the_others_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one without float64, where no layer can be made; each cell's results are saved when it is done."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(check, "train", refuse)
    monkeypatch.setattr(sides, "Model", refuse)
    saved: list[int] = []
    pace = Pace(warm=1, steps=1, seconds=0.01)
    changes: dict[str, Any] = {"exponents": (1.05,), "rounds": 1, "pace": pace, "shares": (0.05,), "probe_bytes": 4096}
    plan = experiment.Plan(60.0, (144 * 8, 112 * 8), 8, dims=(8,), **changes)
    monkeypatch.setattr(common, "require_space", lambda folder, needed: needed and sys.exit("2 MiB free"))
    found = experiment.measure(Device("cpu"), plan, tmp_path, save=lambda results: saved.append(len(results.measured)))
    assert {key.side for key in found.measured} == {"a", "b", "c"}
    assert any(text.startswith("the check: Cannot convert") for text in found.failures)
    assert any("2 MiB free" in text for text in found.skipped)
    assert saved == sorted(saved) and len(saved) >= 3 and saved[0] > 0


def test_rows_that_differ_end_the_command_with_an_error(tmp_path: Path) -> None:
    results = Results(checked=check.Checked(differing=3, difference=1e-7, runs=7, evictions=9))
    assert report.verdicts(results) == ["3 rows differ between device caches"]
    results.checked = check.Checked(differing=0, difference=1e-3, runs=7, evictions=0)
    assert [text.split(",")[0] for text in report.verdicts(results)] == [
        "a weight is 0.001 from the table's on the CPU",
        "the smallest cache evicted nothing",
    ]
    results.checked = check.Checked(differing=0, difference=1e-7, runs=7, evictions=9)
    assert report.verdicts(results) == []


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.2])
def test_ids_follow_their_law(exponent: float) -> None:
    ids = Ids(1000, exponent)
    drawn = ids.draw(np.random.default_rng(0), 400_000)
    counts = np.bincount(drawn, minlength=1000)[ids.hottest(1000)]
    weight = np.arange(1, 1001) ** -exponent
    expected = 400_000 * weight / weight.sum()
    assert np.all(np.abs(counts - expected) < 6 * np.sqrt(expected))


class Tables:
    """What the formulas need to know of tables."""

    record_bytes, dim, place = 1200, 100, "SSD"


def test_formulas() -> None:
    limits = Limits(up=1e6, memory=1e9, read_iops=1000, write=1e6, compute_s={100: 0.001})
    sample = Sample(1.0, 5, unique=10, loaded_bytes=5000, read_records=3, written_bytes=1000)
    # memory: (20 * 400 + 10 * (2 * 1200 + 400)) / 1e9; link: 5000 / 1e6; disk: 3 / 1000 + 1000 / 1e6
    assert limits.formula(sample, Tables(), 20) == (pytest.approx(0.005), "link")  # type: ignore[arg-type]
    limits.up = None
    assert limits.formula(sample, Tables(), 20) == (pytest.approx(0.004), "disk")  # type: ignore[arg-type]
    limits.read_iops, limits.memory = None, 6e6
    assert limits.formula(sample, Tables(), 20) == (pytest.approx(0.006), "memory")  # type: ignore[arg-type]
    limits.memory = 1e9
    assert limits.formula(sample, Tables(), 20) == (0.001, "compute")  # type: ignore[arg-type]


def test_ratios_are_taken_within_rounds_and_judged_only_on_an_accelerator() -> None:
    results = Results()
    ours, resident = Key("d", 64, 1.05, "RAM", 0.05, True), Key("a", 64, 1.05, "RAM")
    for index, (mine, theirs) in enumerate([(1.0, 2.0), (2.0, 8.0), (10.0, 30.0)]):
        results.add(ours, index, Sample(mine, 5, 10), (0.9 * mine, "link"))
        results.add(resident, index, Sample(theirs, 5, 10), None)
    results.add(resident, 3, Sample(1.0, 5, 10), None)  # a round that had no time for ours
    device = Device("cpu")
    plain = report.figures(results, device, judge=True)
    ratio = next(figure for figure in plain if figure.name.startswith("(a) / (d)"))
    assert (ratio.value, ratio.low, ratio.high, ratio.count) == (3, 2, 4, 3)
    assert all(figure.target == "" and "no accelerator" in figure.note for figure in plain)
    device.is_accelerator = True
    judged = {figure.name: figure for figure in report.figures(results, device, judge=True)}
    assert judged[ratio.name].reached
    assert judged["of the formula's limit (link), (d) 5 %, lookahead, dim 64"].reached
    assert all(figure.target == "" for figure in report.figures(results, device, judge=False))


def test_plot_is_a_picture(tmp_path: Path) -> None:
    plot = pytest.importorskip("benchmarks.device.plot")
    point = {"dim": 64, "exponent": 1.05, "place": "RAM", "steps_per_s": 5.0}
    measured = [
        {**point, "side": "a", "share": None, "ahead": False},
        {**point, "side": "d", "share": 0.0, "ahead": True},
        {**point, "side": "d", "share": 1.0, "ahead": True},
    ]
    data = {"measured": measured, "accelerator": False, "device": "cpu", "plan": {"batch": 8}}
    plot.draw(tmp_path / "device.png", data)
    assert (tmp_path / "device.png").read_bytes().startswith(b"\x89PNG")
