"""Implicit-feedback interactions: the input of training, in any form.

The form is detected by content, not by file name: CSV, TSV (also ``;``, ``|`` and ``::`` between columns), Parquet,
adjacency lines (``user item item ...``), and gzip of the text forms. Labels are integers or strings; both become dense
indices by first appearance. File order is kept: "leave the last one out" relies on it.

A repeated pair counts once (the first is kept, ``duplicates`` is the number of dropped ones): with implicit feedback
the pairs are a set, and a repeated pair would be a hidden weight.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from bunkbed.train.data.columns import HeaderChoice, LayoutChoice
from bunkbed.train.data.formats import Pairs, open_pairs, read_candidate_lines
from bunkbed.train.data.reading import Reading
from bunkbed.train.data.sort import Sorter
from bunkbed.train.data.vocab import DataError, Float32Array, Int64Array, Vocab
from bunkbed.train.settings.config import check_split, first_share

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "Candidates",
    "DataError",
    "Dataset",
    "Interactions",
    "Vocab",
    "read_candidates",
    "read_dataset",
    "read_interactions",
]

PathLike = str | os.PathLike[str]
Column = int | str | None

_BATCH_PAIRS = 1 << 20
#: Fields of `Interactions` that say how a file was read; a saved dataset keeps them.
ABOUT = (
    "source", "duplicates", "form", "malformed", "first_malformed", "empty_users", "low_ratings", "mean_rating",
    "rounds",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Interactions:
    """Pairs of user and item, as dense indices in file order. Read-only by agreement; owns its arrays.

    Attributes:
        users: ``int64[N]`` in ``[0, num_users)``.
        items: ``int64[N]`` in ``[0, num_items)``.
        user_vocab: labels of the users.
        item_vocab: labels of the items.
        source: the path as given.
        duplicates: repeated pairs that were dropped.
        form: how the file was read, as text: ``"CSV, users from column 'user', ..."``.
        malformed: number of malformed rows that were left out.
        first_malformed: the problem of the first malformed row.
        empty_users: number of adjacency lines of a user without items, which contain no pair.
        low_ratings: number of rows that were left out because their rating is below the threshold.
        mean_rating: the rating whose weight is 1; 0 without weights.
        rounds: how many pairs the run had when each later file came (`bunkbed.train.merge`).
        weights: factor of each pair's loss, ``float32[N]``; None: ones.
    """

    users: Int64Array
    items: Int64Array
    user_vocab: Vocab
    item_vocab: Vocab
    source: str = ""
    duplicates: int = 0
    form: str = ""
    malformed: int = 0
    first_malformed: str = ""
    empty_users: int = 0
    low_ratings: int = 0
    mean_rating: float = 0.0
    rounds: Sequence[int] = ()
    weights: Float32Array | None = None

    @property
    def num_users(self) -> int:
        """Number of known users, with or without pairs."""
        return len(self.user_vocab)

    @property
    def num_items(self) -> int:
        """Number of known items, with or without pairs."""
        return len(self.item_vocab)

    def __len__(self) -> int:
        return len(self.users)

    def batches(self) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield users and items of a million pairs at a time, in order: ``int64[n]``, or a narrower stored type."""
        for first in range(0, len(self), _BATCH_PAIRS):
            yield self.users[first : first + _BATCH_PAIRS], self.items[first : first + _BATCH_PAIRS]

    @property
    def is_weighted(self) -> bool:
        """Whether there are weights."""
        return self.weights is not None

    def weight_batches(self) -> Iterator[Float32Array | None]:
        """Yield the weights of the pairs of `batches`, batch by batch; None for ones."""
        for first in range(0, len(self), _BATCH_PAIRS):
            yield None if self.weights is None else self.weights[first : first + _BATCH_PAIRS]

    def replace(self, users: Int64Array, items: Int64Array, weights: Float32Array | None = None) -> Interactions:
        """Return the same users and items with other pairs, such as one side of a split."""
        return replace(self, users=users, items=items, weights=weights)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Queries of a sampled ranking: a held-out item and the items that compete with it.

    A positive may also be among its own negatives, as in the file (156 users of the NCF release of MovieLens-1M).

    Attributes:
        users: ``int64[Q]``.
        positives: ``int64[Q]``.
        negatives: ``int64[Q, C]``.
    """

    users: Int64Array
    positives: Int64Array
    negatives: Int64Array
    source: str = ""

    def __len__(self) -> int:
        return len(self.users)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Input of a training run: training pairs and, if given, test pairs.

    All parts share one user and one item vocabulary, numbered in the training file first. Labels that are only in the
    test files get indices too, so that they count in the figures (as misses).

    Attributes:
        cold_users: number of users that are only in the test files.
        cold_items: number of items that are only in the test files.
        split: which pairs of the training file are the test, as `TrainConfig.split`; ``"random"``: none.
    """

    train: Interactions
    test: Interactions | None = None
    candidates: Candidates | None = None
    cold_users: int = 0
    cold_items: int = 0
    split: str = "random"

    @property
    def num_users(self) -> int:
        """Number of users, including cold ones."""
        return self.train.num_users

    @property
    def num_items(self) -> int:
        """Number of items, including cold ones."""
        return self.train.num_items


