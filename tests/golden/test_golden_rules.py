"""The file format of tables whose rows come and go by rules, written and read a second time from FORMAT.md."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from test_golden import FORMAT, Made, payload, read_newest, read_table

USAGE = (("last_step", 3, 1, 48), ("count", 4, 1, 56))


def test_ages_and_rules_open(tmp_path: Path) -> None:
    records = [
        (id_, id_, payload(*[1.0] * 12) + struct.pack("<qI", last, 3)) for id_, last in ((5, 2), (6, 8), (7, 11))
    ]
    facts: dict[str, Any] = {"chunks": ((1, tuple(records)),), "reader_flags": 8, "num_rows": -1, "payload_bytes": 60}
    facts["fields"] = (*Made().fields, *USAGE)
    folder = Made(rules=(5, 100, 1, 12, 1, 2, 0), **facts).write(tmp_path / "made")
    assert bb.check(folder) == []
    with bb.open(folder, ram="16MiB") as table:
        assert table.retention == bb.Retention(expire=5, max_rows=100, keep=1, clock="event", evict="smallest")
        assert table.clock == 12
        swept = table.sweep()
        assert swept.expired == 1 and table.contains([5, 6, 7]).tolist() == [False, True, True]
        assert [(one.low, one.rows) for one in swept.counts] == [(2, 3)]
    wrong = (
        ({"fields": Made().fields}, "another usage"),
        ({"fields": (*Made().fields, USAGE[1], USAGE[0])}, "another usage"),
        ({"fields": (*Made().fields, USAGE[0], ("count", 4, 1, 52))}, "another usage"),
        ({"fields": (*Made().fields, *USAGE), "reader_flags": 0}, "unknown dtype 3"),
        ({"rules": (0, 0, 0, 0, 0, 0, 0)}, "rule of retention is out of range"),
        ({"rules": (5, 0, 0, 0, 2, 0, 0)}, "unknown clock 2"),
        ({"payload_bytes": 64}, "fields this release does not know"),
    )
    for number, (changes, message) in enumerate(wrong):
        folder = Made(**{**facts, **changes}).write(tmp_path / f"wrong-{number}")
        with pytest.raises(bb.FormatError, match=message):
            bb.open(folder, ram="16MiB")


def test_ages_of_the_core_read_by_hand(tmp_path: Path) -> None:
    with bb.create(tmp_path / "table", dim=4, expire=5, clock="event", keep=2, ram="16MiB") as table:
        for clock, ids in ((0, [1, 2, 3]), (2, [2, 3]), (1 << 40, [3])):
            table.clock = clock
            table.update(ids, np.ones((len(ids), 4), np.float32))
        commit = table.commit()
    manifest = (tmp_path / "table" / f"manifest-{commit:016d}").read_bytes()
    assert struct.unpack_from("<Q", manifest, 24)[0] == 8
    assert struct.unpack_from("<qqqqBBH", manifest, len(manifest) - 40) == (5, 0, 2, 1 << 40, 1, 0, 0)
    rows = read_table(tmp_path / "table")
    found = {id_: struct.unpack_from("<qI", body, 48) for id_, (_, body) in rows.items()}
    assert found == {1: (0, 1), 2: (2, 2), 3: (1 << 40, 3)}


def test_a_probability_of_admission_opens(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"num_rows": -1, "reader_flags": 16, "chunks": ((1, ((5, 1, payload(*[1.0] * 12)),)),)}
    folder = Made(admit=0.25, stored_rows=1, **facts).write(tmp_path / "made")
    assert bb.check(folder) == []
    with bb.open(folder, ram="16MiB") as table:
        assert table.retention == bb.Retention(admit=0.25)
    for number, admit in enumerate((0.0, 1.0, -0.5, np.nan, np.inf)):
        with pytest.raises(bb.FormatError, match="probability of admission is out of range"):
            bb.open(Made(admit=admit, stored_rows=1, **facts).write(tmp_path / f"wrong-{number}"), ram="16MiB")


def test_a_probability_of_the_core_read_by_hand(tmp_path: Path) -> None:
    """The flag is the one of FORMAT.md; without the rule the manifest has neither flag nor field."""
    ids = np.array([0, 1, 2, 3, 12345, 2**31, 2**40 + 3, 2**63 - 1])
    with bb.create(tmp_path / "table", dim=4, admit=0.5, seed=7, ram="16MiB") as table:
        for rules, flags in ((bb.Retention(admit=0.5), 16), (bb.Retention(), 0)):
            table.retention = rules
            table.update(ids, np.ones((8, 4), np.float32))
            if flags:
                assert "".join(str(int(one)) for one in table.contains(ids)) == "00001011"
                assert "`00001011`" in FORMAT.read_text()
            commit = table.commit()
            manifest = (tmp_path / "table" / f"manifest-{commit:016d}").read_bytes()
            assert struct.unpack_from("<Q", manifest, 24)[0] == flags
            if flags:
                assert struct.unpack_from("<d", manifest, len(manifest) - 12)[0] == 0.5
        assert table.contains(ids).all()
    assert len(read_table(tmp_path / "table")) == 8


def number_of(count: int, time: int) -> int:
    """The number of a count, as in FORMAT.md."""
    cut = max(0, time.bit_length() - 26)
    return 2**40 - 2**38 - 2**32 + count * 2**31 + cut * 2**25 + (time >> cut)


def test_numbers_of_counts_are_those_of_the_format() -> None:
    text = FORMAT.read_text()
    for count, time in ((1, 5), (2, 2**40 + 1)):
        assert f"{number_of(count, time)}" in text


def test_steps_of_admission_open(tmp_path: Path) -> None:
    counts = ((7, 2, 2, 9), (8, 3, 1, 2), (9, 4, 2, 2**40))  # id, version, count, time
    chunks = (
        (1, ((5, 1, payload(*[1.0] * 12)),)),
        (3, tuple((id_, version, struct.pack("<Q", number_of(*count))) for id_, version, *count in counts)),
        (2, ((9, 5, b""),)),
    )
    facts: dict[str, Any] = {"num_rows": -1, "reader_flags": 32, "chunks": chunks, "stored_rows": 1}
    folder = Made(admit_from=(3, 1, 4), **facts).write(tmp_path / "made")
    assert bb.check(folder) == []
    with bb.open(folder, mode="r") as reader:
        assert reader.stats()["counted_ids"] == 1 and len(reader) == 1
    with bb.open(folder, ram="16MiB") as table:
        assert table.retention == bb.Retention(admit=3)
        assert [column.tolist() for column in table.core.counted(0, 1)[:3]] == [[7], [2], [9]]  # 8 is old, 9 deleted
        table.update([7, 8, 9], np.ones((3, 4), np.float32))
        assert table.contains([5, 7, 8, 9]).tolist() == [True, True, False, False]
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"admit_from": (1, 1, 4)}, bb.FormatError, "steps of admission are out of range"),
        ({"admit_from": (129, 1, 4)}, bb.FormatError, "steps of admission are out of range"),
        ({"admit_from": (3, 1, -4)}, bb.FormatError, "steps of admission are out of range"),
        ({"admit_from": (3, 1, 4), "reader_flags": 48}, bb.FormatError, "steps of admission are out of range"),
        ({"admit_from": (3, 2, 4)}, bb.CorruptionError, "counts of 1 ids that are not stored, the commit says 2"),
        ({"reader_flags": 0}, bb.CorruptionError, "counts of 2 ids that are not stored, the commit says 0"),
    ]
    for bad in (0, number_of(1, 1) - 2**31, number_of(1, 1) + 39 * 2**25, 2**40 - 1):
        chunk = ((3, ((7, 2, struct.pack("<Q", bad)),)),)
        wrong.append(({"chunks": chunk, "stored_rows": 0}, bb.CorruptionError, "a count of id 7 that is none"))
    for number, (changes, kind, message) in enumerate(wrong):
        with pytest.raises(kind, match=message):
            bb.open(
                Made(**{"admit_from": (3, 1, 4), **facts, **changes}).write(tmp_path / f"wrong-{number}"), ram="16MiB"
            )


def test_counts_of_the_core_read_by_hand(tmp_path: Path) -> None:
    with bb.create(tmp_path / "table", dim=4, admit=3, expire=9, clock="event", ram="16MiB") as table:
        for clock, ids in ((5, [1, 2]), (6, [2, 3]), (2**40 + 1, [2, 3])):
            table.clock = clock
            table.update(ids, np.ones((len(ids), 4), np.float32))
        table.sweep()
        commit = table.commit()
    manifest = (tmp_path / "table" / f"manifest-{commit:016d}").read_bytes()
    assert struct.unpack_from("<Q", manifest, 24)[0] & 56 == 40
    assert struct.unpack_from("<IQq", manifest, len(manifest) - 24) == (3, 1, 2**40 + 1 - 9 + 1)
    found, stored = read_newest(tmp_path / "table")
    assert stored == 1 and {id_: kind for id_, (_, kind, _) in found.items()} == {2: 1, 3: 3}
    assert struct.unpack("<Q", found[3][2])[0] == number_of(2, 2**40 + 1)
