"""A story for every pair of features: a table with the options of both, calls of both in turn, other calls between.

`features` and `calls` define the features. `watched` and `missing` check that no feature is missing: each feature runs
alone, and all public names and arguments of Bunkbed must be used.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from torture.parts import Clock, Progress, Result, Size, folder, in_processes
from torture.stories.calls import CALLS
from torture.stories.features import OPTIONS, Story, hole_of, small_tables

FEATURES = (*OPTIONS, *CALLS)
#: Calls between the calls of a pair.
SMALL = ("update", "update", "update", "lookup", "lookup touch", "set", "commit", "evict everything", "stage")
#: Public names and arguments that no story uses, each with the reason.
UNUSED = {
    "Budget.members": "of the device tier only: test_device_memory.py",
    "Budget.least_total": "of the device tier only: test_device_cache.py",
    "Run.names_to_sweep": "of bunkbed sweep only: test_sweep_command.py",
    "ShardedTable.shard_stats": "of `bunkbed inspect` only: test_cli_tables.py",
    "Run.become_sharded": "of layers' checkpoints: test_sharded_commits.py",
    "ShardedTable.open.directories": "of shards that were moved: test_sharded.py",
    "check.epoch": "of damaged tables: the corruption part",
    "check.progress": "the command line's",
    "copy.progress": "the command line's",
    "reshard.progress": "the command line's",
    "reshard.workers": "of the folders of Keras workers: test_reshard_workers.py",
    "export_rows.name": "of one format each: test_io.py",
    "export_rows.vocab": "of one format each: test_io_text.py",
    "export_rows.metric": "of one format each: test_io.py",
    "import_rows.name": "of one format each: test_io.py",
    "import_rows.state": "of one format each: test_io_torch.py",
    "import_rows.vocab": "of one format each: test_io_text.py",
    "import_rows.progress": "the command line's",
    "import_rows.checking": "the command line's",
    "export_rows.progress": "between.py calls from it",
}


def pairs() -> list[tuple[str, str]]:
    """Return all pairs; a call is also paired with itself."""
    found = itertools.combinations(FEATURES, 2)
    return [*((a, b) for a, b in found if not _are_of_one_argument(a, b)), *((call, call) for call in CALLS)]


def _are_of_one_argument(a: str, b: str) -> bool:
    return a in OPTIONS and b in OPTIONS and OPTIONS[a][0] == OPTIONS[b][0]


def holes() -> dict[tuple[str, str], tuple[Any, str]]:
    """Return the pairs that cannot be combined, and their errors."""
    return {pair: hole for pair in pairs() if (hole := hole_of(*pair)) is not None}


def story(features: Sequence[str], seed: int, root: Path, length: int = 16) -> int:
    """Carry out one story; return the number of its calls.

    Raises:
        AssertionError: a row is wrong. Any other error: a call failed.
    """
    options = tuple(feature for feature in features if feature in OPTIONS)
    turns = itertools.cycle([feature for feature in features if feature in CALLS] or ["commit", "reopen", "scan"])
    small = [call for call in SMALL if all(hole_of(option, call) is None for option in options)]
    s = Story(options, root, seed)
    try:
        for number in range(length):
            call = next(turns) if number % 2 else small[int(s.rng.integers(len(small)))]
            if features[-1] in CALLS or all(hole_of(option, call) is None for option in options):
                s.require_time()
                CALLS[call](s)
                s.calls += 1
            if number % 5 == 4:
                s.compare()
        s.settle()
        s.finish()
    finally:
        s.abandon()
    return s.calls


def tell(features: Sequence[str], seed: int) -> tuple[int, str]:
    """Return the number of calls of a story, and its error or ""."""
    hole = hole_of(*features) if len(features) == 2 else None
    with folder() as root, small_tables():
        try:
            calls = story(features, seed, root)
        except Exception as error:
            if hole is not None and isinstance(error, hole[0]) and re.search(hole[1], str(error), re.DOTALL):
                return 1, ""
            return 0, f"{' x '.join(features)}, seed {seed}: {type(error).__name__}: {error}"
    return calls, "" if hole is None else f"{' x '.join(features)}: combined, though it is said to be a hole"


def covering(most: int, seed: int) -> list[tuple[str, ...]]:
    """Return groups of at most `most` features, which contain each pair that is not a hole."""
    chance = np.random.default_rng(seed)
    left = {frozenset(pair) for pair in pairs() if hole_of(*pair) is None and pair[0] != pair[1]}
    groups = []
    while left:
        group = sorted(min(left, key=sorted))
        while len(group) < most:
            able = [
                one
                for one in FEATURES
                if one not in group and all(not _are_of_one_argument(one, f) and hole_of(one, f) is None for f in group)
            ]
            gains = [sum(frozenset((one, f)) in left for f in group) for one in able]
            if not gains or max(gains) == 0:
                break
            group.append(able[int(chance.choice(np.flatnonzero(np.array(gains) == max(gains))))])
        left -= {frozenset(pair) for pair in itertools.combinations(group, 2)}
        groups.append(tuple(group))
    return groups


# ---- Check that no feature is missing


_CLASSES = (bb.Table, bb.ShardedTable, bb.Run, bb.Budget)


def public_names() -> set[str]:
    """Return every public function of Bunkbed with its arguments, and the methods of classes that hold rows."""
    found: set[str] = set()
    for name, value in vars(bb).items():
        if not name.startswith("_") and inspect.isfunction(value):
            found |= {f"{name}.{argument}" for argument in _arguments(value)} | {name}
    for kind in _CLASSES:
        for name, value in _members(kind).items():
            label = f"{kind.__name__}.{name}"
            found.add(label)
            if not isinstance(value, property):
                found |= {f"{label}.{argument}" for argument in _arguments(value)}
    return found


def _members(kind: type) -> dict[str, Any]:
    """Return the public methods and properties of a class and of its private bases."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base is object or (base in _CLASSES and base is not kind):
            continue
        for name, value in vars(base).items():
            is_one = inspect.isfunction(value) or isinstance(value, property | classmethod)
            if not name.startswith("_") and is_one and (name in vars(kind) or kind is not bb.ShardedTable):
                found.setdefault(name, value)  # members inherited from Table count for Table
    return found


