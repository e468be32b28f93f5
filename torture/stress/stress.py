"""Concurrent calls of threads and reader processes, on every kind of table; an oracle checks each row that is read.

Each kind runs in a separate process, so that a hanging call ends only this process, which shows its stacks.
`oracle` defines the valid values of a row, `tables` the calls.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from bunkbed.table import opening
from torture.parts import Child, Clock, Result, Size, folder
from torture.stress.oracle import Counts, Wrong
from torture.stress.tables import DIM, KINDS, ROWS, THREADS, Kind, RunSubject, Subject, check_run, ids_of, rows_of

# ---- Reader processes


def _read(kind: Kind, folder: Path, seed: int, seconds: float) -> Counter[str]:
    """Read in a separate process and check that rows show no unstarted update, all durable ones, and never go back."""
    clock = Clock(seconds)
    chance = np.random.default_rng([seed, 99])
    stop = folder / "stop"
    made: Counter[str] = Counter()
    rows = np.arange(ROWS)
    while not stop.exists() and not clock.is_over:
        try:
            if kind.shape == "run":
                reader = None
                bb.Run(folder / "table", mode="r", ram="16MiB").close()
            else:
                reader = bb.open(folder / "table", mode="r", ram="8MiB")
            break
        except (FileNotFoundError, bb.FormatError):
            threading.Event().wait(0.01)
    both = [Counts(folder / name, ROWS, is_new=False) for name in ("counts", "counts-2")[: 1 + (kind.shape == "run")]]
    seen = np.zeros(ROWS, np.int64)
    while not stop.exists() and not clock.is_over:
        made["reader process"] += 1
        if kind.shape == "run":
            check_run(folder / "table", (both[0], both[1]), None, None)
            continue
        assert reader is not None
        floor = both[0].durable.copy()
        reader.refresh()
        for _ in range(4):
            pairs = np.flatnonzero(chance.random(ROWS // 2) < 0.1)
            some = (pairs[:, None] * 2 + [0, 1]).reshape(-1)
            values = reader.lookup(ids_of(kind, some))
            seen[some] = both[0].check("a reader", some, values, np.maximum(floor, seen), both[0].started.copy())
        if chance.random() < 0.2:
            parts = list(reader.scan(chunk=500))
            ids = np.concatenate([ids for ids, _ in parts]) if parts else rows[:0]
            values = np.concatenate([values for _, values in parts]) if parts else np.empty((0, DIM), np.float32)
            both[0].check_stored("a reader's scan", rows_of(kind, ids), values, floor, both[0].started.copy())
    return made


# ---- A kind


@dataclass
class Outcome:
    """Numbers of calls by name, and errors."""

    made: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def stress(kind: Kind, folder: Path, seed: int, seconds: float, calls: int) -> Outcome:
    """Make `calls` calls, for at most `seconds`, by threads and reader processes on one table; in this process."""
    readers = [
        Child(lambda _, i=i: dict(_read(kind, folder, seed + i, seconds + 60)), seconds + 100)
        for i in range(kind.readers)
    ]
    warnings.simplefilter("ignore", bb.UncommittedWarning)  # of a table after an error
    _native.set_compaction_slack(16 << 10)
    _native.set_index_snapshots(1, in_line=bool(seed % 2))
    _native.set_io("threads" if seed % 2 else "auto")
    outcome = Outcome()
    subject = (RunSubject if kind.shape == "run" else Subject)(kind, folder)
    is_over = threading.Event()

    def attempt(name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Wrong as error:
            outcome.wrong.append(str(error))
            is_over.set()
        except BaseException as error:
            outcome.wrong.append(f"{name} raised {type(error).__name__}: {error}")
            is_over.set()

    def work(thread: int) -> None:
        chance = np.random.default_rng([seed, thread])
        choices = subject.calls(thread)
        names, weights = list(choices), np.array(list(choices.values()))
        for _ in range(calls // THREADS):
            if is_over.is_set() or clock.is_over:
                return
            call = names[int(chance.choice(len(names), p=weights / weights.sum()))]
            attempt(call.__name__, lambda call=call: call(chance, thread))
            with lock:
                outcome.made[call.__name__] += 1

    lock = threading.Lock()
    attempt("open", subject.open)
    clock = Clock(seconds)  # after a framework's import
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    if not is_over.is_set():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not is_over.is_set():
        attempt("end", subject.end)
    (folder / "stop").touch()
    for child in readers:
        if child.wait() != 0:
            outcome.wrong.append(f"a reader process: {child.sent[-1:]}")
        else:
            outcome.made.update(child.sent[-1])
    return outcome


def _without_locks_of_paths() -> None:
    opening.path_lock = lambda place: contextlib.nullcontext()  # type: ignore[assignment]


#: Seeded bugs: name -> (kind that must find it, function that switches it on).
BUGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "no lock of a path": ("opens", _without_locks_of_paths),
    "lost_write_back": ("fixed", lambda: _native.set_fault("lost_write_back")),
    "stale_read": ("fixed", lambda: _native.set_fault("stale_read")),
    "double_update": ("ram", lambda: _native.set_fault("double_update")),
    "scan_misses_change": ("fixed", lambda: _native.set_fault("scan_misses_change")),
}


def in_process(kind: Kind, seed: int, seconds: float, calls: int, prepare: Callable[[], Any] | None = None) -> Outcome:
    """Run `stress` in a separate process with a time limit."""

    def live(send: Callable[[Any], None]) -> Any:
        if prepare is not None:
            prepare()
        with folder() as root:
            return stress(kind, root, seed, seconds, calls)

    child = Child(live, seconds + 120)
    status = child.wait()
    if status == 0:
        return child.sent[-1]
    return Outcome(wrong=[f"the process ended with status {status}: {child.sent[-1:]}"])


def run(size: Size) -> list[Result]:
    """Run every kind repeatedly with other seeds; then the seeded bugs, which must be found."""
    results = []
    calls = size.of(1_000_000, least=200)
    for kind in KINDS:
        if kind.shape == "layer":
            try:
                import torch  # noqa: F401
            except ImportError:
                continue
        result = Result(f"concurrent calls on a table, {kind.name}")
        made: Counter[str] = Counter()
        share = Clock(size.seconds * 0.9 / len(KINDS))
        seed = size.seed
        while sum(made.values()) < calls and not share.is_over:
            outcome = in_process(kind, seed, min(30.0, size.seconds * 0.9 / len(KINDS)), calls - sum(made.values()))
            made.update(outcome.made)
            seed += 1
            result.tried += sum(outcome.made.values()) or 1
            result.passed += sum(outcome.made.values()) if not outcome.wrong else 0
            for text in outcome.wrong:
                result.fail(f"seed {seed - 1}: {text}")
        counted = ", ".join(f"{name} {count:,}" for name, count in sorted(made.items()))
        result.note = f"{counted}\nwrong: {len(result.failures)}"
        results.append(result)
    bugs = Result("seeded bugs of concurrency caught", tried=len(BUGS))
    for name in BUGS:
        if find(name, size.seed, 60.0):
            bugs.passed += 1
        else:
            bugs.fail(f"{name} was not found")
    return [*results, bugs]


def find(name: str, seed: int, seconds: float) -> list[str]:
    """Return the errors with one of `BUGS` switched on, for increasing seeds within `seconds`."""
    kind_name, prepare = BUGS[name]
    kind = next(kind for kind in KINDS if kind.name == kind_name)
    clock = Clock(seconds)
    while not clock.is_over:
        outcome = in_process(kind, seed, 5.0, 2000, prepare)
        if outcome.wrong:
            return outcome.wrong
        seed += 1
    return []
