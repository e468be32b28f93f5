"""What every form of a file of interactions is read as: batches of labels, with the count of what was left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bunkbed.train.data.vocab import DataError

if TYPE_CHECKING:
    import pyarrow as pa


class Pairs(ABC):
    """One opened file of interactions.

    Attributes:
        path: as given, for messages.
        form: how it is read, for people.
        emptiness: what it holds when it holds no pairs.
        is_strict: a malformed row is an error.
        malformed: rows left out so far, where that is not so.
        first_malformed: what was wrong with the first of them.
        remedy: what to do about it where most rows are so.
        empty_users: lines of a user without items so far, which hold no pair and are no mistake.
    """

    path: str
    form: str
    emptiness: str = "a header line"
    is_strict: bool = True
    malformed: int = 0
    first_malformed: str = ""
    remedy: str = ""
    empty_users: int = 0
    _done: int = 0  # rows that `batches` gave
    _first_at: int | None = None  # no row before this one is malformed

    def check_read(self, num_rows: int) -> None:
        """Whether what was read can be gone on with, now that all of it was and `num_rows` pairs came of it.

        Raises:
            DataError: no pairs; or more rows were malformed than not: that is a file taken for what it is not, and
                the few rows left would train a model that nobody asked for.
        """
        if self.malformed > num_rows:
            total = self.malformed + num_rows
            count = f"{self.malformed:,} of {total:,}" if num_rows else f"all {total:,}"
            raise DataError(
                f"{self.path}: {count} rows are malformed, read as {self.form}; "
                f"the first: {self.first_malformed}; {self.remedy}"
            )
        if not num_rows:
            raise DataError(f"{self.path}: holds no pairs of user and item, only {self.emptiness}")

    def whole_rows(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """As `batches`, without rows that lack a label where that is allowed."""
        for batch in self.batches():
            yield batch if self.is_strict else self._with_labels(batch)
            self._done += len(batch[0])
        if self.malformed:
            self.first_malformed = self._first_problem(self._first_at or 0) or self.first_malformed

    def _with_labels(self, batch: tuple[pa.Array, pa.Array]) -> tuple[pa.Array, pa.Array]:
        import pyarrow.compute as pc

        there = [_has_label(labels) for labels in batch]
        keep = pc.and_(*there)
        absent = len(keep) - (keep.true_count)
        if not absent:
            return batch
        at = keep.index(False).as_py()
        what = "item" if there[0][at].as_py() else "user"
        self._leave_out(absent, f"the {what} of row {self._done + at} (from 0) is missing", self._done + at)
        return batch[0].filter(keep), batch[1].filter(keep)

    def _leave_out(self, count: int, problem: str, at: int) -> None:
        # Arrow parses blocks ahead of the batch that is looked at, so the first told of may not be the first.
        self._first_at = at if self._first_at is None else min(self._first_at, at)
        self.first_malformed = self.first_malformed or problem
        self.malformed += count

    def _first_problem(self, skip: int) -> str:
        """Where the first malformed row stands and what is wrong with it; the first `skip` rows are known sound."""
        return self.first_malformed

    @abstractmethod
    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Labels of users and items, two arrays of one length (integers or strings, no nulls) at a time."""

    @abstractmethod
    def raise_missing(self, what: str, words: set[str]) -> None:
        """Raise a `DataError` naming the first line whose `what` ("user" or "item") is one of `words`."""


def _has_label(labels: pa.Array) -> pa.BooleanArray:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_integer(labels.type):
        return labels.is_valid()
    return pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(labels), ""), False)
