"""Sorting, grouping and joining more rows than RAM holds: DuckDB, told where to spill and how much it may hold."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bunkbed.core.budget import format_bytes
from bunkbed.train.data.vocab import DataError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LEAST_BYTES", "Sorter"]

#: Less than this DuckDB cannot work in.
LEAST_BYTES = 64 << 20
_BYTES_A_THREAD = 64 << 20
# A multiple of DuckDB's own vectors, so that batches come full; also the rows of a row group on disk.
_BATCH_ROWS = 1 << 17


class Sorter:
    """A DuckDB database in a folder of its own; a context manager that leaves nothing of it behind.

    One thread at a time. Memory: `ram_bytes`, but at least `LEAST_BYTES`, for what DuckDB holds; the batches that go in
    and come out are beside that, a few MiB each.

    Args:
        folder: made, emptied first where it exists, removed at the end.
        is_stored: tables lie in a file rather than in memory with what does not fit spilled.
    """

    def __init__(self, folder: Path, ram_bytes: int, *, is_stored: bool = False) -> None:
        import duckdb

        self._folder = folder
        self._ram_bytes = max(ram_bytes, LEAST_BYTES)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._duckdb = duckdb
        self._failure: BaseException | None = None
        threads = max(1, min(os.cpu_count() or 1, self._ram_bytes // _BYTES_A_THREAD))
        settings: dict[str, Any] = {
            "memory_limit": f"{self._ram_bytes // 1000}KB",
            "temp_directory": str(folder / "spill"),
            "threads": threads,
            "preserve_insertion_order": False,  # a query that wants an order asks for it
            "enable_external_access": True,
        }
        try:
            self._connection = duckdb.connect(
                str(folder / "tables.duckdb") if is_stored else ":memory:", config=settings
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def __enter__(self) -> Sorter:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stream(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Names a stream of batches, which one query may read once."""
        import pyarrow as pa

        self._connection.register(name, pa.RecordBatchReader.from_batches(schema, self._guarded(batches)))

    def run(self, sql: str) -> None:
        """One statement without an answer.

        Raises:
            DataError: DuckDB cannot: memory, disk.
            Exception: what a stream it read raised.
        """
        with self._errors():
            self._connection.execute(sql)

    def row(self, sql: str) -> tuple[Any, ...]:
        """The only row of an answer; raises as `run` does."""
        with self._errors():
            (answer,) = self._connection.execute(sql).fetchall()
            return tuple(answer)

    def column(self, sql: str) -> list[Any]:
        """The first column of a short answer; raises as `run` does."""
        with self._errors():
            return [answer[0] for answer in self._connection.execute(sql).fetchall()]

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """A long answer, some 131,072 rows at a time; raises as `run` does."""
        with self._errors():
            # `execute` would hold the whole answer, `sql` hands it out as it comes.
            yield from self._connection.sql(sql).to_arrow_reader(_BATCH_ROWS)

    def _guarded(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Keeps what a stream raises: DuckDB would hand on no more than its text."""
        try:
            yield from batches
        except BaseException as error:
            self._failure = error
            raise

    def _errors(self) -> _Errors:
        return _Errors(self)


class _Errors:
    """Tells DuckDB's errors in our words, and those of a stream in its own."""

    def __init__(self, sorter: Sorter) -> None:
        self._sorter = sorter

    def __enter__(self) -> None:
        self._sorter._failure = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        import pyarrow as pa

        sorter = self._sorter
        if error is None or isinstance(error, GeneratorExit):
            return
        if sorter._failure is not None and error is not sorter._failure:
            raise sorter._failure from None
        if isinstance(error, RuntimeError) and str(error) == "Query interrupted":  # how DuckDB tells of Ctrl-C
            raise KeyboardInterrupt from None
        if isinstance(error, sorter._duckdb.OutOfMemoryException):
            raise DataError(
                f"{sorter._folder.parent}: DuckDB cannot sort the interactions within "
                f"{format_bytes(sorter._ram_bytes)}; give a larger --ram ({_first_line(error)})"
            ) from error
        if isinstance(error, (sorter._duckdb.Error, pa.ArrowException)):
            raise DataError(f"{sorter._folder.parent}: DuckDB failed ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
