"""TensorFlow's checkpoints: ``NAME.index`` and ``NAME.data-...``.

TensorFlow reads and writes a tensor whole, so an export or an import holds the bytes of all rows in memory once.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bunkbed.core.arguments import Floats
from bunkbed.core.types import Json
from bunkbed.io.common.source import Chunk, Reading, Source, check_claim, check_rows, need, widened
from bunkbed.io.common.writing import Writing
from bunkbed.io.formats.dense import gather

_INSTALL = '"bunkbed[keras]"'
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
#: Alignment in bytes of memory that TensorFlow uses without a copy.
_ALIGNMENT = 64


def prefix_of(path: Path) -> Path:
    """Return TensorFlow's name of a checkpoint: its files' names without their suffix."""
    return path.with_suffix("") if path.suffix == ".index" else path


def targets(path: Path) -> list[Path]:
    """Return the files that an export makes."""
    prefix = prefix_of(path)
    return [prefix.with_name(f"{prefix.name}.{end}") for end in ("data-00000-of-00001", "index")]


def read(reading: Reading) -> Source:
    """Return rows of a variable by position."""
    path = reading.path
    reading.refuse(ids=reading.id_column, state=reading.state)
    if not targets(path)[1].exists():
        raise FileNotFoundError(2, "No such checkpoint", str(targets(path)[1]))
    tf = need("tensorflow", "a TensorFlow checkpoint", _INSTALL)
    try:
        reader = tf.train.load_checkpoint(str(prefix_of(path)))
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a TensorFlow checkpoint: {error}") from None
    dtypes = {name: kind.name for name, kind in reader.get_variable_to_dtype_map().items()}
    shapes = reader.get_variable_to_shape_map()
    name = _named(reading, shapes, dtypes)
    check_rows(f"{path}: {name.removesuffix(_VALUE)}", shapes[name], dtypes[name], reading.length("weight"))
    rows, chunk = int(shapes[name][0]), reading.rows_of()
    stored = prefix_of(path)
    size = sum(one.stat().st_size for one in stored.parent.glob(f"{glob.escape(stored.name)}.data-*"))
    check_claim(str(path), rows, 4 * reading.length("weight"), size)
    kept: list[Any] = []  # the tensor, which is read once for the check and the import

    def chunks() -> Iterator[Chunk]:
        if not kept:
            kept.append(reader.get_tensor(name))
        for begin in range(0, rows, chunk):
            part = kept[0][begin : begin + chunk]
            is_brain = dtypes[name] == "bfloat16"
            yield None, {"weight": widened(part.view(np.uint16) if is_brain else part, dtypes[name])}

    return Source(rows, ("weight",), chunks)


def _named(reading: Reading, shapes: Json, dtypes: dict[str, str]) -> str:
    """Return the name of the variable to read."""
    tables = [
        name
        for name, shape in shapes.items()
        if len(shape) == 2 and "float" in dtypes[name] and ".OPTIMIZER_SLOT" not in name and name[:10] != "optimizer/"
    ]
    listed = ", ".join(f"{name.removesuffix(_VALUE)} {list(shapes[name])}" for name in sorted(tables)) or "none"
    if reading.name is not None:
        for name in (reading.name, f"{reading.name}{_VALUE}"):
            if name in shapes:
                return name
        raise ValueError(f"{reading.path} has no variable {reading.name!r}; its matrices are: {listed}")
    if len(tables) != 1:
        raise ValueError(f"{reading.path} has {len(tables)} matrices, say which one with name=: {listed}")
    return tables[0]


def write(writing: Writing) -> int:
    """Write every id in ``[0, num_rows)``; ``tf.train.Checkpoint(weight=variable).read(prefix)`` reads it."""
    tf = need("tensorflow", "a TensorFlow checkpoint", _INSTALL)
    rows = writing.every_row()
    ((slot, length),) = writing.lengths.items()
    values = _aligned(rows, length)
    gather(writing.table, slot, values, writing.report)
    with tf.device("CPU:0"):  # the variable shares the memory of `values`
        variable = tf.Variable(tf.experimental.dlpack.from_dlpack(values.__dlpack__()), trainable=False)
    del values
    tf.train.Checkpoint(**{writing.name or "weight": variable}).write(str(writing.out / prefix_of(writing.target).name))
    return rows


def _aligned(rows: int, length: int) -> Floats:
    """Return float32[rows, length] in memory that TensorFlow uses without a copy."""
    flat = np.empty(rows * length + _ALIGNMENT // 4, np.float32)
    begin = -flat.ctypes.data % _ALIGNMENT // 4
    return flat[begin : begin + rows * length].reshape(rows, length)
