"""The comparison of block order with a shuffle: its data, its interval and its picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.cases.training import block_quality

SHAPE = block_quality.Shape(users=40, items=60, pairs=40)


def test_planted_pairs_do_not_repeat_and_a_fifth_is_left_out() -> None:
    data = block_quality.plant(SHAPE, 3)
    trained = np.zeros_like(data.left_out)
    trained[data.users, data.items] = True
    assert trained.sum() == len(data.users) == 40 * 32 and not (trained & data.left_out).any()
    assert (data.left_out.sum(1) == 8).all()
    # The planted scores rank the pairs that are left out, and perfect scores find all.
    rng = np.random.default_rng(0)
    assert data.recall(data.scores) > 1.2 * data.recall(rng.random(data.scores.shape))
    assert data.recall(data.left_out + 2.0 * trained) == 1  # trained pairs do not count


def test_the_interval_is_that_of_paired_differences() -> None:
    found = np.array([[0.5, 0.6], [0.7, 0.7], [0.2, 0.3]])
    *_, shown = block_quality.figures(found, 6)
    assert shown.value is not None and shown.low is not None and shown.high is not None
    error = np.std([0.1, 0, 0.1], ddof=1) / np.sqrt(3)
    assert shown.value == pytest.approx(0.2 / 3) and shown.high - shown.value == pytest.approx(4.303 * error)
    assert shown.value - shown.low == pytest.approx(4.303 * error) and f"{error:.4f}" in shown.note


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    block_quality.draw(tmp_path / "quality.png", np.random.default_rng(0).random((5, 2)), 6)
    assert (tmp_path / "quality.png").read_bytes()[:4] == b"\x89PNG"
