"""Comparisons of all bits, and skewed ids, for the conformance suite and other tests."""

from __future__ import annotations

import numpy as np

from bunkbed import Table
from bunkbed.testing.arithmetic import FloatArray, IntArray
from bunkbed.testing.reference import ReferenceTable


def zipf_ids(rng: np.random.Generator, num_rows: int, size: int, exponent: float = 1.05) -> IntArray:
    """Return int64[size] Zipf-skewed ids in [0, num_rows), permuted so that hot ids are not neighbours."""
    weight = 1.0 / np.arange(1, num_rows + 1) ** exponent
    ranks = np.searchsorted(np.cumsum(weight) / weight.sum(), rng.random(size))
    scatter = np.random.default_rng(12345).permutation(num_rows)
    return scatter[np.minimum(ranks, num_rows - 1)].astype(np.int64)


def assert_same_bits(ours: FloatArray, expected: FloatArray, what: str = "values") -> None:
    """Fail unless both arrays have the same dtype, shape and bytes; name the first difference."""
    assert ours.dtype == expected.dtype, f"{what}: {ours.dtype} is not {expected.dtype}"
    assert ours.shape == expected.shape, f"{what}: {ours.shape} is not {expected.shape}"
    if ours.tobytes() == expected.tobytes():
        return
    differ = np.ascontiguousarray(ours).view(np.uint32) != np.ascontiguousarray(expected).view(np.uint32)
    first = tuple(np.argwhere(differ)[0].tolist())
    raise AssertionError(
        f"{what}: {int(differ.sum())} of {differ.size} differ, first at {first}: "
        f"{ours[first]!r} is not {expected[first]!r}"
    )


def assert_same_rows(table: Table, reference: ReferenceTable, ids: IntArray) -> None:
    """Fail unless the rows `ids` have the same weight, slots and `contains`, and both tables the same step."""
    for slot in ("weight", *reference.slots):
        assert_same_bits(table.get(ids, slot=slot), reference.get(ids, slot=slot), slot)
    assert table.contains(ids).tolist() == reference.contains(ids).tolist()
    assert table.step == reference.step
    if reference.retention.removes and table.retention.removes:
        assert_same_bits(usage_of(table, ids).view(np.uint32), usage_of(reference, ids).view(np.uint32), "usage")


def counts_of(table: Table | ReferenceTable) -> IntArray:
    """Return int64[n, 3]: the ids that steps have named and not stored, ascending, with their counts and times."""
    if isinstance(table, ReferenceTable):
        return table.counted()
    found = np.column_stack(table.core.counted(0, 1)[:3])
    return found[np.argsort(found[:, 0])]


def usage_of(table: Table | ReferenceTable, ids: IntArray) -> FloatArray:
    """Return float32[N, 3] whose bytes are int64 time and uint32 number of the steps that named each row."""
    if isinstance(table, ReferenceTable):
        return table.usage(ids)
    ((field, length),) = table.usage_fields
    found = np.empty((ids.size, length), np.float32)
    table.core.get(ids, field, found)
    return found
