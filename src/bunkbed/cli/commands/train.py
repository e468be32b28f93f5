"""``bunkbed train``: train a recommender on a file of interactions and write a run folder.

Under torchrun every process runs this command with the same options, and all train one run. Rank 0 chooses the folder,
reads the data and stores it there, and alone prints; the others load what it stored.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from enum import StrEnum
from inspect import Signature, signature
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from bunkbed.cli.shared.console import (
    ConfigOption,
    JsonOption,
    UsageProblem,
    escape,
    given_options,
    need,
    print_json,
    stderr,
    stdout,
)
from bunkbed.cli.shared.run_folder import choose_folder
from bunkbed.cli.shared.train_features import add_features, num_drawn, parsed_kinds, side_files, stored_features
from bunkbed.cli.shared.train_options import DATA, FileLayout, RecipeName, option, parameters
from bunkbed.cli.shared.train_text import (
    explained,
    ram_text,
    say_data,
    say_decisions,
    say_features,
    say_outcome,
    say_tables,
)
from bunkbed.core.budget import parse_bytes
from bunkbed.core.types import Json
from bunkbed.train.features.features import ABOUT_NAME
from bunkbed.train.features.reading import KINDS
from bunkbed.train.output.events import EpochReport, Event
from bunkbed.train.output.progress import FREE_TO_CHANGE, Progress
from bunkbed.train.processes.team import Team, join_team
from bunkbed.train.settings.auto import AUTO, Round, decide, decide_round
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.option import LEARNING, RUN
from bunkbed.train.settings.run_config import DATA_NAME, read_config, write_config

if TYPE_CHECKING:
    from bunkbed.run.run import Run
    from bunkbed.train.data.interactions import Dataset
    from bunkbed.train.evaluate.evaluator import EvalResult
    from bunkbed.train.loop import Trainer
    from bunkbed.train.output.display import Display

# Options that --more takes for its round.
_OF_ROUND = ("epochs", "lr", "lr_decay")
_COLUMNS = ("user_col", "item_col", "time_col", "rating_col", "min_rating", "header", "layout", "strict")
_FEATURES = ("user_features", "item_features", "feature_kinds")
_READING = (*_COLUMNS, "test", "test_negatives", *_FEATURES)


def train(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(help="Interactions: CSV, TSV, Parquet, adjacency lines, or gzip of a text form."),
    ] = None,
    *,
    user_col: Annotated[
        str | None, option(DATA, "Read the users from this column: a name, or a position from 0.")
    ] = None,
    item_col: Annotated[
        str | None, option(DATA, "Read the items from this column: a name, or a position from 0.")
    ] = None,
    time_col: Annotated[
        str | None,
        option(
            DATA, "Order the pairs by the times in this column, numbers or ISO dates: a name, or a position from 0."
        ),
    ] = None,
    rating_col: Annotated[
        str | None,
        option(DATA, "Multiply each pair's loss by the rating in this column, or select rows by it with --min-rating."),
    ] = None,
    min_rating: Annotated[
        float | None, option(DATA, "Read only the rows with a rating of at least this.", metavar="NUMBER")
    ] = None,
    header: Annotated[
        bool | None, option(DATA, "Whether line 1 names the columns; default: detected.", "--header/--no-header")
    ] = None,
    layout: Annotated[FileLayout, option(DATA, "Read columns, or lines of 'user item item ...'.")] = FileLayout.auto,
    strict: Annotated[
        bool, option(DATA, "Stop at a malformed row instead of skipping and counting it.", "--strict")
    ] = False,
    test: Annotated[Path | None, option(DATA, "Evaluate on the interactions in this file.", metavar="FILE")] = None,
    test_negatives: Annotated[
        Path | None,
        option(DATA, "Rank each held-out item among these: lines of '(user,item) item ...'.", metavar="FILE"),
    ] = None,
    user_features: Annotated[
        Path | None,
        option(DATA, "Add what this file says of users to their rows: an id and its features a line.", metavar="FILE"),
    ] = None,
    item_features: Annotated[
        Path | None,
        option(DATA, "Add what this file says of items to their rows: an id and its features a line.", metavar="FILE"),
    ] = None,
    feature_kinds: Annotated[
        str,
        option(
            DATA, f"Kinds of columns of features that are not detected: {', '.join(KINDS)}.", metavar="NAME=KIND,..."
        ),
    ] = "",
    recipe: Annotated[
        RecipeName, option(LEARNING, "Decide the options that are not given by the data, for speed or for quality.")
    ] = RecipeName.default,
    out: Annotated[Path | None, option(RUN, "Run folder to create; default: runs/NAME.", metavar="RUN")] = None,
    resume: Annotated[Path | None, option(RUN, "Continue a run from its last commit.", metavar="RUN")] = None,
    more: Annotated[
        Path | None,
        option(
            RUN, "Add the interactions of this file to the run of --resume, and train a round on all.", metavar="FILE"
        ),
    ] = None,
    tensorboard: Annotated[
        bool, option(RUN, "Also write scalars for TensorBoard to the run's folder.", "--tensorboard")
    ] = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    **configured: object,
) -> int:
    """Train a recommender on interactions, on tables larger than RAM.

    Ctrl-C, and SIGTERM, finishes the step and commits (exit code 130); --resume goes on, and ends with the bits of a
    run never stopped. With torchrun -m bunkbed train, several processes train one run (docs/processes.md).
    """
    options = {name: _plain(value) for name, value in configured.items() if name not in AUTO or value is not None}
    if more is not None and resume is None:
        raise UsageProblem("--more adds interactions to a trained run: give the run with --resume RUN")
    if (file is None) == (resume is None):
        raise UsageProblem(
            "give either FILE or --resume RUN, not both" if file else "give a FILE of interactions, or --resume RUN"
        )
    given = given_options(context)
    if time_col is not None and test is None and test_negatives is None and "split" not in given:
        options["split"] = "last"
    if options["model"] == "sasrec" and "loss" not in given:
        options["loss"] = "softmax"
    new_config = _checked(options) if resume is None else None
    reading: Json = {
        "user_col": user_col,
        "item_col": item_col,
        "time_col": time_col,
        "rating_col": rating_col,
        "min_rating": min_rating,
        "header": "auto" if header is None else header,
        "layout": layout.value,
        "strict": strict,
    }
    sides = {"user_features": user_features, "item_features": item_features}
    features: Json = {**sides, "feature_kinds": parsed_kinds(feature_kinds)}
    if feature_kinds and not any(sides.values()) and (resume is None or more is not None):
        raise UsageProblem("--feature-kinds is of columns of --user-features FILE and --item-features FILE: give one")
    of_round = set() if more is None else {*_COLUMNS, *_OF_ROUND, *_FEATURES}
    resumed = _resumed_config(resume, options, given - of_round) if resume is not None else None
    need("torch", "pyarrow", "duckdb", "matplotlib", command="train")
    if tensorboard:
        need("tensorboard", command="train --tensorboard", extra="tensorboard")
    if new_config is not None and new_config.stream:
        _check_streaming(new_config, test, test_negatives)
    team = join_team()
    console = (stderr() if json else stdout()) if team.is_first else Console(quiet=True)
    if resume is not None:
        assert resumed is not None
        changes = {name: options[name] for name in given & {*FREE_TO_CHANGE}}
        if more is not None:
            if team.world > 1:
                raise UsageProblem("--more works in one process: run it without torchrun, and go on with --resume")
            asked = {name: options[name] for name in given & {*_OF_ROUND}}
            columns = {name: value for name, value in reading.items() if name in given}
            given_features = {name: features[name] for name in given & {*_FEATURES}}
            _add(resume, resumed, more, columns, given_features, asked, console, as_json=json)
            resumed, changes = _resumed_config(resume, {}, set()), {}
        return _go_on(team, resume, resumed, changes, console, as_json=json, tensorboard=tensorboard)
    assert file is not None and new_config is not None
    reading |= {"test": test, "test_negatives": test_negatives}
    undecided = {"recipe": recipe.value, "given": options}
    return _start(team, file, reading, features, out, undecided, console, as_json=json, tensorboard=tensorboard)


def _with_configured(command: Callable[..., int]) -> None:
    """Put an option for each field of `TrainConfig` between the options of the data and those of the run."""
    own = [each for each in signature(command, eval_str=True).parameters.values() if each.name != "configured"]
    at = next(index for index, each in enumerate(own) if each.name == "out")
    command.__signature__ = Signature([*own[:at], *parameters(), *own[at:]])  # type: ignore[attr-defined]


_with_configured(train)


def _start(
    team: Team,
    file: Path,
    reading: Json,
    features: Json,
    out: Path | None,
    undecided: Json,
    console: Console,
    *,
    as_json: bool,
    tensorboard: bool,
) -> int:
    """Read the data, create the run folder, train. A failure before the first commit removes a new folder."""
    import bunkbed
    from bunkbed.torch import open_run
    from bunkbed.train.data.interactions import read_dataset
    from bunkbed.train.data.store import load_dataset, open_dataset, save_dataset
    from bunkbed.train.loop import Trainer

    config = _checked(undecided["given"])
    read: list[Dataset] = []  # on rank 0

    def begin() -> str:
        folder = choose_folder(out, file)
        if not config.stream:
            with console.status(f"reading {escape(str(file))}"):
                read.append(read_dataset(file, split=config.split, **reading))
            say_data(console, read[0])
        return str(folder)

    folder = Path(team.first("reading the interactions", begin))
    about: Json = {"bunkbed": bunkbed.__version__, "source": str(file), "recipe": undecided["recipe"]}
    # --more needs these options, and --resume if the preparation is killed.
    paths = {name: str(value.resolve()) for name, value in reading.items() if isinstance(value, Path)}
    about["reading"] = {**reading, **paths, "file": str(file.resolve())}
    about |= stored_features(features)

    def store() -> None:
        write_config(folder, {**about, "train": config.to_dict(), "undecided": undecided})
        if config.stream:
            read.append(_prepare(folder, file, reading, config, console))
            say_data(console, read[0])
        else:
            save_dataset(folder / DATA_NAME, read[0])
        if add_features(folder, about, config, console):
            read.clear()  # it has users or items more

    existed = folder.exists()
    run: Run | None = None
    try:
        run = open_run(folder, ram=config.table_ram_bytes)
        team.first("storing the interactions", store)
        data = read[0] if read else (open_dataset if config.stream else load_dataset)(folder / DATA_NAME)
        if config.stream and not console.is_terminal:
            console.print("splitting", style="dim")
        config = _decided(undecided, data, num_drawn(folder, data), console if team.is_first else None, as_json=as_json)
        with console.status("splitting") if config.stream else nullcontext():
            trainer = Trainer(config, data, run)
        config = trainer.config
        decided = {**about, "train": config.to_dict()}
        team.first("storing the options", lambda: write_config(folder, decided))
    except BaseException:
        if run is not None:
            run.close(commit=False)
        if not existed and team.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if config.is_sequential and reading["time_col"] is None:
        console.print("[b]order[/b]   sequences in the order of the file; --time-col orders them by time")
    return _fit(folder, config, run, trainer, data, console, as_json=as_json, tensorboard=tensorboard)


def _decided(undecided: Json, data: Dataset, num_drawn: int, console: Console | None, *, as_json: bool) -> TrainConfig:
    """Decide the options that were not given, and say why, in the process that has a console.

    Args:
        num_drawn: the items from which negatives are drawn.
    """
    try:
        config, reasons = decide(undecided["given"], undecided["recipe"], pairs=len(data.train), items=num_drawn)
    except (ValueError, TypeError) as error:
        raise UsageProblem(str(error)) from error
    values = config.to_dict()
    if console is not None:
        say_decisions(console, values, reasons)
    if console is not None and as_json:
        print_json({"kind": "auto", "recipe": undecided["recipe"], "options": explained(values, reasons)})
    return config


def _check_streaming(config: TrainConfig, test: Path | None, test_negatives: Path | None) -> None:
    """Raise, before any work, for options that are not supported with interactions on disk."""
    if test_negatives is not None:
        raise UsageProblem(
            "--stream cannot keep --test-negatives on disk; leave out either option (--ranking sampled draws its own)"
        )
    if (test is not None or config.split != "random") and not config.eval_users:
        what = "--test" if test is not None else f"--split {config.split}"
        raise UsageProblem(
            f"--stream with {what} needs to know how many users to ask: give --eval-users, such as 10000"
        )


def _prepare(folder: Path, file: Path, reading: Json, config: TrainConfig, console: Console) -> Dataset:
    """Prepare the interactions in the run's folder; after a failure or an interrupt remove them."""
    from bunkbed.train.data.prepare import prepare_dataset

    options = {name: value for name, value in reading.items() if name != "test_negatives"} | {"split": config.split}
    # The tables are still empty, so this may use the budget, except a quarter for the reader and DuckDB's overhead.
    ram_bytes = parse_bytes(config.ram) // 4 * 3
    try:
        with console.status(f"reading {escape(str(file))}") as status:

            def on_progress(text: str, rows: int | None) -> None:
                if console.is_terminal:
                    status.update(escape(text) + ("" if rows is None else f": {rows:,} rows"))
                elif said != [text]:  # without a terminal, print one line for each stage
                    said[:] = [text]
                    console.print(escape(text), style="dim", soft_wrap=True)

            said: list[str] = []
            return prepare_dataset(folder / DATA_NAME, file, ram_bytes=ram_bytes, on_progress=on_progress, **options)
    except BaseException:
        shutil.rmtree(folder / DATA_NAME, ignore_errors=True)
        raise


