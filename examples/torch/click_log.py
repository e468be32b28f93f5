"""How do I make a click log in Criteo's format with a known best possible AUC?

    python examples/torch/click_log.py clicks.tsv --samples 1_000_000

The clicks are drawn from the model `ClickLog`. A log is tab-separated, without a header: label, 13 integers, 26
categories of 8 hexadecimal digits; a missing value is an empty field. `dlrm_criteo.py` makes a log if it gets no files,
and reads it with `read`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

NUMBERS, CATEGORIES = 13, 26
NAMES = ["label", *(f"I{n + 1}" for n in range(NUMBERS)), *(f"C{n + 1}" for n in range(CATEGORIES))]
SCHEMA = pa.schema([(name, pa.string() if name[0] == "C" else pa.int64()) for name in NAMES])
CHUNK = 100_000
#: Two columns whose vectors' product is part of the log-odds. A sum over columns cannot learn this term.
PAIR = 2, 4


class ClickLog:
    """Synthetic log: columns of 4 to `largest` categories, distributed by Zipf's law, each category with an effect.

    The log-odds of a click are a sum over all columns plus the product of two columns. A missing number counts as 0,
    as in `read`. Rarer categories have smaller effects, so that the effects can be learned from the samples.
    """

    def __init__(self, largest: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.sizes = [int(size) for size in np.geomspace(4, largest, CATEGORIES)]
        # One more entry than the column's size: the last is for the missing value.
        self._effects = [rng.normal(0, 0.5, size + 1) / (1 + np.arange(size + 1) / 10) for size in self.sizes]
        self._vectors = [rng.normal(0, 0.4, (self.sizes[column] + 1, 4)) for column in PAIR]
        self._slopes = rng.normal(0, 0.1, NUMBERS)
        self._names = []
        for size in self.sizes:
            # Any 32 bits whose remainder modulo the column's size is the category.
            numbers = np.arange(size) + size * rng.integers(0, 2**32 // size, size)
            self._names.append(pa.array([*(f"{number:08x}" for number in numbers), None], pa.string()))

    def write(self, path: Path, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Write a log; return the labels, bool[samples], and the probabilities of a click, float64[samples]."""
        labels, chances = [], []
        options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        with csv.CSVWriter(path, SCHEMA, write_options=options) as writer:
            for start in range(0, samples, CHUNK):
                rng = np.random.default_rng([seed, start])
                count = min(CHUNK, samples - start)
                clicked, chance, columns = self._draw(rng, count)
                writer.write(pa.Table.from_arrays([pa.array(clicked.astype(np.int64)), *columns], schema=SCHEMA))
                labels.append(clicked)
                chances.append(chance)
        return np.concatenate(labels), np.concatenate(chances)

    def _draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, list[pa.Array]]:
        numbers = np.floor(rng.lognormal(1.0, 1.5, (NUMBERS, count))).astype(np.int64)
        missing = rng.random(numbers.shape) < 0.1
        logits = -1.5 + self._slopes @ np.where(missing, 0.0, np.log1p(numbers))
        columns = [pa.array(row, mask=absent) for row, absent in zip(numbers, missing, strict=True)]
        ids = []
        for size, effect, name in zip(self.sizes, self._effects, self._names, strict=True):
            seen = np.cumsum(1.0 / np.arange(1, size + 1) ** 1.05)
            column = np.searchsorted(seen, rng.random(count) * seen[-1])
            column[rng.random(count) < 0.02] = size
            logits += effect[column]
            ids.append(column)
            columns.append(name.take(pa.array(column)))
        left, right = (vectors[ids[column]] for vectors, column in zip(self._vectors, PAIR, strict=True))
        logits += (left * right).sum(1)
        chance = 1.0 / (1.0 + np.exp(-logits))
        return rng.random(count) < chance, chance, columns


def read(path: Path, rows: list[int], size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield batches of a file, in constant memory: float32[B] labels, float32[B, 13] numbers, and int64[26, B] rows.

    A category's row is its number modulo (rows of its column - 1), as in DLRM; the last row is for a missing value.
    Integers are returned as logarithms. The last batch of each 16 MiB is smaller.
    """
    blocks = csv.open_csv(
        path,
        csv.ReadOptions(column_names=NAMES, block_size=16 << 20),
        csv.ParseOptions(delimiter="\t"),
        csv.ConvertOptions(column_types=SCHEMA, strings_can_be_null=True),
    )
    with blocks:
        for block in blocks:
            label, *columns = block.columns
            clicked = label.to_numpy().astype(np.float32)
            numbers = np.stack([column.fill_null(0).to_numpy() for column in columns[:NUMBERS]], 1)
            scaled = (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32)
            ids = np.stack([_rows(column, count) for column, count in zip(columns[NUMBERS:], rows, strict=True)])
            for at in range(0, len(clicked), size):
                part = slice(at, at + size)
                yield clicked[part], scaled[part], np.ascontiguousarray(ids[:, part])


def _rows(column: pa.Array, rows: int) -> np.ndarray:
    texts = column.fill_null("0" * 8).to_pylist()
    try:
        numbers = np.frombuffer(bytes.fromhex("".join(texts)), ">u4").astype(np.int64)
        ids = np.where(column.is_null().to_numpy(zero_copy_only=False), rows - 1, numbers % (rows - 1))
    except ValueError:
        bad = next((text for text in texts if not re.fullmatch("[0-9a-f]{8}", text)), "?")
        raise ValueError(f"a category must have 8 hexadecimal digits, got {bad!r}") from None
    return ids


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the probability that a random click has a higher score than a random sample without click."""
    ranks = np.empty(len(scores))
    ranks[scores.argsort()] = np.arange(len(scores))
    clicks = int(labels.sum())
    return float((ranks[labels].sum() - clicks * (clicks - 1) / 2) / (clicks * (len(labels) - clicks)))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("path", type=Path)
    options.add_argument("--samples", type=lambda text: int(text.replace("_", "")), default=100_000)
    options.add_argument("--largest", type=lambda text: int(text.replace("_", "")), default=40_000)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    labels, chances = ClickLog(given.largest).write(given.path, given.samples, given.seed)
    print(f"{len(labels):,} samples, {labels.mean():.1%} clicked; no model's AUC is above {auc(labels, chances):.4f}")


if __name__ == "__main__":
    main()