class SourceOptions(TypedDict, total=False):
    """How files of interactions are read: the arguments of `read_dataset` with these names."""

    user_col: Column
    item_col: Column
    header: HeaderChoice
    layout: LayoutChoice
    strict: bool
    time_col: Column
    rating_col: Column
    min_rating: float | None
    split: str


def open_sources(
    path: PathLike,
    test: PathLike | None,
    *,
    split: str = "random",
    time_col: Column = None,
    rating_col: Column = None,
    min_rating: float | None = None,
    **options: Any,
) -> dict[str, Pairs]:
    """Return the readers of the training file and of the test file, if there is one; see `SourceOptions`.

    Raises:
        ValueError: an option that needs another, or that is out of range. As `open_pairs`.
    """
    check_split(split)
    if split != "random" and test is not None:
        raise DataError(f"option split={split!r} takes the test out of {path}; leave it out, or the test file {test}")
    if first_share("split", split) is not None and time_col is None:
        raise DataError(f"option split={split!r} needs times: give the column that holds them with --time-col")
    if min_rating is not None and rating_col is None:
        raise DataError(
            f"option min_rating={min_rating:g} needs ratings: give the column that holds them, --rating-col"
        )
    if min_rating is not None and not math.isfinite(min_rating):
        raise DataError(f"option min_rating must be a finite number, got {min_rating}")
    ratings = {} if rating_col is None else {"rating": rating_col}
    times = {} if time_col is None else {"time": time_col}
    sources = {"train": open_pairs(path, others=ratings | times, **options)}
    if test is not None:  # a threshold is for all pairs, weights are for those that are trained on
        sources["test"] = open_pairs(test, others=ratings if min_rating is not None else {}, **options)
    return sources


def dataset_of(about: dict[str, Any], table: Callable[[str], pa.Table]) -> Dataset:
    """Return the dataset in memory of a description and its tables."""
    users, items = (Vocab(table(name)["label"].combine_chunks()) for name in ("users", "items"))
    pairs: dict[str, Interactions] = {}
    for name in ("train", "test"):
        if name in about:
            columns = table(name)
            pairs[name] = Interactions(_array(columns["user"]), _array(columns["item"]), users, items, **about[name])
            if "weight" in columns.column_names:
                weights = np.array(columns["weight"], dtype=np.float32)
                pairs[name] = replace(pairs[name], weights=weights)
    candidates = None
    if "candidates" in about:
        columns = table("candidates")
        negatives = _array(columns["negatives"].combine_chunks().flatten()).reshape(len(columns), -1)
        candidates = Candidates(
            _array(columns["user"]), _array(columns["positive"]), negatives, about["candidates"]["source"]
        )
    cold = about["cold_users"], about["cold_items"]
    return Dataset(pairs["train"], pairs.get("test"), candidates, *cold, about.get("split", "random"))


def read_interactions(path: PathLike, **options: Any) -> Interactions:
    """Read one file of interactions; the options are those of `read_dataset`, and it raises the same errors."""
    return read_dataset(path, **options).train


def read_candidates(path: PathLike, vocabs: tuple[Vocab, Vocab]) -> tuple[Candidates, tuple[Vocab, Vocab]]:
    """Read ranking candidates of the NCF release: ``(user,item)<TAB>negative<TAB>negative ...``.

    Returns:
        The candidates, and the vocabularies, extended by labels that are only in this file.

    Raises:
        DataError: a line is not of this form, or has another number of negatives than the lines above it.
    """
    user_labels, rows, width = read_candidate_lines(path)
    users, user_index = vocabs[0].extended(user_labels)
    items, item_index = vocabs[1].extended(rows)
    item_index = item_index.reshape(-1, width + 1)
    candidates = Candidates(
        user_index, item_index[:, 0].copy(), np.ascontiguousarray(item_index[:, 1:]), os.fspath(path)
    )
    return candidates, (users, items)


