"""What ``bunkbed train`` does with an open run: train to the end, train again on all pairs, judge, say the outcome."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from bunkbed.cli.shared.console import escape, print_json
from bunkbed.cli.shared.train_text import ram_text, say_outcome, say_tables
from bunkbed.train.output.events import EpochReport, Event, Outcome
from bunkbed.train.processes.team import Team
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.run_config import read_config

if TYPE_CHECKING:
    from bunkbed.run.run import Run
    from bunkbed.train.data.interactions import Dataset
    from bunkbed.train.evaluate.evaluator import EvalResult
    from bunkbed.train.loop import Trainer
    from bunkbed.train.output.display import Display


class Session(NamedTuple):
    """How this process says what it does.

    Attributes:
        team: the processes that train the run.
        console: for the text; quiet where the process is not the first.
        as_json: also print lines of JSON.
        tensorboard: also write scalars.
    """

    team: Team
    console: Console
    as_json: bool
    tensorboard: bool


class Trained(NamedTuple):
    """A run after `fit`, closed.

    Attributes:
        folder: of the run.
        samples_users: evaluations during the training used a sample of the users.
        last: the last epoch of this call; None: it finished none.
        was_stopped: a process was asked to stop, also if that came after the last step.
    """

    folder: Path
    config: TrainConfig
    data: Dataset
    samples_users: bool
    outcome: Outcome
    last: EpochReport | None
    was_stopped: bool


def fit(session: Session, folder: Path, run: Run, trainer: Trainer, data: Dataset) -> Trained:
    """Say what will be trained; train to the end, or to a stop, and close the run."""
    config, console = trainer.config, session.console
    say_tables(console, run, config)
    advice = trainer.advice()
    if advice is not None and session.team.is_first:
        for line in advice.lines():
            console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True, highlight=False)
        if session.as_json:
            print_json({"kind": "advice", **asdict(advice)})
    return _train(session, folder, run, trainer, data)


def _train(session: Session, folder: Path, run: Run, trainer: Trainer, data: Dataset) -> Trained:
    """Train to the end, or to a stop, and close the run.

    Args:
        folder: of the run that the user named.
    """
    from bunkbed.train.output.display import open_display
    from bunkbed.train.scalars import Scalars

    config = trainer.config
    title = f"{Path(data.train.source).name}   {_model(config)}   {folder}"
    last: list[EpochReport] = []

    def on_event(event: Event) -> None:
        display(event)
        if scalars is not None:
            scalars(event)
        if isinstance(event, EpochReport):
            last[:] = [event]
            if session.as_json:
                print_json({"kind": "epoch", **asdict(event)})

    writes_scalars = session.tensorboard and session.team.is_first
    with (
        run,
        open_display(session.console, title=title, metric=config.metric) as display,
        graceful(trainer, display) as stops,
        Scalars(trainer) if writes_scalars else nullcontext() as scalars,
    ):
        outcome = trainer.fit(on_event)
    was_stopped = session.team.any("the end of a training", lambda: bool(stops))
    return Trained(folder, config, data, trainer.samples_users, outcome, last[0] if last else None, was_stopped)


def _model(config: TrainConfig) -> str:
    return f"{config.model}, {config.loss}, dim {config.dim}, {config.optimizer}"


def fit_again(session: Session, first: Trained) -> Trained:
    """Train a run again on all pairs, where its options say so and it is trained to its end."""
    from bunkbed.torch import open_run
    from bunkbed.train import refit
    from bunkbed.train.loop import Trainer

    outcome, folder, data, team, console = first.outcome, first.folder, first.data, session.team, session.console
    if outcome.interrupted or not first.config.refit:
        return first
    if not outcome.best_epoch:
        console.print("no epoch was evaluated, so there is no best one to train again on all pairs")
        return first
    if first.was_stopped:
        return first._replace(outcome=replace(outcome, interrupted=True))
    held = ExitStack()

    def begin() -> str:
        held.enter_context(refit.locked(folder))
        return str(refit.begin(folder, first.config, outcome))

    with held:
        part = Path(team.first("preparing the training on all pairs", begin))
        config = TrainConfig.of_run(read_config(part)["train"])
        run = open_run(part, ram=config.table_ram_bytes, _one_disk=True)
        try:
            trainer = Trainer(config, data, run, begin=refit.chosen_progress(part))
        except BaseException:
            run.close(commit=False)
            raise
        where = f", from epoch {trainer.epoch}, step {trainer.step:,}" if trainer.step else ""
        console.print(
            f"[b]again[/b]   on all {len(data.train):,} pairs, from new rows, for {config.epochs} epochs: epoch "
            f"{config.epochs} was best by {config.metric}{where}",
            soft_wrap=True,
        )
        if session.as_json and team.is_first:
            print_json({"kind": "refit", "pairs": len(data.train), "epochs": config.epochs, "best": outcome.best})
        second = _train(session, folder, run, trainer, data)
        if not second.outcome.interrupted:
            team.first("putting the training on all pairs in place", lambda: refit.finish(folder))
    return second


def conclude(session: Session, trained: Trained) -> int:
    """Draw the picture, judge the run and say the outcome; return the exit code."""
    from bunkbed.train.evaluate.results import save_test
    from bunkbed.train.output.plots import plot_run

    folder, config, data, samples_users, outcome, last, _ = trained
    console = session.console
    if session.team.is_first:
        title = f"{folder.name}   {_model(config)}, {ram_text(config)} of RAM"
        picture = plot_run(folder, title=title, metric=config.metric)
        result = None
        is_tested = data.test is not None or data.candidates is not None
        if not outcome.interrupted and (is_tested or (samples_users and not config.stream)):
            what = f"ranking the {'test items' if is_tested else 'held-out items of all users'}"
            with console.status(what) as status:
                result = judge(
                    folder,
                    config,
                    data,
                    on_event=lambda report: status.update(f"{what}: {report.done / report.total:.0%}"),
                )
            if is_tested:
                save_test(folder, result, step=outcome.step)
        if session.as_json:
            figures = None if result is None else asdict(result)
            found = {"test": figures if is_tested else None, "validation": None if is_tested else figures}
            print_json({"kind": "outcome", "run": folder, "picture": picture, **asdict(outcome), **found})
        else:
            say_outcome(console, folder, config, outcome, last, result, picture, data)
    return 130 if outcome.interrupted else 0


def judge(folder: Path, config: TrainConfig, data: Dataset, **options: Any) -> EvalResult:
    """Evaluate a run from its files, at its best epoch unless `options` name another snapshot."""
    from bunkbed.train.evaluate.evaluator import evaluate_run
    from bunkbed.train.trained import open_trained

    with open_trained(folder, options.pop("ram", None) or config.ram, options.pop("snapshot", None)) as run:
        return evaluate_run(run, data, config, **options)


@contextmanager
def graceful(trainer: Trainer, display: Display) -> Iterator[list[bool]]:
    """Stop the trainer after its step on the first Ctrl-C or SIGTERM; abort on a later Ctrl-C.

    Yields a list that is empty until then.

    A second SIGTERM has no effect, because `timeout` and schedulers send it to the process and again to its group. Nor
    has a second Ctrl-C under torchrun, which passes on the first one that the process has got already; torchrun itself
    kills the processes if they do not end.
    """
    is_alone = trainer.team.world == 1

    def stop(number: int, frame: FrameType | None) -> None:
        if is_alone:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
        if not is_stopping:
            is_stopping.append(True)
            trainer.request_stop()
            again = " (Ctrl-C again aborts at once)" if is_alone else ""
            display.note(f"stopping: the step ends, then everything is committed{again}")

    is_stopping: list[bool] = []

    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    for kind in before:
        signal.signal(kind, stop)
    try:
        yield is_stopping
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
