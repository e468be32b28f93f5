"""Calls between two steps of a walk over rows: it gives the rows it began with, or says that the table was changed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torture.stories import between
from torture.stories.features import small_tables

import bunkbed as bb
from bunkbed.io.formats import dense

#: The scan of each kind, and other walks of the kinds where most can go wrong. The torture part `between` has all.
CASES = [(kind, "scan", False) for kind in between.KINDS]
CASES += [("disk", walk, False) for walk in ("export of every row", "topk")]
CASES += [("durable", "export", False)]
CASES += [(kind, "scan", True) for kind in ("durable", "disk", "sharded")]


@pytest.mark.parametrize(("kind", "walk", "of_reader"), CASES)
def test_calls_between_its_steps_lose_no_row(kind: str, walk: str, of_reader: bool, tmp_path: Path) -> None:
    if kind == "device cache":
        pytest.importorskip("torch")
    calls = between.calls_for(kind)
    if walk != "scan" or kind not in ("durable", "disk"):
        calls = calls[len(walk) % 2 :: 2]
    with small_tables():
        result = between.story(kind, walk, calls, 0, tmp_path, of_reader=of_reader)
    assert not result.failures, "\n".join(result.failures)
    assert result.passed == result.tried == len(calls)


def test_each_call_has_an_outcome() -> None:
    assert set(between.OUTCOMES) <= set(between.BETWEEN), "an outcome of a call that is not there"
    assert set(between.COMMITS) <= set(between.BETWEEN)


@pytest.mark.parametrize("write", ["fill", "gather"])
def test_rows_that_come_after_the_scan_of_an_export_are_not_in_it(write: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(dense, "_REGION_BYTES", 256 * 8)
    table = bb.create(None, dim=2, num_rows=1000, optimizer=bb.SGD(lr=1.0), init=bb.Zeros())
    table.update([1], np.ones((1, 2), np.float32))
    scan, out = table.scan_slots, np.full((1000, 2), 9, np.float32)

    def scanned(slots: Any, chunk: int) -> Any:
        yield from scan(slots, chunk)
        table.update([1, 700], np.ones((2, 2), np.float32))

    monkeypatch.setattr(table, "scan_slots", scanned)
    with contextlib.suppress(bb.BunkbedError):
        if write == "fill":
            dense.fill(table, {"weight": out}, tmp_path, lambda done, total: None)
        else:
            dense.gather(table, "weight", out, lambda done, total: None)
        assert (out[1, 0], out[700, 0]) == (-1, 0), "row 1 is of the state before the update, row 700 of the one after"
