"""Sums of the counters of a run's tables, and the rates between two of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from bunkbed.core.types import Json
from bunkbed.machine.limits import memory_bytes
from bunkbed.machine.read_paths import PATHS
from bunkbed.train.processes.team import ALONE, Team

__all__ = ["Counters"]


@dataclass(frozen=True)
class Counters:
    """Sums of the counters of all tables in all processes; `records` by access path.

    `stall_s` is the mean over the processes, which wait at the same time.
    """

    unique_rows: int
    hits: int
    misses: int
    read_bytes: int
    written_bytes: int
    ram_bytes: int
    stall_s: float
    device_rows: int
    device_hits: int
    reads: int
    moved_bytes: int
    records: dict[str, int]
    wanted_bytes: int

    @classmethod
    def of(cls, tables: Json, team: Team = ALONE) -> Counters:
        """Return the sums over the tables, by name. Collective."""
        every = team.gather("the counters of tables", lambda: asdict(cls._own(tables)))
        sums: Json = {name: sum(one[name] for one in every) for name in every[0] if name != "records"}
        sums["records"] = {path: sum(one["records"][path] for one in every) for path in every[0]["records"]}
        sums["stall_s"] /= len(every)
        return cls(**sums)

    @classmethod
    def _own(cls, tables: Json) -> Counters:
        """Return the sums over the tables in this process."""
        every = [table.stats() for table in tables.values()]
        moved = sum(
            memory_bytes(stats["ids"], stats["unique_rows"], table.dim, table.record_bytes)
            for table, stats in zip(tables.values(), every, strict=True)
        )

        def total(name: str) -> int:
            return int(sum(stats[name] for stats in every))

        return cls(
            total("unique_rows"),
            total("hits"),
            total("misses"),
            total("read_bytes"),
            total("written_bytes"),
            total("ram_bytes"),
            float(sum(stats["stall_s"] + stats.get("device_stall_s", 0.0) for stats in every)),
            int(sum(stats.get("device_hits", 0) + stats.get("device_misses", 0) for stats in every)),
            int(sum(stats.get("device_hits", 0) for stats in every)),
            total("reads"),
            int(moved),
            {path: total(counter) for path, counter in PATHS.items()},
            int(sum(s["read_records"] * t.record_bytes for t, s in zip(tables.values(), every, strict=True))),
        )

    def hit_rate_since(self, before: Counters) -> float:
        """Return rows found in RAM / unique rows wanted."""
        unique = self.unique_rows - before.unique_rows
        return (self.hits - before.hits) / unique if unique else 0.0

    def disk_share_since(self, before: Counters) -> float:
        """Return rows read from disk / unique rows wanted."""
        unique = self.unique_rows - before.unique_rows
        return (self.misses - before.misses) / unique if unique else 0.0

    def device_hit_rate_since(self, before: Counters) -> float | None:
        """Return rows found on the device / unique rows wanted there, or None without a device cache."""
        rows = self.device_rows - before.device_rows
        return (self.device_hits - before.device_hits) / rows if rows else None
