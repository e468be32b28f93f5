"""A trained run in use: recommendations by the labels of the training file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bunkbed.files.durable import make_file, put_in_place
from bunkbed.run.run import Run
from bunkbed.train.data.interactions import Interactions, read_interactions
from bunkbed.train.data.store import load_vocabs, open_known_pairs, seen_items
from bunkbed.train.data.vocab import DataError, Int64Array, Label, Vocab, arrow_of
from bunkbed.train.evaluate.new_users import scorer_of_new_users
from bunkbed.train.evaluate.recommend import Best, best_items, known_pairs, recommend
from bunkbed.train.models.featured import features_of_run
from bunkbed.train.models.scorer import scorer_of_run
from bunkbed.train.settings.config import TrainConfig, num_first
from bunkbed.train.settings.run_config import DATA_NAME, read_config

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Histories", "Recommender", "open_trained", "read_histories", "read_labels"]

# Of the files of `Recommender.write`.
_SUFFIXES = (".parquet", ".csv")


class Histories(NamedTuple):
    """Pairs of users that a run has not seen.

    Attributes:
        pairs: of the items that the run knows; users by first appearance in the file.
        unknown: pairs of other items, which are left out.
        without: users without a known item, who are left out.
    """

    pairs: Interactions
    unknown: int
    without: int


def open_trained(folder: str | os.PathLike[str], ram: str | int, snapshot: str | None = None) -> Run:
    """Open a run for reading: at `snapshot`, otherwise at the best epoch, otherwise at the last commit."""
    run = Run(folder, ram=ram, mode="r")
    if snapshot is None and "best" not in run.snapshots():
        return run
    run.close(commit=False)
    return Run(folder, ram=ram, mode="r", snapshot=snapshot or "best")


def read_labels(path: str | os.PathLike[str], vocab: Vocab, what: str) -> Int64Array:
    """Read labels, one a line, as ``int64[N]`` distinct dense indices in their order; blank lines do not count.

    Raises:
        DataError: a label is unknown or there twice, or there is none; names the line.
    """
    with Path(path).open(encoding="utf-8") as file:
        lines = [(number, line.strip()) for number, line in enumerate(file, start=1) if line.strip()]
    if not lines:
        raise DataError(f"{path}: has no {what}; write one a line")
    found = vocab.encode([label for _, label in lines])
    if (found < 0).any():
        number, label = lines[int(np.flatnonzero(found < 0)[0])]
        try:
            vocab.index(label, what=what)
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    _, first = np.unique(found, return_index=True)
    if len(first) < len(found):
        again = int(np.setdiff1d(np.arange(len(found)), first)[0])
        number, label = lines[again]
        raise DataError(f"{path}, line {number}: {what} {label!r} is there a second time; write each once")
    return found


def read_histories(path: str | os.PathLike[str], items: Vocab, **options: Any) -> Histories:
    """Read a file of interactions, in any form that `bunkbed train` reads, whose items are those of a run.

    Args:
        items: of the run.
        options: as `bunkbed.train.data.interactions.read_dataset`.

    Raises:
        DataError: as `read_dataset`; or no item of the file is known.
    """
    found = read_interactions(path, **options)
    index = items.encode(found.item_vocab.array.to_pylist())[found.items]
    known = index >= 0
    if not known.any():
        raise DataError(f"{path}: none of its {found.num_items:,} items is known to the run; were columns swapped?")
    having, users = np.unique(found.users[known], return_inverse=True)
    pairs = Interactions(users, index[known], Vocab(found.user_vocab.array.take(having)), items, found.source)
    return Histories(pairs, int((~known).sum()), found.num_users - len(having))


class Recommender:
    """A trained run, open for reading: its users and items by their labels. A context manager.

    `load` makes it; one thread uses it at a time. While a training goes on it stays at the commit that it opened.
    """

    def __init__(self, run: Run, config: TrainConfig, folder: Path) -> None:
        #: The open run, a reader.
        self.run = run
        self._config = config
        self._data = folder / DATA_NAME
        #: The labels of users and of items.
        self.users, self.items = load_vocabs(self._data)
        item = run.table("item")
        # Otherwise a pass over the items would leave only its last ones in RAM.
        self._keeps_items = 4 * item.dim * (item.num_rows or 0) <= run.budget.total_bytes // 2
        self._features = features_of_run(run)
        self._last_seen: tuple[int, Int64Array] | None = None

    @classmethod
    def load(
        cls, run: str | os.PathLike[str], *, ram: str | int | None = None, snapshot: str | None = None
    ) -> Recommender:
        """Open a run that `bunkbed train` wrote.

        Args:
            ram: RAM budget of the tables; None: the run's.
            snapshot: its name; None: the best one, otherwise the last commit.

        Raises:
            FileNotFoundError: no run, or no commit. DataError: the labels are damaged.
        """
        folder = Path(run)
        config = TrainConfig.of_run(read_config(folder)["train"])
        opened = open_trained(folder, ram or config.ram, snapshot)
        try:
            return cls(opened, config, folder)
        except BaseException:
            opened.close(commit=False)
            raise

    def recommend(
        self, user: Label, k: int = 10, *, include_seen: bool = False, items: Sequence[Label] | None = None
    ) -> list[tuple[Label, float]]:
        """Return the `k` items with the highest scores for a user, best first, each with its score.

        Args:
            user: as in the training file.
            include_seen: also recommend items that the user has in the training file.
            items: recommend only these.

        Raises:
            DataError: the user or an item is unknown; the message names the nearest labels. ValueError: `k` below 1.
        """
        index = self.users.index(user, what="user")
        allowed = None if items is None else np.unique(_indices(self.items, items, "item"))
        best = self.best_of(np.array([index]), k, include_seen=include_seen, items=allowed)
        found = best.items[0] >= 0
        return list(zip(self.items.decode(best.items[0, found]), best.scores[0, found].tolist(), strict=True))

    def best_of(
        self, users: Int64Array, k: int, *, include_seen: bool = False, items: Int64Array | None = None
    ) -> Best:
        """Return the best items of users as `recommend`, all by dense indices.

        Args:
            users: ``int64[N]``; duplicates are allowed.
            items: ``int64[M]``, ascending.
        """
        if not len(users):
            return Best(users, np.empty((0, k), np.int64), np.empty((0, k), np.float32))
        distinct, places = np.unique(users, return_inverse=True)
        if len(distinct) == 1 and items is None:  # without a pass over the training pairs
            user, touch = int(distinct[0]), self._keeps_items
            history = self._seen_by(user) if self._config.is_sequential else None
            exclude = None if include_seen else self._seen_by(user)
            found = recommend(
                self.run, self._config, user, k, exclude, history=history, touch=touch, features=self._features
            )
            groups = [Best(distinct, found[0][None], found[1][None])]
        else:
            groups = list(self._best(distinct, k, include_seen, items, None))
        best, scores = (np.concatenate([group[part] for group in groups]) for part in (1, 2))
        return Best(users, best[places], scores[places])

    def num_seen(self, user: Label) -> int:
        """Return how many items a user has in the training file."""
        return len(self._seen_by(self.users.index(user, what="user")))

    def recommend_many(
        self,
        k: int = 10,
        *,
        users: Int64Array | None = None,
        histories: Interactions | None = None,
        items: Int64Array | None = None,
        include_seen: bool = False,
        on_progress: Callable[[float], object] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield recommendations of many users: columns ``user``, ``rank`` from 1, ``item`` and ``score``.

        "All" are those with a training pair: of others the model knows nothing, unless users have features.

        Args:
            users: ``int64[N]`` distinct dense indices (`read_labels`), in whose order the rows come; None: all.
            histories: pairs of users that the run has not seen (`read_histories`): recommend to these, with rows that
                are trained for them alone (`bunkbed.train.evaluate.new_users`); a model of sequences trains nothing, it
                reads the pairs of a user in their order. Instead of `users`.
            items: ``int64[M]`` distinct dense indices; recommend only these. None: all.
            on_progress: called with the finished share of the work.

        Raises:
            ValueError: `k` below 1.
        """
        import pyarrow as pa

        allowed = None if items is None else np.sort(items)
        vocab = self.users
        if histories is not None:
            vocab, everyone = histories.user_vocab, np.arange(histories.num_users)
            found = self._best(everyone, k, include_seen, allowed, on_progress, histories)
        else:
            asked = self._trained_users() if users is None else users
            found = self._best(asked, k, include_seen, allowed, on_progress)
        for best in found:
            owners, places = np.nonzero(best.items >= 0)
            rows = best.items[owners, places]
            columns = {
                "user": vocab.take(best.users[owners]),
                "rank": arrow_of((places + 1).astype(np.int32)),
                "item": self.items.take(rows),
                "score": arrow_of(best.scores[owners, places]),
            }
            yield pa.record_batch(columns)

    def write(self, path: str | os.PathLike[str], k: int = 10, **options: Any) -> int:
        """Write `recommend_many` as Parquet, or as CSV where the name ends so; return the number of rows.

        The file appears in one step, when it is whole.

        Raises:
            FileExistsError: `path` is there. ValueError: it ends in neither .parquet nor .csv. As `recommend_many`.
        """
        target = Path(path)
        if target.suffix not in _SUFFIXES:
            raise ValueError(f"{target}: the name must end in {' or '.join(_SUFFIXES)}")
        if target.exists() or target.is_symlink():
            raise FileExistsError(
                errno.EEXIST, "exists and would be overwritten; give another name, or remove it", str(target)
            )
        made = target.with_name(f"{target.name}.tmp")
        try:
            rows = _write(made, target.suffix, self.recommend_many(k, **options))
            put_in_place(made, target)
        finally:
            made.unlink(missing_ok=True)
        return rows

    def close(self) -> None:
        """Close the run. Idempotent."""
        self.run.close(commit=False)

    def __enter__(self) -> Recommender:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _seen_by(self, user: int) -> Int64Array:
        """Return the items of a user in the training file; those of the last user are kept."""
        if self._last_seen is None or self._last_seen[0] != user:
            self._last_seen = user, seen_items(self._data, user)
        return self._last_seen[1]

    def _trained_users(self) -> Int64Array:
        if "user" in self._features:
            return np.arange(len(self.users))
        has = np.zeros(len(self.users), dtype=np.bool_)
        pairs, share = open_known_pairs(self._data)[0], self._config.valid_first
        left = len(pairs) if share is None else num_first(len(pairs), share)  # without the validation after a time
        for users, _ in pairs.batches():
            has[users[:left]] = True
            left = max(0, left - len(users))
        return np.flatnonzero(has)

    def _best(
        self,
        users: Int64Array,
        k: int,
        include_seen: bool,
        items: Int64Array | None,
        on_progress: Callable[[float], object] | None,
        histories: Interactions | None = None,
    ) -> Iterator[Best]:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        known: list[Interactions] = [histories] if histories is not None else [*open_known_pairs(self._data)]
        of_users = known_pairs(*known)
        if histories is None or self._config.is_sequential:
            touch = self._keeps_items
            scorer = scorer_of_run(self.run, self._config, known=of_users, touch=touch, features=self._features)
        else:
            trained: Interactions = open_known_pairs(self._data)[0]
            if self._config.sampling == "popularity":
                trained = trained.replace(trained.users, trained.items)  # in memory, to draw from
            scorer = scorer_of_new_users(self.run, self._config, histories, trained)
        num_items = self.run.table("item").num_rows
        assert num_items is not None
        return best_items(
            scorer,
            users,
            k,
            num_users=known[0].num_users,
            num_items=num_items,
            known=None if include_seen else of_users,
            items=items,
            on_progress=on_progress,
        )


def _indices(vocab: Vocab, labels: Sequence[Label], what: str) -> Int64Array:
    """Return the dense indices ``int64[N]`` of labels.

    Raises:
        DataError: a label is unknown; the message names the nearest labels.
    """
    found = vocab.encode(labels)
    for place in np.flatnonzero(found < 0)[:1].tolist():
        vocab.index(labels[place], what=what)  # raises
    return found


def _write(path: Path, suffix: str, batches: Iterable[pa.RecordBatch]) -> int:
    """Write batches as a new file; return the number of rows."""
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    rows, writer = 0, None
    with make_file(path) as file:
        for batch in batches:
            if writer is None and suffix == ".csv":
                writer = csv.CSVWriter(file, batch.schema)
            elif writer is None:
                writer = pq.ParquetWriter(file, batch.schema, compression="zstd")
            writer.write_batch(batch)
            rows += len(batch)
        if writer is not None:
            writer.close()
    return rows
