"""Baselines: their scores by hand, judged exactly as the run, stored, and shown by `compare` and the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import torch

from bunkbed.train.data.interactions import Interactions, Vocab
from bunkbed.train.evaluate import baselines
from bunkbed.train.evaluate.baselines import BASELINES, Kind, LeftOut, als, baselines_of, item_item, popular
from bunkbed.train.evaluate.comparison import summarize_run
from bunkbed.train.evaluate.results import load_baselines
from bunkbed.train.models.scorer import Scorer, scorer_of_run
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.trained import open_trained
from report_setup import Page

Run = Callable[..., tuple[int, str, str]]
CONFIG = TrainConfig()
SMALL = ("--dim", "8", "--epochs", "2", "--threads", "1", "--batch-size", "256", "--negatives", "2", "--lr", "0.02")


def interactions(users: Any, items: Any, num_users: int, num_items: int) -> Interactions:
    import pyarrow as pa

    vocabs = (Vocab(pa.array(range(count))) for count in (num_users, num_items))
    return Interactions(np.asarray(users, np.int64), np.asarray(items, np.int64), *vocabs)


def scores_of(scorer: Scorer, pairs: Interactions) -> np.ndarray:
    """Scores of all users and items; those of pairs are the same."""
    users, items = np.arange(pairs.num_users), np.arange(pairs.num_items)
    queries, out = scorer.queries(users), torch.empty(len(users), len(items))
    scorer.all_scores(queries, scorer.vectors(items), scorer.biases(items), out)
    np.testing.assert_allclose(scorer.pair_scores(queries, np.tile(items, (len(users), 1))), out, rtol=1e-6, atol=1e-6)
    for item in items[:3]:
        one, _ = scorer.scores_and_magnitudes(queries, np.full(len(users), item))
        np.testing.assert_allclose(one, out[:, item], rtol=1e-6, atol=1e-6)
    return out.numpy()


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    """Users of two kinds, who like the items of their half, at times in the order of the file."""
    rng = np.random.default_rng(0)
    users = rng.integers(0, 100, 3_000)
    items = np.minimum(rng.geometric(0.06, 3_000), 49) + 50 * (users % 2)
    lines = (f"u{user},i{item},{at}\n" for at, (user, item) in enumerate(zip(users, items, strict=True)))
    (tmp_path / "ratings.csv").write_text("user,item,time\n" + "".join(lines))
    held = "".join(f"u{n},i{50 * (n % 2) + at}\n" for n in range(40) for at in (2, 9))
    (tmp_path / "test.csv").write_text("user,item\n" + held)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where implicit is not installed."""
    monkeypatch.setitem(sys.modules, "implicit.als", None)


def test_popular_counts_the_pairs() -> None:
    pairs = interactions([0, 1, 2, 0, 1], [3, 3, 3, 1, 0], 4, 5)
    assert scores_of(popular(pairs, CONFIG), pairs).tolist() == [[1, 1, 0, 3, 0]] * 4


