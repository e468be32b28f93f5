"""Implicit-feedback interactions: the input of training, in any form.

The form is detected by content, not by file name: CSV, TSV (also ``;``, ``|`` and ``::`` between columns), Parquet,
adjacency lines (``user item item ...``), and gzip of the text forms. Labels are integers or strings; both become dense
indices by first appearance. File order is kept: "leave the last one out" relies on it.

A repeated pair counts once (the first is kept, ``duplicates`` is the number of dropped ones): with implicit feedback
the pairs are a set, and a repeated pair would be a hidden weight.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bunkbed.train.data.columns import HeaderChoice, LayoutChoice
from bunkbed.train.data.encode import LabelEncoder
from bunkbed.train.data.formats import open_pairs, read_candidate_lines
from bunkbed.train.data.vocab import DataError, Int64Array, Vocab

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

    def replace(self, users: Int64Array, items: Int64Array) -> Interactions:
        """Return the same users and items with other pairs, such as one side of a split."""
        return replace(self, users=users, items=items)


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
    """

    train: Interactions
    test: Interactions | None = None
    candidates: Candidates | None = None
    cold_users: int = 0
    cold_items: int = 0

    @property
    def num_users(self) -> int:
        """Number of users, including cold ones."""
        return self.train.num_users

    @property
    def num_items(self) -> int:
        """Number of items, including cold ones."""
        return self.train.num_items


def read_interactions(
    path: PathLike,
    *,
    user_col: Column = None,
    item_col: Column = None,
    header: HeaderChoice = "auto",
    layout: LayoutChoice = "auto",
    vocabs: tuple[Vocab, Vocab] | None = None,
    strict: bool = True,
) -> Interactions:
    """Read one file of interactions.

    Args:
        path: CSV, TSV, Parquet, adjacency lines, or gzip of a text form.
        user_col: name or 0-based position of the users' column; default: a well-known name, else column 0.
        item_col: the same for the items; default: a well-known name, else column 1.
        header: whether the first line names the columns; ``"auto"`` detects this.
        layout: ``"columns"``, ``"adjacency"``, or ``"auto"``: adjacency if blanks (or tabs) separate fields
            and lines mostly differ in length. For adjacency lines of equal length, give ``"adjacency"``.
        vocabs: users and items already known; new labels are appended after them.
        strict: a ragged line or an empty label is an error; otherwise such rows are left out and counted (`malformed`).

    Raises:
        DataError: the file is empty, not text, has no such column or several of that name, a ragged line, a missing
            value, or an unclosed quote; or, if not strict, more than half of its rows are malformed. The message
            names the file, the line and its content.
        FileNotFoundError, IsADirectoryError, PermissionError: the system's error.
    """
    known = vocabs or (None, None)
    users, items = LabelEncoder(known[0]), LabelEncoder(known[1])
    pairs = open_pairs(path, user_col=user_col, item_col=item_col, header=header, layout=layout, strict=strict)
    user_parts: list[Int64Array] = []
    item_parts: list[Int64Array] = []
    for user_labels, item_labels in pairs.whole_rows():
        user_parts.append(users.add(user_labels))
        item_parts.append(items.add(item_labels))
    user_index = _join(user_parts)
    item_index = _join(item_parts)
    pairs.check_read(len(user_index))
    for encoder, what in ((users, "user"), (items, "item")):
        missing = encoder.missing_labels()
        if missing:
            pairs.raise_missing(what, missing)
    user_vocab, item_vocab = users.vocab(), items.vocab()
    kept = _first_of_each(user_index, item_index, len(item_vocab))
    duplicates = len(user_index) - len(kept)
    if duplicates:
        user_index, item_index = user_index[kept], item_index[kept]
    source = os.fspath(path)
    return Interactions(
        user_index,
        item_index,
        user_vocab,
        item_vocab,
        source,
        duplicates,
        pairs.form,
        pairs.malformed,
        pairs.first_malformed,
        pairs.empty_users,
    )


def read_candidates(path: PathLike, vocabs: tuple[Vocab, Vocab]) -> tuple[Candidates, tuple[Vocab, Vocab]]:
    """Read ranking candidates of the NCF release: ``(user,item)<TAB>negative<TAB>negative ...``.

    Returns:
        The candidates, and the vocabularies, extended by labels that are only in this file.

    Raises:
        DataError: a line is not of this form, or has another number of negatives than the lines above it.
    """
    users, items = LabelEncoder(vocabs[0]), LabelEncoder(vocabs[1])
    user_labels, rows, width = read_candidate_lines(path)
    user_index = users.add(user_labels)
    item_index = items.add(rows).reshape(-1, width + 1)
    candidates = Candidates(
        user_index, item_index[:, 0].copy(), np.ascontiguousarray(item_index[:, 1:]), os.fspath(path)
    )
    return candidates, (users.vocab(), items.vocab())


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
) -> Dataset:
    """Read a training file and, if given, test files, with one numbering.

    Args:
        path: the training interactions, see `read_interactions`.
        test: held-out interactions; same columns, but form and header are detected separately.
        test_negatives: candidates for sampled ranking, see `read_candidates`.
        user_col: as in `read_interactions`.
        item_col: as in `read_interactions`.
        header: as in `read_interactions`.
        layout: as in `read_interactions`.
        strict: as in `read_interactions`.

    Raises:
        DataError: as `read_interactions`; or the held-out pairs of the candidates differ from `test`.
    """
    train = read_interactions(path, user_col=user_col, item_col=item_col, header=header, layout=layout, strict=strict)
    vocabs = (train.user_vocab, train.item_vocab)
    held_out: Interactions | None = None
    candidates: Candidates | None = None
    if test is not None:
        held_out = read_interactions(
            test,
            user_col=user_col,
            item_col=item_col,
            header=header,
            layout=layout,
            vocabs=vocabs,
            strict=strict,
        )
        vocabs = (held_out.user_vocab, held_out.item_vocab)
    if test_negatives is not None:
        candidates, vocabs = read_candidates(test_negatives, vocabs)
        if held_out is not None:
            _check_same_pairs(held_out, candidates, vocabs)
    cold_users = len(vocabs[0]) - train.num_users
    cold_items = len(vocabs[1]) - train.num_items
    train = replace(train, user_vocab=vocabs[0], item_vocab=vocabs[1])
    if held_out is not None:
        held_out = replace(held_out, user_vocab=vocabs[0], item_vocab=vocabs[1])
    return Dataset(train, held_out, candidates, cold_users, cold_items)


def _check_same_pairs(test: Interactions, candidates: Candidates, vocabs: tuple[Vocab, Vocab]) -> None:
    known = set(zip(test.users.tolist(), test.items.tolist(), strict=True))
    for at, pair in enumerate(zip(candidates.users.tolist(), candidates.positives.tolist(), strict=True)):
        if pair not in known:
            user, item = vocabs[0].decode([pair[0]])[0], vocabs[1].decode([pair[1]])[0]
            raise DataError(
                f"{candidates.source} line {at + 1}: holds out item {item!r} of user {user!r}, "
                f"a pair that {test.source} does not have; give both files of one release"
            )


def _join(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _first_of_each(users: Int64Array, items: Int64Array, num_items: int) -> Int64Array:
    """Return positions ``int64[M]``, ascending, of the first appearance of each pair."""
    _, first = np.unique(users * np.int64(num_items) + items, return_index=True)
    positions: Int64Array = np.sort(first).astype(np.int64)
    return positions
