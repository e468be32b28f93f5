"""Tables under stress: the creation of each kind, and the calls of threads. See `stress`."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed.table.definition import Definition
from torture.stress.oracle import Counts, Gate, Wrong

ROWS = 3000
DIM = 64
PAIRS = 40  # per batch
THREADS = 4
#: The last pairs are only set, each by one thread, and never updated.
SET_PAIRS = 32
FACTS: dict[str, Any] = {"dim": DIM, "optimizer": bb.SGD(lr=1.0), "init": bb.Zeros()}


@dataclass(frozen=True)
class Kind:
    """A kind of table and its options.

    Attributes:
        made: arguments of `bunkbed.create` that replace `FACTS` and a small `ram`.
        shape: plain, sharded, run (two tables and a dense file), budget (other tables join and leave), layer (below a
            device cache), or opens (each call of a thread opens the table).
        readers: number of reader processes.
    """

    name: str
    made: dict[str, Any] = field(default_factory=dict)
    shape: str = "plain"
    readers: int = 0

    @property
    def is_open(self) -> bool:
        return "num_rows" in self.made

    @property
    def is_in_ram(self) -> bool:
        return self.made.get("ram", 0) is None

    @property
    def is_durable(self) -> bool:
        return not self.is_in_ram and "durability" not in self.made


KINDS = (
    Kind("fixed", readers=1),
    Kind("open", {"num_rows": None}, readers=1),
    Kind("ram", {"ram": None}),
    Kind("scratch", {"durability": "scratch"}),
    Kind("disk", {"disk": "6656KiB"}, readers=1),
    Kind("sharded", shape="sharded", readers=1),
    Kind("run", shape="run", readers=1),
    Kind("budget", shape="budget"),
    Kind("layer", shape="layer"),
    Kind("opens", shape="opens", readers=1),
)


def ids_of(kind: Kind, rows: Any) -> Any:
    return rows * 1_000_003 + 5 if kind.is_open else rows


def rows_of(kind: Kind, ids: Any) -> Any:
    return (ids - 5) // 1_000_003 if kind.is_open else ids


def facts_of(kind: Kind) -> dict[str, Any]:
    facts = {**FACTS, "num_rows": ROWS, **kind.made}
    if "ram" not in facts:
        spec = Definition(DIM, facts["num_rows"], FACTS["optimizer"], FACTS["init"]).spec()
        least = int(spec.minimum_ram(ROWS, True))
        facts["ram"] = 2 * least if kind.is_open else least + 4096
    return facts


class Subject:
    """One table under stress, its counts, and the calls of threads."""

    def __init__(self, kind: Kind, folder: Path, name: str = "table", counts: str = "counts") -> None:
        self.kind = kind
        self.path = folder / name
        self.folder = folder
        self.facts = facts_of(kind)
        self.counts = Counts(folder / counts, ROWS)
        self.gate = Gate()
        self.kept: dict[str, int] = {}  # name -> epoch, of snapshots
        self.keeping: set[int] = set()  # threads that are keeping a commit
        self.table: Any = None
        self.run: Any = None

    def open(self) -> None:
        facts = dict(self.facts)
        match self.kind.shape:
            case "sharded":
                facts["ram"] = 3 * facts["ram"]
                self.table = bb.ShardedTable.open(self.path, create=dict(facts, shards=2))
            case "budget":
                self.budget = bb.Budget(2 * facts.pop("ram") + THREADS * facts_of(self.kind)["ram"])
                self.table = bb.open(self.path, ram=self.budget, create=facts)
            case "layer":
                import bunkbed.torch as bt

                self.layer = bt.Embedding(
                    ROWS, DIM, path=self.path, ram=2 << 20, optimizer=bb.SGD(lr=1.0), init=bb.Zeros(),
                    device_cache=ROWS * DIM,
                )  # fmt: skip
                self.optimizer = bt.Optimizer(self.layer)
                self.table = self.layer.table
            case "opens":
                self.table = None
                bb.open(self.path, create=facts).close()
            case _ if self.kind.is_in_ram:
                self.table = bb.create(None, **facts)
            case _:
                self.table = bb.open(self.path, create=facts)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Any]:
        """Yield the table, if needed opened for this call, whose updates are then durable afterwards."""
        if self.table is not None and self.kind.shape != "opens":
            yield self.table
            return
        with bb.open(self.path, create=self.facts) as table:
            yield table
            low = self.counts.low()
        self.counts.committed(None, low, low)

    @contextlib.contextmanager
    def _counted(self, rows: Any, increments: Any) -> Iterator[None]:
        """Count the start and the end of the one call that adds `increments`."""
        self.counts.begin(rows, increments)
        with self._room():
            try:
                yield
            except OSError:
                self.counts.undo(rows, increments)
                raise
            self.counts.end(rows, increments)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Allow the call to be refused if snapshots take the space of a disk limit."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENOSPC or "disk" not in self.kind.made or not (self.kept or self.keeping):
                raise

    # ---- Calls

    def pairs(self, chance: Any) -> tuple[Any, Any]:
        """Return the rows of some pairs and the increment of each row."""
        pairs = np.minimum(chance.zipf(1.2, PAIRS) - 1, ROWS // 2 - SET_PAIRS - 1)
        spread = pairs * 7919 % (ROWS // 2 - SET_PAIRS)
        return (spread[:, None] * 2 + [0, 1]).reshape(-1), np.repeat(chance.integers(1, 4, PAIRS), 2)

    def update(self, chance: Any, thread: int) -> None:
        rows, increments = self.pairs(chance)
        grads = np.repeat(-increments[:, None], DIM, axis=1).astype(np.float32)
        self.gate.enter()
        try:
            with self.opened() as table, self._counted(rows, increments):
                if self.kind.shape == "layer":
                    self._train(rows, increments)
                else:
                    table.update(ids_of(self.kind, rows), grads)
        finally:
            self.gate.leave()

    def _train(self, rows: Any, increments: Any) -> None:
        import torch

        values = self.layer(torch.from_numpy(rows))
        (values * -torch.from_numpy(increments)[:, None]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set(self, chance: Any, thread: int) -> None:
        pair = ROWS // 2 - 1 - (int(chance.integers(SET_PAIRS)) // THREADS * THREADS + thread) % SET_PAIRS
        rows, increments = np.array([2 * pair, 2 * pair + 1]), np.array([2, 2])
        self.gate.enter()
        try:
            with self.opened() as table, self._counted(rows, increments):
                values = np.repeat(self.counts.high()[rows][:, None], DIM, axis=1).astype(np.float32)
                table.set(ids_of(self.kind, rows), values)
        finally:
            self.gate.leave()

    def read(self, chance: Any, thread: int) -> None:
        rows, _ = self.pairs(chance)
        with self.opened() as table:
            way = int(chance.integers(4))
            low = self.counts.low()
            ids = ids_of(self.kind, rows)
            if way == 0:
                values, what = table.get(ids), "get"
            elif way == 1:
                values, what = table.lookup(ids, touch=False), "lookup untouched"
            elif way == 2:
                sums, what = table.lookup_bags(ids, np.arange(0, len(ids), 2), pooling="sum"), "lookup_bags"
                if (sums % 2).any():
                    raise Wrong(f"lookup_bags: sums of pairs {sums[(sums % 2).any(axis=1)][0]} are odd")
                values = np.repeat(sums / 2, 2, axis=0)
            else:
                values, what = table.lookup(ids), "lookup"
            self.counts.check(what, rows, values, low, self.counts.high())

    def contains(self, chance: Any, thread: int) -> None:
        rows, _ = self.pairs(chance)
        with self.opened() as table:
            low = self.counts.low()[rows] > 0
            found = table.contains(ids_of(self.kind, rows))
            high = self.counts.high()[rows] > 0
        if (low & ~found).any() or (found & ~high).any():
            raise Wrong(f"contains: rows {rows[(low & ~found) | (found & ~high)].tolist()}")

    def look_around(self, chance: Any, thread: int) -> None:
        with self.opened() as table:
            low = int((self.counts.low() > 0).sum())
            stored = len(table)
            high = int((self.counts.high() > 0).sum())
            if not low <= stored <= high:
                raise Wrong(f"len: {stored} rows are stored, expected [{low}, {high}]")
            stats = table.stats()
            disk_limit = stats["disk_limit_bytes"]
            if disk_limit and stats["disk_bytes"] > disk_limit:
                raise Wrong(f"stats: the files take {stats['disk_bytes']} bytes of at most {disk_limit}")
            repr(table), table.step, table.is_dirty, table.explain()

    def stage(self, chance: Any, thread: int) -> None:
        with self.opened() as table:
            table.stage(ids_of(self.kind, self.pairs(chance)[0]))

    def compact(self, chance: Any, thread: int) -> None:
        self.gate.enter()  # it moves rows that a scan has not reached yet
        try:
            with self.opened() as table:
                table.compact()
        finally:
            self.gate.leave()

    def commit(self, chance: Any, thread: int) -> None:
        with self.opened() as table:
            low = self.counts.low()
            if chance.random() < 0.5:
                epoch = table.commit(meta={"by": thread})
                high = self.counts.high()
            else:
                pending = table.begin_commit()
                high = self.counts.high()
                epoch = pending.wait()
        if self.kind.is_durable:
            self.counts.committed(epoch, low, high)

    def keep(self, chance: Any, thread: int) -> None:
        """Keep a commit, read it, drop it. Each thread uses its own name."""
        name = f"kept-{thread}"
        with self.opened() as table:
            if name not in self.kept:
                low = self.counts.low()
                self.keeping.add(thread)
                with self._room():
                    self.kept[name] = epoch = table.commit(keep=name)
                    self.counts.committed(epoch, low, self.counts.high())
                self.keeping.discard(thread)
            elif chance.random() < 0.5:
                table.drop(name)
                del self.kept[name]
            else:
                rows = np.arange(ROWS)
                bounds = self.counts.of_commit(self.kept[name])
                with bb.open(self.path, snapshot=name, ram="8MiB") as snapshot:
                    values = snapshot.lookup(ids_of(self.kind, rows))
                if bounds is not None:
                    self.counts.check(f"snapshot {name}", rows, values, *bounds)

    def scan(self, chance: Any, thread: int) -> None:
        """Scan without changes, or concurrently with changes that must end the scan; other calls go on."""
        is_alone = chance.random() < 0.7
        if is_alone:
            self.gate.close()
        try:
            with self.opened() as table:
                low = self.counts.low()
                way = int(chance.integers(3))
                try:
                    ids, values = self._all_rows(table, way, thread)
                except bb.BunkbedError as error:
                    # Its disk limit makes a commit compact; without one, compact() alone does so next to a scan.
                    may_compact = not is_alone or "disk" in self.kind.made
                    is_compaction = may_compact and "compaction moved its records" in str(error)
                    if not is_compaction and (is_alone or "changed" not in str(error)):
                        raise
                    return
                what = ("scan", "topk", "export")[way]
                self.counts.check_stored(what, rows_of(self.kind, ids), values, low, self.counts.high())
        finally:
            if is_alone:
                self.gate.open()

    def _all_rows(self, table: Any, way: int, thread: int) -> tuple[Any, Any]:
        if way == 0:
            parts = list(table.scan(chunk=200))
            if not parts:
                return np.empty(0, np.int64), np.empty((0, DIM), np.float32)
            return np.concatenate([ids for ids, _ in parts]), np.concatenate([values for _, values in parts])
        if way == 1:
            query = np.zeros(DIM, np.float32)
            query[0] = 1
            ids, scores = table.topk(query, ROWS)
            return ids[ids >= 0], np.repeat(scores[ids >= 0][:, None], DIM, axis=1)
        target = self.folder / f"rows-{thread}.safetensors"
        bb.export_rows(table, target, overwrite=True, chunk=300)
        with bb.create(None, **{**FACTS, "num_rows": self.facts["num_rows"]}) as copy:
            bb.import_rows(copy, target)
            return self._all_rows(copy, 0, thread)

    def open_again(self, chance: Any, thread: int) -> None:
        """Open the table again: updates before the close are durable after it."""
        rows, increments = self.pairs(chance)
        grads = np.repeat(-increments[:, None], DIM, axis=1).astype(np.float32)
        self.gate.enter()
        try:
            with bb.open(self.path) as table:
                with self._counted(rows, increments):
                    table.update(ids_of(self.kind, rows), grads)
                low = self.counts.low()
        finally:
            self.gate.leave()
        self.counts.committed(None, low, low)

    def share(self, chance: Any, thread: int) -> None:
        """Let another table join the budget and leave it."""
        path = self.folder / f"other-{thread}-{chance.integers(2**40)}"
        with bb.create(path, ram=self.budget, num_rows=64, **FACTS) as other:
            other.update([thread], np.full((1, DIM), -1, np.float32))
            used = self.budget.used_bytes
            if used > self.budget.total_bytes:
                raise Wrong(f"budget: {used} of {self.budget.total_bytes} bytes are handed out")

    def calls(self, thread: int) -> dict[Callable[[Any, int], None], float]:
        """Return the calls with their frequencies."""
        calls: dict[Callable[[Any, int], None], float] = {
            self.update: 6, self.set: 2, self.read: 6, self.contains: 1, self.look_around: 1, self.stage: 1,
            self.commit: 2, self.scan: 1.5,
        }  # fmt: skip
        if self.kind.is_durable:
            calls |= {self.keep: 0.7, self.compact: 0.3}
        if self.kind.is_durable and self.kind.shape in ("plain", "sharded", "budget", "opens"):
            calls[self.open_again] = 2
        if self.kind.shape == "budget":
            calls[self.share] = 1
        if self.kind.shape == "layer":
            del calls[self.set]  # others must not change the table within a step of its layer
            if thread != 0:
                del calls[self.update]
        return calls

    def end(self) -> None:
        """Check the sums after all threads have ended, in the table and after reopening."""
        rows = np.arange(ROWS)
        low, high = self.counts.low(), self.counts.high()
        if (low != high).any():
            raise Wrong("a call neither returned nor was undone")
        with self.opened() as table:
            self.counts.check("the end", rows, table.lookup(ids_of(self.kind, rows)), low, high)
        if self.table is not None:
            self.table.close()
        if not self.kind.is_durable:
            return
        with bb.open(self.path, mode="r", ram="16MiB") as table:
            self.counts.check("the last commit", rows, table.lookup(ids_of(self.kind, rows)), low, high)
        problems = bb.check(self.path)
        if problems:
            raise Wrong(f"bb.check: {problems[0]}")


class RunSubject(Subject):
    """Two tables of a run, this one and another; a dense file has the counts that a commit must have of both."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        super().__init__(kind, folder)
        self.second = Counts(folder / "counts-2", ROWS)
        self.lock = threading.Lock()  # a run is not thread-safe

    def open(self) -> None:
        facts = dict(self.facts)
        self.run = bb.Run(self.path, ram=3 * facts.pop("ram"))
        self.table, self.other = (self.run.table(name, create=facts) for name in ("a", "b"))
        with self.lock:
            self._commit_both(None)

    def update_other(self, chance: Any, thread: int) -> None:
        rows, increments = self.pairs(chance)
        self.second.begin(rows, increments)
        self.other.update(rows, np.repeat(-increments[:, None], DIM, axis=1).astype(np.float32))
        self.second.end(rows, increments)
        low = self.second.low()
        self.second.check("lookup", rows, self.other.lookup(rows), low, self.second.high())

    def _commit_both(self, keep: str | None) -> None:
        lows = self.counts.low(), self.second.low()
        pending = self.run.begin_commit(files={"bounds": np.stack(lows).tobytes()}, keep=keep)
        highs = self.counts.high(), self.second.high()
        epoch = pending.wait()
        self.counts.committed(epoch, lows[0], highs[0])
        self.second.committed(epoch, lows[1], highs[1])

    def commit(self, chance: Any, thread: int) -> None:
        with self.lock:
            self._commit_both(None)

    def keep(self, chance: Any, thread: int) -> None:
        name = f"kept-{thread}"
        with self.lock:
            if name not in self.kept:
                self._commit_both(name)
                self.kept[name] = self.run.epoch
            elif chance.random() < 0.5:
                self.run.drop(name)
                del self.kept[name]
            else:
                check_run(self.path, (self.counts, self.second), self.kept[name], name)

    def end(self) -> None:
        with self.lock:
            self._commit_both(None)
        self.run.close()
        check_run(self.path, (self.counts, self.second), None, None)
        problems = bb.check(self.path)
        if problems:
            raise Wrong(f"bb.check: {problems[0]}")

    def calls(self, thread: int) -> dict[Callable[[Any, int], None], float]:
        return {**super().calls(thread), self.update_other: 4}


def check_run(path: Path, both: tuple[Counts, Counts], epoch: int | None, snapshot: str | None) -> None:
    """Check that both tables of a commit have the counts of its dense file, within known bounds of its epoch."""
    rows = np.arange(ROWS)
    for attempt in range(50):
        floors = [counts.durable.copy() for counts in both]
        try:
            with bb.Run(path, mode="r", ram="16MiB", snapshot=snapshot) as run:
                said = np.frombuffer(run.read("bounds"), np.int64).reshape(2, ROWS)
                seen = [run.table(name).lookup(rows) for name in ("a", "b")]
            break
        except FileNotFoundError:  # the writer collected the commit meanwhile
            if snapshot is not None or attempt == 49:
                raise
    for counts, low, floor, values in zip(both, said, floors, seen, strict=True):
        bounds = None if epoch is None else counts.of_commit(epoch)
        least = np.maximum(low, floor) if epoch is None else low
        counts.check("a run's commit", rows, values, least, counts.started.copy() if bounds is None else bounds[1])
