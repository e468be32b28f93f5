"""Recommendations of a trained run: for one user, for some, for all; by label, to files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pq = pytest.importorskip("pyarrow.parquet")
from pyarrow import csv  # noqa: E402

import bunkbed as bb  # noqa: E402
import bunkbed.cli  # noqa: E402
import bunkbed.train  # noqa: E402
from bunkbed.train.data.vocab import DataError, Vocab  # noqa: E402
from bunkbed.train.evaluate import score_blocks  # noqa: E402
from bunkbed.train.evaluate.recommend import best_items  # noqa: E402
from bunkbed.train.models.scorer import Scorer  # noqa: E402
from bunkbed.train.trained import Recommender, read_histories, read_labels  # noqa: E402

NUM_USERS, NUM_ITEMS, DIM = 23, 57, 4


class Rows:
    """A table in a NumPy array."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def lookup(self, ids: Any, *, touch: bool = True) -> Any:
        return self.rows[ids]


def main(arguments: list[str]) -> Any:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        bunkbed.cli.main(arguments)
    return ended.value.code


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, reads and groups although there are few users."""
    monkeypatch.setattr(score_blocks, "BLOCK_USERS", 3)
    monkeypatch.setattr(score_blocks, "BLOCK_ITEMS", 8)
    monkeypatch.setattr(score_blocks, "_QUERY_NUMBERS", 2 * 3 * DIM)
    monkeypatch.setattr(score_blocks, "_READ_NUMBERS", 2 * 8 * DIM)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("k", [1, 7, 57, 80])
@pytest.mark.parametrize("allowed", [None, 20])
@pytest.mark.usefixtures("small_blocks", "native_defaults")
def test_the_best_are_the_first_of_all_sorted_scores(threads: int, k: int, allowed: int | None) -> None:
    bb.set_num_threads(threads)
    rng = np.random.default_rng(0)
    # Whole numbers: many scores are equal, and products are exact.
    rows = [rng.integers(-2, 3, (count, DIM)).astype(np.float32) for count in (NUM_USERS, NUM_ITEMS)]
    bias = rng.integers(-1, 2, (NUM_ITEMS, 1)).astype(np.float32)
    scorer = Scorer(Rows(rows[0]), Rows(rows[1]), item_bias=Rows(bias))
    users = rng.permutation(NUM_USERS)[:17]
    items = None if allowed is None else np.sort(rng.permutation(NUM_ITEMS)[:allowed])
    seen = rng.random((NUM_USERS, NUM_ITEMS)) < 0.2
    seen[users[3]] = True  # one has everything

    def known(asked: Any) -> Any:
        owners, theirs = np.nonzero(seen[asked])
        return asked[owners], theirs

    shares: list[float] = []
    found = list(
        best_items(
            scorer,
            users,
            k,
            num_users=NUM_USERS,
            num_items=NUM_ITEMS,
            known=known,
            items=items,
            on_progress=shares.append,
        )
    )
    assert len(found) > 1 and shares == sorted(shares) and shares[-1] == 1.0
    assert np.array_equal(np.concatenate([best.users for best in found]), users)
    scores = rows[0] @ rows[1].T + bias[:, 0]
    scores[seen] = -np.inf
    every = np.arange(NUM_ITEMS) if items is None else items
    for best in found:
        for user, theirs, values in zip(best.users, best.items, best.scores, strict=True):
            order = [item for item in every[np.argsort(-scores[user, every], kind="stable")] if not seen[user, item]]
            expected = order[:k]
            assert theirs.tolist() == expected + [-1] * (len(theirs) - len(expected))
            assert values.tolist() == [*scores[user, expected], *[-np.inf] * (len(theirs) - len(expected))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of 40 users (u0...) and 30 items (i0...); every user has 6 pairs."""
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(1)
    lines = [f"u{user},i{item}" for user in range(40) for item in rng.permutation(30)[:6]]
    (folder / "ratings.csv").write_text("user,item\n" + "\n".join(lines) + "\n")
    assert (
        main(["train", str(folder / "ratings.csv"), "--out", str(folder / "run"), "--epochs", "2", "--dim", "4"]) == 0
    )
    return folder / "run"


def pairs_of(run: Path) -> set[tuple[str, str]]:
    lines = (run.parent / "ratings.csv").read_text().splitlines()[1:]
    return {tuple(line.split(",")) for line in lines}  # type: ignore[misc]


