"""The formats: a table for the functions, the command line and the tests, and a module for each kind."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Format:
    """A file format of rows.

    Args:
        name: the value of ``format=``.
        module: file of this folder with its ``read`` and ``write``.
        suffixes: suffixes of file names that select it.
        has_state: whether it can hold optimizer slots and the step in addition to the weights.
        every_row: whether an export holds every id in ``[0, num_rows)`` instead of the stored rows.
        has_words: whether its rows are, or may be, named by words.
        can_export: False if it is only read.
        has_metric: whether it is an index of nearest rows, by a metric.
    """

    name: str
    module: str
    suffixes: tuple[str, ...]
    has_state: bool = False
    every_row: bool = False
    has_words: bool = False
    can_export: bool = True
    has_metric: bool = False

    def load(self) -> Any:
        """Import and return its module."""
        return importlib.import_module(f"{__name__}.{self.module}")


FORMATS = (
    Format("npy", "npy", (".npy",), every_row=True),
    Format("parquet", "arrow", (".parquet",), has_state=True, has_words=True),
    Format("arrow", "arrow", (".arrow", ".feather"), has_state=True, has_words=True),
    Format("safetensors", "safetensors_file", (".safetensors",), has_state=True),
    Format("torch", "torch_checkpoint", (".pt", ".pth", ".ckpt"), has_state=True, every_row=True),
    Format("keras", "hdf5", (".keras",), has_state=True, every_row=True, can_export=False),
    Format("weights-h5", "hdf5", (".weights.h5", ".h5"), every_row=True),
    Format("tensorflow", "tensorflow_checkpoint", (".index",), every_row=True),
    Format("word2vec", "word2vec", (".vec",), has_words=True),
    Format("word2vec-binary", "word2vec", (), has_words=True),  # .bin may be anything
    Format("projector", "projector", (".projector", ".tsv"), has_words=True),
    Format("usearch", "usearch_index", (".usearch",), has_metric=True),
)


def format_of(path: Path, name: str | None) -> Format:
    """Return the format of that name, or the one of the file's suffix.

    Raises:
        ValueError: no such format, or an unknown suffix; lists the formats.
    """
    if name is not None:
        for one in FORMATS:
            if one.name == name:
                return one
        raise ValueError(f"there is no format {name!r}; there are {', '.join(one.name for one in FORMATS)}")
    for one in FORMATS:
        if path.name.endswith(one.suffixes):
            return one
    suffixes = ", ".join(suffix for one in FORMATS for suffix in one.suffixes)
    names = ", ".join(one.name for one in FORMATS)
    raise ValueError(
        f"cannot tell the format of {path}; its name must end in one of {suffixes}, or give format= as one of {names}"
    )
