"""Ranking held-out items: against every item, or against a sample of them.

Ties count against us: an item whose score equals that of the held-out one, within the rounding of a float32
dot product, ranks before it. So does a negative that is the held-out item itself, as happens for 156 users of
the NCF release of MovieLens-1M: they cannot rank first. A model that scores everything alike ranks last, not
first.

Evaluation leaves the cache alone and holds at most about 130 MiB outside the RAM budget: 64 MiB of item
vectors where they all fit in that, and blocks of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from bunkbed.train.config import TrainConfig
from bunkbed.train.data import Candidates, Dataset, Interactions
from bunkbed.train.events import EvalReport
from bunkbed.train.metrics import ranking_metrics
from bunkbed.train.models import Float32Array, Scorer, scorer_of_run
from bunkbed.train.sampling import STREAM_EVAL, SeenPairs, random_order, sample_unseen
from bunkbed.train.splits import split

if TYPE_CHECKING:
    from bunkbed.run import Run

__all__ = ["EvalResult", "Evaluator", "evaluate_run", "full_ranks", "sample_candidates", "sampled_ranks"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Progress = Callable[[EvalReport], object]

# Item vectors kept for the whole evaluation where they fit in this, read anew for each block of users else.
_KEPT_BYTES = 64 << 20
# Scores held at once.
_BLOCK_SCORES = 8 << 20
# Scores this close (relative to |query| |item|) are a tie: float32 dot products differ so much by summing
# order.
_TIE = 1e-6


@dataclass(frozen=True)
class EvalResult:
    """Figures, and what they mean.

    Attributes:
        metrics: as `bunkbed.train.metrics.ranking_metrics` gives them.
        ranking: what each held-out item competed with, in words.
        num_users: users the figures are means over.
        split: ``"test"``, ``"test candidates"`` or ``"validation"``.
    """

    metrics: dict[str, float]
    ranking: str
    num_users: int
    split: str


def _target_scores(scorer: Scorer, queries: Float32Array, items: Int64Array) -> tuple[Float32Array, Float32Array]:
    """Scores of ``int64[N]`` items for ``float32[N, dim]`` queries, and the lowest that tie with them."""
    vectors = scorer.items(items)
    scores = np.einsum("nd,nd->n", queries, vectors)
    slack = _TIE * np.linalg.norm(queries, axis=1) * np.linalg.norm(vectors, axis=1)
    biases = scorer.biases(items)
    if biases is not None:
        scores += biases
        slack += _TIE * np.abs(biases)
    return scores, (scores - slack).astype(np.float32)


class _ItemChunks:
    """Vectors and biases of all items, chunk by chunk; read once where they fit in `_KEPT_BYTES`."""

    def __init__(self, scorer: Scorer, num_items: int, dim: int, chunk: int) -> None:
        self._scorer = scorer
        self._starts = range(0, num_items, chunk)
        self._chunk = chunk
        self._num_items = num_items
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor | None]] | None = None
        if num_items * dim * 4 <= _KEPT_BYTES:
            self._kept = list(self._read())

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        return iter(self._kept) if self._kept is not None else self._read()

    def _read(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        for start in self._starts:
            ids = np.arange(start, min(start + self._chunk, self._num_items), dtype=np.int64)
            biases = self._scorer.biases(ids)
            yield (
                start,
                torch.from_numpy(self._scorer.items(ids)),
                None if biases is None else torch.from_numpy(biases),
            )


def full_ranks(
    scorer: Scorer,
    targets: Interactions,
    excluded: Interactions,
    *,
    on_event: Progress | None = None,
) -> tuple[Int64Array, Int64Array]:
    """The rank of every held-out item among all items but those excluded for its user.

    Held-out items of one user have different ranks; equal scores count against us otherwise. A held-out item
    is ranked even where it is among the excluded.

    Args:
        targets: held-out pairs, without repetition.
        excluded: pairs that are not ranked: those trained on.

    Returns:
        ``int64[Q]`` users and ``int64[Q]`` exact ranks from 1, in an order of their own.
    """
    num_items = targets.num_items
    counts = np.bincount(targets.users, minlength=targets.num_users)
    # Users with the most held-out items first: then "users with more than j" are the first rows of a block.
    users = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())].astype(np.int64)
    if len(users) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    place = np.full(targets.num_users, -1, dtype=np.int64)
    place[users] = np.arange(len(users))
    order = np.lexsort((targets.items, place[targets.users]))
    target_users, target_items = targets.users[order], targets.items[order]
    target_starts = np.concatenate([[0], np.cumsum(counts[users])])

    hidden_users, hidden_items = place[excluded.users], excluded.items
    asked = np.flatnonzero(hidden_users >= 0)
    asked = asked[np.argsort(hidden_users[asked], kind="stable")]
    hidden_users, hidden_items = hidden_users[asked], hidden_items[asked]

    dim = scorer.queries(users[:1]).shape[1]
    keeps_items = num_items * dim * 4 <= _KEPT_BYTES
    block_items = min(num_items, 8192 if keeps_items else 1024)
    block_users = max(1, min(len(users), _BLOCK_SCORES // block_items))
    chunks = _ItemChunks(scorer, num_items, dim, block_items)
    ahead = np.zeros(len(target_users), dtype=np.int64)
    scores = torch.empty(block_users * block_items)
    scratch = np.empty((block_users, block_items), dtype=np.bool_)
    for first in range(0, len(users), block_users):
        last = min(first + block_users, len(users))
        mine = slice(int(target_starts[first]), int(target_starts[last]))
        hide = slice(*np.searchsorted(hidden_users, [first, last]))
        # What is not counted: excluded items, and the held-out ones, which are ranked among themselves below.
        rows = np.concatenate([hidden_users[hide], place[target_users[mine]]]) - first
        columns = np.concatenate([hidden_items[hide], target_items[mine]])
        by_item = np.argsort(columns, kind="stable")
        rows, columns = rows[by_item], columns[by_item]

        queries = scorer.queries(users[first:last])
        own = place[target_users[mine]] - first
        own_scores, floors = _target_scores(scorer, queries[own], target_items[mine])
        offsets = target_starts[first : last + 1] - target_starts[first]
        ahead[mine] += _ahead_among_targets(own, own_scores)
        query_block = torch.from_numpy(queries)
        counted = np.zeros(len(floors), dtype=np.int64)
        for start, vectors, biases in chunks:
            # A view of the front of the buffer, so that a narrower last chunk is contiguous too.
            block = scores[: (last - first) * len(vectors)].view(last - first, len(vectors))
            torch.mm(query_block, vectors.T, out=block)
            if biases is not None:
                block += biases
            lo, hi = np.searchsorted(columns, [start, start + len(vectors)])
            block[torch.from_numpy(rows[lo:hi]), torch.from_numpy(columns[lo:hi] - start)] = -torch.inf
            _count_ahead(block.numpy(), floors, offsets, counted, scratch)
        ahead[mine] += counted
        if on_event is not None:
            on_event(EvalReport(last, len(users)))
    return target_users, ahead + 1


def _count_ahead(
    block: Float32Array, floors: Float32Array, offsets: Int64Array, counted: Int64Array, scratch: BoolArray
) -> None:
    """Add to `counted[Q]` how many scores of its user's row reach each of the floors ``float32[Q]``.

    Row by row with `count_nonzero`, which is 20 times as fast as summing booleans along an axis.
    """
    sizes = np.diff(offsets)
    for j in range(int(sizes[0])):
        num_rows = int(np.searchsorted(-sizes, -j, side="left"))  # rows with more than j targets
        at = offsets[:num_rows] + j
        reached = scratch[:num_rows, : block.shape[1]]
        np.greater_equal(block[:num_rows], floors[at][:, None], out=reached)
        counted[at] += [np.count_nonzero(row) for row in reached]


def _ahead_among_targets(owners: Int64Array, scores: Float32Array) -> Int64Array:
    """For each target, how many targets of the same owner come before it; owners ascend."""
    order = np.lexsort((-scores, owners))
    position = np.arange(len(owners)) - np.searchsorted(owners, owners)
    result = np.empty(len(owners), dtype=np.int64)
    result[order] = position
    return result


def sampled_ranks(
    scorer: Scorer, candidates: Candidates, *, on_event: Progress | None = None
) -> tuple[Int64Array, Int64Array]:
    """The rank of every positive among its own negatives: ``int64[Q]`` users and ranks from 1."""
    total, width = candidates.negatives.shape
    ranks = np.empty(total, dtype=np.int64)
    dim = scorer.queries(candidates.users[:1]).shape[1] if total else 1
    step = max(1, _BLOCK_SCORES // (max(width, 1) * dim))
    for first in range(0, total, step):
        mine = slice(first, min(first + step, total))
        queries = scorer.queries(candidates.users[mine])
        _, floors = _target_scores(scorer, queries, candidates.positives[mine])
        vectors = scorer.items(candidates.negatives[mine])
        scores = np.matmul(vectors, queries[:, :, None])[:, :, 0]
        biases = scorer.biases(candidates.negatives[mine])
        if biases is not None:
            scores += biases
        ranks[mine] = 1 + (scores >= floors[:, None]).sum(1)
        if on_event is not None:
            on_event(EvalReport(mine.stop, total))
    return candidates.users, ranks


def sample_candidates(targets: Interactions, known: Interactions, count: int, seed: int) -> Candidates:
    """Draw `count` items for each held-out pair, none of which its user has in `known` or `targets`.

    A pure function of the pairs and the seed. Negatives of one pair may repeat. A user who has
    every item gets some of them.
    """
    users = np.concatenate([targets.users, known.users])
    items = np.concatenate([targets.items, known.items])
    seen = SeenPairs(users, items, targets.num_items)
    owners = np.repeat(targets.users, count)
    drawn = sample_unseen(seed, STREAM_EVAL, owners, targets.num_items, seen)
    return Candidates(targets.users, targets.items, drawn.reshape(-1, count))


class Evaluator:
    """One evaluation that is repeated as a model trains: who is asked, and what is ranked.

    Owns copies of the held-out pairs; immutable.

    Args:
        targets: held-out pairs.
        known: pairs to leave out of a full ranking and never to sample: those trained on, and for a test the
            validation pairs too.
        candidates: given negatives; None draws them where ranking is sampled.
    """

    def __init__(
        self,
        targets: Interactions,
        known: Interactions,
        *,
        ranking: str,
        ks: Sequence[int],
        eval_negatives: int = 99,
        eval_users: int = 0,
        seed: int = 0,
        candidates: Candidates | None = None,
        split: str = "validation",
    ) -> None:
        self._split = split
        self._ks = tuple(ks)
        if eval_users:
            targets = _some_users(targets, eval_users, seed)
        self._targets = targets
        self._known = known
        self._candidates = candidates
        if ranking == "sampled" and candidates is None:
            self._candidates = sample_candidates(targets, known, eval_negatives, seed)
        if ranking == "full":
            self._candidates = None

    @property
    def ranking(self) -> str:
        """What a held-out item competes with, in words."""
        if self._candidates is None:
            return f"full ranking of {self._targets.num_items:,} items, less those trained on"
        return f"sampled ranking: {self._candidates.negatives.shape[1]} negatives for each held-out item"

    def evaluate(self, scorer: Scorer, on_event: Progress | None = None) -> EvalResult:
        """Rank with the model as it is now."""
        if self._candidates is None:
            owners, ranks = full_ranks(scorer, self._targets, self._known, on_event=on_event)
        else:
            owners, ranks = sampled_ranks(scorer, self._candidates, on_event=on_event)
        return EvalResult(ranking_metrics(owners, ranks, self._ks), self.ranking, len(np.unique(owners)), self._split)


def _some_users(targets: Interactions, count: int, seed: int) -> Interactions:
    """The pairs of `count` users, drawn by seed."""
    users = np.unique(targets.users)
    chosen = users[random_order(seed, STREAM_EVAL, 1, len(users))[:count]]
    keep = np.isin(targets.users, chosen)
    return targets.replace(targets.users[keep], targets.items[keep])


def evaluate_run(
    run: Run,
    data: Dataset,
    config: TrainConfig,
    *,
    ranking: str | None = None,
    ks: Sequence[int] | None = None,
    on_event: Progress | None = None,
) -> EvalResult:
    """Figures of what a run holds as it was opened (a reader, a snapshot, or the writer).

    Judged by the test candidates if the data has them (sampled ranking), else by the test pairs (full
    ranking), else by the run's own validation pairs (as `config.ranking` says).

    Args:
        run: committed at least once.
        ranking: ``"full"`` or ``"sampled"`` instead of what the data suggest.
        ks: cut-offs instead of the config's.
        on_event: told about progress.

    Raises:
        ValueError: nothing is held out: no test file, and ``valid`` is none.
    """
    if ranking not in (None, "full", "sampled"):
        raise ValueError(f"ranking must be full or sampled, got {ranking!r}")
    evaluate = partial(
        Evaluator, ks=tuple(ks or config.cutoffs), eval_negatives=config.eval_negatives, seed=config.seed
    )
    if data.candidates is not None and ranking != "full":
        evaluator = evaluate(
            data.train.replace(data.candidates.users, data.candidates.positives),
            data.train,
            ranking="sampled",
            candidates=data.candidates,
            split="test candidates",
        )
    elif data.test is not None or data.candidates is not None:
        test = data.test
        if test is None:
            assert data.candidates is not None
            test = data.train.replace(data.candidates.users, data.candidates.positives)
        evaluator = evaluate(test, data.train, ranking=ranking or "full", split="test")
    else:
        parts = split(data.train, config)
        if parts.valid is None:
            raise ValueError(
                "nothing is held out to evaluate on: train with --valid random, or give a test file with --test"
            )
        evaluator = evaluate(parts.valid, parts.train, ranking=ranking or config.ranking)
    return evaluator.evaluate(scorer_of_run(run, config), on_event)