def _arguments(function: Any) -> list[str]:
    """Return the optional arguments: required ones are used whenever the function is."""
    parameters = inspect.signature(getattr(function, "__func__", function)).parameters.values()
    return [p.name for p in parameters if p.default is not p.empty and not p.name.startswith("_")]


@contextmanager
def watched() -> Iterator[set[str]]:
    """Yield a set that collects used public names, and arguments with other values than their defaults."""
    used: set[str] = set()

    def watch(label: str, function: Any) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def watching(*arguments: Any, **rest: Any) -> Any:
            used.add(label)
            with suppress(TypeError):
                for name, value in signature.bind(*arguments, **rest).arguments.items():
                    if value is not signature.parameters[name].default:
                        used.add(f"{label}.{name}")
            return function(*arguments, **rest)

        return watching

    before: list[tuple[Any, str, Any]] = []
    for name, value in list(vars(bb).items()):
        if not name.startswith("_") and inspect.isfunction(value):
            before.append((bb, name, value))
            setattr(bb, name, watch(name, value))
    for kind in _CLASSES:
        for name, value in _members(kind).items():
            label = f"{kind.__name__}.{name}"
            before.append((kind, name, vars(kind).get(name)))
            if isinstance(value, property):
                setattr(kind, name, property(watch(label, value.fget), value.fset))
            elif isinstance(value, classmethod):
                setattr(kind, name, classmethod(watch(label, value.__func__)))
            else:
                setattr(kind, name, watch(label, value))
    try:
        yield used
    finally:
        for owner, name, value in before:
            delattr(owner, name) if value is None else setattr(owner, name, value)


def missing(used: set[str]) -> tuple[list[str], list[str]]:
    """Return public names in no feature, and names of `UNUSED` that are used or do not exist."""
    names = public_names()
    return sorted(names - used - set(UNUSED)), sorted(name for name in UNUSED if name in used or name not in names)


def run(size: Size) -> list[Result]:
    """Run every pair, repeatedly with other seeds in a longer form; only some pairs in a shorter form."""
    every = pairs()
    rounds = max(1, round(4 * size.factor))
    cases = [(pair, size.seed + number) for number in range(rounds) for pair in every]
    if size.factor < 0.25:
        chosen = np.random.default_rng(size.seed).permutation(len(cases))[: size.of(4 * len(cases))]
        cases = [cases[number] for number in chosen]

    def work(index: int, send: Any) -> Any:
        clock, result, calls = Clock(size.seconds), Result("pairs of features"), 0
        mine = cases[index :: size.processes]
        progress = Progress("pairs, stories", len(mine), index)
        for number, (pair, seed) in enumerate(mine):
            if clock.is_over:
                break
            progress.show(number)
            made, wrong = tell(pair, seed)
            calls += made
            result.tried += 1
            result.passed += not wrong
            if wrong:
                result.fail(wrong)
        return result, calls

    total, calls = Result("pairs of features", wanted=len(cases)), 0
    for result, made in in_processes(work, size.processes, size.seconds + 120):
        total.add(result)
        calls += made
    total.note = (
        f"{len(FEATURES)} features, {len(every):,} pairs with {len(holes())} holes; {total.tried:,} stories, "
        f"{calls:,} calls, {total.tried - total.passed} wrong\n"
    ) + "\n".join(f"hole: {a} x {b}: {kind_of(error)}: {text}" for (a, b), (error, text) in holes().items())
    return [total]


def kind_of(error: Any) -> str:
    return "/".join(one.__name__ for one in (error if isinstance(error, tuple) else (error,)))