def test_neighbors_by_hand() -> None:
    # Item 0 has users {0, 1}, item 1 {0, 1, 2, 3}, item 2 {3}, item 3 none.
    pairs = interactions([0, 1, 0, 1, 2, 3, 3], [0, 0, 1, 1, 1, 1, 2], 5, 4)
    near, far = 2 / np.sqrt(2 * 4), 1 / np.sqrt(4 * 1)
    expected = [[near, near, far, 0]] * 2 + [[near, 0, far, 0], [near, far, far, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(scores_of(item_item(pairs, CONFIG), pairs), expected, rtol=1e-6)


@pytest.mark.parametrize("kept", [3, 100])
def test_neighbors_are_those_of_a_brute_force(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    matrix = rng.random((40, 30)) < np.linspace(0.02, 0.6, 30)
    pairs = interactions(*np.nonzero(matrix), *matrix.shape)
    sizes = matrix.sum(0)
    cosines = matrix.T.astype(float) @ matrix / np.sqrt(np.maximum(np.outer(sizes, sizes), 1))
    np.fill_diagonal(cosines, 0)
    for row in cosines:
        row[np.argsort(-row, kind="stable")[kept:]] = 0  # the neighbours of the item that is scored
    expected = matrix @ cosines.T
    monkeypatch.setattr(baselines, "_NEIGHBORS", kept)
    for numbers in (70, 1 << 22):  # in blocks of two items, and their users in parts
        monkeypatch.setattr(baselines, "_NUMBERS", numbers)
        np.testing.assert_allclose(scores_of(item_item(pairs, CONFIG), pairs), expected, rtol=1e-5)


def test_als_is_that_of_implicit(ratings: Path, cli: Run) -> None:
    implicit = pytest.importorskip("implicit.als")
    from scipy.sparse import csr_matrix
    from threadpoolctl import threadpool_limits

    rng = np.random.default_rng(2)
    matrix = rng.random((40, 30)) < 0.3
    pairs = interactions(*np.nonzero(matrix), *matrix.shape)
    config = TrainConfig(seed=5)
    with threadpool_limits(1, "blas"):
        model = implicit.AlternatingLeastSquares(random_state=5)
        model.fit(csr_matrix(matrix.astype(np.float32)), show_progress=False)
    expected = model.user_factors @ model.item_factors.T
    np.testing.assert_allclose(scores_of(als(pairs, config), pairs), expected, atol=1e-3)

    assert cli("train", "ratings.csv", "--test", "test.csv", *SMALL, "--out", "a")[0] == 0
    found = json.loads(cli("compare", "a", "--baselines", "--json")[1])
    of_test = {one["name"]: one["test"]["metrics"]["ndcg@10"] for one in found["baselines"]}
    assert list(of_test) == ["popular", "item-item", "als"] and not found["left_out"]
    assert of_test["als"] > of_test["popular"]


def test_ranks_by_hand_without_seen_items(cli: Run, tmp_path: Path, quick: None) -> None:
    # By popularity: a (4), b (3), c (2), d (1). User 1 has seen a and b, user 4 only d.
    pairs = ["1,a", "2,a", "3,a", "5,a", "1,b", "2,b", "3,b", "2,c", "3,c", "4,d"]
    (tmp_path / "train.csv").write_text("user,item\n" + "".join(f"{pair}\n" for pair in pairs))
    (tmp_path / "test.csv").write_text("user,item\n1,c\n4,b\n")
    options = ("--valid", "none", "--ks", "1,2", "--metric", "hr@1")
    assert cli("train", "train.csv", "--test", "test.csv", *SMALL, *options, "--out", "a")[0] == 0
    code, out, err = cli("compare", "a", "--baselines", "--json")
    assert (code, err) == (0, "")
    popular, near = json.loads(out)["baselines"]
    assert popular["validation"] is None
    assert popular["test"]["metrics"] == {
        **{"hr@1": 0.5, "ndcg@1": 0.5, "recall@1": 0.5, "hr@2": 1.0, "recall@2": 1.0},
        **{"ndcg@2": pytest.approx(0.5 + 0.5 / np.log2(3)), "mrr": 0.75},
    }
    # User 1: c is near a and b, d is not. User 4: a, b, c have no user in common with d, and ties count against b.
    assert near["test"]["metrics"]["hr@1"] == 0.5 and near["test"]["metrics"]["mrr"] == (1 + 1 / 3) / 2
    code, out, _ = cli("compare", "a", "--baselines")
    rows = {row.split()[0]: row.split() for row in out.splitlines()}
    assert rows["popular"][4] == "0.5000"  # of the test: there is no validation


@pytest.mark.parametrize(
    "options",
    [
        ("--test", "test.csv"),
        ("--test", "test.csv", "--ranking", "sampled", "--eval-negatives", "20", "--eval-users", "30"),
        ("--time-col", "time", "--split", "time:0.9", "--ks", "5,10"),
        ("--test", "test.csv", "--stream", "--eval-users", "30", "--ram", "256MiB"),
    ],
    ids=["test", "sampled", "by time", "stream"],
)
def test_the_scores_of_the_run_have_the_figures_of_the_run(
    options: tuple[str, ...], cli: Run, ratings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("train", "ratings.csv", *options, *SMALL, "--out", "a")[0] == 0
    with open_trained("a", "64MiB") as run:

        def fit(pairs: Interactions, config: TrainConfig) -> Scorer:
            return scorer_of_run(run, config)

        monkeypatch.setattr(baselines, "BASELINES", {"itself": Kind("", lambda *sizes: 0, fit)})
        (found,), left_out = baselines_of([Path("a")])
    summary = summarize_run(Path("a"))
    assert found.validation is not None and found.test is not None and not left_out
    assert found.best == summary.best and found.test == summary.test


def test_trained_pairs_are_those_of_the_run(cli: Run, ratings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the validation, also for the test."""
    seen = []

    def fit(pairs: Interactions, config: TrainConfig) -> Scorer:
        seen.append(len(pairs))
        return popular(pairs, config)

    assert cli("train", "ratings.csv", "--test", "test.csv", *SMALL, "--out", "a")[0] == 0
    monkeypatch.setattr(baselines, "BASELINES", {"popular": Kind("", lambda *sizes: 0, fit)})
    baselines_of([Path("a")])
    assert seen == [summarize_run(Path("a")).data[2] - 100]


def test_figures_are_stored_until_they_are_stale(
    cli: Run, ratings: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    assert cli("train", "ratings.csv", "--test", "test.csv", *SMALL, "--out", "a")[0] == 0
    before = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    code, out, err = cli("compare", "a", "--baselines")
    assert (
        code == 0 and err == "note als is left out: needs the package implicit; install it with: pip install implicit\n"
    )
    assert "seconds" in out.splitlines()[0]
    rows = [row.split() for row in out.splitlines()[1:]]
    assert {row[0] for row in rows} == {"a", "item-item", "popular"}
    values = [float(row[4]) for row in rows]
    assert values == sorted(values, reverse=True)
    after = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {Path("a/baselines.json")}
    assert all(after[path] == before[path] for path in before)

    def refuse(*arguments: Any) -> Scorer:
        raise LeftOut("computed again")

    for name in BASELINES:
        monkeypatch.setitem(BASELINES, name, BASELINES[name]._replace(fit=refuse))
    again = json.loads(cli("compare", "a", "--baselines", "--json")[1])
    assert [one["name"] for one in again["baselines"]] == ["popular", "item-item"]
    assert again["left_out"] == {"als": "computed again"}  # it may be installed now
    assert "baselines" not in json.loads(cli("compare", "a", "--json")[1])
    assert cli("report", "a")[0] == 0
    page = Page(Path("a/report.html").read_text())
    shown = page.sections["baselines"]
    assert all(f"{one['test']['metrics']['ndcg@10']:.4f} {one['about']}" in shown for one in again["baselines"])
    assert f"ndcg@10 on the test ({again['baselines'][0]['test']['ranking']})" in shown
    assert shown.count("this run") == 2 + 1  # its title, bar and row

    for change in ({"seed": 9}, {"data": {}}):
        stored = json.loads(after[Path("a/baselines.json")])
        stored["judged_by"] |= change
        Path("a/baselines.json").write_text(json.dumps(stored))
        assert cli("report", "a", "--overwrite")[0] == 0
        page = Page(Path("a/report.html").read_text())
        assert ("baselines" in page.sections) == ("data" in change)  # the data of a run never change
        found = json.loads(cli("compare", "a", "--baselines", "--json")[1])
        assert not found["baselines"] and found["left_out"].keys() == BASELINES.keys()
    Path("a/baselines.json").write_bytes(after[Path("a/baselines.json")])
    options = {name: json.loads(after[Path("a/baselines.json")])["judged_by"][name] for name in ("seed", "stream")}
    assert load_baselines(Path("a"), judged_by=options, cutoffs=(10, 20))
    assert not load_baselines(Path("a"), judged_by=options, cutoffs=(10, 30))
    Path("a/baselines.json").write_text("{")
    code, _, err = cli("compare", "a", "--baselines")
    assert code == 1 and "a/baselines.json: is damaged" in err and "remove it" in err


def test_two_runs_have_one_row_for_each_baseline(cli: Run, ratings: Path, quick: None) -> None:
    for name, more in (("a", ("--ks", "10")), ("b", ("--l2", "0.01", "--ks", "5,10"))):
        assert cli("train", "ratings.csv", *SMALL, *more, "--out", name)[0] == 0
    code, out, _ = cli("compare", "a", "b", "--baselines")
    assert code == 0
    assert sorted(row.split()[0] for row in out.splitlines()[1:]) == ["a", "b", "item-item", "popular"]
    stored = [json.loads(Path(name, "baselines.json").read_text()) for name in "ab"]
    assert stored[0] == stored[1]
    assert {"hr@5", "hr@10"} < stored[0]["baselines"][0]["validation"]["metrics"].keys()
    assert stored[0]["baselines"][0]["test"] is None


def test_runs_that_are_judged_otherwise_are_refused(cli: Run, ratings: Path, quick: None) -> None:
    text = Path("ratings.csv").read_text()
    Path("other.csv").write_text(text.replace("u7,i51,", "u7,i52,").replace("u8,i1,", "u8,i2,"))
    for name, source, more in (
        ("a", "ratings.csv", ()),
        ("seed", "ratings.csv", ("--seed", "1")),
        ("other", "other.csv", ()),
        ("none", "ratings.csv", ("--valid", "none")),
    ):
        assert cli("train", source, *SMALL, *more, "--out", name)[0] == 0
    code, _, err = cli("compare", "a", "seed", "--baselines")
    assert code == 1 and "seed was judged otherwise than a: option seed is 1, and of a 0" in err
    code, _, err = cli("compare", "a", "other", "--baselines")
    assert code == 1 and "other has other pairs of users and items than a" in err
    code, _, err = cli("compare", "none", "--baselines")
    assert code == 1 and "none: has nothing to judge by" in err
    assert not list(Path().glob("*/baselines.json"))
    code, _, err = cli("compare", "a", "--ram", "1MiB")
    assert code == 2 and "--ram goes with --baselines" in err
    code, out, err = cli("compare", "a", "--baselines", "--ram", "64MiB")
    assert code == 0 and "item-item is left out: takes about 9" in err and "popular" in out
    code, out, err = cli("compare", "a", "--baselines")
    assert code == 0 and "item-item" in out and "item-item" not in err
