"""Calls between two steps of walks over rows: `scan`, exports, `topk`, `neighbors`, copies, also of readers.

A walk yields each row of the state at its start once, or raises the error that the table was changed. `OUTCOMES` says
for each call which of these must happen. A row that is missing, wrong or repeated is a failure.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing.compare import assert_same_bits
from torture.parts import Clock, Result, Size, folder
from torture.stories.calls import CALLS
from torture.stories.features import Story, copied, hole_of, must_raise, small_tables

#: Rows of the tables: several chunks of each walk. With `disk=` rows are large, so that commits have to compact.
ROWS, DIM, LARGE_DIM = 1_000, 24, 160
CHANGED = "while it was scanned|is closed"

#: kind -> options of the story. `disk` gets the smallest limit that is sufficient for its rows.
KINDS = {
    "durable": (),
    "disk": (),
    "scratch": ("scratch",),
    "RAM only": ("RAM only",),
    "run": ("run",),
    "sharded": ("sharded",),
    "device cache": ("device cache",),
}
#: Outcome of a walk after each call. "exact": all rows of the state at the start. "refused": it raises `CHANGED`.
#: "either": one of both, because the call may change or move rows. The outcome of other calls is "exact".
OUTCOMES = dict.fromkeys(
    ("update", "update lr", "update step", "update nothing", "update_batch", "set", "delete", "window", "threads"),
    "refused",
) | {
    **dict.fromkeys(("compact", "rewind", "neighbors", "budget changes", "update refused", "sweep"), "either"),
    **dict.fromkeys(("reopen", "reopen with another optimizer", "exception in a with block", "repair"), "refused"),
}
#: With `disk=`, these calls may compact the log first.
COMMITS = ("commit", "commit meta", "commit keep", "commit refused", "begin_commit", "drop", "drop_snapshot")
COMMITS += (
    "commit fails",
    "keep too much",
    "reader",
    "snapshot reader",
    "copy",
    "copy rewriting",
    "open twice",
    "check",
    "changes",
    "reshard",
)
#: Not called between two steps: the call would release the table while the walk holds it.
LEFT_OUT = ("left open",)


def _keep_too_much(s: Story) -> None:
    """Keep a snapshot that leaves too little of `disk=`: it is refused."""
    if "disk" not in s.limits:
        return s.commit(keep="much") if s.is_durable or s.path is None else None
    s.settle()
    must_raise(OSError, "would leave too little", s.table.commit, keep="much")
    return None


def _commit_fails(s: Story) -> None:
    """Let a commit fail, because no manifest can be made: nothing is lost."""
    if not s.is_durable:
        return
    s.settle()
    s.faulty.fail_all("link", errno.ENOSPC)
    try:
        with suppress(OSError):
            (s.run or s.table).commit(meta={"refused": True})
            raise AssertionError("a commit without a manifest was acknowledged")
    finally:
        s.faulty.heal()
    s.commit()


def _walked_refreshes(s: Story) -> None:
    """Refresh the walked table, if it is a reader."""
    if s.walked.mode == "w":
        must_raise(ValueError, "for readers", s.walked.refresh)
        return
    s.train()
    s.commit()
    if s.walk in PINNED:  # the walk stays at its commit
        must_raise(bb.BunkbedError, r"refresh\(\) within pinned\(\)", s.walked.refresh)
    else:
        s.walked.refresh()


BETWEEN: dict[str, Callable[[Story], None]] = {
    **{name: function for name, function in CALLS.items() if name not in LEFT_OUT and not name.startswith("export ")},
    "keep too much": _keep_too_much,
    "commit fails": _commit_fails,
    "refresh": _walked_refreshes,
    "export parquet": CALLS["export parquet"],
}
#: Walks that keep a reader at one commit.
PINNED = ("topk", "neighbors")
OUTCOMES["export parquet"] = "refused"  # it imports the rows again
OUTCOMES["evict everything"] = "exact"


# ---- Walks: each calls `between` once, between two of its steps, and returns {slot: [(ids, rows), ...]}


Rows = dict[str, list[tuple[np.ndarray, np.ndarray]]]


def _scan(s: Story, table: Any, between: Callable[[], None], slot: str, chunk: int) -> Rows:
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for number, part in enumerate(table.scan(slot=slot, chunk=chunk)):
        found.append(part)
        if number == 1:
            between()
    return {slot: found}


def _scan_weight(s: Story, table: Any, between: Callable[[], None]) -> Rows:
    return _scan(s, table, between, "weight", 257)


def _scan_state(s: Story, table: Any, between: Callable[[], None]) -> Rows:
    return _scan(s, table, between, s.oracle.slots[-1], 700)


def _export(s: Story, table: Any, between: Callable[[], None]) -> Rows:
    return _exported(s, table, between, ".parquet", ("weight", *s.oracle.slots))


def _export_all(s: Story, table: Any, between: Callable[[], None]) -> Rows:
    return _exported(s, table, between, ".npy", ("weight",))


@contextmanager
def _called_within(table: Any, name: str, between: Callable[[], None]) -> Iterator[None]:
    """Make the first scan by `table.NAME` use chunks of at most 300 rows, and call `between` after the second."""
    scan = getattr(table, name)

    def scanned(*slots: Any, chunk: int) -> Iterator[Any]:
        vars(table).pop(name, None)  # `between` may scan too
        for number, part in enumerate(scan(*slots, chunk=min(chunk, 300))):
            if number == 1:
                between()
            yield part

    vars(table)[name] = scanned if name == "scan" else lambda slots, chunk: scanned(slots, chunk=chunk)
    try:
        yield
    finally:
        vars(table).pop(name, None)


def _exported(s: Story, table: Any, between: Callable[[], None], end: str, slots: tuple[str, ...]) -> Rows:
    path = s.file(end)
    with _called_within(table, "scan_slots", between):
        bb.export_rows(table, path, slots=slots)
    with bb.create(None, **s.facts) as other:
        bb.import_rows(other, path, slots=slots)
        stored = s.all[other.contains(s.all)]
        return {slot: [(stored, other.get(stored, slot))] for slot in slots}


def _topk(s: Story, table: Any, between: Callable[[], None]) -> Rows:
    queries, before = s.floats(1, s.table.dim), copied(s.oracle)
    with _called_within(table, "scan", between):
        ids, scores = table.topk(queries, 9)
    expected = before.topk(queries, 9)
    assert ids.tobytes() == expected[0].tobytes() and scores.tobytes() == expected[1].tobytes(), "topk is wrong"
    return {}


def _neighbors(s: Story, table: Any, between: Callable[[], None]) -> Rows:
    ids, before = list(s.oracle._places)[:1], copied(s.oracle)
    with _called_within(table, "scan", between):
        found = bb.neighbors(table, ids, k=5)
    expected = before.topk(before.lookup(ids), 5, exclude=[ids])  # type: ignore[arg-type]
    assert found[0].tobytes() == expected[0].tobytes(), "neighbors are wrong"
    return {}


WALKS: dict[str, Callable[[Story, Any, Callable[[], None]], Rows]] = {
    "scan": _scan_weight,
    "scan of a slot": _scan_state,
    "export": _export,
    "export of every row": _export_all,
    "topk": _topk,
    "neighbors": _neighbors,
}


# ---- Stories


def _make(kind: str, root: Path, seed: int) -> Story:
    arguments: dict[str, Any] = {"dim": DIM, **({} if kind == "RAM only" else {"ram": "2MiB"})}
    if kind == "disk":
        arguments |= {"dim": LARGE_DIM, "disk": "24MiB"}
    s = Story(KINDS[kind], root, seed, ROWS, **arguments)
    for start in range(0, ROWS, 250):
        s.train(s.all[start : start + 250])
    if kind == "disk":
        s.close(commit=True)
        try:
            bb.open(s.path, ram="2MiB", disk=1)  # type: ignore[arg-type]
        except ValueError as error:
            s.limits["disk"] = int(re.findall(r"disk=(\d+)", str(error))[-1]) + (1 << 20)
        s.table = s._open()
    return s


def outcome_of(call: str, kind: str) -> str:
    """Return the outcome of a walk on a writer of this kind with the call between its steps."""
    if call in COMMITS and kind == "disk":
        return "either"
    return OUTCOMES.get(call, "exact")


def one(s: Story, table: Any, state: Any, walk: str, call: str, expected: str) -> None:
    """Walk over `table`, which has the rows of `state`, with a call between two steps.

    Raises:
        AssertionError: other rows, or another outcome than in `OUTCOMES`.
    """
    called: list[bool] = []
    s.walk = walk

    def between() -> None:
        called.append(True)
        try:
            BETWEEN[call](s)
        except OSError as error:
            if "would leave too little of disk=" not in str(error):  # a snapshot was refused, and nothing was changed
                raise

    try:
        found = WALKS[walk](s, table, between)
    except bb.BunkbedError as error:
        assert called, "it was refused before the call"
        assert type(error) in (bb.BunkbedError, bb.TableClosedError) and re.search(CHANGED, str(error)), (
            f"{type(error).__name__}: {error}"
        )
        assert expected != "exact", f"refused, though nothing changed: {error}"
        return
    assert called, "the walk had no second step"
    assert expected != "refused", "rows changed, and the walk went on"
    for slot, parts in found.items():
        ids = np.concatenate([part for part, _ in parts])
        wanted = state._places if walk != "export of every row" else dict.fromkeys(s.all.tolist())
        assert len(ids) == len(set(ids.tolist())) == len(wanted), (
            f"{len(ids)} rows, {len(set(ids.tolist()))} distinct rows, of {len(wanted)}"
        )
        for part, values in parts:
            assert_same_bits(values, state.get(part, slot), slot)


def _leave_pending(s: Story, number: int) -> None:
    """Leave in turn nothing, an unfinished commit, and prefetches."""
    if number % 3 == 1:
        CALLS["begin_commit"](s)
    elif number % 3 == 2:
        s.table.stage(s.ids(200))


def story(kind: str, walk: str, calls: list[str], seed: int, root: Path, *, of_reader: bool = False) -> Result:
    """Make each call once between two steps of a walk over one table, or over its reader."""
    result = Result(f"between: {walk} of {kind}{', a reader' if of_reader else ''}")
    s = _make(kind, root, seed)
    s.faulty = _native.FaultVfs()
    _native.use_vfs(s.faulty)
    try:
        s.reopen() if s.is_durable else None  # opens through the files that can fail
        for call in calls:
            result.tried += 1
            expected = outcome_of(call, kind)
            try:
                for _ in range(3):  # makes records to write and to compact
                    s.train(s.all[s.rng.integers(0, ROWS, 300)])
                if of_reader:
                    s.commit()
                    with s.open_reader() as s.walked:
                        outcome = "refused" if call == "refresh" and walk not in PINNED else "exact"
                        one(s, s.walked, copied(s.committed), walk, call, outcome)
                else:
                    s.walked = s.table
                    _leave_pending(s, result.tried)
                    one(s, s.table, copied(s.oracle), walk, call, expected)
                s.settle()
                s.compare()
            except Exception as error:
                result.fail(f"{call}: {type(error).__name__}: {error}")
                if isinstance(error, OSError | bb.BunkbedError) or s.table.closed:
                    break
            else:
                result.passed += 1
        if s.reader is not None:
            s.reader.close()
            s.reader = None
        s.finish()
    except Exception as error:
        result.tried += 1
        result.fail(f"in the end: {type(error).__name__}: {error}")
    finally:
        _native.use_vfs(None)
        s.abandon()
    return result


def calls_for(kind: str) -> list[str]:
    """Return the calls of a table of this kind."""
    return [call for call in BETWEEN if all(hole_of(option, call) is None for option in KINDS[kind])]


def run(size: Size) -> list[Result]:
    """Run every walk of every kind, and of a reader, with every call; more seeds in the long form."""
    clock, results = Clock(size.seconds), []
    for seed in range(size.seed, size.seed + size.of(4)):
        for kind in KINDS:
            for walk in WALKS:
                for of_reader in (False, True) if kind in ("durable", "disk", "sharded") else (False,):
                    if clock.is_over:
                        return results
                    calls = calls_for(kind)
                    np.random.default_rng(seed).shuffle(calls)
                    with folder() as root, small_tables():
                        results.append(story(kind, walk, calls, seed, root, of_reader=of_reader))
    return results
