"""Sorting, grouping and joining more rows than RAM holds, with DuckDB, a spill folder and a memory limit."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bunkbed.core.budget import format_bytes
from bunkbed.core.types import Json
from bunkbed.train.data.vocab import DataError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LEAST_BYTES", "Sorter", "path_literal"]

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
        folder: created, emptied first if it exists, removed at the end; None: a new one for temporary files.
        ram_bytes: DuckDB spills what needs more; None: half of the machine's memory.
        is_stored: store tables in a file, instead of in memory with spilling.
    """

    def __init__(self, folder: Path | None, ram_bytes: int | None = None, *, is_stored: bool = False) -> None:
        import duckdb

        self._advice = "give a larger --ram"
        if ram_bytes is None:
            ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
            self._advice = "use --stream"
        self._ram_bytes = max(ram_bytes, LEAST_BYTES)
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="bunkbed-"))
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self._folder = folder
        self._duckdb = duckdb
        self._failures: list[BaseException] = []  # of the stream that a statement reads
        self._describe: Callable[[BaseException], DataError] = self._failed
        threads = max(1, min(os.cpu_count() or 1, self._ram_bytes // _BYTES_A_THREAD))
        settings: Json = {
            "memory_limit": f"{self._ram_bytes // 1000}KB",
            "temp_directory": str(self._folder / "spill"),
            "threads": threads,
            "preserve_insertion_order": False,  # queries that need an order use ORDER BY; `insert` sets it
            "enable_external_access": True,
        }
        try:
            self._connection = duckdb.connect(
                str(self._folder / "tables.duckdb") if is_stored else ":memory:", config=settings
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
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

    def insert(self, sql: str) -> int:
        """Run a statement that adds rows to a table in their order, and return their number; raises as `run` does.

        The column ``rowid`` of the table then ascends in that order.
        """
        with self._errors():
            return self._insert(sql)

    def attempt(self, sql: str) -> bool:
        """Run `insert` and return whether it succeeded; it inserts all rows or none."""
        with self._errors():
            try:
                self._insert(sql)
            except self._duckdb.Error:
                return False
            return True

    def _insert(self, sql: str) -> int:
        self._connection.execute("SET preserve_insertion_order = true")
        try:
            (count,) = self._connection.execute(sql).fetchall()[0]
        finally:
            self._connection.execute("SET preserve_insertion_order = false")
        return int(count)

    def row(self, sql: str) -> tuple[Any, ...]:
        """Return the only row of a result; raises as `run` does."""
        with self._errors():
            (answer,) = self._connection.execute(sql).fetchall()
            return tuple(answer)

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Yield a long result, about 131,072 rows at a time; raises as `run` does."""
        with self._errors():
            # `execute` would hold the whole result in memory; `sql` streams it.
            yield from self._connection.sql(sql).to_arrow_reader(_BATCH_ROWS)

    @contextmanager
    def reading(self, describe: Callable[[BaseException], DataError]) -> Iterator[None]:
        """Raise `describe` of an error of DuckDB, for statements that read a file from outside."""
        self._describe = describe
        try:
            yield
        finally:
            self._describe = self._failed

    def _guarded(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches and keep the error of a stream: DuckDB would pass on only its text."""
        try:
            yield from batches
        except BaseException as error:
            self._failures.append(error)
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert DuckDB's errors to `DataError`, and raise the original error of a stream."""
        import pyarrow as pa

        self._failures.clear()
        try:
            yield
        except Exception as error:
            if self._failures and error is not self._failures[-1]:
                raise self._failures[-1] from None
            if isinstance(error, RuntimeError) and str(error) == "Query interrupted":  # DuckDB's error for Ctrl-C
                raise KeyboardInterrupt from None
            if isinstance(error, self._duckdb.OutOfMemoryException):
                raise DataError(
                    f"{self._folder.parent}: DuckDB cannot sort the interactions within "
                    f"{format_bytes(self._ram_bytes)}; {self._advice} ({_first_line(error)})"
                ) from error
            if isinstance(error, (self._duckdb.Error, pa.ArrowException)):
                raise self._describe(error) from error
            raise

    def _failed(self, error: BaseException) -> DataError:
        return DataError(f"{self._folder.parent}: DuckDB failed ({_first_line(error)})")


def path_literal(path: str) -> str:
    """Return SQL for the path of one file: DuckDB would take some characters as a pattern of several files."""
    return "'" + re.sub(r"([*?[])", r"[\1]", path).replace("'", "''") + "'"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
