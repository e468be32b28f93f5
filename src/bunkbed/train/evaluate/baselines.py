"""Baselines next to a trained model: popular items, item-item neighbours, and ALS of the package `implicit`.

A baseline is a `Scorer` of the pairs that the run trains on; the run's own evaluators rank with it, so that it is
judged exactly as the run. Baselines use the pairs without weights.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import bunkbed as bb
from bunkbed.core.budget import format_bytes, parse_bytes
from bunkbed.core.types import Array, Json
from bunkbed.train.data.interactions import Dataset, Interactions
from bunkbed.train.data.store import load_dataset, open_dataset
from bunkbed.train.data.stream import sums_of
from bunkbed.train.evaluate.evaluator import Evaluator, final_evaluator, open_parts, validation_evaluator
from bunkbed.train.evaluate.results import Baseline, EvalResult, judged_by, load_baselines, save_baselines
from bunkbed.train.models.scorer import Float32Array, Int64Array, Scorer
from bunkbed.train.output.events import EvalReport
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.run_config import DATA_NAME, read_config

__all__ = ["BASELINES", "Kind", "LeftOut", "baselines_of", "judging"]

# Of item-item: neighbours of an item, as in RecBole's ItemKNN. All neighbours have a lower recall on Gowalla.
_NEIGHBORS = 100
# Numbers in memory at once while similarities are counted, and users whose scores are added up at once.
_NUMBERS, _ADDED_USERS = 1 << 22, 16
_ALS_FACTORS = 100  # implicit's default


class LeftOut(Exception):
    """A baseline cannot be computed here; the message says why, and what to do."""


class Kind(NamedTuple):
    """A baseline: how it scores, the memory it takes for a number of pairs, users and items, and its model."""

    about: str
    nbytes: Callable[[int, int, int], int]
    fit: Callable[[Interactions, TrainConfig], Scorer]


def popular(pairs: Interactions, config: TrainConfig) -> Scorer:
    """Return scores that are the number of pairs of each item, for every user."""
    counts = np.zeros(pairs.num_items, dtype=np.int64)
    for _, items in pairs.batches():
        counts += np.bincount(items, minlength=pairs.num_items)
    return Scorer(_Array(np.ones((1, 1), np.float32)), _Array(counts[:, None].astype(np.float32)))


def item_item(pairs: Interactions, config: TrainConfig) -> Scorer:
    """Return scores by neighbours of items (Sarwar et al. 2001).

    The similarity of two items is the cosine of their sets of users. The score of an item is the sum of its
    similarities to those of its 100 most similar items that the user has.
    """
    return _ItemItem(pairs)


def als(pairs: Interactions, config: TrainConfig) -> Scorer:
    """Return the scores of implicit's AlternatingLeastSquares at its defaults (Hu et al. 2008), on the CPU.

    Raises:
        LeftOut: the package is not installed.
    """
    try:
        from implicit.als import AlternatingLeastSquares
        from scipy.sparse import csr_matrix
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise LeftOut("needs the package implicit; install it with: pip install implicit") from error
    shape = pairs.num_users, pairs.num_items
    matrix = csr_matrix((np.ones(len(pairs), np.float32), (pairs.users, pairs.items)), shape=shape)
    with threadpool_limits(1, "blas"):  # as implicit advises: it has threads of its own
        model = AlternatingLeastSquares(random_state=config.seed, use_gpu=False, num_threads=bb.get_num_threads())
        model.fit(matrix, show_progress=False)
    return Scorer(_Array(model.user_factors), _Array(model.item_factors))


#: Name -> baseline, in the order in which they are computed.
BASELINES = {
    "popular": Kind("number of pairs of the item", lambda pairs, users, items: 8 * items, popular),
    "item-item": Kind(
        f"cosine, {_NEIGHBORS} neighbors of each item",
        lambda pairs, users, items: 48 * pairs + (32 * _NEIGHBORS + 1_500) * items + 24 * _NUMBERS,
        item_item,
    ),
    "als": Kind(
        "implicit, at its defaults",
        lambda pairs, users, items: 48 * pairs + 12 * _ALS_FACTORS * (users + items),
        als,
    ),
}


class _Array:
    """Rows of an array, as a table has them; one row serves every id.

    Args:
        rows: ``float32[N, d]``.
    """

    def __init__(self, rows: Float32Array) -> None:
        self._rows = rows

    def lookup(self, ids: Int64Array, *, touch: bool = True) -> Float32Array:
        found: Float32Array = self._rows[ids if len(self._rows) > 1 else np.zeros_like(ids)]
        return found


class _Lists:
    """Columns of pairs by owner.

    Args:
        owners: ``int64[P]`` below `count`.
        columns: ``[P]`` each.
    """

    def __init__(self, owners: Array, count: int, *columns: Array) -> None:
        order = np.argsort(owners, kind="stable")
        self.sizes = np.bincount(owners, minlength=count)
        self._ends = np.cumsum(self.sizes)
        self._columns = [column[order] for column in columns]

    def of(self, owners: Int64Array) -> tuple[Array, ...]:
        """Return the pairs of ``int64[N]`` owners: the place of the owner of each in `owners`, and the columns."""
        sizes = self.sizes[owners]
        places = np.repeat(np.arange(len(owners)), sizes)
        at = np.arange(len(places)) + np.repeat(self._ends[owners] - np.cumsum(sizes), sizes)
        return places, *(column[at] for column in self._columns)


class _ItemItem(Scorer):
    """Scores of item-item neighbours. The query of a user has the scores of all items, and a vector its item."""

    def __init__(self, pairs: Interactions) -> None:
        users, items, self._num_items = pairs.users, pairs.items, pairs.num_items
        self._items_of = _Lists(users, pairs.num_users, items)
        neighbors, candidates, cosines = _neighbors(self._items_of, _Lists(items, pairs.num_items, users))
        self._scored_by = _Lists(neighbors, pairs.num_items, candidates, cosines)

    @property
    def numbers_per_score(self) -> int:
        return 0

    def queries(self, users: Int64Array) -> Tensor:
        scores = np.empty((len(users), self._num_items), dtype=np.float32)
        for first in range(0, len(users), _ADDED_USERS):
            part = scores[first : first + _ADDED_USERS]
            rows, items = self._items_of.of(users[first : first + _ADDED_USERS])
            places, candidates, cosines = self._scored_by.of(items)
            at = rows[places] * self._num_items + candidates
            part[:] = np.bincount(at, cosines, part.size).reshape(part.shape)
        return torch.from_numpy(scores)

    def vectors(self, items: Int64Array) -> Tensor:
        return torch.from_numpy(items)[..., None].expand(*items.shape, self._num_items)

    def biases(self, items: Int64Array) -> Tensor | None:
        return None

    def pair_scores(self, queries: Tensor, items: Int64Array) -> Tensor:
        return queries.gather(1, torch.from_numpy(items))

    def all_scores(self, queries: Tensor, vectors: Tensor, biases: Tensor | None, out: Tensor) -> Tensor:
        return out.copy_(queries.index_select(1, vectors[:, 0]))

    def scores_and_magnitudes(self, queries: Tensor, items: Int64Array) -> tuple[Tensor, Tensor]:
        scores = self.pair_scores(queries, items[:, None])[:, 0]
        return scores, scores  # sums of numbers that are not negative


def _neighbors(items_of: _Lists, users_of: _Lists) -> tuple[Array, ...]:
    """Return the most similar items of each item; equal cosines by smaller index.

    Returns:
        Neighbours and the items that have them, ``int32[N]``, and their cosines, ``float32[N]``.
    """
    sizes = users_of.sizes
    total = len(sizes)
    columns: list[tuple[Array, ...]] = []
    step = max(1, _NUMBERS // max(total, 1))
    for first in range(0, total, step):
        block = np.arange(first, min(first + step, total))
        for item, counts in zip(block.tolist(), _common_users(block, items_of, users_of), strict=True):
            counts[item] = 0
            others = np.flatnonzero(counts)
            cosines = counts[others] / np.sqrt(float(sizes[item]) * sizes[others])
            if len(others) > _NEIGHBORS:
                among = np.flatnonzero(cosines >= np.partition(cosines, -_NEIGHBORS)[-_NEIGHBORS])
                among = among[np.argsort(-cosines[among], kind="stable")[:_NEIGHBORS]]
                others, cosines = others[among], cosines[among]
            columns.append((others.astype(np.int32), np.full(len(others), item, np.int32), cosines.astype(np.float32)))
    return tuple(np.concatenate(column) for column in zip(*columns, strict=True))


def _common_users(block: Int64Array, items_of: _Lists, users_of: _Lists) -> Int64Array:
    """Return the number of common users of the items of a block and every item: ``int64[len(block), num_items]``."""
    total = len(users_of.sizes)
    counts = np.zeros(len(block) * total, dtype=np.int64)
    rows, users = users_of.of(block)
    for part in _parts(items_of.sizes[users]):
        places, others = items_of.of(users[part])
        counts += np.bincount(rows[part][places] * total + others, minlength=len(counts))
    return counts.reshape(len(block), total)


def _parts(sizes: Int64Array) -> Iterator[slice]:
    """Yield slices that cover the sizes, each of about `_NUMBERS` in sum."""
    groups = np.cumsum(sizes) // _NUMBERS
    edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(sizes)]
    for first, last in pairwise(edges):
        if first < last:
            yield slice(first, last)


def judging(data: Dataset, config: TrainConfig) -> Json:
    """Return what the figures of a baseline depend on: sizes and checksums of the pairs, and options of the run.

    They are the same wherever the pairs are stored; weights do not matter.
    """
    pairs: Json = {"users": data.num_users, "items": data.num_items}
    for name, part in (("training", data.train), ("test", data.test)):
        pairs[name] = None if part is None else [len(part), *sums_of(part)[:2]]
    if data.candidates is not None:
        columns = data.candidates.users, data.candidates.positives, data.candidates.negatives
        pairs["candidates"] = [zlib.crc32(np.ascontiguousarray(column).data) for column in columns]
    return {"data": pairs, **judged_by(config)}


def baselines_of(
    folders: Sequence[Path],
    *,
    ram: int | None = None,
    on_progress: Callable[[str], object] = lambda text: None,
) -> tuple[list[Baseline], dict[str, str]]:
    """Return the baselines of runs that were judged alike, in the order of `BASELINES`.

    Takes the figures that the folders have stored, computes the others, and stores all in each folder, in
    ``baselines.json``; changes nothing else, so that a training may go on in a folder.

    Args:
        folders: of runs of `bunkbed train`, at least one.
        ram: bytes that a baseline may take; None: the largest `TrainConfig.ram` of the runs, at least 1 GiB.
        on_progress: called with what is done now, as text.

    Returns:
        The baselines; and the name of each one that is left out, with the reason.

    Raises:
        ValueError: the runs have different data or were judged differently, nothing is held out, or a file of
            figures is damaged. DataError: a dataset is damaged. OSError: a folder cannot be written.
    """
    configs = [TrainConfig.of_run(read_config(folder)["train"]) for folder in folders]
    cutoffs = sorted({k for config in configs for k in config.cutoffs})
    first, shared = folders[0], {}
    for folder, config in zip(folders, configs, strict=True):
        on_progress(f"reading the pairs of {folder}")
        data = _data(folder, config)
        mine = judging(data, config)
        if folder == first:
            shared = mine
        for name in shared:
            if mine[name] != shared[name]:
                raise ValueError(_difference(name, folder, mine[name], first, shared[name]))
    stored = [load_baselines(folder, judged_by=shared, cutoffs=cutoffs) for folder in folders]
    found = {one.name: one for several in stored for one in several}
    left_out: dict[str, str] = {}
    if set(found) != set(BASELINES):
        ram = max(1 << 30, *(parse_bytes(config.ram) for config in configs)) if ram is None else ram
        judge = _Judge(data, config, folder, cutoffs, ram)
        for name in BASELINES:
            if name not in found:
                try:
                    found[name] = judge.baseline(name, on_progress)
                except LeftOut as reason:
                    left_out[name] = str(reason)
    result = [found[name] for name in BASELINES if name in found]
    for folder, old in zip(folders, stored, strict=True):
        if old != result:
            save_baselines(folder, result, judged_by=shared)
    return result, left_out


class _Judge:
    """The evaluations of a run, for its baselines."""

    def __init__(self, data: Dataset, config: TrainConfig, folder: Path, cutoffs: Sequence[int], ram: int) -> None:
        self._config = config
        self._ram = ram
        parts = open_parts(data, config, folder)
        self._train = parts.train
        self._validation = validation_evaluator(parts, config, cutoffs)
        self._test = None
        if data.test is not None or data.candidates is not None:
            self._test = final_evaluator(data, config, folder, ks=cutoffs)
        if self._validation is None and self._test is None:
            raise ValueError(f"{folder}: has nothing to judge by: no test, and --valid none holds nothing out")

    def baseline(self, name: str, on_progress: Callable[[str], object]) -> Baseline:
        """Compute a baseline and rank with it. Raises `LeftOut` where it cannot be computed."""
        kind, pairs = BASELINES[name], self._train
        needed = kind.nbytes(len(pairs), pairs.num_users, pairs.num_items)
        if needed > self._ram:
            raise LeftOut(
                f"takes about {format_bytes(needed)} of RAM, more than the {format_bytes(self._ram)} it may; "
                "give it more with --ram"
            )
        on_progress(name)
        begin = time.perf_counter()
        scorer = kind.fit(pairs, self._config)
        seconds = time.perf_counter() - begin

        def rank(evaluator: Evaluator | None, what: str) -> EvalResult | None:
            def show(report: EvalReport) -> None:
                on_progress(f"{name}: ranking the {what}: {report.done / report.total:.0%}")

            return None if evaluator is None else evaluator.evaluate(scorer, show)

        return Baseline(name, kind.about, seconds, rank(self._validation, "validation"), rank(self._test, "test"))


def _data(folder: Path, config: TrainConfig) -> Dataset:
    return (open_dataset if config.stream else load_dataset)(folder / DATA_NAME)


def _difference(name: str, folder: Path, value: object, first: Path, wanted: object) -> str:
    what = f"{folder} was judged otherwise than {first}: option {name} is {value!r}, and of {first} {wanted!r}"
    if name == "data":
        what = f"{folder} has other pairs of users and items than {first}"
    return f"{what}; give --baselines runs of the same data that were judged alike"
