"""Vectors of ids with side features, in training and in ranking: own row plus weighted sum of the rows of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bunkbed.torch import Embedding
from bunkbed.train.data.vocab import DataError
from bunkbed.train.features.features import ABOUT_NAME, SIDES, Bags, Features, load_features, table_of
from bunkbed.train.settings.run_config import DATA_NAME

if TYPE_CHECKING:
    from bunkbed.run.run import Run

__all__ = ["FeaturedLayer", "FeaturedRows", "Rows", "features_of_run", "rows_of_run"]

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

# Ids whose features are summed together, to limit memory.
_CHUNK = 1 << 14


class Rows(Protocol):
    """Protocol of the only table method that ranking calls."""

    def lookup(self, ids: Int64Array, *, touch: bool = True) -> Float32Array: ...


class FeaturedLayer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Layer that returns the vectors of ids with features, for training.

    The rows of features are looked up one by one and summed here: the sums of an `EmbeddingBag` have other bits with a
    device cache.

    Args:
        rows: of the ids.
        values: of the features.
    """

    def __init__(self, rows: Embedding, values: Embedding, features: Features) -> None:
        super().__init__()
        self.rows = rows
        self.values = values
        self._features = features

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of ids whose own rows count: ``int64[...]`` -> ``float32[..., dim]``."""
        bags = self._features.bags(ids.numpy().reshape(-1))
        rows, values = self.rows(ids), self.values(torch.from_numpy(bags.features))
        return rows + _sums(torch.arange(len(values), device=values.device), values, bags).reshape(rows.shape)

    def wanted(self, ids: Tensor) -> dict[nn.Module, Tensor]:
        """Return the ids that `forward` looks up in each table."""
        features = self._features.bags(ids.numpy().reshape(-1)).features
        return {self.rows: ids, self.values: torch.from_numpy(features)}

    def for_ranking(self) -> Rows:
        """Return the present vectors."""
        return FeaturedRows(self.rows.table, self.values.table, self._features)


class FeaturedRows:
    """The vectors of ids with features, for ranking; each has the same bits alone or with others.

    Owns nothing; as thread-safe as its tables.

    Args:
        rows: of the ids. Those that do not count (`Features.has_row`) are left out.
        values: of the features.
    """

    def __init__(self, rows: Rows, values: Rows, features: Features) -> None:
        self._rows = rows
        self._values = values
        self._features = features

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is untyped here
    def lookup(self, ids: Int64Array, *, touch: bool = True) -> Float32Array:
        """Return vectors: ``int64[...]`` -> ``float32[..., dim]``."""
        found = self._rows.lookup(ids, touch=touch)
        flat, vectors = ids.reshape(-1), found.reshape(-1, found.shape[-1])
        vectors[~self._features.has_row[flat]] = 0
        for first in range(0, len(flat), _CHUNK):
            bags = self._features.bags(flat[first : first + _CHUNK])
            if len(bags.features):
                distinct, at = np.unique(bags.features, return_inverse=True)
                values = torch.from_numpy(self._values.lookup(distinct, touch=touch))
                vectors[first : first + _CHUNK] += _sums(torch.from_numpy(at), values, bags).numpy()
        return found


def _sums(places: Tensor, values: Tensor, bags: Bags) -> Tensor:
    """Return the weighted sum of each bag: ``float32[N, dim]``.

    Args:
        places: ``int64[M]``, the place in `values` of the row of each feature of `bags`.
    """
    starts, weights = (torch.from_numpy(part).to(values.device) for part in (bags.starts, bags.weights))
    weights = weights.to(values.dtype)
    return nn.functional.embedding_bag(places, values, starts, mode="sum", per_sample_weights=weights)


def features_of_run(run: Run) -> dict[str, Features]:
    """Return the features of a run by side.

    Raises:
        DataError: a file is damaged or missing.
    """
    wanted = [side for side in SIDES if table_of(side) in run.table_names]
    found = load_features(run.path / DATA_NAME) if wanted else {}
    for side in wanted:
        if side not in found:
            raise DataError(
                f"{run.path / DATA_NAME / ABOUT_NAME}: is missing, or without features of {side}s, which the run has; "
                "put a copy of it back"
            )
    return found


def rows_of_run(run: Run, side: str, features: Mapping[str, Features]) -> Rows:
    """Return the vectors of ``"user"`` or ``"item"`` at the commit at which a run is open."""
    table: Rows = run.table(side)
    return FeaturedRows(table, run.table(table_of(side)), features[side]) if side in features else table
