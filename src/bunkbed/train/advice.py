"""Advice before the first step of a run that will be much slower than in RAM: why, and which options would change it.

An estimate, without measurements: rows are taken as equally popular and all as stored; the time of a step in RAM is
that of the bytes that the tables move, and of passes over the rows for the model's work. Rates are those that
`bunkbed.machine.measure` stored, or `ASSUMED`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bunkbed.machine import limits
from bunkbed.machine.rates import Machine
from bunkbed.table.table import Table
from bunkbed.train.block_choice import decided
from bunkbed.train.output.events import Advice, Change
from bunkbed.train.settings.config import TrainConfig

__all__ = ["ASSUMED", "SLOW", "advice"]

#: Advice is given from this many times the time in RAM.
SLOW = 5.0
#: Rates where none were measured.
ASSUMED = Machine(memory_bytes_per_s=20e9, read_iops=100_000, write_bytes_per_s=1e9)
_READ_BYTES_PER_S = 1.5e9  # of large reads: a table's log is not read more often than once for the rows of a call
# The model's own work takes about the time of so many passes over the rows looked up (MovieLens-1M, Gowalla in RAM).
_MODEL_PASSES = 7
_ROW_S = 1.5e-6  # processor time of a row that is read and evicted
_AMPLIFICATION = 1.3  # bytes written for each byte of an evicted record
_SHARED = 256  # shared negatives to advise: they cost less than four of each pair's own
_WORTH = 1.25  # a change is named if an epoch is at least so many times faster
_MIB = 1 << 20


@dataclass(frozen=True)
class _Rows:
    """A table in a prediction."""

    rows: int
    frames: float
    dim: int
    record_bytes: int


def advice(
    config: TrainConfig,
    tables: Mapping[str, Table],
    num_pairs: int,
    machine: Machine | None,
    *,
    is_new: bool,
    processes: int = 1,
) -> Advice | None:
    """Return advice if an epoch is predicted to take more than `SLOW` times as long as in RAM, otherwise None.

    Args:
        config: with a decided order.
        tables: of the run, in their budget.
        num_pairs: training pairs.
        machine: measured rates, or None. Rates that it does not have are `ASSUMED`.
        is_new: the run has no step yet, so that each of its options may change.
        processes: number of those that share the tables, each with a cache of this size; time is that of one process.
    """
    known = machine or Machine()
    rates = Machine(
        memory_bytes_per_s=known.memory_bytes_per_s or ASSUMED.memory_bytes_per_s,
        read_iops=known.read_iops or ASSUMED.read_iops,
        write_bytes_per_s=known.write_bytes_per_s or ASSUMED.write_bytes_per_s,
    )
    found = _tables(config, config, tables, processes)
    epoch_s, in_ram_s, rows_read = _predict(config, found, num_pairs, rates)
    slowdown = epoch_s / in_ram_s
    if slowdown <= SLOW:
        return None
    changes = []
    for options, changed in _changes(config, tables, is_new, processes):
        speedup = epoch_s / _predict(changed, _tables(config, changed, tables, processes), num_pairs, rates)[0]
        if speedup >= _WORTH:
            changes.append(Change(options, speedup))
    wanted = sum(table.wanted_bytes() or 0 for table in tables.values())
    changes.append(Change(f"--ram {-(-wanted // _MIB)}MiB", slowdown))
    return Advice(slowdown, rows_read, known.read_iops is not None, tuple(changes))


def _changes(
    config: TrainConfig, tables: Mapping[str, Table], is_new: bool, processes: int
) -> Iterator[tuple[str, TrainConfig]]:
    """Yield options, and the config with these."""
    if not is_new:  # the other options of a run may not change
        return
    if config.blocks is None and not config.is_sequential:
        yield "--order blocks", decided(replace(config, order="blocks", batch_size=None), tables, processes)
    if not config.share_negatives and config.sampling == "uniform":
        least = min(_SHARED, (tables["item"].num_rows or 0) // (2 * (config.blocks or (1, 1))[1]))
        if least:
            yield (
                f"--share-negatives --negatives {least}",
                replace(config, share_negatives=True, negatives=least),
            )
    narrow = replace(config, dtype="bfloat16", optimizer="rowwise_adagrad")
    if narrow.record_bytes() < config.record_bytes():
        yield "--dtype bfloat16 --optimizer rowwise_adagrad (needs another --lr)", narrow


def _tables(config: TrainConfig, changed: TrainConfig, tables: Mapping[str, Table], processes: int) -> dict[str, _Rows]:
    """Return the tables as another config would have them in the same RAM."""
    result = {}
    for name, table in tables.items():
        rows, now = int(table.num_rows or 0), processes * table.stats()["frame_capacity"]
        new = changed.record_bytes(table.dim)
        frames = min(rows, now * config.record_bytes(table.dim) / new)
        result[name] = _Rows(rows, frames, table.dim, new)
    return result


def _predict(
    config: TrainConfig, tables: dict[str, _Rows], num_pairs: int, machine: Machine
) -> tuple[float, float, float]:
    """Return the seconds of an epoch, its seconds in RAM, and the rows that a step reads."""
    assert machine.memory_bytes_per_s and machine.read_iops and machine.write_bytes_per_s
    steps = -(-num_pairs // config.step_pairs)
    pairs = min(num_pairs, config.step_pairs)
    users, items = config.blocks or (1, 1)
    moved = read_s = written_s = read_rows = 0.0
    for name, table in tables.items():
        negatives = config.negatives if config.share_negatives else config.negatives * pairs
        ids = pairs if name == "user" else pairs + negatives
        blocks = users if name == "user" else items
        unique = limits.zipf(-(-table.rows // blocks), 0.0).unique_rows(ids)
        passes = _MODEL_PASSES * ids * 4 * table.dim
        moved += steps * (passes + limits.memory_bytes(ids, unique, table.dim, table.record_bytes))
        if table.frames >= table.rows:
            continue
        if table.frames >= table.rows / blocks:  # read once for each visit of its block
            missed = float(table.rows * (items if name == "user" and users > 1 else 1))
            calls = blocks * (items if name == "user" else 1)
        else:
            resident = table.frames / (table.rows / blocks)
            # What a batch needs beyond the cache is read again by its update.
            missed = steps * (unique * (1 - resident) if unique <= table.frames else 2 * unique - table.frames)
            calls = steps * (1 if unique <= table.frames else 2)
        read_rows += missed
        read_s += min(missed / machine.read_iops, calls * table.rows * table.record_bytes / _READ_BYTES_PER_S)
        read_s += missed * _ROW_S
        written_s += missed * table.record_bytes * _AMPLIFICATION / machine.write_bytes_per_s
    in_ram_s = moved / machine.memory_bytes_per_s
    disk_s = read_s + written_s
    epoch_s = in_ram_s + disk_s if config.lookahead == 0 else max(in_ram_s, disk_s)
    return epoch_s, in_ram_s, read_rows / steps
