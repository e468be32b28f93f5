"""Base class of readers of interactions: batches of labels, and the number of rows that were left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bunkbed.train.data.vocab import DataError

if TYPE_CHECKING:
    import pyarrow as pa


class Pairs(ABC):
    """Reader of one file of interactions.

    Attributes:
        path: the given path, for messages.
        form: how the file is read, as text.
        emptiness: description of the file if it has no pairs.
        is_strict: a malformed row is an error.
        malformed: number of rows left out so far, if not strict.
        first_malformed: the problem of the first malformed row.
        remedy: advice for a file with mostly malformed rows.
        empty_users: number of lines of a user without items so far, which are not malformed.
    """

    path: str
    form: str
    emptiness: str = "a header line"
    is_strict: bool = True
    malformed: int = 0
    first_malformed: str = ""
    remedy: str = ""
    empty_users: int = 0
    _done: int = 0  # rows that `batches` has returned
    _first_at: int | None = None  # no row before this one is malformed

    def check_read(self, num_rows: int) -> None:
        """Check a file after all of it was read, with `num_rows` pairs.

        Raises:
            DataError: no pairs; or more rows are malformed than not, because then the form of the file was not
                recognized, and a model of the few other rows would be useless.
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
        """Yield `batches`; if not strict, without rows that lack a label."""
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
        # Arrow parses blocks ahead of the current batch, so the first reported row may not be the first one.
        self._first_at = at if self._first_at is None else min(self._first_at, at)
        self.first_malformed = self.first_malformed or problem
        self.malformed += count

    def _first_problem(self, skip: int) -> str:
        """Return place and problem of the first malformed row; the first `skip` rows are known to be sound."""
        return self.first_malformed

    @abstractmethod
    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yield labels of users and items: two arrays of equal length (integers or strings, no nulls)."""

    @abstractmethod
    def raise_missing(self, what: str, words: set[str]) -> None:
        """Raise a `DataError` naming the first line whose `what` ("user" or "item") is one of `words`."""


def _has_label(labels: pa.Array) -> pa.BooleanArray:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_integer(labels.type):
        return labels.is_valid()
    return pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(labels), ""), False)
