"""Ranks of torch.distributed: random jobs have the bits of one process, and a kill at any time loses no commit.

A job is a random mix of what `tests/support/rank_cases.py` knows: model, optimizer, dtype, accumulation, clipping,
scaler, an overflow on one rank, several losses, ids ahead, shards, files that are closed and opened in the middle. One
process runs the ranks' batches one after another, and every bit of rows, state, norms and dense weights must agree.

A life trains one table from W ranks with a commit in the background every third step, until one rank is killed. The
others must end by themselves; the table must then open in one process, without a problem, at a step that was reached,
with the bits of one process at that step; and all ranks must go on from there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from torture.parts import Clock, Progress, Result, Size, folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

_ROWS, _DIM, _IDS = 300, 6, 80
_JOBS, _LIVES = 300, 60
#: Jobs of one start of processes, which takes as long as several jobs.
_TOGETHER = 10


def run(size: Size) -> list[Result]:
    """Return the figures of both."""
    half = replace(size, seconds=size.seconds / 2)
    return [_jobs(half), _lives(half)]


# ---- Random jobs


def _case(chance: np.random.Generator) -> Any:
    """Return a job that is allowed, of random parts."""
    from rank_cases import MODELS, Case

    def sometimes(share: float) -> bool:
        return bool(chance.random() < share)

    optimizers = (
        bb.Adam(lr=1e-2), bb.Adam(lr=1e-2, state_dtype="bfloat16"), bb.SGD(lr=0.1), bb.Adagrad(lr=0.1),
        bb.RowwiseAdagrad(lr=0.1),
    )  # fmt: skip
    scales, ahead, in_files = sometimes(0.3), sometimes(0.5), sometimes(0.4)
    is_one_layer = (kind := str(chance.choice(list(MODELS)))) == "embedding"
    losses = int(chance.integers(1, 3))
    return Case(
        kind,
        optimizer=optimizers[chance.integers(len(optimizers))],
        dtype=str(chance.choice(["float32", "bfloat16", "float16"], p=[0.6, 0.2, 0.2])),
        ddp=("gradient_as_bucket_view",) if sometimes(0.2) else (),
        micro=1 if kind == "collection" and ahead else int(chance.integers(1, 4)),
        clips=sometimes(0.4),
        scales=scales,
        overflows=scales and sometimes(0.5),
        losses=losses,
        parts=is_one_layer and losses == 1 and not scales and sometimes(0.3),
        ahead=ahead,
        window=int(chance.integers(1, 5)) if ahead and sometimes(0.5) else None,
        lacks=kind in ("embedding", "two tables") and sometimes(0.3),
        shards=int(chance.integers(1, 4)),
        ram="64MiB" if in_files else None,
        reopens=in_files and sometimes(0.6),
        seed=int(chance.integers(1, 1 << 30)),
    )


def _trained(rank: int, cases: list[Any], world: int, place: str) -> list[dict[str, Any]]:
    from rank_cases import run as run_case

    warnings.simplefilter("ignore")  # the tables of a job are left open, with changes
    return [run_case(case, world, rank, Path(place) / str(number)) for number, case in enumerate(cases)]


def _jobs(size: Size) -> Result:
    from rank_cases import run as run_case
    from rank_processes import spawn

    result, clock = Result("random jobs of 2 and 4 ranks with the bits of one process"), Clock(size.seconds)
    total = size.of(_JOBS, _TOGETHER)
    progress = Progress("jobs", total)
    for start in range(0, total, _TOGETHER):
        if clock.is_over:
            break
        chance = np.random.default_rng([size.seed, start])
        world = 4 if start % (3 * _TOGETHER) == 0 else 2
        cases = [_case(chance) for _ in range(min(_TOGETHER, total - start))]
        with folder() as place:
            try:
                found = spawn(world, _trained, cases, world, str(place), seconds=300)
            except AssertionError as error:
                result.tried += len(cases)
                result.fail(f"jobs {start} to {start + len(cases) - 1} of {world} ranks: {error}")
                continue
        for number, case in enumerate(cases):
            result.tried += 1
            alone = run_case(case, world, None)
            wrong = {
                key
                for one in found
                for key, value in one[number].items()
                if not np.array_equal(value, alone[key], equal_nan=key == "norms")
            }
            result.passed += not wrong
            if wrong:
                result.fail(f"job {start + number} of {world} ranks, {case}: {', '.join(sorted(wrong))} differ")
        progress.show(result.tried)
    return result


# ---- Kills


def _batch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return rng.integers(0, _ROWS, _IDS), rng.standard_normal((_IDS, _DIM), np.float32)


def _facts() -> dict[str, Any]:
    return {"optimizer": bb.Adam(lr=0.1), "init": bb.Normal(std=0.1), "seed": 5}


def _life(rank: int, place: str, dying: int, after_s: float, steps: int) -> list[Any]:
    """Train until this rank is killed or another one is, or for some steps; return the step and the error."""
    import bunkbed.torch as bt

    table = bt.Embedding(_ROWS, _DIM, path=place, ram="64MiB", **_facts()).table
    began, first, message = time.monotonic(), table.step, ""
    if rank == dying:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        while dying >= 0 or table.step < first + steps:
            table.update(*_batch(table.step, rank))
            if table.step % 3 == 0:
                table.begin_commit(meta={"step": table.step})
        table.commit(meta={"step": table.step})
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if time.monotonic() - began > after_s + 20:
            message += " (after more than 20 s)"
    step = table.step
    table.close(commit=False)
    return [step, message]


class _Oracle:
    """The rows at each step of one process."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._table = bb.create(None, dim=_DIM, num_rows=_ROWS, **_facts())
        self._at: list[np.ndarray] = []

    def rows(self, step: int) -> np.ndarray:
        while len(self._at) <= step:
            self._at.append(self._table.get(np.arange(_ROWS)).copy())
            parts = [_batch(self._table.step, rank) for rank in range(self._world)]
            ids, grads = (np.concatenate(one) for one in zip(*parts, strict=True))
            self._table.update(ids, grads)
        return self._at[step]


