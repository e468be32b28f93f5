"""Random training programs have the losses and rows of torch.nn; the torture part `dropin` runs 10,000."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torture.dropin import Program, mismatch

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()
NUMBER = 120


@pytest.mark.parametrize("part", range(4))
def test_random_programs(part: int, tmp_path: Path) -> None:
    logging.disable()
    try:
        for seed in range(part, NUMBER, 4):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tables are left without a commit
                why = mismatch(Program.of(10**6 + seed), tmp_path / str(seed))
            assert not why, f"program {10**6 + seed}: {why}"
    finally:
        logging.disable(logging.NOTSET)


def test_programs_are_drawn_from_all_that_there_is() -> None:
    programs = [Program.of(10**6 + seed) for seed in range(NUMBER)]
    operations = Counter(name for program in programs for name, _ in program.operations)
    assert set(operations) == {
        *("zero", "backward", "clip", "step", "schedule", "rate", "freeze", "evaluate", "save", "load", "again", "stop")
    }
    assert min(operations.values()) >= 8, operations
    layers = [layer for program in programs for layer in program.layers]
    assert {layer.place for layer in layers} == {"ram", "files", "device"}
    assert {layer.mode for layer in layers} == {None, "sum", "mean"} and any(layer.shares == 0 for layer in layers)
    assert {(program.rule, program.follows) for program in programs} == {
        *(("SGD", True), ("Adagrad", True), ("SGD", False), ("Adagrad", False), ("SparseAdam", False))
    }


def test_a_program_that_differs_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bunkbed.torch.optimizer._TableGroup.follow", lambda self, now: None)
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [mismatch(Program.of(10**6 + seed), tmp_path / str(seed)) for seed in range(40)]
    finally:
        logging.disable(logging.NOTSET)
    assert any(found) and not all(found)
