"""Features of a table, and stories that combine them, for `pairs` and `between`.

A feature is an option of a table's creation, or a call. A story makes a table with some options, carries out calls on
it and on a `ReferenceTable`, and compares every row and slot. An option is arguments; a call is a function of `Story`.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from bunkbed.table.definition import Definition
from bunkbed.testing import ReferenceTable
from bunkbed.testing.compare import assert_same_bits, assert_same_rows

ROWS, DIM, BATCH = 240, 12, 24
#: name -> (its argument, arguments of `create`). Two values of one argument are not a pair.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "num_rows": ("num_rows", {"num_rows": ROWS}),
    "any id": ("num_rows", {"num_rows": None}),
    "float32": ("dtype", {"dtype": "float32"}),
    "bfloat16": ("dtype", {"dtype": "bfloat16"}),
    "float16": ("dtype", {"dtype": "float16"}),
    "SGD": ("optimizer", {"optimizer": bb.SGD(lr=0.1)}),
    "Adagrad": ("optimizer", {"optimizer": bb.Adagrad(lr=0.1, initial_accumulator=0.1)}),
    "RowwiseAdagrad": ("optimizer", {"optimizer": bb.RowwiseAdagrad(lr=0.1)}),
    "Adam": ("optimizer", {"optimizer": bb.Adam(lr=0.02)}),
    "16-bit state": ("state", {"state_dtype": "bfloat16"}),
    "weight decay": ("decay", {"weight_decay": 0.02, "decoupled": True}),
    "Zeros": ("init", {"init": bb.Zeros()}),
    "Normal": ("init", {"init": bb.Normal(std=0.1)}),
    "Uniform": ("init", {"init": bb.Uniform(-0.5, 0.5)}),
    "seed": ("seed", {"seed": 77}),
    "expire": ("rules", {"expire": 5, "keep": 20}),
    "max_rows": ("rules", {"max_rows": 60, "evict": "rarest"}),
    "clock of events": ("rules", {"expire": 3, "clock": "event"}),
    "admit": ("rules", {"admit": 0.5}),
    "admit the third": ("rules", {"admit": 3}),
    "ram least": ("ram", {}),
    "ram ample": ("ram", {"ram": "8MiB"}),
    "Budget": ("ram", {}),
    "disk": ("disk", {"disk": "8MiB"}),
    "scratch": ("durability", {"durability": "scratch"}),
    "RAM only": ("place", {}),
    "run": ("place", {}),
    "sharded": ("place", {}),
    "device cache": ("above", {}),
}
CALLS: dict[str, Callable[[Story], None]] = {}
#: Pairs that cannot be combined, and the error for them; `call` adds pairs.
HOLES: dict[tuple[str, str], tuple[Any, str]] = {
    ("SGD", "16-bit state"): (TypeError, "state_dtype"),
    ("any id", "export npy"): (ValueError, r"takes any id, which \.npy cannot name"),
    ("any id", "export torch"): (ValueError, r"takes any id, which \.pt cannot name"),
    ("any id", "export weights-h5"): (ValueError, r"takes any id, which \.weights\.h5|\.h5 cannot name"),
    ("any id", "export tensorflow"): (ValueError, r"takes any id, which \.index cannot name"),
    ("RAM only", "disk"): (ValueError, "a table in RAM only has none"),
    ("RAM only", "scratch"): (ValueError, "needs a path to overflow to"),
    ("run", "scratch"): (ValueError, 'durability="scratch" keeps nothing'),
    ("sharded", "scratch"): (TypeError, "durability"),
    ("RowwiseAdagrad", "export torch"): (ValueError, "torch has no optimizer with the state of RowwiseAdagrad"),
    **{
        ("num_rows", rule): (ValueError, "is for a table of any id")
        for rule in ("expire", "max_rows", "clock of events", "admit", "admit the third")
    },
    **{
        (rule, f"export {name}"): (ValueError, "takes any id, which")
        for rule in ("expire", "max_rows", "clock of events", "admit", "admit the third")
        for name in ("npy", "torch", "weights-h5", "tensorflow")
    },
    ("admit", "device cache"): (ValueError, "a device_cache stores every row that a step names"),
    ("admit the third", "device cache"): (ValueError, "a device_cache stores every row that a step names"),
    ("sharded", "device cache"): (ValueError, "is sharded: a device cache lies above one table"),
}


def call(
    name: str, *, scratch: str = "", files: bool = False
) -> Callable[[Callable[[Story], None]], Callable[[Story], None]]:
    """Register a call as a feature. `scratch`: the error of a scratch table. `files`: the call needs a path."""

    def add(function: Callable[[Story], None]) -> Callable[[Story], None]:
        CALLS[name] = function
        if scratch:
            HOLES["scratch", name] = ((bb.BunkbedError, ValueError), scratch)
        if files:
            HOLES["RAM only", name] = (TypeError, "(path|src) must be a string or a path")
        return function

    return add


class Story:
    """A table and its oracle, with the other open objects."""

    def __init__(self, options: tuple[str, ...], folder: Path, seed: int, rows: int = ROWS, **arguments: Any) -> None:
        self.options, self.folder, self.rows = options, folder, rows
        self.rng = np.random.default_rng(seed)
        self.calls = 0
        self.facts: dict[str, Any] = {"dim": DIM, "num_rows": rows, "optimizer": bb.Adam(lr=0.02), "seed": 3}
        self.facts |= {"init": bb.Normal(std=0.1), "dtype": "float32"}
        extra: dict[str, Any] = {}
        for option in options:
            group, values = OPTIONS[option]
            (extra if group in ("state", "decay", "ram", "disk", "durability") else self.facts).update(values)
        self.facts |= {key: value for key, value in arguments.items() if key in self.facts}
        if self.facts["num_rows"] is not None:
            has_rule = any(OPTIONS[option][0] == "rules" for option in options)
            self.facts["num_rows"] = None if has_rule and "num_rows" not in options else rows
        changed = {key: extra.pop(key) for key in ("state_dtype", "weight_decay", "decoupled") if key in extra}
        self.facts["optimizer"] = dataclasses.replace(self.facts["optimizer"], **changed)
        self.limits = {**extra, **{key: value for key, value in arguments.items() if key not in self.facts}}
        if "disk" in options and self.facts["num_rows"] is None:
            self.limits["disk"] = "512MiB"  # its segments are large, and there may be two shards
        self.all = np.arange(rows) * (1 if self.facts["num_rows"] is not None else 1_000_003)
        self.run: Any = None
        self.layer: Any = None
        self.reader: Any = None
        self.mover: Any = None  # the reader, or the run that moves it
        self.seen: Any = None
        self.pending: Any = None
        self.faulty: Any = None  # for `between`: the files that can fail, and the walked table
        self.walked: Any = None
        self.walk = ""
        self.committed: Any = None
        self.delivered: dict[int, Any] = {}  # the rows of a consumer of the changes
        self.dense = b""  # the file of a run's last commit with a file
        self.files = 0
        self.path = None if "RAM only" in options else folder / "table"
        self.budget: Any = None
        self.oracle = ReferenceTable(**self.facts)
        self.table: Any = self._open(make=True)
        self.remember()

    # ---- Opening and closing

    @property
    def is_durable(self) -> bool:
        return self.path is not None and "scratch" not in self.options

    def ram(self) -> Any:
        spec = Definition(**self.facts).spec(belongs_to_run="run" in self.options)
        least = spec.minimum_ram(self.rows, self.path is not None) + (4 << 10)
        least += 32 << 10 if self.facts["num_rows"] is None else 0  # the directory grows
        least = least * 2 if "sharded" in self.options else least
        least += 64 << 10 if "device cache" in self.options else 0
        if "Budget" in self.options:
            self.budget = self.budget or bb.Budget(3 * least)
            return self.budget
        return self.limits.get("ram", None if self.path is None else least)

    def _open(self, *, make: bool = False, **changes: Any) -> Any:
        rest = {key: value for key, value in self.limits.items() if key != "ram"}
        if "run" in self.options:
            self.run = bb.Run(self.path, ram=self.ram())
            optimizer = changes.get("optimizer")
            create = {**self.facts, **rest} if make else {**rest, **({"optimizer": optimizer} if optimizer else {})}
            table: Any = self.run.table("t", create=create)
            if make:
                self.run.commit()
        elif not make and "sharded" in self.options:
            facts = {key: value for key, value in self.facts.items() if key != "optimizer"}
            table = bb.ShardedTable.open(self.path, ram=self.ram(), create=facts, **rest, **changes)  # type: ignore[arg-type]
        elif not make:
            rest.pop("durability", None)
            table = bb.open(self.path, ram=self.ram(), **rest, **changes)  # type: ignore[arg-type]
        elif "sharded" in self.options:
            where: dict[str, Any] = {"shards": 2}
            if self.rng.integers(2):
                where = {"directories": [self.folder / "one", self.folder / "other"]}
            table = bb.ShardedTable.create(self.path, ram=self.ram(), **where, **self.facts, **rest)  # type: ignore[arg-type]
        else:
            table = bb.create(self.path, ram=self.ram(), **self.facts, **rest)
        if not make and "optimizer" not in changes:
            # Each commit has the hyperparameters, also one that closing makes for an index snapshot.
            optimizers, rules = zip(*self.committed_definitions, strict=True)
            assert table.optimizer in (self.oracle.optimizer, *optimizers)
            self.oracle.optimizer = table.optimizer
            assert table.retention in (self.oracle.retention, *rules)
            self.oracle.retention = table.retention
        if "device cache" in self.options:
            self._put_cache_above(table)
        return table

    def _put_cache_above(self, table: Any) -> None:
        import bunkbed.torch as bt

        size = max(3 * BATCH, self.rows // 2) * table.record_bytes
        self.layer = bt.Embedding(table.num_rows, table.dim, table=table, device_cache=size)
        self.trainer = bt.Optimizer(self.layer)

    def require_time(self) -> None:
        """Set a clock of events that was not set, or not in the commit that the story went back to."""
        if self.oracle.clock < 0:
            self.table.clock = self.oracle.clock = 0

    def close(self, commit: bool) -> None:
        """Close, and discard uncommitted changes unless `commit`."""
        self.settle()
        self.layer = self.trainer = None
        (self.run or self.table).close(commit=commit)
        if commit:
            self.commit_oracle()
        elif self.is_durable:
            self.oracle.revert()

    def reopen(self, commit: bool = True, **changes: Any) -> None:
        self.close(commit)
        self.table = self._open(**changes)

    def finish(self) -> None:
        """Compare all rows, also after reopening."""
        self.compare()
        if self.is_durable:
            self.reopen()
            self.compare()
        self.close(commit=False)
        if self.is_durable:
            assert bb.check(self.path) == []

    def abandon(self) -> None:
        """Close all open objects, also after a failure."""
        for one in (self.reader, self.run, self.table):
            with suppress(Exception):
                one.close(commit=False)
        self.layer = None

    # ---- Parts of calls

    def ids(self, size: int = BATCH) -> np.ndarray:
        """Return skewed ids with duplicates."""
        return self.all[(self.rows * self.rng.random(size) ** 1.5).astype(np.int64)]

    def floats(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def train(self, ids: np.ndarray | None = None, **rest: Any) -> None:
        """Do a step of table and oracle; through the layer if there is one and the step is plain."""
        ids = self.ids() if ids is None else ids
        grads = self.floats(len(ids), self.facts["dim"])
        if self.layer is not None and not rest:
            import torch

            self.trainer.zero_grad()
            self.trainer.param_groups[0]["lr"] = self.oracle.optimizer.lr  # type: ignore[attr-defined]
            (self.layer(torch.from_numpy(ids)) * torch.from_numpy(grads)).sum().backward()
            self.trainer.step()
        else:
            self.table.update(ids, grads, **rest)
        self.oracle.update(ids, grads, **rest)

    def commit_oracle(self, **arguments: Any) -> None:
        self.oracle.commit(**arguments)
        self.remember()

    def remember(self) -> None:
        """Remember the committed state."""
        # With no changed row, a plain table commits new hyperparameters; a run or sharded table only after compaction.
        may_be_none = bool({"run", "sharded"} & set(self.options))
        if self.committed is None or self.oracle.epoch != self.committed.epoch or not may_be_none:
            self.committed_definitions = []
        self.committed_definitions.append((self.oracle.optimizer, self.oracle.retention))
        self.committed = copied(self.oracle)

    def commit(self, **arguments: Any) -> None:
        self.settle()
        if self.run is not None:
            must_raise(bb.BunkbedError, r"with run\.commit\(\)", self.table.commit)
        if self.run is not None and self.rng.integers(2):
            self.dense = self.rng.bytes(20)
            self.run.commit(files={"dense": self.dense}, **arguments)
        else:
            (self.run or self.table).commit(**arguments)
        self.commit_oracle(**arguments)

    def settle(self) -> None:
        if self.pending is not None:
            assert self.pending.wait() > 0
        self.pending = None

    def kept(self) -> str:
        """Return the name of an existing snapshot."""
        if not self.oracle.snapshots():
            self.commit(keep="a")
        return sorted(self.oracle.snapshots())[0]

    def file(self, end: str) -> Path:
        self.files += 1
        return self.folder / f"rows-{self.files}{end}"

    def compare(self) -> None:
        assert_same_rows(self.table, self.oracle, self.all)
        assert len(self.table) == len(self.oracle)
        if self.run is not None and self.dense:
            self.settle()
            assert self.run.files == ["dense"] and self.run.read("dense") == self.dense
        assert (self.table.retention, self.table.clock) == (self.oracle.retention, self.oracle.clock)
        assert self.table.optimizer == self.oracle.optimizer, f"{self.table.optimizer} is not {self.oracle.optimizer}"
        if self.reader is not None:
            assert_same_rows_of_reader(self.reader, self.seen, self.all)

    def compare_scan(self, found: Iterator[Any], slot: str, oracle: Any = None) -> None:
        oracle = self.oracle if oracle is None else oracle
        parts = list(found)
        ids = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in parts)])
        assert sorted(ids.tolist()) == sorted(oracle._places), "rows are missing, or there twice"
        for part, values in parts:
            assert_same_bits(values, oracle.get(part, slot), slot)

    def open_reader(self, **arguments: Any) -> Any:
        if self.path is None:
            return bb.open(None, mode="r", ram="8MiB")  # type: ignore[arg-type]
        if self.run is None:
            opened = bb.ShardedTable.open if "sharded" in self.options else bb.open
            return opened(self.path, ram="8MiB", **{"mode": "r", **arguments})
        run = bb.Run(self.path, ram="8MiB", mode="r", **arguments)
        table = run.table("t")
        self.reader_run = run  # destroying it closes its tables
        return table


def copied(oracle: ReferenceTable) -> ReferenceTable:
    """Copy like deepcopy, but only parts that change in place."""
    one = copy.copy(oracle)
    for name in ("_places", "_commits", "_names", "_counts", "_usage"):
        setattr(one, name, dict(getattr(oracle, name)))
    one._arrays = {slot: array.copy() for slot, array in oracle._arrays.items()}
    return one


def assert_same_rows_of_reader(reader: Any, oracle: Any, ids: np.ndarray) -> None:
    for slot in ("weight", *oracle.slots):
        assert_same_bits(reader.get(ids, slot), oracle.get(ids, slot), f"{slot} of a reader")
    assert reader.contains(ids).tolist() == oracle.contains(ids).tolist()


@contextmanager
def small_tables() -> Iterator[None]:
    """Enable compaction and index snapshots of small tables within the context."""
    _native.set_compaction_slack(4 << 10)
    _native.set_index_snapshots(1, in_line=True)
    try:
        yield
    finally:
        _native.set_compaction_slack(256 << 10)
        _native.set_index_snapshots()


def must_raise(kinds: Any, pattern: str, function: Callable[..., Any], *arguments: Any, **rest: Any) -> None:
    """Fail unless the call raises such an error."""
    try:
        function(*arguments, **rest)
    except kinds as error:
        assert re.search(pattern, str(error), re.DOTALL), f"{type(error).__name__} says {error}, not {pattern}"
    else:
        raise AssertionError(f"{function.__name__} did not raise {pattern}")


def hole_of(first: str, second: str) -> tuple[Any, str] | None:
    """Return the error of two features that cannot be combined, or None."""
    for pair in ((first, second), (second, first)):
        if pair in HOLES:
            return HOLES[pair]
    return None
