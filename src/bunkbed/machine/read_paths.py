"""Access paths: by which reads the wanted records of a step come from the log.

The core reads two neighbouring records together where the bytes between them take less device time than one more read
(`Machine.read_gap`). A record so is read alone, with neighbours, or, where a batch wants many records of a segment, by
one of the large reads of a sweep. `expected_reads` predicts the reads, `records_by_path` counts those that were made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bunkbed.machine.rates import LARGE_READ_BYTES

DEFAULT_GAP = 16 << 10  # the core's, where the rates of the disk are unknown

#: Name of each path, and the counter of `Table.stats` with the records that it brought.
PATHS = {"single reads": "single_records", "merged reads": "merged_records", "sweep": "swept_records"}


@dataclass(frozen=True)
class Reads:
    """The reads of a step.

    Attributes:
        reads: number of reads.
        read_bytes: bytes of those reads, with gaps and alignment.
        records: wanted records by path, in the order of `PATHS`.
    """

    reads: float
    read_bytes: float
    records: dict[str, float]

    @property
    def path(self) -> str | None:
        """The path of most records; None where nothing is read."""
        return main_path(self.records)


def records_by_path(stats: Mapping[str, float]) -> dict[str, float]:
    """Return the records that each path brought, from the counters of `Table.stats` or their increase.

    >>> records_by_path({"single_records": 3, "merged_records": 9, "swept_records": 0})
    {'single reads': 3, 'merged reads': 9, 'sweep': 0}
    """
    return {path: stats[counter] for path, counter in PATHS.items()}


def main_path(records: Mapping[str, float]) -> str | None:
    """Return the path that brought most records; None where nothing was read.

    >>> main_path({"single reads": 3, "merged reads": 9, "sweep": 0})
    'merged reads'
    """
    return max(records, key=lambda path: records[path]) if any(records.values()) else None


def expected_reads(
    wanted: float,
    slots: float,
    stored_bytes: int,
    *,
    gap_bytes: int = DEFAULT_GAP,
    read_unit: int = 512,
    largest_bytes: int = LARGE_READ_BYTES,
) -> Reads:
    """Return the expected reads of records at random places of the log.

    Each slot is wanted with probability ``p = wanted / slots``, so the distance d from one wanted slot to the next is
    geometric. The two may share a read if d is at most D, which depends on the gap, on the place of the first in its
    block, and on the largest read. With ``q = P(d > D) = (1 - p)**D`` and ``s = E[d; d <= D] / (1 - q)``, both
    averaged over these places:

    - Records form runs that end with probability q: ``wanted * q`` runs of a geometric length.
    - A read has room for ``K = 1 + (largest - record) / (s * record)`` records, and a longer run takes several reads:
      in all ``wanted * q / (1 - (1 - q)**K)``. Its reads after the first are the sweep, with ``wanted * (1 - q)**K``
      records.
    - A read has the bytes of its first record with alignment, and ``s * record`` for each further one.

    A gap that is not read takes more device time than the read after it, by the definition of `Machine.read_gap`. The
    reads therefore never take more time than reading all slots once.

    Skewed batches want recently evicted records more often. These are together in the log, so real reads are fewer.

    Args:
        wanted: records. slots: places of records in the log, of dead records too. stored_bytes: a place.
        gap_bytes: the most bytes between two records that share a read.
        read_unit: unit of reads in bytes. largest_bytes: the most bytes of a read.

    >>> rare, half = (expected_reads(share * 1e6, 1e6, 776) for share in (0.001, 0.5))
    >>> rare.path, round(rare.reads), half.path, round(half.reads)
    ('single reads', 978, 'sweep', 2959)

    Raises:
        ValueError: more records than slots.
    """
    if wanted > slots:
        raise ValueError(f"{wanted:g} wanted records need as many slots, got {slots:g}")
    if not wanted:
        return Reads(0.0, 0.0, dict.fromkeys(PATHS, 0.0))
    share = min(wanted / slots, 1 - 1e-12)
    grain = math.gcd(stored_bytes, read_unit)
    # The slot at distance d joins if its first block begins at most gap_bytes after the last block of this record.
    begins = np.arange(0, read_unit, grain)
    ends = -(-(begins + stored_bytes) // read_unit) * read_unit
    reach = -(-(ends + gap_bytes // read_unit * read_unit + read_unit - begins) // stored_bytes) - 1
    one_bytes = stored_bytes + read_unit - grain
    rest_bytes = max(0, largest_bytes - one_bytes)
    joined = np.minimum(reach, rest_bytes // stored_bytes)
    none = np.exp(joined * math.log1p(-share))
    alone = max(float(none.mean()), 1e-12)
    near = max(1 - alone, 1e-12)
    step_bytes = max(1.0, float(((1 - none * (1 + share * joined)) / share).mean()) / near) * stored_bytes
    room = 1 + rest_bytes // step_bytes
    reads = wanted * alone / -math.expm1(room * math.log1p(-alone))
    # Reads that begin further than D slots from the record before them, with their records.
    first = wanted * max(float(np.exp(reach * math.log1p(-share)).mean()), 1e-12)
    single = first * (alone if room >= 2 else 1.0)
    swept = wanted - first * -math.expm1(room * math.log1p(-alone)) / alone
    return Reads(
        reads=reads,
        read_bytes=reads * one_bytes + (wanted - reads) * step_bytes,
        records=dict(zip(PATHS, (single, wanted - single - swept, swept), strict=True)),
    )
