"""The order of times, and the splits: the pairs of an independent reading, never the future, from memory and disk."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
import pyarrow.parquet as pq  # noqa: E402

from bunkbed.train.data.interactions import DataError, Dataset, Interactions, read_dataset  # noqa: E402
from bunkbed.train.data.prepare import prepare_dataset  # noqa: E402
from bunkbed.train.data.splits import split as split_pairs  # noqa: E402
from bunkbed.train.data.store import load_dataset, save_dataset, seen_items  # noqa: E402
from bunkbed.train.data.stream import open_split  # noqa: E402
from bunkbed.train.settings.config import TrainConfig  # noqa: E402

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data is not at {DATA}")

Row = tuple[str, str, int]
#: A repeated pair, a user with one pair, equal times, a user and an item that come last.
ROWS = [
    ("ann", "i1", 50),
    ("bob", "i2", 10),
    ("ann", "i3", 20),
    ("ann", "i1", 10),  # the first of the repeated pair, by time
    ("cid", "i4", 30),
    ("bob", "i1", 40),
    ("bob", "i3", 40),  # as late as the pair above, which is before it in the file
    ("ann", "i2", 20),
    ("dan", "i5", 60),
    ("ann", "i4", 15),
]
SPLITS = ["last", "time:0.5", "time:0.9", "random"]


def expected(rows: Sequence[Row], split: str) -> tuple[list[Row], list[Row]]:
    """Split as the documentation says, by lists and loops."""
    pairs: list[Row] = []
    for user, item, time in sorted(rows, key=lambda row: row[2]):  # stable
        if all(row[:2] != (user, item) for row in pairs):
            pairs.append((user, item, time))
    if split == "random":
        return pairs, []
    if split != "last":
        count = max(1, round(len(pairs) * float(split.removeprefix("time:"))))
        return pairs[:count], pairs[count:]
    train, test = [], []
    for at, pair in enumerate(pairs):
        others = [place for place, row in enumerate(pairs) if row[0] == pair[0]]
        (test if len(others) > 1 and at == others[-1] else train).append(pair)
    return train, test


def labels(part: Interactions | None) -> list[tuple[Any, Any]]:
    if part is None:
        return []
    return list(zip(part.user_vocab.decode(part.users), part.item_vocab.decode(part.items), strict=True))


def both(tmp_path: Path, path: Path, **options: Any) -> list[Dataset]:
    """Read in memory, and prepare on disk."""
    return [read_dataset(path, **options), prepare_dataset(tmp_path / "stored", path, ram_bytes=64 << 20, **options)]


def date(time: int) -> datetime:
    return datetime(2024, 2, 28, tzinfo=UTC) + timedelta(hours=time)


def text(rows: Sequence[Row], show: Callable[[int], str], *, between: str = ",", header: bool = True) -> str:
    lines = [between.join((user, show(time), item)) for user, item, time in rows]
    return "\n".join([between.join(("user", "when", "item"))] * header + lines) + "\n"


# Offsets change from row to row: the order is that of the instants.
FORMS: dict[str, Callable[[int], str]] = {
    "seconds": lambda time: str(1_700_000_000 + time),
    "nanoseconds": lambda time: str(1_700_000_000_123_456_700 + time),  # differ beyond the digits of a float64
    "negative": lambda time: str(time - 25),
    "decimals": lambda time: f" {time / 1e4:.9f}",
    "exponent": lambda time: f"{time / 10}e8",
    "date": lambda time: f"{datetime(2024, 1, 1) + timedelta(days=time):%Y-%m-%d}",
    "date and time": lambda time: f"{date(time):%Y-%m-%d %H:%M:%S}",
    "iso": lambda time: f"{date(time):%Y-%m-%dT%H:%M:%S}.{time:06}Z",
    "offsets": lambda time: date(time).astimezone(timezone(timedelta(hours=time * 7 % 23 - 11))).isoformat(),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", FORMS)
def test_pairs_are_in_the_order_of_their_times_and_split_by_it(form: str, split: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text(ROWS, FORMS[form]))
    train, test = ([row[:2] for row in part] for part in expected(ROWS, split))
    for data in both(tmp_path, path, time_col="when", split=split):
        assert labels(data.train) == train
        assert (data.test is None) == (split == "random") and labels(data.test) == test
        assert data.split == split
        assert data.train.form == "CSV, users from column 'user', items from column 'item', times from column 'when'"
        assert data.train.duplicates == 1
        assert data.cold_users == len({user for user, _ in test} - {user for user, _ in train})
        assert data.cold_items == len({item for _, item in test} - {item for _, item in train})


QUOTED = 'user,when,item,title\n"ann",2,i1,"a, b"\n"ann","1",i2,c\n'


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.tsv", text(ROWS, str, between="\t", header=False), {"time_col": 1, "item_col": 2}),
        ("a.txt", text(ROWS, str, between="  ", header=False), {"time_col": "1", "item_col": 2, "user_col": 0}),
        ("a.dat", text(ROWS, str, between="::", header=False), {"time_col": 1, "item_col": 2}),
        ("broken.csv", text(ROWS, str) + "cid\n,99,i9\n", {"time_col": "when", "strict": False}),
        ("quoted.csv", text(ROWS, str).replace("ann", '"ann"').replace(",i", ', "i').replace("\n", '"\n'), {}),
        ("recbole.inter.gz", text(ROWS, str).replace("user,when,item", "user_id:token,when:float,item_id:token"), {}),
    ],
)
def test_every_form_of_text_has_times(name: str, content: str, column: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "quoted.csv":
        content = "user,when,item\n" + "".join(f'"{user}"," {time} ","{item}"\n' for user, item, time in ROWS)
    path.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    column = column or {"time_col": "when:float" if "recbole" in name else "when"}
    train, test = expected(ROWS, "last")
    for data in both(tmp_path, path, split="last", **column):
        assert (labels(data.train), labels(data.test)) == ([row[:2] for row in train], [row[:2] for row in test])
        assert data.train.malformed == 2 * (name == "broken.csv")


@pytest.mark.parametrize(
    "kind",
    ["int32", "uint64", "float64", "timestamp[us]", "timestamp[ns]", "timestamp[us, tz=America/New_York]", "date32"],
)
def test_parquet_has_times_of_every_type(kind: str, tmp_path: Path) -> None:
    users, items, times = zip(*ROWS, strict=True)
    type_ = pa.type_for_alias(kind) if "tz" not in kind else pa.timestamp("us", "America/New_York")
    when = pa.array(times, pa.int32() if kind == "date32" else pa.int64()).cast(type_)
    pq.write_table(pa.table({"user": users, "item": items, "when": when}), tmp_path / "a.parquet")
    train, test = expected(ROWS, "last")
    for data in both(tmp_path, tmp_path / "a.parquet", time_col="when", split="last"):
        assert (labels(data.train), labels(data.test)) == ([row[:2] for row in train], [row[:2] for row in test])


def random_rows(seed: int) -> list[Row]:
    """Rows of which many have equal times, and some repeat."""
    rng = np.random.default_rng(seed)
    users = (40 * rng.random(600) ** 2).astype(int)
    columns = zip(users.tolist(), rng.integers(0, 60, 600).tolist(), rng.integers(0, 150, 600).tolist(), strict=True)
    return [(f"u{user}", f"i{item}", time) for user, item, time in columns]


@pytest.mark.parametrize("valid", ["", "last", "time:0.8", "none"])
@pytest.mark.parametrize("split", ["last", "time:0.9", "time:0.3"])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_pair_is_trained_on_that_comes_after_those_held_out(
    seed: int, split: str, valid: str, tmp_path: Path
) -> None:
    rows = random_rows(seed)
    path = tmp_path / "a.csv"
    path.write_text(text(rows, str))
    time_of: dict[tuple[str, str], int] = {}
    for user, item, time in rows:
        time_of[user, item] = min(time, time_of.get((user, item), time))
    config = TrainConfig(split=split, valid=valid, stream=True, eval_users=10, ram="256MiB")
    in_memory, stored = both(tmp_path, path, time_col="when", split=split)
    parts = split_pairs(in_memory.train, config), open_split(stored.train, config, tmp_path / "stream")
    for found in (parts[0].train, parts[1].train), (parts[0].valid, parts[1].valid), (in_memory.test, stored.test):
        assert labels(found[0]) == labels(found[1])
    train, held, test = (
        [(*pair, time_of[pair]) for pair in labels(part)] for part in (parts[0].train, parts[0].valid, in_memory.test)
    )
    assert sorted(train + held + test) == sorted((*pair, time) for pair, time in time_of.items())
    assert train and test and (not held) == (valid == "none")
    last_of: dict[str, int] = {}
    for rule, before, after in ((split, train + held, test), (config.valid, train, held)):
        if rule.startswith("time:"):
            assert max(row[2] for row in before) <= min(row[2] for row in after)
            assert len(before) == round(len(before + after) * float(rule.removeprefix("time:")))
        for user, _, time in before:
            last_of[user] = max(time, last_of.get(user, 0))
        if rule == "last":
            assert all(last_of[user] <= time for user, _, time in after)
            users = [user for user, _, _ in after]
            assert len(set(users)) == len(users)
            assert all(sum(row[0] == user for row in before) for user in users)
        last_of.clear()
    if split == "last":  # users with one pair are trained on; of two pairs one, and none is for the validation
        counts = {user: sum(pair[0] == user for pair in time_of) for user, _ in time_of}
        assert {user for user, _, _ in test} == {user for user, count in counts.items() if count > 1}
        if config.valid == "last":
            assert {user for user, _, _ in held} == {user for user, count in counts.items() if count > 2}


def test_the_validation_follows_the_split() -> None:
    assert TrainConfig().valid == "random"
    assert TrainConfig(split="last").valid == "last"
    assert TrainConfig(split="time:0.8").valid == "time:0.8"
    assert TrainConfig(split="time:0.8", valid="none").valid == "none"
    assert TrainConfig.from_dict(TrainConfig(split="last").to_dict()) == TrainConfig(split="last")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "first"}, "option split must be last, random or a share of the time such as time:0.9, got 'first'"),
        ({"split": "time:1"}, "option split must have a share between 0 and 1 after time: such as 0.9, got 'time:1'"),
        ({"split": "time:0"}, "option split must have a share between 0 and 1 .*, got 'time:0'"),
        ({"split": "time:nan"}, "option split must have a share between 0 and 1 .*, got 'time:nan'"),
        ({"split": "time:"}, "option split must have a share between 0 and 1 .*, got 'time:'"),
        ({"valid": "time:-1"}, "option valid must have a share between 0 and 1 .*, got 'time:-1'"),
        ({"split": "last", "valid": "random"}, "option valid='random' would train on what comes after the held-out"),
        ({"split": "time:0.9", "valid": "0.1"}, "with split='time:0.9' it is last, none or a share of the time"),
    ],
)
def test_splits_that_are_none_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)  # type: ignore[arg-type]
    if list(options) == ["split"]:
        with pytest.raises(ValueError, match=message):
            read_dataset("absent.csv", time_col="when", **options)  # type: ignore[arg-type]


TIMES = {
    "word": (["5", "6", "soon", "7", "later"], "line 4: the time is not a number, as those above are (found 'soon')"),
    "date": (["5", "2024-01-01"], "line 3: the time is not a number, as those above are (found '2024-01-01')"),
    "nan": (["5", "nan"], "line 3: the time is not a number, as those above are (found 'nan')"),
    "infinite": (["5", "inf"], "line 3: the time is not a number, as those above are (found 'inf')"),
    "empty": (["5", ""], "line 3: the time is not a number, as those above are (found '')"),
    "number": (["2024-01-01", "5"], "line 3: the time is not a date, as those above are (found '5')"),
    "month": (["2024-01-01", "2024-13-01"], "line 3: the time is not a date, as those above are (found '2024-13-01')"),
    "end": (["2024-01-01", "infinity"], "line 3: the time is not a date, as those above are (found 'infinity')"),
    "slashes": (
        ["31/05/2024"],
        "line 2: the time is neither a number nor a date such as 2024-05-31 or 2024-05-31T12:00:00+02:00 "
        "(found '31/05/2024')",
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_a_time_that_cannot_be_read_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    values, message = TIMES[name]
    path = tmp_path / "a.csv"
    path.write_text("user,item,when\n" + "".join(f"u{at},i{at},{value}\n" for at, value in enumerate(values)))
    whole = f"{path} {message}; correct or drop such rows, or give another --time-col"
    for strict in (False, True):
        with pytest.raises(DataError) as error:
            read_dataset(path, time_col="when", strict=strict)
        assert str(error.value) == whole
    with pytest.raises(DataError) as error:
        prepare_dataset(tmp_path / "stored", path, ram_bytes=64 << 20, time_col="when")
    assert str(error.value) == whole
    assert not any((tmp_path / "stored").iterdir())


def test_a_time_of_parquet_that_is_missing_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for when, found in ((pa.array([3, None, 1]), "null"), (pa.array([3.0, float("nan"), 1.0]), "'nan'")):
        pq.write_table(pa.table({"user": [1, 2, 3], "item": [1, 2, 3], "when": when}), path)
        with pytest.raises(DataError, match=rf"row 1: the time is not a number, as those above are \({found}\); corr"):
            read_dataset(path, time_col="when")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("u,i,7\nu,j,8\n", {"split": "time:0.9"}, "option split='time:0.9' needs times: give the column .* --time-col"),
        (
            "u,i,7\nu,j,8\n",
            {"split": "last", "test": "b.csv"},
            "takes the test out of .*; leave it out, or the test file",
        ),
        ("u,i,7\nu,j,8\n", {"split": "last", "test_negatives": "b.csv"}, "takes the test out of .*; leave it out, or"),
        ("u,i,7\nv,j,8\n", {"split": "last"}, "split last leaves no test: no user has two items; use --split random"),
        ("u,i,7\nu,i,8\n", {"split": "last"}, "split last leaves no test: no user has two items"),
        ("u,i,7\nu,i,8\n", {"split": "time:0.9", "time_col": 2}, "time:0.9 leaves no test: it has 1 different pairs"),
        (
            "u,i,7\nu,j,8\n",
            {"time_col": 1},
            "column .i. cannot hold both the items and the times; give another --time-col",
        ),
        ("u,i,7\nu,j,8\n", {"time_col": 3}, "has no column 3; it has 3 columns"),
        ("user,item,t\nu,j,8\n", {"time_col": "T"}, "has no column 'T'; it has: user, item, t; did you mean 't'"),
        (
            "u i j\nu k\n",
            {"time_col": 1, "layout": "adjacency"},
            "adjacency lines .* have no column of times; leave out",
        ),
    ],
)
def test_what_does_not_go_with_a_split_is_refused(
    content: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_dataset(path, **options)


def test_without_times_the_last_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("user,item\nu,i\nv,i\nu,j\nv,k\n")
    for data in both(tmp_path, path, split="last"):
        assert (labels(data.train), labels(data.test)) == ([("u", "i"), ("v", "i")], [("u", "j"), ("v", "k")])
        assert data.train.form.endswith("items from column 'item', in the order of the file")


def test_a_saved_dataset_keeps_its_split_and_all_of_a_user_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text(ROWS, str))
    data = read_dataset(path, time_col="when", split="last")
    save_dataset(tmp_path / "data", data)
    found = load_dataset(tmp_path / "data")
    assert (found.split, labels(found.train), labels(found.test)) == ("last", labels(data.train), labels(data.test))
    ann = data.train.user_vocab.index("ann")
    seen = data.train.item_vocab.decode(seen_items(tmp_path / "data", ann))
    assert seen == ["i1", "i4", "i3", "i2"]  # the last one is the test
    # A dataset of an earlier release says nothing of a split.
    about = json.loads((tmp_path / "data" / "dataset.json").read_text())
    del about["split"]
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(about))
    assert load_dataset(tmp_path / "data").split == "random"
    assert len(seen_items(tmp_path / "data", ann)) == 3


@needs_data
@pytest.mark.parametrize("split", ["last", "time:0.9"])
def test_movielens_is_split_as_numpy_splits_it(split: str, tmp_path: Path) -> None:
    path = DATA / "ml-100k" / "ml-100k.inter.gz"
    with gzip.open(path, "rt") as file:
        rows = np.loadtxt(file, dtype=np.float64, skiprows=1).astype(np.int64)
    rows = rows[np.argsort(rows[:, 3], kind="stable")]
    held = np.arange(len(rows)) >= 90_000
    if split == "last":
        held = np.zeros(len(rows), bool)
        held[len(rows) - 1 - np.unique(rows[::-1, 0], return_index=True)[1]] = True
        assert held.sum() == 943
    for data in both(tmp_path, path, time_col="timestamp:float", split=split):
        assert data.test is not None
        assert labels(data.train) == [tuple(row) for row in rows[~held, :2].tolist()]
        assert labels(data.test) == [tuple(row) for row in rows[held, :2].tolist()]
        assert data.cold_users == len(np.setdiff1d(rows[held, 0], rows[~held, 0]))
        assert data.cold_items == len(np.setdiff1d(rows[held, 1], rows[~held, 1]))
