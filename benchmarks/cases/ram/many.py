"""26 tables of a click model, one id of each for a sample: a training step compared with FBGEMM's fused call.

26 tables of 100,000 rows of 16 float32, Adagrad, Zipf(1.05) ids, batches of 256 and 2,048 samples. Both sides give the
model one tensor of (samples, 26 * 16) and take its gradient: FBGEMM's call returns that tensor, ours goes through
`bunkbed.torch` and concatenates. At this size calls cost more than rows.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from benchmarks.cases.ram import resident
from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings
from benchmarks.peers import fbgemm, ours

TABLES, DIM, OPTIMIZER = 26, 16, "adagrad"
#: Samples of a batch -> the ratio to FBGEMM that is wanted.
TARGETS = {256: 3.0, 2_048: 2.5}


def many_tables(settings: Settings) -> list[Figure]:
    """Lookup, backward of a constant gradient, and optimizer step of all tables."""
    num_rows = 500 if settings.tiny else 100_000
    figures = []
    for samples, target in TARGETS.items():
        sample = common.zipf(num_rows)
        rng = np.random.default_rng(settings.seed)
        batches = [torch.from_numpy(sample(rng, TABLES * samples)).view(TABLES, samples) for _ in range(8)]
        print(f"{TABLES} tables of {num_rows:,} x {DIM} float32, {OPTIMIZER}, {samples} Zipf(1.05) ids each")
        grad = torch.ones(samples, TABLES * DIM)
        arguments = (OPTIMIZER, TABLES, num_rows, DIM, grad)
        makers = {
            turns.OURS: functools.partial(ours.training_many, *arguments),
            "one by one": functools.partial(ours.training_one_by_one, *arguments),
            "fbgemm": functools.partial(fbgemm.training_many, *arguments),
        }
        sides, absent = resident.build(makers)
        rounds, steps = settings.pick((2, 2), (10, 20), (30, 40))
        times = turns.interleave(sides, batches, rounds=rounds, steps=steps)
        for peer in list(sides)[1:]:
            name = f"ratio {peer} / {turns.OURS}, {samples} samples"
            wanted = {"at_least": target} if peer == "fbgemm" else {}
            figures.append(turns.ratio(times, peer, name=name, **wanted))
        figures += turns.step_times(times, notes=resident.notes(sides)) + absent
    return figures
