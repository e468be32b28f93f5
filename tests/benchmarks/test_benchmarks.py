"""Each case of the benchmark suite runs, tiny: what it prints is no figure, but it prints one."""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from benchmarks.cases.disk import simulate
from benchmarks.harness import common, figures, report, suite, turns
from benchmarks.harness.figures import Figure, Outcome, Settings
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bunkbed as bb

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: case.name)
def test_runs_tiny(case: suite.Case, tmp_path: Path) -> None:
    if why_not := case.why_not():
        pytest.skip(why_not)
    space = tmp_path / "space"
    outcome = suite.run_case(case, Settings("tiny"), ["--tiny", "--dir", str(space), "--data", str(tmp_path)])
    assert not outcome.failed
    assert "machine: " in outcome.machine
    assert not space.exists(), "temporary files stayed behind"
    assert any(figure.value is not None for figure in outcome.figures)
    for figure in outcome.figures:
        # What could not be measured says why: a peer that is not installed names its install command.
        assert figure.value is not None or "pip install" in figure.note, figure.line()
        if case.correctness:
            assert figure.reached is not False, figure.line()


@pytest.mark.parametrize("module", ["exactness", "disk.larger_than_memory", "ram.resident", "bounded_memory", "huge"])
def test_old_commands_know_their_options(module: str) -> None:
    if module in ("ram.resident",):
        pytest.importorskip("torch")
    done = run("-m", f"benchmarks.cases.{module}", "--help")
    assert done.returncode == 0 and "--tiny" in done.stdout


