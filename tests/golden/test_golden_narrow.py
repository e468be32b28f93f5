"""The file format of 16-bit state, written and read a second time from FORMAT.md, and its vectors of rounding."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.testing import ReferenceTable
from bunkbed.testing.philox import narrow_stochastic
from test_golden import FORMAT, Made, read_table


def narrow_made(**changes: Any) -> Made:
    """bfloat16 rows and state, dim 3: every field has two bytes of padding."""
    fields = (("weight", 1, 3, 0), ("exp_avg", 1, 3, 8), ("exp_avg_sq", 1, 3, 16))
    body = struct.pack("<3HH3HH3HH", 0x3F80, 0xC000, 0x4040, 0, 0x3F00, 0x3E80, 0x3E00, 0, 0x3DCD, 0x0001, 0x7F7F, 0)
    chunks = ((1, ((5, 1, body),)),)
    made: dict[str, Any] = {
        "dim": 3,
        "fields": fields,
        "payload_bytes": 24,
        "reader_flags": 1,
        "chunks": chunks,
        "stored_rows": 1,
    }
    return Made(**(made | changes))


def test_state_in_bfloat16_made_by_hand_opens(tmp_path: Path) -> None:
    made = narrow_made()
    folder = made.write(tmp_path / "made")
    assert made.manifest(len(made.segment())).hex() == MANIFEST_BYTES
    assert bb.check(folder) == []
    for mode in ("r", "w"):
        with bb.open(folder, mode=mode, ram="16MiB") as table:
            assert table.dtype == "bfloat16" and table.optimizer == bb.Adam(lr=0.01, state_dtype="bfloat16")
            assert table.lookup([5])[0].tolist() == [1.0, -2.0, 3.0]
            assert table.get([5], slot="exp_avg")[0].tolist() == [0.5, 0.25, 0.125]
            smallest, largest = float.fromhex("0x1p-133"), float.fromhex("0x1.fep127")
            assert table.get([5], slot="exp_avg_sq")[0].tolist() == [float.fromhex("0x1.9ap-4"), smallest, largest]
    with bb.open(folder, ram="16MiB") as table:
        kwargs: dict[str, Any] = {"dim": 3, "num_rows": 100, "init": bb.Normal(0.1), "seed": 7}
        oracle = ReferenceTable(dtype="bfloat16", optimizer=table.optimizer, **kwargs)
        for slot in ("weight", *oracle.slots):
            oracle.set([5], table.get([5], slot=slot), slot=slot)
        for t in (table, oracle):
            t.update([5, 6], np.full((2, 3), 0.3, np.float32), step=4)
        expected = {slot: oracle.get([5, 6], slot=slot) for slot in ("weight", *oracle.slots)}
    rows = read_table(folder)
    for index, id_ in enumerate((5, 6)):
        parts = [(values[index].view(np.uint32) >> 16).astype(np.uint16) for values in expected.values()]
        assert rows[id_][1] == b"".join(part.tobytes() + b"\0\0" for part in parts)


def test_state_in_bfloat16_is_named_by_the_core(tmp_path: Path) -> None:
    """The reader flag, so that releases before it refuse, and the fields' dtype; neither for float32 state."""
    for state_dtype, flags, dtype in (("float32", 0, 0), ("bfloat16", 1, 1)):
        folder = tmp_path / state_dtype
        bb.create(folder, dim=3, optimizer=bb.Adagrad(state_dtype=state_dtype), dtype="float16", ram="64MiB").close()
        manifest = (folder / f"manifest-{0:016d}").read_bytes()
        assert struct.unpack_from("<Q", manifest, 24)[0] == flags
        assert b"\x03\0\0\0sum" + struct.pack("<BII", dtype, 3, 8) in manifest


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (narrow_made(reader_flags=0), r"flags"),
        (Made(reader_flags=1), r"flags"),
        (Made(fields=(("weight", 0, 4, 0), ("exp_avg", 2, 4, 16))), r"exp_avg.*float16"),
        (
            Made(reader_flags=1, fields=(("weight", 0, 4, 0), ("exp_avg", 1, 4, 16), ("exp_avg_sq", 0, 4, 24))),
            r"several dtypes",
        ),
        (
            narrow_made(fields=(("weight", 1, 3, 0), ("exp_avg", 1, 3, 6), ("exp_avg_sq", 1, 3, 12))),
            r"fields this release does not know",
        ),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_manifest_whose_state_lies(tmp_path: Path, made: Made, message: str) -> None:
    folder = made.write(tmp_path / "made")
    for mode in ("r", "w"):
        with pytest.raises(bb.FormatError, match=message):
            bb.open(folder, mode=mode, ram="16MiB")
    assert bb.check(folder)


def test_the_page_has_vectors_of_rounding_that_hold() -> None:
    """The same for stochastic rounding, through updates that store exactly the values on the page."""
    page = FORMAT.read_text()
    values = re.search(r"^`([^`]* [^`]*)`$", page, re.MULTILINE)
    rows = re.findall(r"^\| (b?float16) \| (\S+) \| (\d+) \| (\d+) \| (\d) \| `([^`]*)` \|$", page, re.MULTILINE)
    assert values is not None and len(rows) == 4 and {row[4] for row in rows} == {"0", "2"}
    exact = [float.fromhex(text) if text.startswith("0x") else float(text) for text in values[1].split()]
    x = np.array([exact], np.float32)
    for dtype, seed, id_, step, field, words in rows:
        key: dict[str, Any] = {"seed": int(seed, 0), "ids": np.array([int(id_)]), "step": int(step)}
        stored = narrow_stochastic(dtype, x, field=int(field), **key)[0]
        assert words_of(stored, dtype) == words.split()
        if field == "0":  # a step from zero by -1 times the gradient
            with bb.create(
                None, dim=8, dtype=dtype, seed=int(seed, 0), init=bb.Zeros(), optimizer=bb.SGD(lr=1.0)
            ) as table:
                table.update([int(id_)], -x, step=int(step))
                assert words_of(table.lookup([int(id_)])[0], dtype) == words.split()


def words_of(values: Any, dtype: str) -> list[str]:
    words = values.view(np.uint32) >> 16 if dtype == "bfloat16" else values.astype(np.float16).view(np.uint16)
    return [f"{word:04x}" for word in words]


MANIFEST_BYTES = (
    "424245444d414e0a01000000000000003d01000000000000010000000000000000000000000000000001020304050607"
    "08090a0b0c0d0e0f01000000000000000000000000000000030000000000000064000000000000000200000000000000"
    "640000000000000003000000010300009a9999999999b93f000000000000000007000000000000007b14ae47e17a843f"
    "3a8c30e28e79453ecdccccccccccec3f2b8716d9cef7ef3f000000000000000000000000000000000000000001000000"
    "180000000000000000800000000000000100000000000000030000000600000077656967687401030000000000000007"
    "0000006578705f6176670103000000080000000a0000006578705f6176675f7371010300000010000000010000000100"
    "000000000000010000000000000000200000000000000000000000000000130000007b226d616465223a202262792068"
    "616e64227d67f9ec92"
)
