"""Evaluations: the competitors of each held-out item, and the resulting figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bunkbed.train.data.interactions import Candidates, Dataset, Interactions
from bunkbed.train.data.sampling import STREAM_EVAL, SeenPairs, sample_unseen
from bunkbed.train.data.sequences import sorted_pairs
from bunkbed.train.data.splits import Split, split
from bunkbed.train.data.stream import STREAM_FOLDER, StreamedSplit, draw_users, open_split, pairs_of
from bunkbed.train.evaluate.metrics import ranking_metrics
from bunkbed.train.evaluate.ranking import Progress, full_ranks, sampled_ranks
from bunkbed.train.evaluate.results import EvalResult
from bunkbed.train.models.scorer import Int64Array, Known, Scorer, scorer_of_run
from bunkbed.train.processes.team import ALONE, Team
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from bunkbed.run.run import Run

__all__ = [
    "EvalResult",
    "Evaluator",
    "evaluate_run",
    "final_evaluator",
    "open_parts",
    "sample_candidates",
    "validation_evaluator",
]


def sample_candidates(targets: Interactions, known: Interactions, count: int, seed: int) -> Candidates:
    """Draw `count` items for each held-out pair that its user does not have in `known` or `targets`.

    A pure function of the pairs and the seed. Negatives of one pair may repeat. A user with every item gets any items.
    """
    users = np.concatenate([targets.users, known.users])
    items = np.concatenate([targets.items, known.items])
    seen = SeenPairs(users, items, targets.num_items)
    owners = np.repeat(targets.users, count)
    drawn = sample_unseen(seed, STREAM_EVAL, owners, targets.num_items, seen)
    return Candidates(targets.users, targets.items, drawn.reshape(-1, count))


class Evaluator:
    """Evaluation that is repeated while a model trains: its users and the items that are ranked.

    With `eval_users` it owns copies of the pairs of its users, otherwise it refers to all pairs; immutable.

    Args:
        targets: held-out pairs.
        known: pairs to exclude from a full ranking and from sampling: the training pairs, and for a test also the
            validation pairs.
        eval_users: number of users, drawn by seed: the same ones in every evaluation; 0: all.
        candidates: given negatives; None draws negatives for a sampled ranking.
        split: of the result.
        rule: how the targets were held out, to say it: a value of `TrainConfig.valid`, or ``"given"``.
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
        rule: str = "random",
    ) -> None:
        self._split = split
        self._rule = rule
        self._ks = tuple(ks)
        if eval_users:
            asked, self._of_users = draw_users(targets, eval_users, seed)
            targets, known = pairs_of(targets, asked), pairs_of(known, asked)
        else:
            self._of_users = len(np.unique(targets.users))
        self._num_users = min(eval_users or self._of_users, self._of_users)
        self._targets = targets
        self._known = known
        self._candidates = candidates
        if ranking == "sampled" and candidates is None:
            self._candidates = sample_candidates(targets, known, eval_negatives, seed)
        if ranking == "full":
            self._candidates = None

    @property
    def ranking(self) -> str:
        """Description of the competitors of a held-out item, of the users, and of the split."""
        of_all = f" of {self._of_users:,}" if self.samples_users else ""
        users = f"{self._num_users:,}{of_all} users; split {self._rule}"
        if self._candidates is None:
            return f"full ranking of {self._targets.num_items:,} items, less those trained on; {users}"
        return f"sampled ranking: {self._candidates.negatives.shape[1]} negatives for each held-out item; {users}"

    def known(self, users: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the pairs of ascending users by which a model of sequences ranks: those excluded, in their order."""
        return self._sorted(users)

    @cached_property
    def _sorted(self) -> Known:
        return sorted_pairs(self._known)

    @property
    def samples_users(self) -> bool:
        """Whether more users have held-out pairs than this evaluation uses."""
        return self._num_users < self._of_users

    def evaluate(self, scorer: Scorer, on_event: Progress | None = None, team: Team = ALONE) -> EvalResult:
        """Rank with the current model. Collective: the processes of a team share the users, and return one result."""
        if self._candidates is None:
            owners, ranks = full_ranks(scorer, self._targets, self._known, on_event=on_event, team=team)
        else:
            owners, ranks = sampled_ranks(scorer, self._candidates, on_event=on_event, team=team)
        return EvalResult(ranking_metrics(owners, ranks, self._ks), self.ranking, self._num_users, self._split)


def open_parts(data: Dataset, config: TrainConfig, folder: Path) -> Split | StreamedSplit:
    """Return the pairs that a run in `folder` trains on and its validation pairs. Raises as `split`, `open_split`."""
    return open_split(data.train, config, folder / STREAM_FOLDER) if config.stream else split(data.train, config)


def validation_evaluator(
    parts: Split | StreamedSplit, config: TrainConfig, ks: Sequence[int] | None = None
) -> Evaluator | None:
    """Return the evaluation after each epoch of a run; None if the run holds nothing out.

    Args:
        parts: as `open_parts`.
        ks: cut-offs instead of the config's.
    """
    if parts.valid is None:
        return None
    return Evaluator(
        parts.valid,
        parts.train,
        ranking=config.ranking,
        ks=tuple(ks or config.cutoffs),
        eval_negatives=config.eval_negatives,
        eval_users=config.eval_users,
        seed=config.seed,
        rule=config.valid,
    )


def final_evaluator(
    data: Dataset,
    config: TrainConfig,
    folder: Path,
    *,
    ranking: str | None = None,
    ks: Sequence[int] | None = None,
) -> Evaluator:
    """Return the evaluation of a finished run.

    It uses the test candidates if the data has them (sampled ranking), otherwise the test pairs (full ranking),
    otherwise the run's own validation pairs (with `config.ranking`). Uses all users; with `config.stream`,
    `config.eval_users` users, so that pairs of other users are never in memory.

    Args:
        folder: of the run.
        ranking: ``"full"`` or ``"sampled"``, instead of the default for the data.
        ks: cut-offs instead of the config's.

    Raises:
        ValueError: nothing is held out: no test file, and ``valid`` is none.
    """
    if ranking not in (None, "full", "sampled"):
        raise ValueError(f"ranking must be full or sampled, got {ranking!r}")
    make = partial(
        Evaluator,
        ks=tuple(ks or config.cutoffs),
        eval_negatives=config.eval_negatives,
        eval_users=(config.eval_users or data.num_users) if config.stream else 0,
        seed=config.seed,
    )
    if data.candidates is not None and ranking != "full":
        return make(
            data.train.replace(data.candidates.users, data.candidates.positives),
            data.train,
            ranking="sampled",
            candidates=data.candidates,
            split="test candidates",
            rule="given",
        )
    if data.test is not None or data.candidates is not None:
        test = data.test
        if test is None:
            assert data.candidates is not None
            test = data.train.replace(data.candidates.users, data.candidates.positives)
        rule = "given" if data.split == "random" else data.split
        return make(test, data.train, ranking=ranking or "full", split="test", rule=rule)
    parts = open_parts(data, config, folder)
    if parts.valid is None:
        raise ValueError(
            "nothing is held out to evaluate on: train with --valid random and without --refit, or give a test file "
            "with --test"
        )
    return make(parts.valid, parts.train, ranking=ranking or config.ranking, rule=config.valid)


def evaluate_run(
    run: Run,
    data: Dataset,
    config: TrainConfig,
    *,
    ranking: str | None = None,
    ks: Sequence[int] | None = None,
    on_event: Progress | None = None,
) -> EvalResult:
    """Evaluate the commit at which a run is open (by a reader, at a snapshot, or by the writer), as `final_evaluator`.

    Args:
        run: committed at least once.
        on_event: called with the progress.

    Raises:
        ValueError: nothing is held out: no test file, and ``valid`` is none.
    """
    evaluator = final_evaluator(data, config, run.path, ranking=ranking, ks=ks)
    return evaluator.evaluate(scorer_of_run(run, config, known=evaluator.known), on_event)
