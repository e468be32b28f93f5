"""More interactions for a trained run: its tables get rows for new users and items, and a new round of training begins.

Protocol. A process that is killed at any point leaves the old or the new run at the path, whole:

1. The writer's lock of the run is taken, so its last commit stays the last.
2. The new run is made in ``.NAME.more`` next to the path, after the removal of a folder that an earlier process left
   there: the dataset (`bunkbed.train.merge`), the tables and one commit. The rows are those of the best epoch,
   times a number that the round decides, with their optimizer state; a new row is what a larger table of the same seed
   has there.
3. One system call exchanges the two folders (`bunkbed.files.durable.replacing`), and their parent folder is synced.
   From then on the new run exists.
4. The old run, now at ``.NAME.more``, is removed.

Dataset, options and tables change together, so no reader of the folder mixes two vocabularies. The rejected
alternative, another data folder and a commit in the same run, needs each reader to follow the folder of its commit.
Readers that have the run open must open it again.

The commit is kept as ``"best"`` where the run has a best epoch, so that `recommend` knows the new labels at once. The
counts of epochs and steps go on. The round has its own learning rates: `Progress` has them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from bunkbed.core.budget import parse_bytes
from bunkbed.core.types import Json
from bunkbed.files.durable import replacing
from bunkbed.files.run_files import RunFiles
from bunkbed.maintenance.rewriting import rewrite_rows
from bunkbed.maintenance.shard_runs import link_others
from bunkbed.run.run import Run
from bunkbed.sharded.base.shards import Shards
from bunkbed.table.definition import Definition
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.prepare import prepare_dataset
from bunkbed.train.data.store import open_dataset
from bunkbed.train.data.stream import STREAM_FOLDER
from bunkbed.train.evaluate.evaluator import open_parts
from bunkbed.train.features.features import table_of
from bunkbed.train.features.reading import SideFile, store_features
from bunkbed.train.merge import Merged, merge_datasets
from bunkbed.train.output.progress import Progress
from bunkbed.train.refit import BEST, require_no_kept_snapshots
from bunkbed.train.settings.auto import Round
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.run_config import CONFIG_NAME, DATA_NAME, read_config, write_config

__all__ = ["add_interactions", "remove_leftover"]

#: Decides the round, by the progress of the run and by what the file added.
Decide = Callable[[Progress, Merged], Round]


def _part(place: Path) -> Path:
    return place.with_name(f".{place.name}.more")


def remove_leftover(folder: Path) -> None:
    """Remove what a killed `add_interactions` left next to a run. Requires: the run's lock held."""
    shutil.rmtree(_part(folder.resolve()), ignore_errors=True)


def add_interactions(
    folder: Path,
    config: TrainConfig,
    file: Path,
    reading: Json,
    decide: Decide,
    sides: Mapping[str, SideFile] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> tuple[Merged, Json]:
    """Add the interactions of a file to a trained run, which then has a round of training to do.

    Args:
        folder: the run; no process may have it open for writing.
        config: its options, with those that may change on resuming.
        reading: options of `bunkbed.train.data.prepare.prepare_dataset` for the file.
        sides, kinds: files of features and the kinds of their columns, see `store_features`.

    Returns:
        What the file added; and what the features are, see `store_features`.

    Raises:
        ValueError: the run is not trained to its end, or has kept snapshots. DataError: as `merge_datasets` and
            `store_features`; the file cannot be read. TableLockedError: the run is open for writing. OSError: the disk
            is full or failing, or the filesystem cannot exchange two folders. The run is as it was.
    """
    place = folder.resolve()
    files = RunFiles(place)
    lock = files.lock()
    try:
        part = _part(place)
        with replacing(place, part):
            found = _make(place, part, config, file, reading, decide, sides or {}, kinds or {})
        return found
    finally:
        files.unlock(lock)


def _make(
    place: Path,
    part: Path,
    config: TrainConfig,
    file: Path,
    reading: Json,
    decide: Decide,
    sides: Mapping[str, SideFile],
    kinds: Mapping[str, str],
) -> tuple[Merged, Json]:
    """Make the whole new run in `part`: step 2."""
    half = parse_bytes(config.ram) // 2
    ram_bytes = half if config.stream else None
    with Run(place, half, mode="r") as run:
        progress, names = _finished(run, config), run.snapshots()
    best = BEST if BEST in names else None
    with Run(part, half) as new:
        fresh, data = part / "fresh", part / DATA_NAME
        prepare_dataset(fresh, file, ram_bytes=ram_bytes, **reading)
        data.mkdir()
        merged = merge_datasets(place / DATA_NAME, fresh, data, ram_bytes)
        stored = read_config(place)

        def trained() -> Interactions:
            return open_parts(open_dataset(data), config, fresh).train  # with option stream, in files

        about = store_features(data, sides, kinds, trained, place / DATA_NAME)
        shutil.rmtree(fresh)
        grown = open_dataset(data)
        sizes = {"user": grown.num_users, "item": grown.num_items, "item_bias": grown.num_items}
        sizes |= {table_of(side): of_side["features"] for side, of_side in about.items()}
        chosen = decide(progress, merged)
        config = replace(config, epochs=progress.epoch + chosen.epochs)
        progress = Progress(
            epoch=progress.epoch,
            global_step=progress.global_step,
            before=progress.epoch,
            first=progress.first or progress.epoch,
            lr_scale=chosen.lr_scale,
            lr_decay=chosen.lr_decay,
        )
        with Run(place, half, mode="r", snapshot=best) as run:
            for name in run.table_names:
                table = run.table(name)
                shards = {"shards": table.num_shards} if isinstance(table, Shards) else {}
                create = {**replace(Definition.of(table), num_rows=sizes[name]).arguments(), **shards}
                # All scores are multiplied by the same number, so their order stays.
                scale = chosen.row_scale ** (2 if name == "item_bias" else 1)
                rewrite_rows(table, new.table(name, create=create), None, scale=scale)
            dense = {name: run.read(name) for name in run.files}
        new.commit(dense, progress.to_meta(config), best)
    link_others(place, part, {DATA_NAME, STREAM_FOLDER, CONFIG_NAME, "test.json"})
    if sides:
        files = {f"{side}_features": str(given.path.resolve()) for side, given in sides.items()}
        stored["features"] |= {**files, "feature_kinds": {**stored["features"]["feature_kinds"], **kinds}}
    write_config(part, {**stored, "train": config.to_dict()})
    return merged, about


def _finished(run: Run, config: TrainConfig) -> Progress:
    """Return the progress of a run that can get more interactions."""
    if not run.version:
        raise ValueError(f"{run.path}: has no commit yet; train it first: bunkbed train --resume {run.path}")
    progress, _ = Progress.from_meta(run.meta, config)
    if config.refit and progress.best_epoch:
        raise ValueError(
            f"{run.path}: its training on all pairs (--refit) is not finished; finish it first: bunkbed train --resume "
            f"{run.path}, with --no-refit to leave it out"
        )
    if not progress.is_done(config):
        raise ValueError(
            f"{run.path}: its training is not finished (epoch {progress.epoch} of {config.epochs}); finish it first: "
            f"bunkbed train --resume {run.path}"
            + (f", or with --epochs {progress.epoch} to end it here" if progress.epoch and not progress.step else "")
        )
    require_no_kept_snapshots(run.path)
    return progress
