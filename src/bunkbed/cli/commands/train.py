"""``bunkbed train``: train a recommender on a file of interactions and write a run folder.

Under torchrun every process runs this command with the same options, and all train one run. Rank 0 chooses the folder,
reads the data and stores it there, and alone prints; the others load what it stored.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from enum import StrEnum
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from bunkbed.cli.shared.train_fit import Session, Trained, conclude, fit, fit_again
from bunkbed.cli.shared.train_options import DATA, FileLayout, RecipeName, option, parameters
from bunkbed.cli.shared.train_text import (
    explained,
    say_data,
    say_decisions,
    say_features,
)
from bunkbed.core.budget import parse_bytes
from bunkbed.core.types import Json
from bunkbed.train.features.features import ABOUT_NAME
from bunkbed.train.features.reading import KINDS
from bunkbed.train.output.progress import FREE_TO_CHANGE, Progress
from bunkbed.train.processes.team import join_team
from bunkbed.train.settings.auto import AUTO, Round, decide, decide_loss, decide_round
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.option import LEARNING, RUN
from bunkbed.train.settings.run_config import DATA_NAME, read_config, write_config

if TYPE_CHECKING:
    from bunkbed.run.run import Run
    from bunkbed.train.data.interactions import Dataset
    from bunkbed.train.merge import Merged

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
    new_config = _checked(decide_loss(options, candidates=test_negatives is not None)[0]) if resume is None else None
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
    session = Session(team, console, json, tensorboard)
    if resume is not None:
        assert resumed is not None
        changes = {name: options[name] for name in given & {*FREE_TO_CHANGE}}
        if more is not None:
            if team.world > 1:
                raise UsageProblem("--more works in one process: run it without torchrun, and go on with --resume")
            asked = {name: options[name] for name in given & {*_OF_ROUND}}
            columns = {name: value for name, value in reading.items() if name in given}
            given_features = {name: features[name] for name in given & {*_FEATURES}}
            _add(session, resume, resumed, more, columns, given_features, asked)
            resumed, changes = _resumed_config(resume, {}, set()), {}
        trained = _go_on(session, resume, resumed, changes)
    else:
        assert file is not None and new_config is not None
        reading |= {"test": test, "test_negatives": test_negatives}
        undecided = {"recipe": recipe.value, "given": options}
        trained = _start(session, file, reading, features, out, new_config, undecided)
    return conclude(session, fit_again(session, trained))


def _with_configured(command: Callable[..., int]) -> None:
    """Put an option for each field of `TrainConfig` between the options of the data and those of the run."""
    own = [each for each in signature(command, eval_str=True).parameters.values() if each.name != "configured"]
    at = next(index for index, each in enumerate(own) if each.name == "out")
    command.__signature__ = Signature([*own[:at], *parameters(), *own[at:]])  # type: ignore[attr-defined]


_with_configured(train)


def _start(
    session: Session, file: Path, reading: Json, features: Json, out: Path | None, config: TrainConfig, undecided: Json
) -> Trained:
    """Read the data, create the run folder, train. A failure before the first commit removes a new folder."""
    import bunkbed
    from bunkbed.torch import open_run
    from bunkbed.train import refit
    from bunkbed.train.data.interactions import read_dataset
    from bunkbed.train.data.store import load_dataset, open_dataset, save_dataset
    from bunkbed.train.loop import Trainer

    team, console = session.team, session.console
    read: list[Dataset] = []  # on rank 0

    def begin() -> str:
        folder = choose_folder(out, file)
        refit.remove_leftover(folder)
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
        run = open_run(folder, ram=config.table_ram_bytes, _one_disk=True)
        team.first("storing the interactions", store)
        data = read[0] if read else (open_dataset if config.stream else load_dataset)(folder / DATA_NAME)
        if config.stream and not console.is_terminal:
            console.print("splitting", style="dim")
        config = _decided(session, undecided, data, num_drawn(folder, data))
        with console.status("splitting") if config.stream else nullcontext():
            trainer = Trainer(config, data, run)
        config = trainer.config
        if config.refit:
            team.first("preparing the training on all pairs", lambda: refit.require_possible(folder))
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
    return fit(session, folder, run, trainer, data)


def _decided(session: Session, undecided: Json, data: Dataset, num_drawn: int) -> TrainConfig:
    """Decide the options that were not given, and say why, in the first process.

    Args:
        num_drawn: the items from which negatives are drawn.
    """
    try:
        config, reasons = decide(
            undecided["given"],
            undecided["recipe"],
            pairs=len(data.train),
            items=num_drawn,
            candidates=data.candidates is not None,
        )
    except (ValueError, TypeError) as error:
        raise UsageProblem(str(error)) from error
    values = config.to_dict()
    say_decisions(session.console, values, reasons)
    if session.team.is_first and session.as_json:
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
    session: Session, folder: Path, config: TrainConfig, file: Path, columns: Json, features: Json, asked: Json
) -> None:
    """Add the interactions of a file to a run, and say what came and how it will be trained."""
    from bunkbed.train.more import add_interactions

    stored, console = read_config(folder), session.console
    sides = side_files(features, {**stored.get("reading", {}), **columns})
    reading = {name: value for name, value in stored.get("reading", {}).items() if name in _COLUMNS}
    chosen: list[tuple[Round, dict[str, str]]] = []

    def decide(progress: Progress, merged: Merged) -> Round:
        epochs, known = progress.first or progress.epoch, merged.known / merged.pairs
        chosen.append(decide_round(asked, config, epochs=epochs, known=known))
        return chosen[0][0]

    with console.status(f"reading {escape(str(file))}"):
        options = {"strict": False, **reading, **columns}
        kinds = features.get("feature_kinds", {})
        merged, about = add_interactions(folder, config, file, options, decide, sides, kinds)
    found, reasons = chosen[0]
    lr = float(f"{config.lr * found.lr_scale:.6g}")  # without the last bits, which a product may have
    values = {"epochs": found.epochs, "lr": lr, "lr_decay": found.lr_decay}
    repeated = f"; {merged.repeated:,} repeated pairs left out" if merged.repeated else ""
    console.print(
        f"[b]{escape(file.name)}[/b]  {merged.pairs:,} new pairs, {merged.users:,} new users, "
        f"{merged.items:,} new items{repeated}",
        soft_wrap=True,
    )
    say_features(console, {side: about[side] for side in sides})
    say_decisions(console, values, reasons)
    if found.row_scale != 1.0:
        console.print(
            f"[b]rows[/b]    the round begins with the trained rows times {found.row_scale:g}", soft_wrap=True
        )
    if session.as_json:
        about_round = {"options": explained(values, reasons), "row_scale": found.row_scale}
        print_json({"kind": "more", "file": file, **asdict(merged), **about_round})


def _go_on(session: Session, folder: Path, config: TrainConfig, changes: Json) -> Trained:
    from bunkbed.torch import open_run
    from bunkbed.train import refit
    from bunkbed.train.data.store import load_dataset, open_dataset
    from bunkbed.train.loop import Trainer
    from bunkbed.train.more import remove_leftover

    team, console = session.team, session.console

    def remove_leftovers() -> None:
        remove_leftover(folder)
        if not config.refit:
            refit.remove_leftover(folder)

    def read_to_the_end() -> None:
        reading = read_config(folder).get("reading")
        if config.stream and reading is not None and not (folder / DATA_NAME / "dataset.json").exists():
            console.print("the interactions were not read to their end; reading them again", soft_wrap=True)
            say_data(console, _prepare(folder, Path(reading.pop("file")), reading, config, console))
        if not (folder / DATA_NAME / ABOUT_NAME).exists():
            add_features(folder, read_config(folder), config, console)

    run = open_run(folder, ram=config.table_ram_bytes, _one_disk=True)
    try:
        team.first("removing what a killed --more or --refit left", remove_leftovers)
        if config.refit:
            team.first("preparing the training on all pairs", lambda: refit.require_possible(folder))
        team.first("storing the interactions", read_to_the_end)
        data = (open_dataset if config.stream else load_dataset)(folder / DATA_NAME)
        stored = read_config(folder)
        undecided = stored.pop("undecided", None)
        if undecided is not None:  # the run ended before its options were decided
            undecided["given"] |= changes
            config = _decided(session, undecided, data, num_drawn(folder, data))
        trainer = Trainer(config, data, run)
        config = trainer.config
    except BaseException:
        run.close(commit=False)
        raise
    team.first("storing the options", lambda: write_config(folder, {**stored, "train": config.to_dict()}))
    where = f"after epoch {trainer.epoch}, step {trainer.step:,}"
    if config.refit and (trainer.epoch >= config.epochs or trainer.stopped_early):
        where += "; it is trained to its end"
    elif trainer.epoch >= config.epochs:
        where += f"; nothing left to do, --epochs more than {config.epochs} goes on"
    elif trainer.stopped_early:
        where += f"; it stopped early, --patience more than {config.patience} goes on, or 0 for never"
    console.print(f"resuming {escape(str(folder))} {where}", soft_wrap=True)
    return fit(session, folder, run, trainer, data)


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


def _plain(value: object) -> object:
    return value.value if isinstance(value, StrEnum) else value
