"""Training again on all pairs, once held-out pairs have chosen the epoch.

The second training begins with new rows, holds nothing out, has the other options of the first one, and ends after as
many epochs as the best one had. It is an ordinary run, in ``.NAME.refit`` next to the first: its bits are those of a
run that was started with ``--valid none --epochs N`` and these options. Until its end the first run is at its path and
in use, under the writer's lock. Then one system call exchanges the two folders (`bunkbed.files.durable.exchange`).

Protocol. A process that is killed at any point leaves the first or the second run at the path, whole:

1. `begin` makes the folder: the interactions by hard links, the features, and last ``config.json``. A later call with
   the same choice finds the folder, and the training goes on there; what is not complete or of another choice is
   removed.
2. The second run trains and commits.
3. `finish` links the other files of the first run into the folder, its log as ``choice.jsonl`` and its scalars;
   exchanges the folders; removes the first run. `remove_leftover` removes it where a kill came between.

The rejected alternative, to set the rows of the run back and train on, has no usable model for most of the time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from bunkbed.core.types import Json
from bunkbed.files.durable import exchange, link, link_folder, require_real, take_place
from bunkbed.files.run_files import RunFiles
from bunkbed.maintenance.shard_runs import link_others, remove_others
from bunkbed.run.run import Run
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.store import open_dataset
from bunkbed.train.data.stream import STREAM_FOLDER
from bunkbed.train.evaluate.evaluator import open_parts
from bunkbed.train.evaluate.results import FIGURES
from bunkbed.train.features.features import FEATURE_FILES
from bunkbed.train.features.reading import store_features
from bunkbed.train.output.events import Outcome
from bunkbed.train.output.progress import FREE_TO_CHANGE, Progress
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.run_config import (
    CHOICE_NAME,
    CONFIG_NAME,
    DATA_NAME,
    LOG_NAME,
    SCALARS_NAME,
    read_config,
    write_config,
)

__all__ = [
    "BEST",
    "begin",
    "chosen_progress",
    "finish",
    "locked",
    "remove_leftover",
    "require_no_kept_snapshots",
    "require_possible",
]

# Of the second run's configuration: the progress with which it begins.
_CHOSEN = "chosen"
# In addition to the files of a run, a training makes these. Of the first run's, its log and its scalars are kept.
_MADE = (DATA_NAME, CONFIG_NAME, LOG_NAME, STREAM_FOLDER, f"{STREAM_FOLDER}.lock", SCALARS_NAME, *FIGURES)
# The first run's scalars, as a run of their own for TensorBoard.
_CHOICE = "choice"
#: The snapshot of a run's best epoch.
BEST = "best"


def _part(place: Path) -> Path:
    return place.with_name(f".{place.name}.refit")


def remove_leftover(folder: Path) -> None:
    """Remove a second run next to a run, or what a killed `finish` left there. Requires: the run's lock held."""
    shutil.rmtree(_part(folder.resolve()), ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the writer's lock of a run."""
    files = RunFiles(folder.resolve())
    lock = files.lock()
    try:
        yield
    finally:
        files.unlock(lock)


def require_possible(folder: Path) -> None:
    """Check, before the first training, that a second one can be made next to a run and take its place.

    Raises:
        OSError: the filesystem has no hard links between the two folders or cannot exchange them, or the parent folder
            is read-only.
    """
    place = folder.resolve()
    part = _part(place)
    if part.exists():  # of an earlier call
        return
    try:
        part.mkdir()
        try:
            link(place / CONFIG_NAME, part / CONFIG_NAME)
            for name in ("one", "other"):
                (part / name).mkdir()
            exchange(part / "one", part / "other")
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{folder}: the training on all pairs needs a folder next to the run, and there {error.strerror or error}; "
            "--no-refit leaves it out",
        ) from error


def require_no_kept_snapshots(folder: Path) -> None:
    """Raise `ValueError` where a run has kept snapshots other than its best one, which a new run in its place lacks."""
    for name in sorted(set(RunFiles(folder.resolve()).snapshots()) - {BEST}):
        raise ValueError(
            f"{folder}: has the kept snapshot {name!r}, which would be lost; copy it "
            f"(bunkbed copy --snapshot {name}), then drop it (bunkbed.Run.drop)"
        )


def begin(folder: Path, config: TrainConfig, outcome: Outcome) -> Path:
    """Return the folder of a run's second training, which is new or of an earlier call. Requires: `locked`.

    Args:
        config: of the first run.
        outcome: of the first run, with a best epoch.

    Raises:
        ValueError: the first run has kept snapshots. FormatError: a symbolic link is in the folder's place. OSError: as
            `require_possible`, or the disk is full or failing. Nothing has changed.
    """
    place = folder.resolve()
    part, data = _part(place), _part(place) / DATA_NAME
    require_no_kept_snapshots(folder)
    require_real(part)
    assert outcome.best_epoch is not None
    second = replace(config, valid="none", refit=False, patience=0, epochs=outcome.best_epoch)
    chosen = Progress(best_epoch=outcome.best_epoch, best=dict(outcome.best), chosen_on=config.valid)
    values = {**read_config(place), "train": second.to_dict(), _CHOSEN: asdict(chosen)}
    if (part / CONFIG_NAME).exists() and _fixed(read_config(part)) == _fixed(values):
        write_config(part, values)  # others of its options may change
        return part
    shutil.rmtree(part, ignore_errors=True)
    try:
        Run(part, config.table_ram_bytes).close(commit=False)
        link_folder(place / DATA_NAME, data, FEATURE_FILES)

        def trained() -> Interactions:
            return open_parts(open_dataset(data), second, part).train

        store_features(data, {}, {}, trained, place / DATA_NAME)
        write_config(part, values)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return part


def _fixed(values: Json) -> Json:
    """Return what of a second run's configuration makes it another training if it changes."""
    free = {*FREE_TO_CHANGE} - {"epochs"}
    return {
        _CHOSEN: values.get(_CHOSEN),
        "train": {name: value for name, value in values["train"].items() if name not in free},
    }


def chosen_progress(folder: Path) -> Progress | None:
    """Return the progress with which a second run begins; None for other runs."""
    chosen = read_config(folder).get(_CHOSEN)
    return None if chosen is None else Progress(**chosen)


def finish(folder: Path) -> None:
    """Put a second run that is trained to its end in the place of the first. Requires: `locked`.

    Raises:
        ValueError: the first run has kept snapshots. OSError: as `bunkbed.files.durable.exchange`, or the disk is
            failing. The first run is at its place.
    """
    place = folder.resolve()
    part = _part(place)
    require_no_kept_snapshots(folder)
    remove_others(part, _MADE)  # what an earlier call linked, which may have changed since
    link_others(place, part, _MADE)
    if (place / LOG_NAME).exists():
        link(place / LOG_NAME, part / CHOICE_NAME)
    if (place / SCALARS_NAME).is_dir():
        (part / SCALARS_NAME).mkdir(exist_ok=True)
        shutil.rmtree(part / SCALARS_NAME / _CHOICE, ignore_errors=True)
        link_folder(place / SCALARS_NAME, part / SCALARS_NAME / _CHOICE)
    take_place(part, place)
