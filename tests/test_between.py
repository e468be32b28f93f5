"""Calls between two steps of a walk over rows: it gives the rows it began with, or says that the table was changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from torture import between
from torture.features import small_tables

#: The scan of each kind, and other walks of those where most can go wrong; all of them in the torture part `between`.
CASES = [(kind, "scan", False) for kind in between.KINDS]
CASES += [("disk", walk, False) for walk in ("export of every row", "topk", "copies in RAM")]
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