def test_everyone_gets_what_each_would_get_alone(run: Path, tmp_path: Path) -> None:
    with bunkbed.train.Recommender.load(run) as model:
        assert isinstance(model, Recommender)
        count = model.write(tmp_path / "top.parquet", k=5)
        table = pq.read_table(tmp_path / "top.parquet")
        assert count == table.num_rows == 40 * 5
        assert table.column_names == ["user", "rank", "item", "score"]
        seen = pairs_of(run)
        rows = table.to_pylist()
        for number in range(40):
            own = rows[number * 5 : number * 5 + 5]
            assert {row["user"] for row in own} == {own[0]["user"]}
            assert [row["rank"] for row in own] == [1, 2, 3, 4, 5]
            # The same bits, alone or with others.
            assert [(row["item"], row["score"]) for row in own] == model.recommend(own[0]["user"], 5)
            assert not {(row["user"], row["item"]) for row in own} & seen
        everything = model.recommend("u7", 100, include_seen=True)
        assert len(everything) == 30 and len(model.recommend("u7", 100)) == 24
        assert everything[:3] == model.recommend("u7", 3, include_seen=True)
        few = model.recommend("u7", 2, items=["i3", "i1", "i2"], include_seen=True)
        assert [item for item, _ in few] == [item for item, _ in everything if item in ("i1", "i2", "i3")][:2]
        with pytest.raises(DataError, match="user 'u70' is not among the 40 known; the nearest are u7"):
            model.recommend("u70")
        with pytest.raises(DataError, match="item 'i33' is not among the 30 known; the nearest are i3"):
            model.recommend("u7", items=["i3", "i33"])
        with pytest.raises(ValueError, match="k must be at least 1, got 0"):
            model.recommend("u7", 0, items=["i1"])


def test_everyone_without_pandas(run: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "import sys\n"
        "tried = set()\n"
        "class Watch:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        tried.add(name)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from bunkbed.train import Recommender\n"
        "with Recommender.load(sys.argv[1]) as model:\n"
        "    model.write(sys.argv[2])\n"
        "assert 'pandas' not in tried, 'it takes 0.4 s to import, and nothing here needs it'\n"
    )
    arguments = [sys.executable, "-c", program, str(run), str(tmp_path / "top.parquet")]
    subprocess.run(arguments, check=True, capture_output=True, timeout=120)


def test_users_and_items_of_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "users.txt").write_text("u9\n\nu3\nu31\n")
    (tmp_path / "items.txt").write_text("i5\ni2\ni9\n")
    files = ["--users", str(tmp_path / "users.txt"), "--items", str(tmp_path / "items.txt"), "--include-seen"]
    out = tmp_path / "top.csv"
    assert main(["recommend", str(run), *files, "-k", "2", "--out", str(out)]) == 0
    assert f"wrote 6 recommendations to {out}" in " ".join(capsys.readouterr().out.split())
    rows = csv.read_csv(out).to_pylist()
    assert [row["user"] for row in rows] == ["u9", "u9", "u3", "u3", "u31", "u31"]
    assert {row["item"] for row in rows} <= {"i5", "i2", "i9"}
    with Recommender.load(run) as model:
        for user in ("u9", "u3", "u31"):
            best = model.recommend(user, 2, items=["i5", "i2", "i9"], include_seen=True)
            assert [row["item"] for row in rows if row["user"] == user] == [item for item, _ in best]
    assert main(["recommend", str(run), "--all", "--out", str(tmp_path / "all.parquet"), "--json"]) == 0
    assert '"rows":400' in capsys.readouterr().out.replace(" ", "")


def test_bad_calls_write_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.parquet"
    there.write_bytes(b"mine")
    (tmp_path / "users.txt").write_text("u1\nu99\n")
    out = str(tmp_path / "new.parquet")
    for arguments, message in (
        (["--all", "--out", str(there)], "exists and would be overwritten"),
        (["--all", "--out", str(tmp_path / "new.txt")], "must end in .parquet or .csv"),
        (["--all"], "--out FILE goes with --users, --history and --all"),
        (["--user", "u1", "--out", out], "--out FILE goes with --users, --history and --all"),
        (["--all", "--out", out, "--item-col", "1"], "--user-col and --item-col are of --history FILE"),
        (["--user", "u1", "--all"], "give one of --user ID, --users FILE, --history FILE and --all"),
        ([], "give one of --user ID"),
        (["--users", str(tmp_path / "users.txt"), "--out", out], "users.txt, line 2: user 'u99' is not among the 40"),
        (["--users", str(tmp_path / "none.txt"), "--out", out], "none.txt"),
    ):
        assert main(["recommend", str(run), *arguments]) != 0
        assert message in " ".join(capsys.readouterr().err.split()), arguments
    assert there.read_bytes() == b"mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["there.parquet", "users.txt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no user; write one a line"),
        ("a\n b \nx\n", "line 3: user 'x' is not among the 2 known"),
        ("a\n\nb\na\n", "line 4: user 'a' is there a second time"),
    ],
)
def test_labels_of_a_file_that_are_wrong_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "users.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read_labels(tmp_path / "users.txt", Vocab.of(["a", "b"]), "user")


