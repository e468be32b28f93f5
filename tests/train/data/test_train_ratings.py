"""Ratings as weights of the loss, or as a threshold: read, stored and trained with, from memory and disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
import pyarrow.parquet as pq  # noqa: E402

import bunkbed as bb  # noqa: E402
from bunkbed.train.data import interactions as data_module  # noqa: E402
from bunkbed.train.data.interactions import DataError, Dataset, Interactions, read_dataset  # noqa: E402
from bunkbed.train.data.prepare import prepare_dataset  # noqa: E402
from bunkbed.train.data.sampling import BatchSource  # noqa: E402
from bunkbed.train.data.splits import split as split_pairs  # noqa: E402
from bunkbed.train.data.store import load_dataset, save_dataset  # noqa: E402
from bunkbed.train.data.stream import open_split  # noqa: E402
from bunkbed.train.loop import Trainer  # noqa: E402
from bunkbed.train.settings.config import TrainConfig  # noqa: E402

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data is not at {DATA}")

Run = Callable[..., tuple[int, str, str]]
#: User, item, rating, time; the pair of ann and i1 is there twice.
ROWS = [
    ("ann", "i1", "4.5", 3),
    ("ann", "i2", "0", 1),
    ("bob", "i1", "3", 2),
    ("bob", "i3", "0.000000001", 4),
    ("ann", "i1", "1", 0),
    ("bob", "i2", "5e0", 5),
    ("cid", "i2", "2.25", 6),
]
SMALL = ("--dim", "8", "--ram", "256MiB", "--threads", "1", "--batch-size", "64", "--epochs", "2")


def write(path: Path, rows: Any = ROWS) -> Path:
    path.write_text("user,item,rating,at\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    return path


def pairs_of(part: Interactions | None) -> list[tuple[Any, Any]]:
    assert part is not None
    return list(zip(part.user_vocab.decode(part.users), part.item_vocab.decode(part.items), strict=True))


def both(tmp_path: Path, path: Path, **options: Any) -> list[Dataset]:
    """Read in memory, and prepare on disk."""
    return [read_dataset(path, **options), prepare_dataset(tmp_path / "stored", path, ram_bytes=64 << 20, **options)]


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("split", ["random", "last"])
@pytest.mark.parametrize("form", ["a.csv", "blanks.txt", "a.parquet"])
def test_weights_are_ratings_over_their_mean(form: str, split: str, by_time: bool, tmp_path: Path) -> None:
    path = write(tmp_path / form)
    if form == "blanks.txt":
        path.write_text(path.read_text().replace(",", "   "))
    if form == "a.parquet":
        users, items, ratings, times = zip(*ROWS, strict=True)
        columns = {"user": users, "item": items, "rating": [float(rating) for rating in ratings], "at": times}
        pq.write_table(pa.table(columns), path)
    rated: dict[tuple[str, str], Fraction] = {}
    for user, item, rating, _ in sorted(ROWS, key=lambda row: row[3]) if by_time else ROWS:
        rated.setdefault((user, item), Fraction(rating))
    last = dict(rated.keys())
    held = (
        {pair for pair in last.items() if sum(user == pair[0] for user, _ in rated) > 1} if split == "last" else set()
    )
    train = {pair: rating for pair, rating in rated.items() if pair not in held}
    mean = sum(train.values()) / len(train)
    for data in both(tmp_path, path, rating_col="rating", time_col="at" if by_time else None, split=split):
        assert pairs_of(data.train) == list(train)
        assert data.train.weights is not None and data.train.weights.dtype == np.float32 and data.train.is_weighted
        np.testing.assert_allclose(data.train.weights, [float(rating / mean) for rating in train.values()], rtol=1e-7)
        assert data.train.form.startswith(
            f"{'Parquet' if form == 'a.parquet' else 'CSV' if form == 'a.csv' else 'blank'}"
        )
        assert "ratings from column 'rating'" in data.train.form and ", as weights" in data.train.form
        assert data.train.low_ratings == 0
        if held:
            assert set(pairs_of(data.test)) == held and data.test is not None and data.test.weights is None
    memory, stored = both(tmp_path / "again", path, rating_col="rating")
    assert memory.train.weights.tobytes() == stored.train.weights.tobytes()  # type: ignore[union-attr]


def test_a_threshold_leaves_out_rows_before_all_else(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv")
    options: dict[str, Any] = {"rating_col": "rating", "time_col": "at", "min_rating": 2.25}
    for data in both(tmp_path, path, split="last", **options):
        assert (pairs_of(data.train), pairs_of(data.test)) == (
            [("bob", "i1"), ("ann", "i1"), ("cid", "i2")],
            [("bob", "i2")],
        )
        assert data.train.weights is None and not data.train.is_weighted
        assert (data.train.low_ratings, data.train.duplicates) == (3, 0)
        assert data.train.form.endswith("ratings from column 'rating', times from column 'at', of at least 2.25")
    # The test file is of what users like, too.
    write(tmp_path / "b.csv", [("ann", "i9", "1", "never"), ("bob", "i9", "4", "never")])
    for data in both(tmp_path, path, test=tmp_path / "b.csv", **options):
        assert pairs_of(data.test) == [("bob", "i9")] and data.test is not None and data.test.low_ratings == 1
    low = write(tmp_path / "low.csv", [("ann", "i1", "-2", 1), ("ann", "i2", "-1.5", 1)])
    assert pairs_of(read_dataset(low, rating_col="rating", min_rating=-1.5).train) == [("ann", "i2")]


@pytest.mark.parametrize(
    ("ratings", "options", "message"),
    [
        (["4", "good"], {}, "line 3: the rating is not a number (found 'good'); correct or drop such rows, or give "),
        (["4", ""], {}, "line 3: the rating is not a number (found '')"),
        (["nan"], {}, "line 2: the rating is not a number (found 'nan')"),
        (["1", "2", "inf"], {"min_rating": 1}, "line 4: the rating is not a number (found 'inf')"),
        (
            ["0", "-1", "-2"],
            {},
            "line 3: the rating is below 0, which no weight is; --min-rating X selects rows instead",
        ),
        (["0", "0.0"], {}, "no pair for training has a rating above 0; leave out --rating-col"),
        (["1", "2.5"], {"min_rating": 3}, "no rating is 3 or more, the highest is 2.5; give a lower --min-rating"),
        (["1"], {"min_rating": float("nan")}, "option min_rating must be a finite number, got nan"),
        (["1"], {"min_rating": 3, "rating_col": None}, "option min_rating=3 needs ratings: give the column that holds"),
        (["1"], {"rating_col": "stars"}, "has no column 'stars'; it has: user, item, rating, at"),
        (
            ["1"],
            {"rating_col": 3, "time_col": 3},
            "column 'at' cannot hold both the ratings and the times; give another",
        ),
    ],
)
def test_bad_ratings_are_named(ratings: list[str], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [(f"u{at}", f"i{at}", rating, at) for at, rating in enumerate(ratings)])
    options = {"rating_col": "rating", **options}
    said = []
    for read in (read_dataset, lambda *args, **more: prepare_dataset(tmp_path / "d", *args, ram_bytes=1, **more)):
        with pytest.raises(DataError) as error:
            read(path, **options)
        said.append(str(error.value))
    assert message in said[0] and said[0] == said[1]
    assert not (tmp_path / "d" / "dataset.json").exists()


def rated(seed: int, path: Path, ratings: Callable[[Any], Any]) -> Path:
    rng = np.random.default_rng(seed)
    users, items = (60 * rng.random(900) ** 2).astype(int), rng.integers(0, 80, 900)
    rows = zip(users.tolist(), items.tolist(), ratings(rng).tolist(), rng.integers(0, 99, 900).tolist(), strict=True)
    return write(path, rows)


CONFIGS = {
    "own": TrainConfig(dim=4, batch_size=100, epochs=2, negatives=3, lr=0.02, ram="256MiB", threads=1, eval_users=20),
    "shared": TrainConfig(
        dim=4, batch_size=100, epochs=2, negatives=20, share_negatives=True, hardness=1.0, lr=0.02, ram="256MiB",
        threads=1, eval_users=20, order="blocks:3x2",
    ),
    "neumf": TrainConfig(
        model="neumf", loss="bce", dim=4, batch_size=100, epochs=2, lr=0.02, ram="256MiB", threads=1, eval_users=20,
        valid="time:0.9",
    ),
    "softmax": TrainConfig(
        model="two-tower", loss="softmax", sampling="popularity", dim=4, batch_size=100, epochs=2, negatives=20,
        share_negatives=True, ram="256MiB", threads=1, eval_users=20, bias=True,
    ),
}  # fmt: skip


def trained(
    path: Path, config: TrainConfig, data: Dataset, stop_after: int = 0
) -> tuple[list[float], dict[str, bytes]]:
    """Losses and rows of a run, stopped after some steps or not."""
    with bb.Run(path, ram=config.table_ram_bytes) as run:
        trainer = Trainer(config, data, run)
        step = trainer.optimizer.step

        def stop(*args: Any) -> None:
            step(*args)
            if len(trainer.losses) + 1 == stop_after:
                trainer.request_stop()

        trainer.optimizer.step = stop  # type: ignore[method-assign]
        trainer.fit()
        ids = {name: np.arange(table.num_rows) for name, table in run.tables.items()}
        return trainer.losses, {name: table.lookup(ids[name]).tobytes() for name, table in run.tables.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_train_the_same_bits_from_disk_and_resumed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "_BATCH_PAIRS", 100)
    path = rated(0, tmp_path / "a.csv", lambda rng: rng.integers(0, 6, 900))
    config = CONFIGS[name]
    memory, stored = both(tmp_path, path, rating_col="rating", time_col="at")
    losses, rows = trained(tmp_path / "memory", config, memory)
    first, _ = trained(tmp_path / "disk", replace(config, stream=True), stored, stop_after=5)
    save_dataset(tmp_path / "data", memory)
    rest, found = trained(tmp_path / "disk", config, load_dataset(tmp_path / "data"))
    assert (first + rest, found) == (losses, rows) and len(first) == 5
    _, unweighted = trained(tmp_path / "plain", config, read_dataset(path, time_col="at"))
    assert unweighted != rows


def test_batches_have_the_weight_of_each_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "_BATCH_PAIRS", 100)
    path = rated(1, tmp_path / "a.csv", lambda rng: rng.integers(0, 6, 900))
    config = replace(CONFIGS["own"], stream=True, valid="last")
    memory, stored = both(tmp_path, path, rating_col="rating")
    train = memory.train
    assert train.weights is not None
    weight_of = dict(
        zip(zip(train.users.tolist(), train.items.tolist(), strict=True), train.weights.tolist(), strict=True)
    )
    streamed = open_split(stored.train, config, tmp_path / "stream")
    for part, order in ((split_pairs(train, config).train, None), (streamed.train, streamed.order(config))):
        for shared in (False, True):
            source = BatchSource(part, batch_size=64, negatives=5, seed=1, seen=None, shared=shared, order=order)
            found = {}
            for batch in source.batches(1):
                assert batch.pair_weights is not None and batch.pair_weights.dtype == np.float32
                positives = batch.items[: len(batch.users)] if shared else batch.items[:, 0]
                pairs = zip(batch.users.tolist(), positives.tolist(), strict=True)
                found |= dict(zip(pairs, batch.pair_weights.tolist(), strict=True))
            assert found == {pair: weight_of[pair] for pair in found} and len(found) == len(part)
    # Files of other weights are made again.
    other = replace_weights(stored.train, 2 * train.weights)
    again = open_split(other, config, tmp_path / "stream").train
    np.testing.assert_array_equal(again.weights, 2 * streamed.train.weights)  # type: ignore[operator]


def replace_weights(pairs: Interactions, weights: Any) -> Interactions:
    return pairs.replace(pairs.users, pairs.items, weights)


def test_equal_ratings_train_the_bits_of_none(tmp_path: Path) -> None:
    path = rated(2, tmp_path / "a.csv", lambda rng: np.full(900, 4))
    for name in ("own", "shared"):
        of_both = [
            trained(tmp_path / f"{name}{column}", CONFIGS[name], read_dataset(path, rating_col=column))
            for column in ("rating", None)
        ]
        assert of_both[0] == of_both[1]


def test_the_command_says_what_ratings_do(cli: Run, tmp_path: Path) -> None:
    rated(3, tmp_path / "a.csv", lambda rng: rng.integers(1, 6, 900))
    code, out, err = cli("train", "a.csv", "--rating-col", "rating", *SMALL, "--out", "weights")
    assert (code, err) == (0, "")
    assert "items from column 'item', ratings from column 'rating', as weights)" in out
    options = ("--rating-col", "rating", "--min-rating", "3.5", "--time-col", "at")
    for stream in ([], ["--stream"]):
        code, out, err = cli("train", "a.csv", *options, *SMALL, "--out", f"likes{len(stream)}", *stream)
        assert (code, err) == (0, "")
        assert "ratings from column 'rating', times from column 'at', of at least 3.5)" in out
        assert (
            f"{sum(line.split(',')[2] in '123' for line in Path('a.csv').read_text().splitlines())} rows of a.csv"
            in out
        )
    assert cli("train", "--resume", "weights", "--epochs", "3")[0] == 0
    code, _, err = cli("train", "--resume", "weights", "--min-rating", "3")
    assert code == 2 and "--min-rating cannot change on resuming: weights keeps its own copy of the data" in err
    for wrong, message in (
        (("--min-rating", "3"), "option min_rating=3 needs ratings: give the column that holds them, --rating-col"),
        (
            ("--rating-col", "rating", "--min-rating", "6"),
            "a.csv: no rating is 6 or more, the highest is 5; give a lower",
        ),
        (("--rating-col", "item"), "a.csv: column 'item' cannot hold both the items and the ratings; give another"),
    ):
        for stream in ([], ["--stream"]):
            code, _, err = cli("train", "a.csv", *SMALL, *wrong, "--out", "none", *stream)
            assert code == 1 and message in err and err.count("\n") == 1
            assert not Path("none").exists()


@needs_data
def test_movielens_has_the_ratings_that_numpy_reads(tmp_path: Path) -> None:
    path = DATA / "ml-100k" / "ml-100k.inter.gz"
    rows = np.loadtxt(path, dtype=np.float64, skiprows=1)
    rows = rows[np.argsort(rows[:, 3], kind="stable")]
    for data in both(tmp_path, path, time_col=3, rating_col="rating:float"):
        np.testing.assert_array_equal(data.train.weights, (rows[:, 2] / rows[:, 2].mean()).astype(np.float32))
    liked = read_dataset(path, time_col=3, rating_col=2, min_rating=4)
    assert pairs_of(liked.train) == [(int(user), int(item)) for user, item in rows[rows[:, 2] >= 4, :2]]
    assert liked.train.low_ratings == (rows[:, 2] < 4).sum()
