"""The part of the conformance suite for 16 bits: rows in bfloat16 or float16, state in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.core.types import Json
from bunkbed.testing.compare import assert_same_bits, assert_same_rows
from bunkbed.testing.philox import narrow_nearest
from bunkbed.testing.reference import ReferenceTable
from bunkbed.testing.suite_part import Pair, SuitePart

#: Rows or state in 16 bits, as arguments of ``bb.create``.
NARROW: list[Json] = [
    {"dtype": "bfloat16", "optimizer": bb.SGD(lr=0.1)},
    {"dtype": "float16", "optimizer": bb.SGD(lr=0.1, weight_decay=0.01)},
    {"dtype": "bfloat16", "optimizer": bb.RowwiseAdagrad(lr=0.1)},
    {"dtype": "float16", "optimizer": bb.Adam(lr=0.01)},
    {"dtype": "bfloat16", "optimizer": bb.Adam(lr=0.01, weight_decay=0.01, decoupled=True)},
    {"dtype": "float32", "optimizer": bb.Adam(lr=0.01, state_dtype="bfloat16")},
    {"dtype": "bfloat16", "optimizer": bb.Adam(lr=0.01, state_dtype="bfloat16")},
    {"dtype": "float16", "optimizer": bb.Adagrad(lr=0.1, initial_accumulator=0.1, state_dtype="bfloat16")},
    {"dtype": "bfloat16", "optimizer": bb.Adagrad(lr=0.1, weight_decay=0.01, state_dtype="bfloat16")},
    {"dtype": "bfloat16", "optimizer": bb.RowwiseAdagrad(lr=0.1, weight_decay=0.01, state_dtype="bfloat16")},
    {"dtype": "float32", "optimizer": bb.RowwiseAdagrad(lr=0.1, state_dtype="bfloat16")},
]
# 16 bits for rows and state. With float32 it is enough for tests of code that only copies stored values.
ALL_NARROW: Json = {"dtype": "bfloat16", "optimizer": bb.Adam(lr=0.01, state_dtype="bfloat16")}
both_widths = pytest.mark.parametrize("pair", [{}, ALL_NARROW], indirect=True, ids=["float32", "bfloat16"])


class NarrowTests(SuitePart):
    """Tests of `TableTests` with rows or state in 16 bits."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_lookup_fills_out_in_16_bits(self, tmp_path: Path, dtype: str) -> None:
        kwargs: Json = {
            "dim": self.dim,
            "num_rows": self.num_rows,
            "optimizer": bb.Adam(lr=0.01),
            "init": bb.Normal(std=0.1),
            "dtype": dtype,
        }
        table, reference = self.make_table(tmp_path, **kwargs), ReferenceTable(**kwargs)
        self.train(table, reference, steps=3)
        ids = self.all_ids().reshape(2, -1)
        out = np.zeros((*ids.shape, self.dim), np.uint16 if dtype == "bfloat16" else np.float16)
        expected = reference.lookup(ids, out=np.zeros_like(out))
        assert table.lookup(ids, out=out) is out
        assert out.tobytes() == expected.tobytes()
        wide = out.astype(np.uint32) << 16 if dtype == "bfloat16" else out.astype(np.float32)
        assert wide.tobytes() == table.lookup(ids).tobytes()
        if table.path is not None:  # the oracle does not check the dtype of `out`
            with pytest.raises(ValueError, match="out"):
                table.lookup(ids, out=np.zeros_like(out, np.float16 if dtype == "bfloat16" else np.uint16))
        table.close(commit=False)

    @pytest.mark.parametrize("pair", NARROW, indirect=True, ids=repr)
    def test_16_bit_rows_are_the_reference_to_the_last_bit(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference)
        assert_same_rows(table, reference, self.all_ids())
        assert table.nbytes == reference.nbytes

    @pytest.mark.parametrize("pair", NARROW, indirect=True, ids=repr)
    def test_set_rounds_to_nearest_and_get_gives_what_is_stored(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference, steps=2)
        rng = np.random.default_rng(4)
        for slot in ("weight", *reference.slots):
            ids = rng.choice(self.num_rows, 100, replace=False)
            values = rng.random((100, *reference.get(ids, slot=slot).shape[1:])).astype(np.float32)
            dtype = reference.dtype if slot == "weight" else reference.state_dtype
            for again in range(2):  # the second time, values that were read are stored without a change
                table.set(ids, values, slot=slot)
                assert_same_bits(table.get(ids, slot=slot), narrow_nearest(dtype, values), f"{slot}, {again}")
                reference.set(ids, values, slot=slot)
                values = table.get(ids, slot=slot)
        assert_same_rows(table, reference, self.all_ids())
        self.train(table, reference, steps=2, seed=9)
        assert_same_rows(table, reference, self.all_ids())

    @pytest.mark.parametrize(
        ("pair", "value"), [({"dtype": "float16"}, 65520.0), ({"dtype": "bfloat16"}, -3.3961776e38)], indirect=["pair"]
    )
    def test_a_value_beyond_the_rows_dtype_changes_nothing(self, pair: Pair, value: float) -> None:
        table, reference = pair
        values = np.zeros((3, self.dim), np.float32)
        values[:2] = np.nextafter(np.float32(value), np.float32(0))  # rounds to the largest finite value
        table.set([1, 2, 3], values)
        reference.set([1, 2, 3], values)
        values[1, 5] = value
        with pytest.raises(ValueError, match=rf"position 1.*{table.dtype}"):
            table.set([4, 5, 6], values)
        assert_same_rows(table, reference, self.all_ids())
