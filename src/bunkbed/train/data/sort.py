"""Sorting, grouping and joining more rows than RAM holds, with DuckDB, a spill folder and a memory limit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bunkbed.core.budget import format_bytes
from bunkbed.core.types import Json
from bunkbed.train.data.vocab import DataError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LEAST_BYTES", "Sorter"]

#: DuckDB cannot work in less memory.
LEAST_BYTES = 64 << 20
_BYTES_A_THREAD = 64 << 20
# A multiple of DuckDB's vectors, so that batches are full; also the rows of a row group on disk.
_BATCH_ROWS = 1 << 17


class Sorter:
    """Temporary DuckDB database in a folder; a context manager that removes the folder at the end.

    One thread at a time. Memory: `ram_bytes`, but at least `LEAST_BYTES`, for DuckDB. Input and output batches take a
    few MiB each in addition.

    Args:
        folder: created, emptied first if it exists, removed at the end.
        is_stored: store tables in a file, instead of in memory with spilling.
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
        settings: Json = {
            "memory_limit": f"{self._ram_bytes // 1000}KB",
            "temp_directory": str(folder / "spill"),
            "threads": threads,
            "preserve_insertion_order": False,  # queries that need an order use ORDER BY
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
        """Name a stream of batches, which one query may read once."""
        import pyarrow as pa

        self._connection.register(name, pa.RecordBatchReader.from_batches(schema, self._guarded(batches)))

    def run(self, sql: str) -> None:
        """Run one statement without result.

        Raises:
            DataError: memory or disk are too small for DuckDB.
            Exception: the error of a stream that the statement read.
        """
        with self._errors():
            self._connection.execute(sql)

    def row(self, sql: str) -> tuple[Any, ...]:
        """Return the only row of a result; raises as `run` does."""
        with self._errors():
            (answer,) = self._connection.execute(sql).fetchall()
            return tuple(answer)

    def column(self, sql: str) -> list[Any]:
        """Return the first column of a short result; raises as `run` does."""
        with self._errors():
            return [answer[0] for answer in self._connection.execute(sql).fetchall()]

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Yield a long result, about 131,072 rows at a time; raises as `run` does."""
        with self._errors():
            # `execute` would hold the whole result in memory; `sql` streams it.
            yield from self._connection.sql(sql).to_arrow_reader(_BATCH_ROWS)

    def _guarded(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches and keep the error of a stream: DuckDB would pass on only its text."""
        try:
            yield from batches
        except BaseException as error:
            self._failure = error
            raise

    def _errors(self) -> _Errors:
        return _Errors(self)


class _Errors:
    """Context manager that converts DuckDB's errors to `DataError`, and raises the original error of a stream."""

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
        if isinstance(error, RuntimeError) and str(error) == "Query interrupted":  # DuckDB's error for Ctrl-C
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
