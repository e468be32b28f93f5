"""Rows as decimal numbers, for the formats that are text.

Nine significant digits bring every float32 back bit for bit, also through the float64 that text is parsed to.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bunkbed.arguments import Floats, Ids
from bunkbed.io.exporting import Writing


def parse(lines: Sequence[bytes], length: int, path: Path, first_line: int) -> Floats:
    """float32[len(lines), length] of numbers between white space.

    Raises:
        ValueError: a line that does not hold so many numbers; names the first, counted from `first_line`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # what older versions of NumPy say of what is no number
        try:
            flat = np.fromstring(b" ".join(lines), np.float32, sep=" ")
        except (ValueError, DeprecationWarning):
            flat = np.empty(0, np.float32)
    # Line by line as well: two wrong ones may make up for each other.
    if flat.size == len(lines) * length and all(len(line.split()) == length for line in lines):
        return flat.reshape(len(lines), length)
    for at, line in enumerate(lines):
        numbers = line.split()
        where = f"{path}: line {first_line + at}"
        if len(numbers) != length:
            raise ValueError(f"{where} holds {len(numbers)} numbers, expected {length}; nothing was changed")
        for number in numbers:
            try:
                float(number)
            except ValueError:
                text = number.decode(errors="replace")
                raise ValueError(f"{where} holds {text!r}, which is no number; nothing was changed") from None
    raise AssertionError(f"{path}: lines from {first_line} on parse one by one, not together")


def formatted(rows: Floats, separator: str) -> list[str]:
    """A line for each row, without its end."""
    pattern = separator.join(["%.9g"] * rows.shape[1])
    return [pattern % tuple(row) for row in rows.tolist()]


def ids_in_order(writing: Writing) -> Ids:
    """Ids of the stored rows, ascending: 8 bytes a row, beside text that takes hundreds."""
    table, chunk = writing.table, writing.rows_of()
    parts = [ids for ids, _ in table.scan("weight", chunk)]
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)
