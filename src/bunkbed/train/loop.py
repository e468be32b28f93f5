"""The training loop: it reads batches and writes commits and reports.

A run is one sequence of steps, a pure function of the config and the data. It can stop at any step and continue with
the same bits, because:

1. Batches are pure functions of (seed, epoch, step), see `bunkbed.train.data.sampling`.
2. A commit contains tables and dense weights, both with optimizer state, and `Progress`, in one manifest
   (`bunkbed.Run`), all of one step.
3. All decisions (learning rate, best epoch, patience) follow from `Progress` and the config.

A commit becomes durable while the next steps run; `Trainer.fit` returns once the last commit is durable. A failed
commit ends `fit` with its error at the next commit, or at the end. Steps after the last commit are not durable: a run
that was killed continues from its last commit, does the same steps again, and ends with the same bits.

Several processes train a run of `bunkbed.torch.open_run` together: each takes its part of every batch and of the users
of an evaluation. They make the same decisions at the same steps, because a stop, a loss and the time for a report are
exchanged before each is acted on. Rank 0 alone writes the log and reports.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import bunkbed as bb
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.machine import remembered
from bunkbed.torch import Optimizer, lookahead
from bunkbed.train.advice import advice
from bunkbed.train.block_choice import decided
from bunkbed.train.counters import Counters
from bunkbed.train.data.blocks import pair_blocks
from bunkbed.train.data.interactions import Dataset
from bunkbed.train.data.sampling import Batch, BatchesAhead, BatchSource
from bunkbed.train.data.sequences import SequenceSource
from bunkbed.train.data.splits import Split
from bunkbed.train.data.stream import StreamedSplit
from bunkbed.train.evaluate.evaluator import open_parts, validation_evaluator
from bunkbed.train.features.features import SIDES, Features, load_features, table_of
from bunkbed.train.models.dense import DENSE_FILE, dense_bytes, dense_state
from bunkbed.train.models.recommender import create_tables, make_model
from bunkbed.train.output.events import Advice, EpochReport, EvalReport, Event, Outcome, StepReport
from bunkbed.train.output.progress import MetricsLog, Progress
from bunkbed.train.processes.team import Team
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.run_config import DATA_NAME, LOG_NAME

if TYPE_CHECKING:
    from bunkbed.run.run import Run
    from bunkbed.table.commits import PendingCommit

__all__ = ["Trainer"]

OnEvent = Callable[[Event], object]

_REPORT_EVERY_S = 0.2
_REPORTS_PER_EPOCH = 200
# Batches made ahead of the step (double-buffering): one waits while the next is made.
_BATCHES_AHEAD = 2
# Dense weights use Adam. Its learning rate follows that of the tables only if they use Adam too, because rates of
# other optimizers have another scale.
_DENSE_LR = 1e-3


class _Interrupted(Exception):
    """Ends an evaluation after `Trainer.request_stop`."""


class Trainer:
    """Trainer of a recommender in a run; continues from the run's last commit if there is one.

    In a run of several processes each has a trainer, with equal arguments; making it and `fit` are collective.
    Owns the model, its optimizer, the batches (about 26 bytes a training pair, 30 with shared negatives, 4 more with
    weights; with `stream` files in the run's folder instead) and 16 bytes for each pair of the users that evaluations
    use, 32 for a model of sequences. The caller owns and closes the run and its tables. Commits every `commit_every`
    epochs, after each best epoch (kept as snapshot ``"best"``), at the end, and when interrupted. A commit becomes
    durable during the next steps; all commits are durable when `fit` returns. One thread calls the trainer, but
    `request_stop` may be called anywhere, also in signal handlers.

    Args:
        config: the options; on resuming, the options of the first start (see `progress.FREE_TO_CHANGE`).
        data: the data; on resuming, the same data as before.
        run: open for writing, empty or trained by a `Trainer`; a run of `bunkbed.torch.open_run` in several processes.
        begin: the progress of a run that has no commit; None: none.

    Raises:
        ValueError: nothing to train on, nothing to hold out, another split than that of the data, or an option that
            may not change on resuming.
    """

    def __init__(self, config: TrainConfig, data: Dataset, run: Run, begin: Progress | None = None) -> None:
        if config.split != data.split:
            raise ValueError(f"option split={config.split!r} differs from {data.split!r}, by which the data were split")
        self._progress = begin or Progress()
        if run.epoch:
            self._progress, config = Progress.from_meta(run.meta, config)
        self.team = team = Team.of(run)
        features = _features(run, data)
        self._drawn = features["item"].with_row if "item" in features else None
        if config.is_sequential:
            _check_sequential(data, team, features)
        sizes = {"pairs": len(data.train), "users": data.num_users, "items": data.num_items}
        sizes |= {f"{side}_features": len(of_side.features) for side, of_side in features.items()}
        team.require_same("Trainer", **config.to_dict(), **sizes)
        tables = create_tables(run, config, data.num_users, data.num_items, features)
        found = team.gather(
            "the choice of an order", lambda: decided(config, tables, team.world, self._drawn).to_dict()
        )[0]
        #: The options, with a decided order and batch size.
        self.config = config = TrainConfig.from_dict(found)
        self.run = run
        parts = open_parts(data, config, run.path)
        self._order = parts.order(config)
        self._num_users, self._num_items = data.num_users, data.num_items
        self._source = self._batch_source(parts, config)
        self._num_pairs = self._source.num_pairs
        self._evaluator = validation_evaluator(parts, config)
        self.model = make_model(config, tables, features)
        dense = self.model.dense_parameters()
        #: The model whose call returns the loss; its backward joins the gradients of all processes.
        self._module: nn.Module = self.model
        if dense and team.world > 1:
            self._module = nn.parallel.DistributedDataParallel(self.model, process_group=team.process_group)
        dense_lr = config.lr if config.optimizer == "adam" else _DENSE_LR
        self._dense_lr = dense_lr
        self._dense = torch.optim.Adam(dense, lr=dense_lr) if dense else None
        self.optimizer = Optimizer(self.model, dense=self._dense)
        if run.epoch:
            self._load_dense()
        self._stop_requested = False
        self._pending: PendingCommit | None = None
        self._owes_commit = False  # the last commit that was started is not known to be durable
        #: The loss of every step of this session, exact; of several processes, the mean of what they computed.
        self.losses: list[float] = []
        #: Wall time of this session's steps, with making batches, without evaluations and commits.
        self.step_seconds = 0.0
        #: Positive pairs of those steps.
        self.pairs_done = 0

    def _batch_source(self, parts: Split | StreamedSplit, config: TrainConfig) -> BatchSource:
        given: Json = {
            "batch_size": config.step_pairs,
            "negatives": config.negatives,
            "popular": config.sampling == "popularity",
            "seed": config.seed,
            "seen": parts.seen() if config.reject_seen else None,
            "drawn": self._drawn,
        }
        if config.is_sequential:
            return SequenceSource(parts.train, parts.sequences(config), length=config.length_or_default, **given)
        return BatchSource(
            parts.train,
            shared=config.share_negatives,
            log_q=config.loss == "softmax",
            order=self._order,
            blocks=pair_blocks(config, parts.train),
            team=self.team,
            **given,
        )

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self._progress.epoch

    @property
    def stopped_early(self) -> bool:
        """Whether patience has run out, so that `fit` returns at once."""
        return self._progress.stopped_early

    @property
    def step(self) -> int:
        """Steps done, including those before a resume."""
        return self._progress.global_step

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the present epoch. With blocks, epochs differ in a few steps."""
        return self._source.steps(min(self._progress.epoch + 1, self.config.epochs))

    @property
    def owes_evaluation(self) -> bool:
        """Whether all steps of the present epoch are done, but not its evaluation."""
        return self._progress.step == self.steps_per_epoch

    @property
    def num_pairs(self) -> int:
        """Positive pairs of an epoch."""
        return self._num_pairs

    @property
    def samples_users(self) -> bool:
        """Whether evaluations during training use a sample of the users with held-out pairs."""
        return self._evaluator is not None and self._evaluator.samples_users

    def advice(self) -> Advice | None:
        """Return advice if an epoch is predicted to take more than five times as long as in RAM; measures nothing."""
        machine = remembered(self.run.path) or remembered()
        is_new = not self._progress.global_step
        tables, world = self.run.tables, self.team.world
        return advice(self.config, tables, self._num_pairs, machine, is_new=is_new, processes=world)

    def request_stop(self) -> None:
        """Finish the current step, commit, and return from `fit`. Safe in a signal handler, idempotent.

        A request before `fit` makes `fit` return at once; each request stops one `fit`, in all processes.
        """
        self._stop_requested = True

    def fit(self, on_event: OnEvent | None = None) -> Outcome:
        """Train until the last epoch, until patience runs out, or until `request_stop`.

        Args:
            on_event: called on rank 0 with `StepReport` (at most five a second), `EvalReport` and `EpochReport`.

        Returns:
            The outcome; everything is committed.
        """
        threads = torch.get_num_threads(), bb.get_num_threads()
        own = max(1, threads[1] // self.team.local_world)
        bb.set_num_threads(self.config.threads or own)
        torch.set_num_threads(self.config.threads or max(1, min(threads[0], own) - 1))
        log = None
        if self.team.is_first:
            log = MetricsLog(
                self.run.path / LOG_NAME,
                global_step=self._progress.global_step,
                epoch=self._progress.epoch,
            )
        batches = BatchesAhead(self._source, depth=_BATCHES_AHEAD, epochs=self.config.epochs)
        try:
            # A commit of a fit() that another error ended. Where it failed, too, this fit() commits again.
            with contextlib.suppress(OSError, BunkbedError):
                self._settle()
            return _Session(self, log, batches, on_event).fit()
        finally:
            batches.close()
            if self._progress.is_done(self.config):
                self._order.close()
            self._stop_requested = False
            if log is not None:
                log.close()
            torch.set_num_threads(threads[0])
            bb.set_num_threads(threads[1])

    def _load_dense(self) -> None:
        state = dense_state(self.run.read(DENSE_FILE))
        self.model.head.load_state_dict(state["weights"])
        if self._dense is not None:
            self._dense.load_state_dict(state["optimizer"])

    def _set_lr(self, epoch: int) -> None:
        factor = self._progress.lr_factor(epoch, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = (self.config.lr if "table" in group else self._dense_lr) * factor

    def _commit(self, keep: str | None = None) -> None:
        """Start a commit of the run; raise the error of the previous commit."""
        self._owes_commit = True
        self._pending = self.run.begin_commit(
            files={DENSE_FILE: dense_bytes(self.model.head, self._dense)},
            meta=self._progress.to_meta(self.config),
            keep=keep,
        )

    def _settle(self) -> None:
        """Wait until the last commit is durable; raise its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            self._owes_commit = False


def _features(run: Run, data: Dataset) -> dict[str, Features]:
    """Return the features in the run's folder by side.

    Raises:
        ValueError: they are not those of the data, or of the run's tables.
    """
    found = load_features(run.path / DATA_NAME)
    for side, of_side in found.items():
        count = data.num_users if side == "user" else data.num_items
        if len(of_side) != count:
            raise ValueError(f"{run.path}: has features of {len(of_side):,} {side}s, and the data {count:,}")
    named = {side for side in SIDES if table_of(side) in run.table_names}
    if run.epoch and named != set(found):
        raise ValueError(
            f"{run.path}: has tables of features of {sorted(named)}, and features of {sorted(found)} next to the data"
        )
    return found


def _check_sequential(data: Dataset, team: Team, features: Mapping[str, Features]) -> None:
    """Raise ValueError for what a model of sequences cannot train with."""
    if "user" in features:
        raise ValueError("option model=sasrec has no rows of users to add features to; leave out --user-features")
    if team.world > 1:
        raise ValueError("option model=sasrec trains in one process; start it without torchrun")
    if data.train.is_weighted:
        raise ValueError("option model=sasrec has no weights of pairs; select pairs by their rating with --min-rating")


class _Session:
    """One call of `Trainer.fit`: the clock, the reports, the order of steps, evaluations and commits.

    Args:
        log: on rank 0.
    """

    def __init__(
        self, trainer: Trainer, log: MetricsLog | None, batches: BatchesAhead, on_event: OnEvent | None
    ) -> None:
        self._trainer = trainer
        self._source = batches
        self._config = trainer.config
        self._progress = trainer._progress
        self._team = trainer.team
        self._log = log
        self._on_event = on_event
        self._began = time.perf_counter()
        budgets = self._team.gather("the budgets of ranks", lambda: trainer.run.budget.total_bytes)
        self._budget_bytes = sum(budgets)
        self._has_news = True  # whether a rank was asked to stop, or sees the end of a commit; alone: always
        # For the ETA: this session's steps, and its evaluations with commits.
        self._steps_done = 0
        self._epoch_ends_done = 0
        self._epoch_end_seconds = 0.0

    def fit(self) -> Outcome:
        progress, config = self._progress, self._config
        interrupted = False
        while not progress.is_done(config):
            if not self._epoch():
                interrupted = True
                break
        if self._trainer._owes_commit and self._trainer._pending is None:
            self._trainer._commit()  # the last one of an earlier fit() failed
        self._trainer._settle()
        return Outcome(
            interrupted=interrupted,
            stopped_early=progress.stopped_early,
            epoch=progress.epoch,
            step=progress.global_step,
            best_epoch=progress.best_epoch or None,
            best=dict(progress.best),
            seconds=time.perf_counter() - self._began,
        )

    def _epoch(self) -> bool:
        """Train, evaluate and commit one epoch, or the rest of it; return False on a stop request."""
        trainer, progress = self._trainer, self._progress
        before = self.counters()
        seconds, pairs = trainer.step_seconds, trainer.pairs_done
        finished = self._steps(progress.epoch + 1)
        seconds, pairs = trainer.step_seconds - seconds, trainer.pairs_done - pairs
        if not finished:
            trainer._commit()
            return False
        began = time.perf_counter()
        try:
            result, ranking = self._evaluate(progress.epoch + 1)
        except _Interrupted:
            # All steps of the epoch are done and none of the next: resuming starts with this evaluation.
            trainer._commit()
            return False
        eval_seconds = time.perf_counter() - began
        self._end_epoch(result, ranking, before, seconds, pairs, eval_seconds)
        self._epoch_ends_done += 1
        self._epoch_end_seconds += time.perf_counter() - began
        return True

    def _steps(self, epoch: int) -> bool:
        """Do the remaining steps of an epoch; return False on a stop request before the last step."""
        trainer, progress = self._trainer, self._progress
        module, optimizer = trainer._module, trainer.optimizer
        module.train()
        trainer._set_lr(epoch)
        reports = _StepReports(self, epoch)
        began = time.perf_counter()  # a step's time includes making its batch and waiting for its rows
        self._has_news = True
        for batch, tensors in self._batches(epoch, progress.step):
            if self._has_news and self._team.any("the start of a step", self._must_stop):
                return False
            loss = module(*tensors)
            if batch.weight != 1.0:
                loss = loss * batch.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value, is_due = self._agreed(loss.item(), reports)
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the loss is {value} at step {progress.step + 1} of epoch {epoch}; the run is as of its "
                    f"last commit; use a smaller --lr than {self._config.lr:g}"
                )
            progress.step += 1
            progress.global_step += 1
            progress.loss_sum += value
            trainer.losses.append(value)
            now = time.perf_counter()
            trainer.step_seconds += now - began
            trainer.pairs_done += batch.step_pairs
            self._steps_done += 1
            reports.add(value, batch.step_pairs)
            if is_due:
                reports.write(now)
            began = time.perf_counter()
        return True

    def _must_stop(self) -> bool:
        """Return whether this process was asked to stop. Raises a failure of a commit now, not an epoch later."""
        trainer = self._trainer
        if trainer._pending is not None and trainer._pending.done:
            trainer._settle()
        return trainer._stop_requested

    def _agreed(self, loss: float, reports: _StepReports) -> tuple[float, bool]:
        """Return the loss of a step, and whether a report is due after it; both are equal on all ranks.

        Also finds out whether the next step must begin with `_must_stop`: an exchange costs as much as one of rows.
        """
        trainer = self._trainer

        def say() -> tuple[float, bool, bool]:
            is_over = trainer._pending is not None and trainer._pending.done
            return loss, reports.are_due(time.perf_counter()), is_over or trainer._stop_requested

        said = self._team.gather("the end of a step", say)
        self._has_news = self._team.world == 1 or any(has_news for _, _, has_news in said)
        return sum(one for one, _, _ in said) / len(said), said[0][1]

    def counters(self) -> Counters:
        """Return the counters of all tables in all processes. Collective."""
        return Counters.of(self._trainer.run.tables, self._team)

    def _batches(self, epoch: int, first: int) -> Iterator[tuple[Batch, tuple[torch.Tensor | None, ...]]]:
        """Yield this rank's part of each batch, and the arguments of the model for it."""
        model = self._trainer.model

        def pairs() -> Iterator[tuple[Batch, tuple[torch.Tensor | None, ...]]]:
            for batch in self._source.batches(epoch, first):
                yield batch, tuple(None if part is None else torch.from_numpy(part) for part in batch.parts)

        def ids(batch: tuple[Batch, tuple[Any, ...]]) -> dict[Any, torch.Tensor]:
            return model.wanted(batch[1])

        return iter(lookahead(pairs(), model, ids=ids, depth=self._config.lookahead, window=self._config.window))

    def _evaluate(self, epoch: int) -> tuple[dict[str, float], str]:
        evaluator = self._trainer._evaluator
        is_due = epoch % self._config.eval_every == 0 or epoch == self._config.epochs
        if evaluator is None or not is_due:
            return {}, ""

        def on_event(report: EvalReport) -> None:
            self._tell(report)
            if self._team.any("an evaluation", lambda: self._trainer._stop_requested):
                raise _Interrupted

        scorer = self._trainer.model.scorer(evaluator.known)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._config.threads or bb.get_num_threads())  # nothing else runs during an evaluation
        try:
            return evaluator.evaluate(scorer, on_event, self._team).metrics, evaluator.ranking
        finally:
            torch.set_num_threads(threads)

    def _end_epoch(
        self,
        metrics: dict[str, float],
        ranking: str,
        before: Counters,
        seconds: float,
        pairs: int,
        eval_seconds: float,
    ) -> None:
        trainer, progress, config = self._trainer, self._progress, self._config
        loss = progress.loss_sum / progress.step
        progress.epoch += 1
        progress.step = 0
        progress.loss_sum = 0.0
        is_best = False
        if metrics:
            is_best = not progress.best or metrics[config.metric] > progress.best[config.metric]
            progress.stale = 0 if is_best else progress.stale + 1
            if is_best:
                progress.best_epoch, progress.best = progress.epoch, metrics
            progress.settle_patience(config)
        now = self.counters()
        report = EpochReport(
            epoch=progress.epoch,
            epochs=config.epochs,
            global_step=progress.global_step,
            loss=loss,
            metrics=metrics,
            is_best=is_best,
            ranking=ranking,
            seconds=seconds,
            eval_seconds=eval_seconds,
            unique_hit_rate=now.hit_rate_since(before),
            ram_bytes=now.ram_bytes,
            ram_budget_bytes=self._budget_bytes,
            disk_read_bytes=now.read_bytes - before.read_bytes,
            disk_written_bytes=now.written_bytes - before.written_bytes,
            stall_s=now.stall_s - before.stall_s,
            device_hit_rate=now.device_hit_rate_since(before),
            samples_per_s=pairs / seconds if seconds else 0.0,
            disk_reads=now.reads - before.reads,
            moved_bytes=now.moved_bytes - before.moved_bytes,
            records_by_path={path: number - before.records[path] for path, number in now.records.items()},
            wanted_bytes=now.wanted_bytes - before.wanted_bytes,
            time_s=time.perf_counter() - self._began,
        )
        # The line is written before the commit: after a crash between the two, opening the log drops the line.
        self.write(report)
        is_last = progress.epoch == config.epochs or progress.stopped_early
        if is_best or is_last or progress.epoch % config.commit_every == 0:
            trainer._commit(keep="best" if is_best or (is_last and progress.chosen_on) else None)
        self._tell(report)

    def write(self, report: StepReport | EpochReport) -> None:
        """Write a line of the log, on rank 0."""
        if self._log is not None:
            self._log.write(report)

    def _tell(self, event: Event) -> None:
        if self._on_event is not None and self._team.is_first:
            self._on_event(event)

    def _eta_s(self) -> float:
        progress, config = self._progress, self._config
        epochs_left = config.epochs - progress.epoch
        steps_left = epochs_left * self._trainer.steps_per_epoch - progress.step
        per_step = self._trainer.step_seconds / max(self._steps_done, 1)
        per_end = self._epoch_end_seconds / max(self._epoch_ends_done, 1)
        return steps_left * per_step + epochs_left * per_end


class _StepReports:
    """Sums of steps for reports, with limits on reports per second and per epoch."""

    def __init__(self, session: _Session, epoch: int) -> None:
        self._session = session
        self._epoch = epoch
        self._min_steps = -(-session._trainer.steps_per_epoch // _REPORTS_PER_EPOCH)
        self._reset(time.perf_counter())

    def _reset(self, now: float) -> None:
        self._since = now
        self._losses = 0.0
        self._steps = 0
        self._samples = 0
        self._counters = self._session.counters()

    def are_due(self, now: float) -> bool:
        """Return whether the step that is not added yet is to be followed by a report."""
        return self._steps + 1 >= self._min_steps and now - self._since >= _REPORT_EVERY_S

    def add(self, loss: float, samples: int) -> None:
        """Add a step."""
        self._losses += loss
        self._steps += 1
        self._samples += samples

    def write(self, now: float) -> None:
        """Report the steps since the last report. Collective."""
        session, progress = self._session, self._session._progress
        before, counters = self._counters, session.counters()
        seconds = now - self._since
        report = StepReport(
            epoch=self._epoch,
            epochs=session._config.epochs,
            step=progress.step,
            steps_per_epoch=session._trainer.steps_per_epoch,
            global_step=progress.global_step,
            loss=self._losses / self._steps,
            samples_per_s=self._samples / seconds,
            eta_s=session._eta_s(),
            unique_hit_rate=counters.hit_rate_since(before),
            ram_bytes=counters.ram_bytes,
            ram_budget_bytes=session._budget_bytes,
            ssd_read_bytes_per_s=(counters.read_bytes - before.read_bytes) / seconds,
            ssd_write_bytes_per_s=(counters.written_bytes - before.written_bytes) / seconds,
            stall_share=min(1.0, (counters.stall_s - before.stall_s) / seconds),
            time_s=now - session._began,
            device_hit_rate=counters.device_hit_rate_since(before),
            disk_share=counters.disk_share_since(before),
        )
        session.write(report)
        session._tell(report)
        self._reset(now)