def read_dataset(
    path: PathLike,
    *,
    test: PathLike | None = None,
    test_negatives: PathLike | None = None,
    user_col: Column = None,
    item_col: Column = None,
    header: HeaderChoice = "auto",
    layout: LayoutChoice = "auto",
    strict: bool = True,
    time_col: Column = None,
    rating_col: Column = None,
    min_rating: float | None = None,
    split: str = "random",
) -> Dataset:
    """Read a training file and, if given, test files, with one numbering.

    Args:
        path: CSV, TSV, Parquet, adjacency lines, or gzip of a text form.
        test: held-out interactions; same columns, but form and header are detected separately.
        test_negatives: candidates for sampled ranking, see `read_candidates`.
        user_col: name or 0-based position of the users' column; default: a well-known name, else column 0.
        item_col: the same for the items; default: a well-known name, else column 1.
        header: whether the first line names the columns; ``"auto"`` detects this.
        layout: ``"columns"``, ``"adjacency"``, or ``"auto"``: adjacency if blanks (or tabs) separate fields
            and lines mostly differ in length. For adjacency lines of equal length, give ``"adjacency"``.
        strict: a ragged line or an empty label is an error; otherwise such rows are left out and counted (`malformed`).
        time_col: name or position of a column of times: numbers (nine decimals), or dates and times in ISO form
            (microseconds, UTC where no offset is given). The training pairs are then in the order of their times, and
            of equal times in that of the file; a repeated pair has its first time. None: the order of the file.
        rating_col: name or position of a column of ratings, numbers (nine decimals) of at least 0. A pair's rating,
            divided by the mean of the training pairs, is its weight in the loss; a repeated pair has its first one.
        min_rating: instead, read only rows whose rating in `rating_col` is at least this, also of the test file, and
            without weights; ratings may then be below 0.
        split: takes the test out of the training file. ``"last"``: the last pair of every user who has two or more;
            ``"time:0.9"``: all pairs after the first 90 %, rounded to a pair, which needs `time_col`; ``"random"``: no
            test.

    Raises:
        DataError: a file is empty, not text, has no such column or several of that name, a ragged line, a missing
            value, or an unclosed quote; or, if not strict, more than half of its rows are malformed. The message
            names the file, the line and its content. Or the held-out pairs of the candidates differ from `test`; or a
            time or a rating cannot be read; or the threshold or the split leave nothing, or there is a test file too.
        FileNotFoundError, IsADirectoryError, PermissionError: the system's error.
    """
    if split != "random" and test_negatives is not None:
        raise DataError(f"option split={split!r} takes the test out of {path}; leave it out, or {test_negatives}")
    sources = open_sources(
        path,
        test,
        split=split,
        time_col=time_col,
        rating_col=rating_col,
        min_rating=min_rating,
        user_col=user_col,
        item_col=item_col,
        header=header,
        layout=layout,
        strict=strict,
    )
    tables: dict[str, pa.Table] = {}

    def keep(name: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        import pyarrow as pa

        tables[name] = pa.Table.from_batches(batches, schema)

    with Sorter(None) as sorter:
        about = Reading(sorter, sources, keep, lambda text, rows: None, split=split, min_rating=min_rating).run()
    data = dataset_of(about, tables.pop)
    if test_negatives is None:
        return data
    train, held_out = data.train, data.test
    candidates, vocabs = read_candidates(test_negatives, (train.user_vocab, train.item_vocab))
    if held_out is not None:
        _check_same_pairs(held_out, candidates, vocabs)
        held_out = replace(held_out, user_vocab=vocabs[0], item_vocab=vocabs[1])
    return Dataset(
        replace(train, user_vocab=vocabs[0], item_vocab=vocabs[1]),
        held_out,
        candidates,
        data.cold_users + len(vocabs[0]) - train.num_users,
        data.cold_items + len(vocabs[1]) - train.num_items,
    )


def _check_same_pairs(test: Interactions, candidates: Candidates, vocabs: tuple[Vocab, Vocab]) -> None:
    known = set(zip(test.users.tolist(), test.items.tolist(), strict=True))
    for at, pair in enumerate(zip(candidates.users.tolist(), candidates.positives.tolist(), strict=True)):
        if pair not in known:
            user, item = vocabs[0].decode([pair[0]])[0], vocabs[1].decode([pair[1]])[0]
            raise DataError(
                f"{candidates.source} line {at + 1}: holds out item {item!r} of user {user!r}, "
                f"a pair that {test.source} does not have; give both files of one release"
            )


def _array(column: pa.Array | pa.ChunkedArray) -> Int64Array:
    """Return the numbers of a column as an array that owns its memory."""
    return np.array(column, dtype=np.int64)