def test_a_failure_leaves_no_file(run: Path, tmp_path: Path) -> None:
    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with Recommender.load(run) as model, pytest.raises(KeyboardInterrupt):
        model.write(tmp_path / "top.parquet", on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_given_candidates(tmp_path: Path) -> None:
    pairs = [(f"u{user}", f"i{item}") for user in range(6) for item in (user, user + 1, user + 2)]
    (tmp_path / "a.csv").write_text("user,item\n" + "".join(f"{user},{item}\n" for user, item in pairs))
    given = "".join(f"(u{user},i{user + 3})\ti{user + 4}\ti0\n" for user in range(1, 4))
    (tmp_path / "negatives.tsv").write_text(given)
    command = ["train", str(tmp_path / "a.csv"), "--test-negatives", str(tmp_path / "negatives.tsv"), "--dim", "4"]
    assert main([*command, "--epochs", "1", "--valid", "none", "--out", str(tmp_path / "run")]) == 0
    (tmp_path / "new.csv").write_text("user,item\nnew,i1\nnew,i3\n")
    out = str(tmp_path / "all.csv")
    assert main(["recommend", str(tmp_path / "run"), "--all", "-k", "2", "--out", out]) == 0
    rows = [(row["user"], row["item"]) for row in csv.read_csv(out).to_pylist()]
    assert len(rows) == 12 and not set(rows) & set(pairs)
    out = str(tmp_path / "new-top.csv")
    command = ["recommend", str(tmp_path / "run"), "--history", str(tmp_path / "new.csv"), "-k", "2", "--out", out]
    assert main(command) == 0
    assert csv.read_csv(out).num_rows == 2


def history_of(run: Path, users: list[str], path: Path) -> Path:
    """The pairs of some users of the run, as of new ones."""
    rows = [f"new-{user},{item}\n" for user, item in sorted(pairs_of(run)) if user in users]
    path.write_text("user,item\n" + "".join(rows))
    return path


def test_new_users_get_rows_of_their_own(run: Path, tmp_path: Path) -> None:
    history = history_of(run, ["u1", "u2", "u3"], tmp_path / "history.csv")
    with history.open("a") as file:
        file.write("new-u1,unheard\nnone,unheard\n")
    with Recommender.load(run) as model:
        found = read_histories(history, model.items)
        assert (found.unknown, found.without, found.pairs.num_users) == (2, 1, 3)
        tables = [
            next(model.recommend_many(5, histories=found.pairs)).to_pydict(),
            next(model.recommend_many(5, histories=found.pairs)).to_pydict(),
        ]
        assert tables[0] == tables[1] and len(tables[0]["user"]) == 15
        own = pairs_of(run)
        for user, item in zip(tables[0]["user"], tables[0]["item"], strict=True):
            assert (user.removeprefix("new-"), item) not in own
        seen = next(model.recommend_many(30, histories=found.pairs, include_seen=True)).to_pydict()
        assert len(seen["user"]) == 90
        before = model.recommend("u1", 5)
    with Recommender.load(run) as model:
        assert model.recommend("u1", 5) == before  # the run is as it was


@pytest.mark.parametrize("options", [[], ["--loss", "softmax", "--sampling", "popularity", "--bias"]])
@pytest.mark.parametrize("model", ["mf", "gmf", "neumf", "two-tower"])
@pytest.mark.parametrize("shared", [[], ["--share-negatives", "--negatives", "8"]])
def test_histories_are_learned(model: str, shared: list[str], options: list[str], tmp_path: Path) -> None:
    """Two groups of users and items: who has items of a group is recommended the rest of that group."""
    rng = np.random.default_rng(0)
    pairs = [(f"u{user}", f"i{20 * (user % 2) + item}") for user in range(60) for item in rng.permutation(20)[:12]]
    text = "user,item\n" + "".join(f"{user},{item}\n" for user, item in pairs)
    (tmp_path / "a.csv").write_text(text)
    command = ["train", str(tmp_path / "a.csv"), "--model", model, "--dim", "8", "--epochs", "12", "--lr", "0.03"]
    command += ["--batch-size", "64", "--valid", "none", "--out", str(tmp_path / "run"), *shared, *options]
    assert main(command) == 0
    new = [f"{name},i{20 * group + item}\n" for group, name in enumerate(("a", "b")) for item in range(10)]
    (tmp_path / "new.csv").write_text("user,item\n" + "".join(new))
    with Recommender.load(tmp_path / "run") as trained:
        found = read_histories(tmp_path / "new.csv", trained.items)
        rows = next(trained.recommend_many(8, histories=found.pairs)).to_pydict()
    right = [
        int(item[1:]) // 20 == ("a", "b").index(user) for user, item in zip(rows["user"], rows["item"], strict=True)
    ]
    assert sum(right) >= 14, rows


def test_history_on_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = history_of(run, ["u1", "u2"], tmp_path / "history.csv")
    with history.open("a") as file:
        file.write("new-u1,unheard\n")
    out = str(tmp_path / "new.csv")
    assert main(["recommend", str(run), "--history", str(history), "-k", "3", "--out", out]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "wrote 6 recommendations" in shown and "left out: 1 pairs with items that the run does not know" in shown
    history.write_text("liked,who,player\n5,a,i1\n5,a,i2\n")
    columns = ["--user-col", "who", "--item-col", "player"]
    named = str(tmp_path / "named.csv")
    assert main(["recommend", str(run), "--history", str(history), *columns, "-k", "3", "--out", named]) == 0
    assert csv.read_csv(named)["user"].to_pylist() == ["a"] * 3
    history.write_text("user,item\na,unheard\n")
    assert main(["recommend", str(run), "--history", str(history), "--out", str(tmp_path / "again.csv")]) == 1
    assert "none of its 1 items is known to the run" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "again.csv").exists()
