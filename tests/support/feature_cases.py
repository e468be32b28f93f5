"""Interactions of users who like items of one kind, and files of features, for tests of side features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bunkbed.train.data.interactions import Dataset, Interactions
from bunkbed.train.data.store import load_dataset, save_dataset
from bunkbed.train.data.vocab import Vocab
from bunkbed.train.features.features import load_features, read_names
from bunkbed.train.features.reading import SideFile, parse_kinds, store_features

USERS, ITEMS, COLD = 60, 40, 8
KINDS = 4


def kind_of(item: int) -> int:
    return item % KINDS


def interactions(seed: int = 0) -> Dataset:
    """Users like items of one kind; the last items have no pair."""
    rng = np.random.default_rng(seed)
    pairs = [(user, item) for user in range(USERS) for item in rng.permutation(ITEMS - COLD) if liked(rng, user, item)]
    users, items = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    return Dataset(Interactions(users, items, Vocab.of(range(USERS)), Vocab.of(range(ITEMS - COLD)), source="pairs"))


def liked(rng: Any, user: int, item: int) -> bool:
    return bool(rng.random() < (0.8 if kind_of(user) == kind_of(item) else 0.05))


def item_file(folder: Path) -> Path:
    path = folder / "items.csv"
    rows = [f"{item},k{kind_of(item)},{item % 3},{'x|y' if item % 2 else 'y'}" for item in range(ITEMS)]
    path.write_text("item,kind,size,tags\n" + "\n".join(rows) + "\n")
    return path


def user_file(folder: Path) -> Path:
    path = folder / "users.csv"
    path.write_text("user,kind\n" + "".join(f"{user},u{kind_of(user)}\n" for user in range(USERS + 2)))
    return path


def matrix(folder: Path, side: str) -> tuple[np.ndarray[Any, Any], list[tuple[str, str]]]:
    """Return the features of a folder as a dense matrix, and their names."""
    features = load_features(folder)[side]
    found = np.zeros((len(features), features.num_features))
    for one in range(len(features)):
        bags = features.bags(np.array([one]))
        np.add.at(found[one], bags.features, bags.weights)
    return found, read_names(folder, side)


def every_pair(data: Path) -> Callable[[], Interactions]:
    return lambda: load_dataset(data).train


def small(folder: Path, items: list[Any] | None = None) -> Path:
    """A dataset of three items, 1, 2 and 3, and two users."""
    vocab = Vocab.of([1, 2, 3] if items is None else items)
    pairs = Interactions(np.array([0, 0, 1]), np.array([0, 1, 2]), Vocab.of(["a", "b"]), vocab)
    save_dataset(folder / "data", Dataset(pairs))
    return folder / "data"


def read(folder: Path, text: str | bytes, kinds: str = "", side: str = "item", **options: Any) -> dict[str, Any]:
    path = folder / "features.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    data = folder / "data" if (folder / "data").exists() else small(folder)
    return store_features(data, {side: SideFile(path, **options)}, parse_kinds(kinds), every_pair(data))