def _lives(size: Size) -> Result:
    from rank_processes import spawn

    result, clock = Result("kills of a rank at random times, and the ranks go on"), Clock(size.seconds)
    chance, total = np.random.default_rng([size.seed, 7]), size.of(_LIVES, 2)
    oracles = {world: _Oracle(world) for world in (2, 3)}
    progress = Progress("kills", total)
    for number in range(total):
        if clock.is_over:
            break
        world = 2 + number % 2
        dying, after_s = int(chance.integers(world)), float(chance.uniform(0, 0.5))
        result.tried += 1
        with folder() as place:
            path = place / "rows"
            try:
                spawn(world, _life, str(path), -1, 0.0, 2)
                said = spawn(world, _life, str(path), dying, after_s, 0, dying=dying)
                errors = [one[1] for rank, one in enumerate(said) if rank != dying]
                assert all("RanksError" in error and "more than" not in error for error in errors), errors
                _require_sound(path, oracles[world])
                spawn(world, _life, str(path), -1, 0.0, 4)
                _require_sound(path, oracles[world])
                result.passed += 1
            except AssertionError as error:
                result.fail(f"kill {number}: rank {dying} of {world} after {after_s:.3f} s: {error}")
        progress.show(result.tried)
    return result


def _require_sound(path: Path, oracle: _Oracle) -> None:
    problems = bb.check(path)
    assert not problems, str(problems[0])
    with bb.open(path, mode="r") as table:
        assert table.meta == {"step": table.step}, f"the meta {table.meta} is not that of step {table.step}"
        wrong = (table.get(np.arange(_ROWS)) != oracle.rows(table.step)).any(1).sum()
        assert not wrong, f"{wrong} rows are not those of step {table.step}"
