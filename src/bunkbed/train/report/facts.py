"""Facts of a run or a table, gathered read-only from its files.

Only the ages of rows are slow to gather: they are read from the whole log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import bunkbed as bb
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError, FormatError
from bunkbed.files.run_files import RunFiles, is_sharded
from bunkbed.machine.limits import StepTimes, step_times
from bunkbed.machine.rates import Machine, remembered
from bunkbed.machine.read_paths import PATHS
from bunkbed.machine.text import read_paths
from bunkbed.table.table import Table
from bunkbed.train.evaluate.results import Baseline, EvalResult, judged_by, load_baselines, load_test
from bunkbed.train.output.plots import Metrics, read_run
from bunkbed.train.report.ages import Ages, ages_of
from bunkbed.train.report.hot_rows import MOST_ROWS, Curve, count_uses, curve
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.run_config import CONFIG_NAME, LOG_NAME, read_config

Kind = Literal["run", "table", "sharded table"]

_TRIES = 5

#: The default of an option that this release does not know.
UNKNOWN = object()


@dataclass(frozen=True)
class AboutTable:
    """Facts of one table, or of all shards of a sharded table.

    Attributes:
        nbytes: bytes of all records in RAM: of `num_rows` rows, or of the stored rows if any id is valid.
        live_bytes: bytes of the newest record of every stored row in the log.
        index_snapshot_bytes: bytes of the index snapshot.
        disk_bytes: bytes of all files, including snapshots.
    """

    name: str
    num_rows: int | None
    dim: int
    dtype: str
    optimizer: str
    init: str
    record_bytes: int
    stored_rows: int
    nbytes: int
    live_bytes: int
    index_snapshot_bytes: int
    disk_bytes: int
    step: int
    epoch: int
    shards: int = 0


@dataclass(frozen=True)
class Option:
    """Option of a run; `default` is `UNKNOWN` if this release has no such option."""

    name: str
    value: Any
    default: Any

    @property
    def differs(self) -> bool:
        return bool(self.value != self.default)


@dataclass(frozen=True)
class Limit:
    """Time of a run's steps, compared with the limit of this machine for the same work.

    Attributes:
        epochs: number of counted epochs.
        seconds: wall time of their steps.
        times: least seconds that each resource needed for these steps.
    """

    epochs: int
    seconds: float
    times: StepTimes
    machine: Machine

    @property
    def share(self) -> float:
        """Measured speed / speed of the limit."""
        return self.times.together / self.seconds


@dataclass(frozen=True)
class Facts:
    """All facts of a page. Unknown facts are empty, and `why` has the reason by the name of the field.

    Attributes:
        epoch: number of the reported commit; 0: none yet.
        disk: bytes on disk by purpose; see `_disk`.
        ages: of the tables that have rules by which rows come and go.
        reads: by which access paths the epochs of a run read their records, as text.
        baselines: those that `bunkbed compare --baselines` stored, as long as they are judged as the run.
        test: figures of the run on its test.
    """

    kind: Kind
    path: Path
    epoch: int
    committed: datetime | None
    meta: Json
    tables: list[AboutTable]
    snapshots: list[bb.Snapshot]
    disk: dict[str, int]
    ages: list[Ages] = field(default_factory=list)
    source: str = ""
    trained_by: str = ""
    options: list[Option] = field(default_factory=list)
    metrics: Metrics | None = None
    limit: Limit | None = None
    reads: str = ""
    curves: list[Curve] = field(default_factory=list)
    baselines: list[Baseline] = field(default_factory=list)
    test: EvalResult | None = None
    why: dict[str, str] = field(default_factory=dict)

    @property
    def progress(self) -> Json:
        """Progress in the meta of the reported commit; empty if `bunkbed train` did not make the commit."""
        return _progress(self.meta)

    def option(self, name: str, default: Any = None) -> Any:
        """Return the value of an option of the run."""
        return next((one.value for one in self.options if one.name == name), default)


def _progress(meta: Json) -> Json:
    found = meta.get("progress")
    if not isinstance(found, dict) or not isinstance(found.get("best"), dict):
        return {}
    return found if all(isinstance(found.get(name), int) for name in ("epoch", "global_step")) else {}


def kind_of(place: Path) -> Kind:
    """Return the kind of a folder, from its manifests; opening the table refuses a folder without table.

    Raises:
        FileNotFoundError: no such path. FormatError: a file. CorruptionError: the newest manifest is damaged.
    """
    if not place.exists():
        raise FileNotFoundError(2, "no such table or run", str(place))
    if not place.is_dir():
        raise FormatError(f"{place}: is a file; give the folder of a table or of a run")
    if RunFiles(place).epochs():
        return "sharded table" if is_sharded(place) else "run"
    # A training before its first commit.
    return "run" if (place / CONFIG_NAME).is_file() and (place / "tables").is_dir() else "table"


def gather(place: Path, kind: Kind, *, ram: float | str) -> Facts:
    """Gather the facts of the run or table at `place`. Raises the errors of `write_report`."""
    for _ in range(_TRIES):
        newest = _newest(place)
        try:
            return _of_run(place, ram) if kind == "run" else _of_table(place, kind, ram)
        except (BunkbedError, OSError):
            # A concurrent writer may remove the commit that is being read, once it has the next commit.
            if _newest(place) == newest:
                raise
    return _of_run(place, ram) if kind == "run" else _of_table(place, kind, ram)


def _newest(place: Path) -> list[str]:
    return sorted(entry.name for entry in place.iterdir() if entry.name.startswith(("run-", "manifest-")))[-1:]


def _of_table(place: Path, kind: Kind, ram: float | str) -> Facts:
    with bb.open(place, mode="r", ram=ram) as table:
        about, epoch, meta = _about(place.name, table), table.epoch, table.meta
        folders, ages = _folders(table), ages_of(place.name, table)
    kept = bb.describe_snapshots(place)
    manifest = f"manifest-{epoch:016d}" if kind == "table" else f"run-{epoch:016d}"
    why = {
        "metrics": "A table keeps no history. The process that has it open can report what it did "
        "(print(table.explain()), table.stats()), and a run of bunkbed train stores it.",
        "curves": "A table does not know how often its rows were looked up: its cache counts for itself, in RAM, and "
        "only as much as it needs. Of a run the saved pairs tell.",
        "limit": "In the process that has the table open, print(table.explain()) reports what it did, and how near "
        "that was to the machine's limit.",
    }
    return Facts(
        kind=kind,
        path=place,
        epoch=epoch,
        committed=_time(place / manifest),
        meta=meta,
        tables=[about],
        snapshots=kept,
        disk=_disk(place, [about], kept, {about.name: folders}),
        ages=[] if ages is None else [ages],
        why=why,
    )


def _of_run(place: Path, ram: float | str) -> Facts:
    why: dict[str, str] = {}
    tables: list[AboutTable] = []
    ages: list[Ages | None] = []
    folders: dict[str, list[Path]] = {}
    epoch, meta = 0, {}
    kept: list[bb.Snapshot] = []
    if RunFiles(place).epochs():
        with bb.Run(place, ram=ram, mode="r") as run:
            epoch, meta = run.epoch, run.meta
            for name in run.table_names:
                table = run.table(name)
                tables.append(_about(name, table))
                ages.append(ages_of(name, table))
                folders[name] = _folders(table)
        kept = bb.describe_snapshots(place)
    else:
        why["tables"] = "Nothing is committed yet: the tables can be read once the first epoch is."
    config = read_config(place) if (place / CONFIG_NAME).is_file() else None
    metrics = None
    if (place / LOG_NAME).is_file():
        metrics = read_run(place)
    elif config is None:
        why["metrics"] = "This run was not made by bunkbed train, which is what writes down how a training goes."
    else:
        why["metrics"] = "This run has no metrics.jsonl: nothing was reported yet."
    progress = _progress(meta)
    curves, why["curves"] = _curves(place, tables)
    limit, why["limit"] = _limit(place, metrics)
    return Facts(
        kind="run",
        path=place,
        epoch=epoch,
        committed=_time(place / f"run-{epoch:016d}"),
        meta=meta,
        tables=tables,
        snapshots=kept,
        disk=_disk(place, tables, kept, folders),
        ages=[one for one in ages if one is not None],
        source=str((config or {}).get("source", "")),
        trained_by=str((config or {}).get("bunkbed", "")),
        options=_options((config or {}).get("train", {})),
        metrics=metrics,
        limit=limit,
        reads=_reads(metrics),
        curves=curves,
        baselines=_baselines(place, (config or {}).get("train")),
        test=load_test(place, step=progress["global_step"]) if progress else None,
        why=why,
    )


def _baselines(place: Path, options: Json | None) -> list[Baseline]:
    try:
        config = TrainConfig.of_run(options or {})
    except (ValueError, TypeError):
        return []  # options of another release
    return load_baselines(place, judged_by=judged_by(config), cutoffs=config.cutoffs)


def _about(name: str, table: Table) -> AboutTable:
    stats = table.stats()
    shown = [
        f"{one.name}={getattr(table.optimizer, one.name)}"
        for one in fields(table.optimizer)
        if one.name == "lr" or getattr(table.optimizer, one.name) != one.default
    ]
    is_sharded_table = isinstance(table, bb.ShardedTable)
    return AboutTable(
        name=name,
        num_rows=table.num_rows,
        dim=table.dim,
        dtype=str(table.dtype),
        optimizer=f"{type(table.optimizer).__name__}({', '.join(shown)})",
        init=repr(table.init),
        record_bytes=table.record_bytes,
        stored_rows=int(stats["stored_rows"]),
        nbytes=table.record_bytes * (int(stats["stored_rows"]) if table.num_rows is None else table.num_rows),
        live_bytes=int(stats["live_bytes"]),
        index_snapshot_bytes=int(stats.get("index_snapshot_bytes", 0)),
        disk_bytes=sum(_bytes_below(folder) for folder in _folders(table)),
        step=table.step,
        epoch=table.epoch,
        shards=len(_folders(table)) if is_sharded_table else 0,
    )


def _folders(table: Table) -> list[Path]:
    if isinstance(table, bb.ShardedTable):
        return list(table.directories)
    return [] if table.path is None else [table.path]


def _bytes_below(folder: Path) -> int:
    return sum(size for _, size in _files(folder))


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield every file below a folder with its size, without files that a writer removes meanwhile."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            try:
                yield path, path.lstat().st_size
            except FileNotFoundError:
                continue


def _disk(
    place: Path, tables: list[AboutTable], kept: list[bb.Snapshot], folders: dict[str, list[Path]]
) -> dict[str, int]:
    """Return bytes by purpose. A concurrent writer may change files, so differences are limited to 0 or more."""
    live = sum(table.live_bytes for table in tables)
    checkpoints = sum(table.index_snapshot_bytes for table in tables)
    snapshots = sum(one.own_bytes for one in kept)
    of_tables = sum(table.disk_bytes for table in tables)
    inside = [folder for several in folders.values() for folder in several]
    parts = {"files": 0, "data": 0, "rest": 0}
    for path, size in _files(place):
        if any(path.is_relative_to(folder) for folder in inside):
            continue
        first = path.relative_to(place).parts[0]
        # Files in the tables' folders count as tables, also before the first commit of a training.
        if first == "tables":
            of_tables += size
        else:
            parts[first if first in parts else "rest"] += size
    return {
        "live": live,
        "snapshots": snapshots,
        "checkpoints": checkpoints,
        "superseded": max(0, of_tables - live - snapshots - checkpoints),
        "dense": parts["files"],
        "data": parts["data"],
        "rest": parts["rest"],
    }


def _options(values: Json) -> list[Option]:
    """Return options in the order of `TrainConfig`, then unknown options of another release."""
    if not values:
        return []
    defaults = TrainConfig().to_dict()
    known = [Option(name, values.get(name, default), default) for name, default in defaults.items()]
    return known + [Option(name, value, UNKNOWN) for name, value in values.items() if name not in defaults]


def _curves(place: Path, tables: list[AboutTable]) -> tuple[list[Curve], str]:
    wanted = {"user", "item"}
    found = []
    for table in tables:
        if table.name not in wanted or table.num_rows is None:
            continue
        if table.num_rows > MOST_ROWS:
            return [], f"Counting the uses of {table.num_rows:,} rows would take more memory than a report should."
        try:
            counts = count_uses(place / "data", table.name, table.num_rows)
        except FileNotFoundError:
            return [], "The run keeps no copy of the pairs it is trained on, and tables count no uses of their rows."
        except ValueError as error:
            return [], f"The uses of rows could not be counted: {error}."
        one = curve(table.name, counts)
        if one is not None:
            found.append(one)
    return found, "" if found else "There are no committed tables of users and items whose uses could be counted."


def _limit(place: Path, metrics: Metrics | None) -> tuple[Limit | None, str]:
    counted = [
        entry
        for entry in (metrics.epochs if metrics else [])
        if all(
            isinstance(entry.get(name), (int, float))
            for name in ("disk_reads", "disk_read_bytes", "moved_bytes", "disk_written_bytes", "seconds")
        )
        and entry["seconds"] > 0
    ]
    if not counted:
        return None, "No finished epoch has counted its reads and the bytes it moved yet."

    def total(name: str) -> float:
        return float(sum(entry[name] for entry in counted))

    machine = remembered(place)
    if machine is None:
        return None, (
            "The limits of this machine and disk were never measured: bunkbed plan does so once, in about five "
            "seconds, where --dir names this folder, and the next report shows them."
        )
    needs = (
        ("disk_reads", machine.read_iops),
        ("disk_written_bytes", machine.write_bytes_per_s),
        ("moved_bytes", machine.memory_bytes_per_s),
    )
    if any(total(name) and not rate for name, rate in needs):
        return None, "Of this machine not all limits are known: bunkbed plan --remeasure measures them again."
    times = step_times(
        reads=total("disk_reads"),
        read_bytes=total("disk_read_bytes"),
        read_bytes_per_s=machine.read_bytes_per_s,
        written_bytes=total("disk_written_bytes"),
        moved_bytes=total("moved_bytes"),
        read_iops=machine.read_iops or 1.0,
        write_bytes_per_s=machine.write_bytes_per_s or 1.0,
        memory_bytes_per_s=machine.memory_bytes_per_s or 1.0,
    )
    return Limit(len(counted), total("seconds"), times, machine), ""


def _reads(metrics: Metrics | None) -> str:
    records, read_bytes, wanted_bytes = dict.fromkeys(PATHS, 0.0), 0.0, 0.0
    for entry in metrics.epochs if metrics else []:
        found = entry.get("records_by_path")
        numbers: list[Any] = [found.get(path) for path in PATHS] if isinstance(found, dict) else [None]
        numbers += [entry.get("disk_read_bytes"), entry.get("wanted_bytes")]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            continue  # of an earlier release
        *paths, read, wanted = numbers
        for path, number in zip(PATHS, paths, strict=True):
            records[path] += number
        read_bytes, wanted_bytes = read_bytes + read, wanted_bytes + wanted
    return read_paths(records, read_bytes, wanted_bytes) if any(records.values()) and wanted_bytes else ""


def _time(file: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(file.stat().st_mtime).astimezone()
    except OSError:
        return None


__all__ = ["UNKNOWN", "AboutTable", "Facts", "Kind", "Limit", "Option", "gather", "kind_of"]
