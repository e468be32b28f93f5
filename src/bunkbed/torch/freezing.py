"""`freeze`: a copy of a model in plain torch, without tables, which traces, exports and runs anywhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from bunkbed.core.arguments import as_ids
from bunkbed.core.budget import parse_bytes
from bunkbed.torch.bag import EmbeddingBag
from bunkbed.torch.collection import EmbeddingCollection, Inputs
from bunkbed.torch.embedding import Embedding
from bunkbed.torch.layer import TableLayer

#: Which rows of a table `freeze` copies: of every table, or by layer.
Wanted: TypeAlias = ArrayLike | Mapping[TableLayer, ArrayLike]

_CHUNK = 65_536


class FrozenEmbedding(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Some rows of a table, by id. An id without a row gives NaN, as an exported graph cannot raise.

    Args:
        ids: int64[N], ascending.
        rows: [N + 1, dim], the last one NaN.
    """

    def __init__(self, ids: Tensor, rows: nn.Parameter) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        self.num_ids = len(ids)  # in a traced graph the shape would be a tensor
        self.rows = rows

    def places(self, input: Tensor) -> Tensor:
        """Return the places of ids in `rows`."""
        last = self.num_ids
        if last == 0:
            return torch.zeros_like(input, dtype=torch.int64)
        input = input.to(torch.int64)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            places = self._search(input)
        else:
            places = torch.searchsorted(self.ids, input)
        places = places.clamp(max=last - 1)
        return torch.where(self.ids[places] == input, places, last)

    def _search(self, input: Tensor) -> Tensor:
        """Return what `torch.searchsorted` does, of operations that ONNX has: a binary search, its steps unrolled."""
        last = self.num_ids
        places = torch.zeros_like(input)
        for bit in reversed(range(last.bit_length())):
            next_places = places + (1 << bit)
            is_below = self.ids[(next_places - 1).clamp(max=last - 1)] < input
            places = torch.where(is_below & (next_places <= last), next_places, places)
        return places

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., dim] rows of int64[...] ids."""
        return nn.functional.embedding(self.places(input), self.rows)


class FrozenEmbeddingBag(FrozenEmbedding):
    """Bags of some rows of a table; the arguments are those of `torch.nn.EmbeddingBag`."""

    def __init__(
        self, ids: Tensor, rows: nn.Parameter, mode: str, padding_idx: int | None, *, include_last_offset: bool
    ) -> None:
        super().__init__(ids, rows)
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.padding_idx: int | None = None
        if padding_idx is not None:
            self.padding_idx = int(torch.searchsorted(ids, padding_idx))

    def forward(self, input: Tensor, offsets: Tensor = None, per_sample_weights: Tensor = None) -> Tensor:
        """Return pooled rows, [B, dim]."""
        return nn.functional.embedding_bag(
            self.places(input),
            self.rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )


class FrozenCollection(nn.ModuleDict):  # type: ignore[misc]  # torch is untyped here
    """Frozen layers by name, called as `EmbeddingCollection` is."""

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return {name: rows}."""
        return {
            name: layer(*inputs[name]) if isinstance(inputs[name], tuple) else layer(inputs[name])
            for name, layer in self.items()
        }


