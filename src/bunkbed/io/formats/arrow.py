"""Parquet and Arrow files: a column ``id``, a column of fixed-size lists for each slot, and the step in the schema.

With a vocabulary there is also a column ``word``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bunkbed.core.arguments import Ids
from bunkbed.io.common.naming import words_of
from bunkbed.io.common.source import FLOATS, Arrow, Chunk, Reading, Source, check_claim, check_rows, need, widened
from bunkbed.io.common.writing import Writing

_INSTALL = '"bunkbed[train]"'
_STEP = b"bunkbed.step"
_WORD = "word"


def read(reading: Reading) -> Source:
    """Return rows named by a column of ids or words, with values in columns of lists."""
    pa = need("pyarrow", f"the format {reading.format}", _INSTALL)
    path, key = reading.path, reading.id_column or "id"
    reading.refuse(state=reading.state)
    try:
        schema, rows, batches = _open_parquet(reading) if reading.format == "parquet" else _open_arrow(reading)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a file of the format {reading.format}: {error}") from None
    columns = {slot: reading.name if slot == "weight" and reading.name else slot for slot in reading.slots}
    columns = {slot: column for slot, column in columns.items() if slot == "weight" or column in schema.names}
    if "weight" not in reading.slots:
        columns.pop("weight", None)
    for column in (key, *columns.values()):
        if column not in schema.names:
            hint = "; name another one with ids=" if column == key else ""
            raise ValueError(f"{path} has no column {column!r}; it has: {', '.join(schema.names)}{hint}")
    types = {slot: _float_of(pa, schema.field(column).type) for slot, column in columns.items()}
    for slot, column in columns.items():
        kind = schema.field(column).type
        wide = kind.list_size if pa.types.is_fixed_size_list(kind) else reading.length(slot)
        check_rows(f"{path}: column {column!r}", (rows, wide), types[slot], reading.length(slot))
    check_claim(str(path), rows, 4 * sum(map(reading.length, columns)), path.stat().st_size)

    def chunks() -> Iterator[Chunk]:
        begin = 0
        for batch in batches([key, *columns.values()]):
            if not len(batch):
                continue
            values = {}
            for slot, column in columns.items():
                length = reading.length(slot)
                values[slot] = _lists(batch.column(column), length, types[slot], f"{path}: column {column!r}", begin)
            yield _keys(pa, batch.column(key), f"{path}: column {key!r}", begin), values
            begin += len(batch)

    step = (schema.metadata or {}).get(_STEP)
    return Source(rows, tuple(columns), chunks, None if step is None else int(step))


def _open_parquet(reading: Reading) -> tuple[Arrow, int, Arrow]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(reading.path)
    for at in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(at)
        for column in map(group.column, range(group.num_columns)):  # one list could exceed memory
            where = f"{reading.path}: column {column.path_in_schema!r}"
            check_claim(where, column.num_values, 4, reading.path.stat().st_size)

    def batches(columns: list[str]) -> Iterator[Arrow]:
        yield from file.iter_batches(batch_size=reading.rows_of(), columns=columns)

    return file.schema_arrow, file.metadata.num_rows, batches


def _open_arrow(reading: Reading) -> tuple[Arrow, int, Arrow]:
    import pyarrow as pa

    file = pa.ipc.open_file(pa.memory_map(str(reading.path)))
    rows = 0
    for at in range(file.num_record_batches):
        batch = file.get_batch(at)
        batch.validate(full=True)  # otherwise pyarrow follows offsets outside the file
        rows += batch.num_rows

    def batches(columns: list[str]) -> Iterator[Arrow]:
        for at in range(file.num_record_batches):
            batch = file.get_batch(at).select(columns)
            for begin in range(0, len(batch), reading.rows_of()):
                yield batch.slice(begin, reading.rows_of())

    return file.schema, rows, batches


def _float_of(pa: Arrow, kind: Arrow) -> str:
    """Return the dtype of a column's lists, or for another column a text that is not in `FLOATS`."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    inner = kind.value_type if is_list else kind
    name = {"float": "float32", "halffloat": "float16", "double": "float64"}.get(str(inner), str(inner))
    return name if is_list else f"{name}, no list"


def _lists(column: Arrow, length: int, dtype: str, what: str, begin: int) -> Arrow:
    """Return float32[n, length] of a column of lists."""
    assert dtype in FLOATS
    if column.null_count:
        at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"{what} is null at position {begin + at}; nothing was changed")
    flat = column.flatten()
    if flat.null_count:
        at = int(np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))[0]) // length
        raise ValueError(f"{what} has a null in the list at position {begin + at}; nothing was changed")
    if not hasattr(column.type, "list_size"):
        import pyarrow.compute as pc

        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        if (lengths != length).any():
            at = int(np.flatnonzero(lengths != length)[0])
            raise ValueError(
                f"{what} must hold lists of {length} values, that at position {begin + at} has {lengths[at]}; "
                "nothing was changed"
            )
    return widened(flat.to_numpy(zero_copy_only=False), dtype).reshape(len(column), length)


def _keys(pa: Arrow, column: Arrow, what: str, begin: int) -> Arrow:
    if column.null_count:
        at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"{what} is null at position {begin + at}; nothing was changed")
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.to_pylist()
    return column.to_numpy(zero_copy_only=False)


def write(writing: Writing) -> int:
    """Write stored rows, in log order."""
    pa = need("pyarrow", f"{writing.target.name}", _INSTALL)
    fields = [pa.field("id", pa.int64(), nullable=False)]
    if writing.words is not None:
        fields.append(pa.field(_WORD, pa.string(), nullable=False))
    fields += [
        pa.field(slot, pa.list_(pa.float32(), length), nullable=False) for slot, length in writing.lengths.items()
    ]
    metadata = {_STEP: str(writing.table.step).encode()} if writing.state else None
    schema = pa.schema(fields, metadata=metadata)
    done = 0
    with _writer(pa, writing, schema) as writer:
        for ids, values in writing.stored():
            columns = [pa.array(ids)]
            if writing.words is not None:
                columns.append(_words(pa, writing, ids))
            columns += [
                pa.FixedSizeListArray.from_arrays(pa.array(values[slot].reshape(-1)), length)
                for slot, length in writing.lengths.items()
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            done += len(ids)
    return done


def _words(pa: Arrow, writing: Writing, ids: Ids) -> Arrow:
    words = list(words_of(writing.vocab, ids, writing.words))
    try:
        return pa.array(words, pa.string())
    except UnicodeEncodeError:
        at = next(at for at, word in enumerate(words) if _has_surrogates(word))
        raise ValueError(
            f"{writing.target}: word {words[at]!r} of id {ids[at]} in {writing.vocab} is not UTF-8, which a column of "
            "text must be"
        ) from None


def _has_surrogates(word: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in word)


def _writer(pa: Arrow, writing: Writing, schema: Arrow) -> Arrow:
    if writing.format == "parquet":
        import pyarrow.parquet as parquet

        # Trained floats rarely repeat: a dictionary would take most of the time and save nothing.
        return parquet.ParquetWriter(writing.file, schema, use_dictionary=False)
    return pa.ipc.new_file(str(writing.file), schema)