def test_resident_prints_its_ratio(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run("-m", "benchmarks.cases.ram.resident", "--tiny", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "ratio torch / bunkbed" in done.stdout and "machine: " in done.stdout


def test_changes_prints_files_and_what_deletes_free(tmp_path: Path) -> None:
    done = run("-m", "benchmarks.cases.changes", "--tiny", "--rounds", "1", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "10,000 changed rows of 40,000 x 64 to Parquet" in done.stdout and "half deleted:" in done.stdout


def test_serving_prints_the_age_of_a_reader(tmp_path: Path) -> None:
    done = run("-m", "benchmarks.cases.serving", "age", "--tiny", "--dir", str(tmp_path))
    assert done.returncode == 0 and "age: p50" in done.stdout, done.stderr


def test_more_compares_with_training_on_all(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run("-m", "benchmarks.cases.recommenders.more", "--tiny", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "of training on all" in line)
    assert float(line.split("ndcg@10 ")[1].split()[0]) > 0.7 and "of the time" in line


def test_untuned_judges_every_side_alike(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run("-m", "benchmarks.cases.training.untuned", "--tiny", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = {line[11:29].strip(): line for line in done.stdout.splitlines() if line.startswith("tiny ")}
    ndcg = {side: float(line.split("ndcg@10 ")[1].split()[0]) for side, line in found.items()}
    assert 0.2 < ndcg["bunkbed train"] < ndcg["planted optimum"]


@pytest.mark.parametrize(("train", "dim"), [("", 64), ("--recipe best", 192), ("--recipe best --dim 16", 16)])
def test_ram_is_a_part_of_the_bytes_of_the_rows(train: str, dim: int) -> None:
    pytest.importorskip("torch")
    from benchmarks.cases.training import untuned

    chosen = Namespace(ram=30.0, train=train)
    *given, option, ram = untuned.training_options(chosen, 1_000, 500)
    with bb.create(None, dim=dim, num_rows=1_500, optimizer=bb.Adam()) as table:
        assert int(ram) == pytest.approx(0.3 * 1_500 * table.record_bytes + (1 << 20), rel=0.02)
    assert (given, option) == (train.split(), "--ram")


def test_attainable_is_between_chance_and_the_optimum(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run("-m", "benchmarks.cases.recommenders.attainable", "--tiny", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("tiny ") and 0.77 < float(last.split(": ")[1].rstrip("%")) / 100 < 1


def test_sequences_judges_every_side_alike(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run(
        "-m", "benchmarks.cases.recommenders.sequences", "--tiny", "--train", "--epochs 6", "--dir", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    found = {line[11:29].strip(): line for line in done.stdout.splitlines() if line.startswith("tiny ")}
    ndcg = {side: float(line.split("ndcg@10 ")[1].split()[0]) for side, line in found.items()}
    assert 2 * ndcg["mf"] < ndcg["sasrec"] < ndcg["planted optimum"] and ndcg["popular"] < ndcg["sasrec"]


def test_items_without_pairs_are_found_by_their_features(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run("-m", "benchmarks.cases.recommenders.cold", "--tiny", "--train", "--epochs 5", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = {
        line[9:69].strip(): float(line[69:].split()[0]) for line in done.stdout.splitlines() if "items" in line[:20]
    }
    among = "items without pairs: "
    assert found["all items: without features"] == 0 < found["all items: features"]
    assert found[among + "popularity (chance)"] < found[among + "features"] <= found[among + "true scores"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=env)


# ---- the command


def test_list_names_every_case_and_target() -> None:
    done = run("-m", "benchmarks", "--list")
    assert done.returncode == 0
    for case in suite.CASES:
        assert case.name in done.stdout and case.target in done.stdout


def test_listing_imports_no_library() -> None:
    code = "import sys; from benchmarks.harness import suite, report; assert 'torch' not in sys.modules"
    assert run("-c", code).returncode == 0


def test_what_benchmarks_import_comes_with_their_extra() -> None:
    """`make bench` installs it and nothing else; here the tests' own packages are there too and would hide a gap."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {canonicalize_name("bunkbed")}

    def add(line: str) -> None:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name == "bunkbed":
            for extra in requirement.extras:
                for other in extras["optional-dependencies"][extra]:
                    add(other)
        elif name not in known and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            known.add(name)
            for other in metadata.requires(name) or ():
                add(other)

    for line in (*extras["dependencies"], "bunkbed[bench]"):
        add(line)
    owners = metadata.packages_distributions()
    missing = {}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for module in {name.partition(".")[0] for name in names} - {"benchmarks"} - sys.stdlib_module_names:
                if not known & {canonicalize_name(owner) for owner in owners.get(module, [module])}:
                    missing[module] = path.name
    assert not missing


def test_unknown_case() -> None:
    done = run("-m", "benchmarks", "adan")
    assert done.returncode == 1
    assert "no case 'adan'; there are adam, adagrad" in done.stderr


def test_names_are_unique_and_functions_exist() -> None:
    names = [case.name for case in suite.CASES]
    assert len(set(names)) == len(names)
    for case in suite.CASES:
        module, function = case.function.split(":")
        path = (ROOT / "benchmarks" / module.replace(".", "/")).with_suffix(".py")
        assert f"def {function}(settings: Settings" in path.read_text()


def test_every_measurement_has_its_command_in_the_results() -> None:
    pages = [ROOT / "benchmarks" / "RESULTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
    results = "".join(page.read_text() for page in pages)
    missing = [case.name for case in suite.CASES if not re.search(rf"(`|benchmarks ){case.name}\b", results)]
    assert missing == []


def test_a_case_that_fails_or_hangs_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = suite.Case("huge", "cases.huge:huge", "", needs=(), limit_s=0.01)
    outcome = suite.run_case(hanging, Settings("tiny"), ["--tiny", "--dir", str(tmp_path)])
    assert outcome.failed == "ended after 0 s"
    absent = suite.Case("huge", "cases.huge:huge", "", needs=("no_such_module",))
    assert suite.run_case(absent, Settings("tiny"), []).skipped == "needs no_such_module"
    unknown = suite.Case("no-such-case", "cases.huge:huge", "", needs=())
    assert suite.run_case(unknown, Settings("tiny"), []).failed == "exit status 1"


def test_ending_the_suite_ends_its_case(tmp_path: Path) -> None:
    """A case has a process group of its own, which must not outlive the suite."""
    command = [sys.executable, "-m", "benchmarks", "huge", "--dir", str(tmp_path / "space"), "--out", str(tmp_path)]
    suite_ = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert suite_.stdout is not None
    try:
        for line in suite_.stdout:
            if line.startswith("create and close"):  # printed by the case, which now trains for seconds
                break
        children = Path(f"/proc/{suite_.pid}/task/{suite_.pid}/children").read_text().split()
        assert len(children) == 1
        suite_.terminate()
        suite_.stdout.read()  # ends when no process has it open
        assert suite_.wait(timeout=30) == 1
        assert not Path(f"/proc/{children[0]}").exists()
        assert not (tmp_path / "space").exists(), "temporary files stayed behind"
    finally:
        suite_.kill()
        suite_.stdout.close()


# ---- turns and ratios


def test_order_rotates_and_reverses() -> None:
    sides = ["a", "b", "c"]
    orders = [turns.order(sides, round_index) for round_index in range(6)]
    assert all(sorted(order) == sides for order in orders)
    firsts = [order[0] for order in orders]
    lasts = [order[-1] for order in orders]
    assert firsts.count("a") == firsts.count("b") == firsts.count("c") == 2
    assert lasts.count("a") == lasts.count("b") == lasts.count("c") == 2
    pairs = {(before, after) for order in orders for before, after in itertools.pairwise(order)}
    assert len(pairs) == 6, "each side follows each other side at some time"


def test_sides_take_the_same_batches_and_warm_up_counts_for_nothing() -> None:
    taken: dict[str, list[int]] = {"a": [], "b": []}

    def turn(name: str) -> Callable[..., list[float]]:
        def take(indices: list[int]) -> list[float]:
            taken[name] += indices
            return [len(taken[name])] * len(indices)

        return take

    times = turns.take({name: turn(name) for name in taken}, 5, rounds=3, steps=2, warmup=1)
    assert taken["a"] == taken["b"] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert times.rounds["a"] == [[4, 4], [6, 6], [8, 8]]


def test_ratios_are_taken_within_rounds() -> None:
    # Both sides slow down tenfold in the third round: the ratio does not notice.
    times = turns.Times({"bunkbed": [[1.0], [2.0], [10.0]], "peer": [[3.0], [8.0], [20.0]]})
    found = turns.ratio(times, "peer", at_least=3)
    assert (found.value, found.low, found.high, found.count) == (3, 2, 4, 3)
    assert found.reached
    assert turns.step_time(times, "peer", unit="ms").value == 8000
    assert times.fastest(["peer", "bunkbed"]) == "bunkbed"


# ---- figures and the report


def test_figures_know_whether_they_reach_their_target() -> None:
    assert Figure("f", 2.0, at_least=2).reached is True
    assert Figure("f", 1.9, at_least=2).reached is False
    assert Figure("f", 1.9, at_most=2, at_least=1).reached is True
    assert Figure("f", 2.1, at_most=2, at_least=1).reached is False
    assert Figure("f", 2.1).reached is None
    assert figures.missing("f", "why", at_least=2).reached is None
    assert Figure("f", 6.25, "x", 5.5, 7, at_least=6).line() == "f: 6.25x (5.5 to 7), wanted >= 6 x: reached"
    assert Figure("f", float(np.float64(1)), at_most=1).reached is Figure("f", np.float64(1), at_most=1).reached is True
    assert figures.judged([Figure("f", 1, at_least=2)], tiny=True)[0].target == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (1234.5, "1,234"), (123456789.0, "123,456,789"), (6.254, "6.25"), (0.00012345, "0.000123")],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert figures.number(value) == text


def test_report_is_written_and_merged(tmp_path: Path) -> None:
    first = [
        Outcome("adam", [Figure("ratio torch / bunkbed", 6.5, "x", 6, 7, 20, at_least=6)], "machine: m", "cmd", "abc"),
        Outcome("sgd", [Figure("ratio fbgemm / bunkbed", 1.2, "x", 1, 2, 20, at_least=1.8)], "machine: m"),
    ]
    report.write(tmp_path, first)
    assert report.read(tmp_path) == first
    # A later run replaces its own cases and keeps the others; one that was skipped replaces nothing.
    report.write(tmp_path, [Outcome("sgd", [Figure("ratio fbgemm / bunkbed", 2, "x", at_least=1.8)], "machine: n")])
    report.write(tmp_path, [Outcome("adam", skipped="needs torch"), Outcome("lookup", failed="exit status 1")])
    text = (tmp_path / "figures.md").read_text()
    assert "| adam | ratio torch / bunkbed | 6.5x (6 to 7) | >= 6 x | reached |" in text
    assert "| sgd | ratio fbgemm / bunkbed | 2x | >= 1.8 x | reached |" in text
    assert "| lookup | failed: exit status 1 | | | |" in text
    cases = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert [case["case"] for case in cases] == ["adam", "sgd", "lookup"]
    assert cases[0]["figures"][0]["reached"] is True


# ---- what the measurements share


def test_scatter_is_a_bijection() -> None:
    for num_rows in (1, 7, 1000, 65_536, 2_654_435_761):
        ranks = np.arange(min(num_rows, 1000))
        places = common.scatter(num_rows)(ranks)
        assert np.unique(places).size == ranks.size
        assert places.min() >= 0 and places.max() < num_rows


def test_zipf_scatters_its_ranks() -> None:
    sample, place = common.zipf(1000), common.scatter(1000)
    ids = sample(np.random.default_rng(0), 100_000)
    counts = np.bincount(ids, minlength=1000)[place(np.arange(1000))]
    assert counts[0] == counts.max() and counts[:10].min() > counts[500:].max()


def test_sequential_write_bandwidth_leaves_no_file(tmp_path: Path) -> None:
    try:
        found = common.sequential_write_bandwidth(tmp_path, num_bytes=common.MIB)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    assert found > 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("peer", ["memmap", "advised", "rocksdb", "lmdb"])
def test_peers_keep_what_they_are_given(peer: str, tmp_path: Path) -> None:
    """Each peer trains as the plain recipe in memory does, so that a ratio compares like with like."""
    pytest.importorskip({"rocksdb": "rocksdict", "lmdb": "lmdb"}.get(peer, "numpy"))
    from benchmarks.cases.disk import sides
    from benchmarks.peers import records

    class Plain(records.Records):
        def __init__(self) -> None:
            self.everything = np.concatenate([found.copy() for _, found in records.initial(500)])

        def read(self, rows: np.ndarray) -> np.ndarray:
            return self.everything[rows]

        def write(self, rows: np.ndarray, found: np.ndarray) -> None:
            self.everything[rows] = found

    sides.build(peer, tmp_path / peer, 500)
    opened = sides.peer(peer)[1](tmp_path / peer, 8 * common.MIB)
    plain = Plain()
    theirs, expected = records.Training(opened), records.Training(plain)
    rng = np.random.default_rng(0)
    for _ in range(3):
        ids = rng.integers(0, 500, 300)
        theirs.step(ids)
        expected.step(ids)
    everything = np.arange(500)
    assert opened.read(everything).tobytes() == plain.read(everything).tobytes()
    opened.close()


def test_simulators_agree_on_a_cache_that_holds_everything() -> None:
    rng = random.Random(0)
    batches = [np.array([rng.randrange(50) for _ in range(20)]) for _ in range(30)]
    everything = np.unique(np.concatenate(batches)).size
    for misses in (simulate.lru_misses(batches, 50), simulate.belady_misses(batches, 50)):
        assert misses.sum() == everything


def test_other_processes_are_noticed() -> None:
    before = common.busy_seconds()
    used, _ = os.times()[:2]
    while os.times()[0] - used < 0.2:
        pass
    assert common.busy_seconds() - before >= 0.15
    assert report.disturbed(Outcome("adam", others=0.1)) == ""
    assert report.disturbed(Outcome("adam", others=1.5)) == "; DISTURBED: other processes kept 1.5 cores busy"
