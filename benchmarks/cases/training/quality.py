"""Quality on real data, all in RAM and within a quarter of it, through the public trainer.

    python -m benchmarks.cases.training.quality ml1m
    python -m benchmarks.cases.training.quality gowalla --ram 25%
    python -m benchmarks.cases.training.quality ml1m-bf16

Trains the recipe of `bunkbed.train.recipes` twice: once with room for every record, once with `--ram` percent of
the records' bytes (rows x (weights + optimizer state)) plus a fixed overhead of 1 MiB. Prints HR, NDCG and Recall
on the test items and what they were ranked against, whether losses and rows agree bit for bit, and the time of a
step against what the limits allow:

    allowed = max(T_ram, T_disk);  T_ram: a step with everything in RAM;
    T_disk = reads / IOPS + written bytes / write bandwidth, per step, both counted by the table

IOPS is measured on the run's own segments, 64 threads of 4 KiB O_DIRECT reads, in the same run. Hyperparameters
were chosen on held-out pairs of the training file, after a prototype whose test curves had been looked at; a run looks
at the test items once, at the end.

`ml1m-bf16` compares two recipes instead, both with room for every record: `ml1m` as it is, and with bfloat16 rows
and row-wise Adagrad. It prints what that costs in HR@10 and what it saves in bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from bunkbed.train.data.interactions import Dataset, read_dataset
from bunkbed.train.evaluate.evaluator import EvalResult, evaluate_run
from bunkbed.train.loop import Trainer
from bunkbed.train.output.events import EpochReport, Event
from bunkbed.train.recipes import RECIPES
from bunkbed.train.settings.config import TrainConfig

#: Bytes of the budget in addition to its share of the records: directory, write buffer, scratch memory of a batch.
OVERHEAD_BYTES = common.MIB

FILES = {
    "ml1m": {
        "path": "ncf-ml1m/train.tsv.gz",
        "test": "ncf-ml1m/ml-1m.test.rating.gz",
        "test_negatives": "ncf-ml1m/ml-1m.test.negative.gz",
    },
    "gowalla": {"path": "gowalla/train.txt.gz", "test": "gowalla/test.txt.gz"},
}
FILES["ml1m-bce"] = FILES["ml1m-neumf"] = FILES["ml1m-bf16"] = FILES["ml1m"]
TARGETS = {"ml1m": {"hr@10": 0.70, "ndcg@10": 0.42}, "gowalla": {"recall@20": 0.16}}
TARGETS["ml1m-bce"] = TARGETS["ml1m-bf16"] = TARGETS["ml1m"]
TARGETS["ml1m-neumf"] = {"hr@10": 0.69}
#: What bfloat16 rows and row-wise Adagrad may lose in HR@10, and the share of the record bytes they may need.
NARROW_LOSS, NARROW_SHARE = 0.005, 1 / 3


@dataclass
class Trained:
    """One training run and what came of it."""

    losses: np.ndarray
    rows: list[bytes]
    result: EvalResult
    step_ms: float
    samples_per_s: float
    seconds: float
    counts: dict[str, float]
    iops: float | None


def load(name: str, data: Path, *, tiny: bool) -> Dataset:
    """The data set, or in a tiny run made-up pairs of its shape."""
    if tiny:
        return made_up()
    files = {key: data / value for key, value in FILES[name].items()}
    if not files["path"].exists():
        sys.exit(f"{files['path']} is not there; pass --data with the folder of the data sets")
    return read_dataset(files.pop("path"), **files)


def made_up() -> Dataset:
    """600 users who mostly like items near their own number."""
    from bunkbed.train.data.interactions import Interactions, Vocab

    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(600), 12)
    items = (users // 2 + rng.integers(-20, 20, len(users))) % 300
    pairs = np.unique(np.stack([users, items], axis=1), axis=0)
    pairs = pairs[rng.permutation(len(pairs))]
    vocabs = Vocab.of(list(range(600))), Vocab.of(list(range(300)))
    cut = len(pairs) // 10
    parts = [Interactions(p[:, 0].copy(), p[:, 1].copy(), *vocabs) for p in (pairs[cut:], pairs[:cut])]
    return Dataset(train=parts[0], test=parts[1])


def record_bytes(config: TrainConfig, data: Dataset) -> int:
    """Weights and optimizer state of every row of every table."""
    total = (data.num_users + data.num_items) * config.record_bytes()
    return total + (data.num_items * config.record_bytes(1) if config.bias else 0)


def train(config: TrainConfig, data: Dataset, folder: Path, *, device: bool) -> Trained:
    """Train, judge on the test items, and count."""

    def show(event: Event) -> None:
        if isinstance(event, EpochReport):
            quality = "".join(f"  {k} {v:.4f}" for k, v in event.metrics.items() if k == config.metric)
            print(
                f"  epoch {event.epoch:3d}  loss {event.loss:.5f}{quality}  {event.seconds:.1f} s  "
                f"hit rate {event.unique_hit_rate:.0%}",
                flush=True,
            )

    with bb.Run(folder, ram=config.ram) as run:
        trainer = Trainer(config, data, run)
        before = totals(run)
        start = time.perf_counter()
        outcome = trainer.fit(show)
        seconds = time.perf_counter() - start
        counts = common.delta(totals(run), before)
        steps = len(trainer.losses)
        iops = None
        if device:
            # Not common.segment_files: the segments of so small a table are just below its 1 MiB.
            segments = sorted(folder.glob("tables/*/segment-*"))
            try:
                iops = common.random_read_iops([path for path in segments if path.stat().st_size >= 64 << 10])
            except OSError as error:  # no direct reads here: the rest of the figures stand
                print(f"  the device's limit was not measured: {error}")
    snapshot = "best" if outcome.best_epoch else None
    with bb.Run(folder, mode="r", snapshot=snapshot) as run:
        result = evaluate_run(run, data, config)
        rows = [
            stored(table, slot)
            for table in map(run.table, run.table_names)
            for slot in ("weight", *table.optimizer.slots)
        ]
    return Trained(
        losses=np.array(trainer.losses),
        rows=rows,
        result=result,
        step_ms=trainer.step_seconds / steps * 1e3,
        samples_per_s=trainer.num_pairs * outcome.epoch / trainer.step_seconds,
        seconds=seconds,
        counts={key: value / steps for key, value in counts.items()},
        iops=iops,
    )


def stored(table: Any, slot: str) -> bytes:
    """One slot of every stored row, by ascending id."""
    chunks = [(ids.copy(), values.copy()) for ids, values in table.scan(slot=slot)]
    ids, values = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    order = np.argsort(ids)
    return ids[order].tobytes() + values[order].tobytes()


def totals(run: bb.Run) -> dict[str, float]:
    """Counters of all tables together."""
    keys = ("unique_rows", "hits", "misses", "first_touches", "evictions", "reads", "written_bytes")
    every = [table.stats() for table in run.tables.values()]
    return {key: sum(stats[key] for stats in every) for key in keys}


def report(name: str, trained: Trained, config: TrainConfig) -> None:
    """Quality and speed of one run."""
    wanted = TARGETS[name]
    figures = "  ".join(f"{key} {value:.4f}" for key, value in trained.result.metrics.items())
    print(f"{figures}\n  {trained.result.ranking}; {trained.result.num_users:,} users; {trained.result.split}")
    for key, target in wanted.items():
        value = trained.result.metrics[key]
        print(f"  {key} {value:.4f}, wanted {target}: {'reached' if value >= target else 'MISSED'}")
    # Two separate runs, on two machines even, can be compared by these.
    digests = [hashlib.sha256(data).hexdigest()[:16] for data in (trained.losses.tobytes(), b"".join(trained.rows))]
    print(f"  losses sha256 {digests[0]}, rows and optimizer state sha256 {digests[1]}")
    print(
        f"  {trained.step_ms:.2f} ms a step of {config.step_pairs:,} pairs, "
        f"{trained.samples_per_s:,.0f} pairs/s; {trained.seconds:.0f} s with evaluation and commits"
    )


def compare(roomy: Trained, tight: Trained, write_bandwidth: float) -> dict[str, Any]:
    """Bits, and speed against the limit."""
    counts = tight.counts
    unique = max(counts["unique_rows"], 1)
    same_losses = roomy.losses.tobytes() == tight.losses.tobytes()
    same_rows = roomy.rows == tight.rows
    print(f"losses of {len(tight.losses):,} steps identical to the last bit: {same_losses}")
    print(f"rows and optimizer state identical to the last bit: {same_rows}")
    print(
        f"a step: {unique:,.0f} unique rows, hit rate {counts['hits'] / unique:.1%}, "
        f"{counts['misses']:,.0f} misses, {counts['first_touches']:,.0f} first touches, "
        f"{counts['evictions']:,.0f} evicted, {counts['written_bytes']:,.0f} B written"
    )
    figures: dict[str, Any] = {"same_losses": same_losses, "same_rows": same_rows}
    if tight.iops is not None:
        disk_ms = (counts["reads"] / tight.iops + counts["written_bytes"] / write_bandwidth) * 1e3
        allowed_ms = max(roomy.step_ms, disk_ms)
        share = allowed_ms / tight.step_ms
        print(
            f"device {tight.iops:,.0f} reads/s: T_disk {disk_ms:.2f} ms, T_ram {roomy.step_ms:.2f} ms, "
            f"allowed {allowed_ms:.2f} ms, measured {tight.step_ms:.2f} ms: {share:.0%} of the allowed speed"
        )
        figures |= {"iops": tight.iops, "disk_ms": disk_ms, "allowed_ms": allowed_ms, "share": share}
    print(f"speed against everything in RAM: {roomy.step_ms / tight.step_ms:.0%}")
    return figures


def compare_dtypes(wide: Trained, narrow: Trained, record: dict[str, int]) -> None:
    """Quality and bytes of a float32 Adam run and of a bfloat16 row-wise Adagrad one."""
    lost = wide.result.metrics["hr@10"] - narrow.result.metrics["hr@10"]
    share = record["narrow"] / record["wide"]
    verdicts = ["reached" if ok else "MISSED" for ok in (lost <= NARROW_LOSS, share <= NARROW_SHARE)]
    print(f"HR@10 lost by bfloat16 rows and row-wise Adagrad: {lost:.4f}, at most {NARROW_LOSS} wanted: {verdicts[0]}")
    print(f"bytes of a record: {record['narrow']} of {record['wide']} = {share:.1%}, a third wanted: {verdicts[1]}")
    print(f"a step: {narrow.step_ms:.2f} ms and {wide.step_ms:.2f} ms")


def plan_runs(name: str, config: TrainConfig, data: Dataset, share: float) -> dict[str, TrainConfig]:
    """The runs of a case by name."""
    records = record_bytes(config, data)
    roomy = replace(config, ram=4 * records + 64 * common.MIB)
    if name == "ml1m-bf16":
        wide = RECIPES["ml1m"]
        return {"wide": replace(roomy, optimizer=wide.optimizer, dtype=wide.dtype, lr=wide.lr), "narrow": roomy}
    tight = replace(config, ram=int(share * records) + OVERHEAD_BYTES)
    print(f"tight budget {tight.ram:,} B = {share:.0%} + {OVERHEAD_BYTES:,} B")
    return {"roomy": roomy, "tight": tight}


def main(argv: list[str] | None = None) -> None:
    options = common.parser(__doc__)
    options.add_argument("name", choices=sorted(FILES))
    options.add_argument("--ram", default="25%", help="share of the records' bytes the budget has")
    options.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    options.add_argument("--epochs", type=int, help="fewer than the recipe's; yields no figure")
    options.add_argument("--only", choices=["roomy", "tight", "wide", "narrow"], help="one of the two runs")
    options.add_argument("--write-gbps", type=float, default=2.2, help="sequential write bandwidth, GB/s")
    options.add_argument("--json", type=Path, help="also write the figures here")
    arguments = options.parse_args(argv)
    share = float(arguments.ram.rstrip("%")) / 100

    config = RECIPES[arguments.name]
    data = load(arguments.name, arguments.data, tiny=arguments.tiny)
    if arguments.tiny:
        config = replace(config, dim=8, batch_size=256, epochs=2, negatives=min(config.negatives, 20))
    if arguments.epochs:
        config = replace(config, epochs=arguments.epochs)
    records = record_bytes(config, data)
    print(common.machine(Path.cwd()))
    print(f"recipe: {config}")
    print(f"{len(data.train):,} pairs, {data.num_users:,} users, {data.num_items:,} items, records {records:,} B")
    planned = plan_runs(arguments.name, config, data, share)
    runs: dict[str, Trained] = {}
    with common.workspace(arguments.dir, 48 * records) as folder:
        for which, configured in planned.items():
            if arguments.only in (None, which):
                print(f"\n{which}: {configured.dtype} {configured.optimizer}, ram={configured.ram:,} B")
                device = which == "tight" and not arguments.tiny
                runs[which] = train(configured, data, folder / which, device=device)
                report(arguments.name, runs[which], configured)
    record = {which: configured.record_bytes() for which, configured in planned.items()}
    figures: dict[str, Any] = {
        which: {
            "metrics": run.result.metrics,
            "ranking": run.result.ranking,
            "step_ms": run.step_ms,
            "record_bytes": record[which],
        }
        for which, run in runs.items()
    }
    if len(runs) == 2:
        print()
        if arguments.name == "ml1m-bf16":
            compare_dtypes(runs["wide"], runs["narrow"], record)
        else:
            figures |= compare(runs["roomy"], runs["tight"], arguments.write_gbps * 1e9)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