def freeze(model: nn.Module, rows: Wanted | None = None, max_bytes: float | str | None = None) -> nn.Module:
    """Return a copy of a model in which plain torch modules hold the rows of its tables.

    It may be traced, exported (`torch.export`, ONNX) and loaded where Bunkbed is not installed, and does not follow the
    tables. Its rows have the layers' dtype and device, and no gradients; other weights are copied. Outputs of
    `Embedding` have the same bits as those of the model; pooled rows may differ in the last place.

    Args:
        model: a module; its layers of `bunkbed.torch` become `torch.nn.Embedding` and `torch.nn.EmbeddingBag`.
        rows: int64[N] ids of the rows that are copied, of every table, or {layer: ids}; other ids then give NaN. None:
            all rows; of a layer with ``num_embeddings=None`` its stored rows.
        max_bytes: most bytes that the rows and their ids may take, of all tables together; default ``"1GiB"``.

    Raises:
        ValueError: the rows take more; says how much. IndexError: an id outside a table.

    >>> from bunkbed.torch import Embedding
    >>> model = torch.nn.Sequential(Embedding(10, 4, seed=1), torch.nn.Linear(4, 1))
    >>> frozen = freeze(model)
    >>> torch.equal(frozen(torch.tensor([3, 7])), model(torch.tensor([3, 7])))
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze: model must be a torch.nn.Module, got {type(model).__name__}")
    layers = [layer for layer in model.modules() if isinstance(layer, TableLayer)]
    ids = {layer: _ids_of(layer, rows) for layer in layers}
    by_table: dict[tuple[int, int], tuple[TableLayer, NDArray[np.int64] | None]] = {}
    for layer in layers:
        key = _key(layer, rows)
        by_table.setdefault(key, (layer, ids[layer]))
    _require_room([_bytes_of(*found) for found in by_table.values()], max_bytes)
    made = {key: _copied(*found) for key, found in by_table.items()}
    memo: dict[int, nn.Module] = {id(layer): _frozen(layer, *made[_key(layer, rows)]) for layer in layers}
    for module in model.modules():
        if isinstance(module, EmbeddingCollection):
            frozen = FrozenCollection({name: memo[id(layer)] for name, layer in module.items()})
            memo[id(module)] = frozen.train(module.training)
    return copy.deepcopy(model, memo)


def _key(layer: TableLayer, rows: Wanted | None) -> tuple[int, int]:
    """Return what is equal for layers that share their copied rows."""
    return id(layer.table), id(layer) if isinstance(rows, Mapping) and layer in rows else 0


def _ids_of(layer: TableLayer, rows: Wanted | None) -> NDArray[np.int64] | None:
    """Return the ids of the rows to copy, ascending; None for all."""
    wanted = rows.get(layer) if isinstance(rows, Mapping) else rows
    if wanted is None:
        if layer.num_embeddings is not None:
            return None
        found = [ids for ids, _ in layer.table.scan()]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))
    if isinstance(wanted, torch.Tensor):
        wanted = wanted.cpu().numpy()
    flat = as_ids(wanted, table=f"freeze: table {layer.table.name!r}").reshape(-1)
    padding = [] if layer.padding_idx is None else [layer.padding_idx]
    return np.unique(np.concatenate([flat, np.array(padding, np.int64)]))


def _bytes_of(layer: TableLayer, ids: NDArray[np.int64] | None) -> int:
    width: int = layer.embedding_dim * layer.anchor.element_size()
    return _count(layer, ids) * width if ids is None else (len(ids) + 1) * width + 8 * len(ids)


def _count(layer: TableLayer, ids: NDArray[np.int64] | None) -> int:
    if ids is not None:
        return len(ids)
    assert layer.num_embeddings is not None
    return layer.num_embeddings


def _require_room(needs: list[int], max_bytes: float | str | None) -> None:
    most = 1 << 30 if max_bytes is None else parse_bytes(max_bytes)
    if sum(needs) > most:
        raise ValueError(
            f"freeze: the rows take {sum(needs):,} bytes, and max_bytes allows {most:,}; give max_bytes={sum(needs)}, "
            "or rows= with the ids that are needed"
        )


def _copied(layer: TableLayer, ids: NDArray[np.int64] | None) -> tuple[Tensor, nn.Parameter]:
    """Return the ids, None for all, and the rows, followed by one of NaN where there are ids."""
    count = _count(layer, ids)
    like = layer.anchor
    rows = torch.full((count + (ids is not None), layer.embedding_dim), torch.nan, dtype=like.dtype, device=like.device)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        chunk = np.arange(start, stop) if ids is None else ids[start:stop]
        rows[start:stop] = torch.from_numpy(layer.table.get(chunk))
    parameter = nn.Parameter(rows, requires_grad=False)
    return None if ids is None else torch.from_numpy(ids).to(like.device), parameter


def _frozen(layer: TableLayer, ids: Tensor, rows: nn.Parameter) -> nn.Module:
    """Return the plain module in place of a layer."""
    made: nn.Module
    if isinstance(layer, EmbeddingBag):
        mode, padding, last = layer.mode, layer.padding_idx, layer.include_last_offset
        if ids is None:
            made = nn.EmbeddingBag(
                *rows.shape, mode=mode, _weight=rows.data, include_last_offset=last, padding_idx=padding
            )
            made.weight = rows
        else:
            made = FrozenEmbeddingBag(ids, rows, mode, padding, include_last_offset=last)
    elif ids is None:
        assert isinstance(layer, Embedding)
        made = nn.Embedding(*rows.shape, padding_idx=layer.padding_idx, _weight=rows.data)
        made.weight = rows
    else:
        made = FrozenEmbedding(ids, rows)
    return made.train(layer.training)
