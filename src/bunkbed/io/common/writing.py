"""`Writing`: a request to a format to write a file, and the rows to write."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from bunkbed.core.arguments import Floats, Ids
from bunkbed.errors import BunkbedError
from bunkbed.io.common.ahead import ahead
from bunkbed.io.common.naming import read_vocabulary
from bunkbed.io.common.source import Progress, chunk_rows, slot_length
from bunkbed.table.table import Table

#: Bytes of rows after which the kernel is asked to start write-back.
_DISK_BYTES = 32 << 20


class Writing:
    """A request to write a file; see `export_rows` for the arguments."""

    def __init__(
        self,
        table: Table,
        target: Path,
        format: str,
        slots: Sequence[str],
        chunk: int | None,
        name: str | None,
        vocab: Path | None,
        metric: str,
        progress: Progress | None,
    ) -> None:
        self.table = table
        self.target = target
        self.format = format
        self.lengths = {slot: slot_length(table, slot) for slot in slots}
        self.chunk = chunk
        self.name = name
        self.vocab = vocab
        self.metric = metric
        self.words = None if vocab is None else read_vocabulary(vocab)
        self._progress = progress
        #: Folder of the format's files, which have their final names.
        self.out = Path()
        #: Folder for temporary files.
        self.scratch = Path()

    @property
    def file(self) -> Path:
        """The file to write, for a format of one file."""
        return self.out / self.target.name

    @property
    def state(self) -> tuple[str, ...]:
        """Slots that are optimizer state."""
        return tuple(slot for slot in self.lengths if slot != "weight")

    def rows_of(self) -> int:
        """Return the rows of a chunk."""
        return chunk_rows(self.chunk, max(self.lengths.values()))

    def every_row(self) -> int:
        """Return the number of rows of a format that holds every row.

        Raises:
            ValueError: the table has no number of rows.
        """
        if self.table.num_rows is None:
            raise ValueError(
                f"table '{self.table.name}' takes any id, which {self.target.suffix or self.target.name} cannot name; "
                "export to .parquet"
            )
        return self.table.num_rows

    def stored(self) -> Iterator[tuple[Ids, dict[str, Floats]]]:
        """Yield stored rows in log order with all slots; the next rows are read while these are written."""
        total, done, flushed = len(self.table), 0, 0
        each = max(1, _DISK_BYTES // (4 * sum(self.lengths.values())))
        with closing(ahead(self.table.scan_slots(tuple(self.lengths), self.rows_of()))) as parts:
            for ids, values in parts:
                yield ids, dict(zip(self.lengths, values, strict=True))
                done += len(ids)
                if done - flushed >= each:
                    flushed = done
                    self._begin_writing()
                self.report(done, total)

    def _begin_writing(self) -> None:
        """Start write-back of the file now, so that the sync at the end has less to write."""
        try:
            descriptor = os.open(self.file, os.O_RDONLY)
        except OSError:  # several files, or another name: write-back only starts later
            return
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def require_all(self, done: int, total: int) -> None:
        """Raise BunkbedError if the number of rows written differs from `total`, which the file says."""
        if done != total:
            raise BunkbedError(
                f"table '{self.table.name}' was changed while it was exported: {self.target.name} says {total} rows "
                f"and got {done}; nothing was written, export it again"
            )

    def report(self, done: int, total: int) -> None:
        """Call `progress`."""
        if self._progress is not None:
            self._progress(done, total)