def _add(
    folder: Path,
    config: TrainConfig,
    file: Path,
    columns: Json,
    features: Json,
    asked: Json,
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Add the interactions of a file to a run, and say what came and how it will be trained."""
    from bunkbed.train.more import add_interactions

    stored = read_config(folder)
    sides = side_files(features, {**stored.get("reading", {}), **columns})
    reading = {name: value for name, value in stored.get("reading", {}).items() if name in _COLUMNS}
    chosen: list[tuple[Round, dict[str, str]]] = []

    def decide(progress: Progress) -> Round:
        chosen.append(decide_round(asked, config, epochs=progress.first or progress.epoch))
        return chosen[0][0]

    with console.status(f"reading {escape(str(file))}"):
        options = {"strict": False, **reading, **columns}
        kinds = features.get("feature_kinds", {})
        merged, about = add_interactions(folder, config, file, options, decide, sides, kinds)
    (found, reasons), lr = chosen[0], config.lr * chosen[0][0].lr_scale
    values = {"epochs": found.epochs, "lr": lr, "lr_decay": found.lr_decay}
    repeated = f"; {merged.repeated:,} repeated pairs left out" if merged.repeated else ""
    console.print(
        f"[b]{escape(file.name)}[/b]  {merged.pairs:,} new pairs, {merged.users:,} new users, "
        f"{merged.items:,} new items{repeated}",
        soft_wrap=True,
    )
    say_features(console, {side: about[side] for side in sides})
    say_decisions(console, values, reasons)
    if as_json:
        print_json({"kind": "more", "file": file, **asdict(merged), "options": explained(values, reasons)})


def _go_on(
    team: Team,
    folder: Path,
    config: TrainConfig,
    changes: Json,
    console: Console,
    *,
    as_json: bool,
    tensorboard: bool,
) -> int:
    from bunkbed.torch import open_run
    from bunkbed.train.data.store import load_dataset, open_dataset
    from bunkbed.train.loop import Trainer
    from bunkbed.train.more import remove_leftover

    def read_to_the_end() -> None:
        reading = read_config(folder).get("reading")
        if config.stream and reading is not None and not (folder / DATA_NAME / "dataset.json").exists():
            console.print("the interactions were not read to their end; reading them again", soft_wrap=True)
            say_data(console, _prepare(folder, Path(reading.pop("file")), reading, config, console))
        if not (folder / DATA_NAME / ABOUT_NAME).exists():
            add_features(folder, read_config(folder), config, console)

    run = open_run(folder, ram=config.table_ram_bytes)
    try:
        team.first("removing what a killed --more left", lambda: remove_leftover(folder))
        team.first("storing the interactions", read_to_the_end)
        data = (open_dataset if config.stream else load_dataset)(folder / DATA_NAME)
        stored = read_config(folder)
        undecided = stored.pop("undecided", None)
        if undecided is not None:  # the run ended before its options were decided
            undecided["given"] |= changes
            config = _decided(
                undecided, data, num_drawn(folder, data), console if team.is_first else None, as_json=as_json
            )
        trainer = Trainer(config, data, run)
        config = trainer.config
    except BaseException:
        run.close(commit=False)
        raise
    team.first("storing the options", lambda: write_config(folder, {**stored, "train": config.to_dict()}))
    where = f"after epoch {trainer.epoch}, step {trainer.step:,}"
    if trainer.epoch >= config.epochs:
        where += f"; nothing left to do, --epochs more than {config.epochs} goes on"
    elif trainer.stopped_early:
        where += f"; it stopped early, --patience more than {config.patience} goes on, or 0 for never"
    console.print(f"resuming {escape(str(folder))} {where}", soft_wrap=True)
    return _fit(folder, config, run, trainer, data, console, as_json=as_json, tensorboard=tensorboard)


def _fit(
    folder: Path,
    config: TrainConfig,
    run: Run,
    trainer: Trainer,
    data: Dataset,
    console: Console,
    *,
    as_json: bool,
    tensorboard: bool,
) -> int:
    from bunkbed.train.evaluate.results import save_test
    from bunkbed.train.output.display import open_display
    from bunkbed.train.output.plots import plot_run
    from bunkbed.train.scalars import Scalars

    source = Path(data.train.source).name
    name = f"{config.model}, {config.loss}, dim {config.dim}, {config.optimizer}"
    last: list[EpochReport] = []

    def on_event(event: Event) -> None:
        display(event)
        if scalars is not None:
            scalars(event)
        if isinstance(event, EpochReport):
            last[:] = [event]
            if as_json:
                print_json({"kind": "epoch", **asdict(event)})

    team = trainer.team
    with run:
        say_tables(console, run, config)
        advice = trainer.advice()
        if advice is not None and team.is_first:
            for line in advice.lines():
                console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True, highlight=False)
            if as_json:
                print_json({"kind": "advice", **asdict(advice)})
        with (
            open_display(console, title=f"{source}   {name}   {folder}", metric=config.metric) as display,
            _graceful(trainer, display),
            Scalars(trainer) if tensorboard and team.is_first else nullcontext() as scalars,
        ):
            outcome = trainer.fit(on_event)
    if not team.is_first:
        return 130 if outcome.interrupted else 0
    title = f"{folder.name}   {name}, {ram_text(config)} of RAM"
    picture = plot_run(folder, title=title, metric=config.metric)
    result = None
    is_tested = data.test is not None or data.candidates is not None
    if not outcome.interrupted and (is_tested or (trainer.samples_users and not config.stream)):
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
    if as_json:
        figures = None if result is None else asdict(result)
        found = {"test": figures if is_tested else None, "validation": None if is_tested else figures}
        print_json({"kind": "outcome", "run": folder, "picture": picture, **asdict(outcome), **found})
    else:
        say_outcome(console, folder, config, outcome, last[0] if last else None, result, picture, data)
    return 130 if outcome.interrupted else 0


def judge(folder: Path, config: TrainConfig, data: Dataset, **options: Any) -> EvalResult:
    """Evaluate a run from its files, at its best epoch unless `options` name another snapshot."""
    from bunkbed.train.evaluate.evaluator import evaluate_run
    from bunkbed.train.trained import open_trained

    with open_trained(folder, options.pop("ram", None) or config.ram, options.pop("snapshot", None)) as run:
        return evaluate_run(run, data, config, **options)


@contextmanager
def _graceful(trainer: Trainer, display: Display) -> Iterator[None]:
    """Stop the trainer after its step on the first Ctrl-C or SIGTERM; abort on a later Ctrl-C.

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
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _resumed_config(folder: Path, options: Json, given: set[str]) -> TrainConfig:
    """Return the configuration of a run, with the given options that may change on resuming.

    Raises:
        UsageProblem: a given option may not change on resuming, and differs.
    """
    started = _checked({"order": "uniform", **read_config(folder)["train"]})
    stored = started.to_dict()
    if "order" in given:
        options = {**options, "order": _checked({"order": options["order"]}).with_decisions_of(started).order}
    for name in sorted(given & {*options, *_READING, "recipe"}):
        flag = "--" + name.replace("_", "-")
        if name == "recipe":
            raise UsageProblem(f"--recipe cannot change on resuming: the options of {folder} are decided")
        if name not in options:
            raise UsageProblem(f"{flag} cannot change on resuming: {folder} keeps its own copy of the data")
        if name in FREE_TO_CHANGE:
            stored[name] = options[name]
        elif stored.get(name) != options[name]:
            raise UsageProblem(
                f"{flag} {options[name]} cannot change on resuming: {folder} was started with "
                f"{stored.get(name)}; start a new run for it"
            )
    return _checked(stored)


def _checked(options: Json) -> TrainConfig:
    try:
        return TrainConfig.from_dict(options)
    except (ValueError, TypeError) as error:
        raise UsageProblem(str(error)) from error


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value
