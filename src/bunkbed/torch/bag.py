"""`EmbeddingBag`: `torch.nn.EmbeddingBag` over a table."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from bunkbed import _native
from bunkbed.adapters.bag_gradients import BagGradients, FloatArray, IntArray, only_kept
from bunkbed.adapters.tables import Exist, TableOptions
from bunkbed.core.budget import Budget
from bunkbed.core.init import Initializer
from bunkbed.core.optim import Optimizer as UpdateRule
from bunkbed.core.retention import Retention
from bunkbed.table.table import POOLINGS, Table
from bunkbed.torch.base.ranges import ranged
from bunkbed.torch.base.types import Device
from bunkbed.torch.layer import (
    TableLayer,
    as_leaf,
    id_array,
    outside_graph,
    pretrained_shape,
    refuse_transforms,
    require_live,
)
from bunkbed.torch.lookups import DeviceRequest, Lookup, look_up_on_device
from bunkbed.torch.pending import Pending
from bunkbed.torch.ranks.sharing import Sharing


class _Bags(BagGradients):
    """One batch of bags as the table expects it, without the padding ids. Owns `offsets` and `weights`."""

    __slots__ = ("kept",)

    padding = None  # `ids` has no padding ids

    def __init__(
        self, ids: IntArray, offsets: IntArray, weights: FloatArray | None, kept: Tensor, is_mean: bool
    ) -> None:
        self.kept = kept  # bool[ids of the input]: whether `ids` has the id; None if it has all
        if kept is not None:
            ids, offsets, weights = only_kept(kept, ids, offsets, weights)
        super().__init__(ids, offsets, weights, is_mean)

    @property
    def bags(self) -> _Bags:
        """The bags of the lookup: this object."""
        return self

    def borrows(self, ids: Tensor) -> bool:
        """Return whether `self.ids` shares memory with the tensor `ids` of the caller."""
        return self.kept is None and ids.dtype is torch.int64 and ids.is_cpu and ids.is_contiguous()

    def own_ids(self) -> None:
        """Copy ids that share the caller's memory, where a change before backward would not be detected."""
        if self.kept is None:
            self.ids = self.ids.copy()

    def look_up(self, layer: TableLayer, *, keep_rows: bool, touch: bool | None = None) -> tuple[Tensor, None, Tensor]:
        """See `bunkbed.torch.lookups.Request`; `touch` is for a lookup without gradients."""
        table, mode = layer._pending.table, "mean" if self.is_mean else "sum"
        touch = layer.training if touch is None else touch
        rank_rows = layer._pending.rank_rows
        if keep_rows and rank_rows is not None:  # one exchange among the ranks, not two
            found = table.lookup(self.ids, touch=touch)
            pooled = _native.empty_rows(self.offsets.size, table.dim)
            rank_rows.pool(found.copy(), self.offsets, POOLINGS.index(mode), self.weights, pooled)
            return layer._output(torch.from_numpy(pooled)), None, found
        rows = table.lookup(self.ids, touch=False) if keep_rows else None
        pooled = table.lookup_bags(self.ids, self.offsets, pooling=mode, weights=self.weights, touch=touch)
        return layer._output(torch.from_numpy(pooled)), None, rows

    def weights_grad(self, pending: Pending, rows: FloatArray, grads: FloatArray) -> Tensor:
        """See `bunkbed.torch.lookups.Request`."""
        dots = np.empty(self.ids.size, np.float32)
        _native.bag_dots(rows, self.offsets, grads, dots)
        return torch.from_numpy(dots)

    def wanted_weights(self, weights: Tensor) -> Tensor:
        """Return per_sample_weights, one for each of `ids`, connected to autograd; None if they need no gradient."""
        if weights is None or not weights.requires_grad:
            return None
        flat = weights.reshape(-1)
        return flat if self.kept is None else flat[torch.from_numpy(self.kept).to(flat.device)]


class EmbeddingBag(TableLayer):
    """`torch.nn.EmbeddingBag` whose rows are in a table that may be larger than RAM.

    See `Embedding` for the anchor, ownership, durability and the keywords that torch does not have; the others
    are those of `torch.nn.EmbeddingBag`. Sum and mean skip padding ids; an empty bag is zeros.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as in
            `Embedding`.
        mode: ``"mean"`` or ``"sum"``; ``"max"`` is a ValueError.
        include_last_offset: whether `offsets` of ``forward`` ends with the number of ids.

    >>> import bunkbed as bb
    >>> bag = EmbeddingBag(10, 2, mode="sum", init=bb.Zeros())
    >>> bag(torch.tensor([1, 2, 4, 5]), torch.tensor([0, 3])).detach()
    tensor([[0., 0.],
            [0., 0.]])
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        path: str | PathLike[str] | None = None,
        ram: float | str | Budget | None = None,
        optimizer: UpdateRule | None = None,
        init: Initializer | None = None,
        seed: int | None = None,
        dtype: str | torch.dtype | None = None,
        durability: Literal["durable", "scratch"] | None = None,
        disk: float | str | None = None,
        exist: Exist = "open",
        retention: Retention | None = None,
        table: Table | None = None,
        device: Device = None,
        device_cache: int | str | Budget | None = None,
        keep_checkpoints: int | None = None,
        placement: Literal["sharded", "local"] = "sharded",
        shards: int | None = None,
        process_group: Any = None,
        gradients: Literal["mean", "sum"] = "mean",
    ) -> None:
        if mode == "max":
            raise ValueError(
                "EmbeddingBag: mode='max' is not supported; use mode='sum' or 'mean', or take the maximum of an "
                "Embedding's output: Embedding(...)(ids).amax(dim=1)"
            )
        if mode not in ("sum", "mean"):
            raise ValueError(f"EmbeddingBag: mode must be 'sum' or 'mean', got {mode!r}")
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            scale_grad_by_freq,
            options=TableOptions(
                path, ram, disk, optimizer, init, seed, durability=durability, exist=exist, retention=retention
            ),
            dtype=dtype,
            table=table,
            device=device,
            device_cache=device_cache,
            keep_checkpoints=keep_checkpoints,
            sharing=Sharing(placement, shards, process_group, gradients),
        )
        self.max_norm = None
        self.norm_type = norm_type
        self.scale_grad_by_freq = False
        self.mode = mode
        self.sparse = sparse
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **ours: Any,
    ) -> Self:
        """Return a layer on a new table with the rows `embeddings`; see `Embedding.from_pretrained`."""
        rows, dim = pretrained_shape(cls.__name__, embeddings, ours)
        ours.setdefault("dtype", embeddings.dtype)
        layer = cls(
            rows,
            dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
            **ours,
        )
        return layer._take_pretrained(embeddings, freeze=freeze)

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return pooled rows, [B, embedding_dim].

        Args:
            input: int64 or int32[N] ids of all bags, one after another; or [B, L], B bags of L ids without `offsets`.
            offsets: int64 or int32[B], the start of each bag (first 0, never decreasing); [B + 1] with
                ``include_last_offset``.
            per_sample_weights: float[...] of `input`'s shape, with gradient; for ``mode="sum"`` only.

        Raises:
            TypeError, ValueError: a wrong dtype, shape or offset.
            IndexError: an id outside the table.
        """
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            require_live(self)
            return outside_graph(self, input, offsets, per_sample_weights)
        if isinstance(input, torch.fx.Proxy):
            return as_leaf(self, input, offsets, per_sample_weights)
        return ranged("lookup", self._pending.name, self._pooled, input, offsets, per_sample_weights)

    def _pooled(self, input: Tensor, offsets: Tensor, per_sample_weights: Tensor) -> torch.Tensor:
        self._pending.require_unwritten()
        bags = self.bags_of(input, offsets, per_sample_weights)
        anchor = self._parameters["anchor"]
        grad = torch.is_grad_enabled()
        touch = grad and self.training
        weights = bags.wanted_weights(per_sample_weights) if grad else None
        if self._pending.tier is not None:
            self._pending.require_anchor(anchor)
            bags.own_ids()
            return look_up_on_device(self, DeviceRequest(bags.ids, bags=bags), weights, touch=touch)
        if not grad or not (anchor.requires_grad or weights is not None):
            return bags.look_up(self, keep_rows=False, touch=touch)[0]
        self._pending.require_anchor(anchor)
        if torch._C._are_functorch_transforms_active():
            refuse_transforms(self)
        is_borrowed = bags.borrows(input)
        if not is_borrowed:
            bags.own_ids()
        return Lookup.apply(anchor, weights, input if is_borrowed else None, self, bags)

    def looked_up(self, *arguments: Tensor) -> IntArray:
        return self.bags_of(*arguments).ids

    # Internal: for `EmbeddingCollection`, too.
    def bags_of(self, input: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> _Bags:
        """Return the bags of the arguments of ``forward``, checked."""
        ids = id_array(input)
        if weights is not None:
            if self.mode != "sum":
                raise ValueError(f"per_sample_weights needs mode='sum', but this layer has mode={self.mode!r}")
            if weights.shape != input.shape:
                raise ValueError(
                    f"per_sample_weights must have input's shape {list(input.shape)}, got {list(weights.shape)}"
                )
            if weights.dtype is not self.anchor.dtype:
                raise TypeError(
                    f"per_sample_weights must have the layer's dtype, {self.anchor.dtype}, got {weights.dtype}"
                )
            # A copy: the caller may change the weights before backward.
            weights = weights.detach().reshape(-1).to("cpu", torch.float32, copy=True).contiguous().numpy()
        if ids.ndim == 2:
            if offsets is not None:
                raise ValueError(f"offsets must be None for 2-dimensional input, got {_shape(offsets)}")
            starts = np.arange(ids.shape[0], dtype=np.int64) * ids.shape[1]
        elif ids.ndim == 1:
            if offsets is None:
                raise ValueError("offsets must be given for 1-dimensional input, got None")
            starts = id_array(offsets, "offsets")
            if starts.ndim != 1:
                raise ValueError(f"offsets must be 1-dimensional, got {_shape(offsets)}")
            starts = self._check_offsets(starts, ids.size)
        else:
            raise ValueError(f"input must be 1- or 2-dimensional, got {_shape(input)}")
        ids = ids.reshape(-1)
        kept = None if self.padding_idx is None else ids != self.padding_idx
        return _Bags(ids, starts, weights, None if kept is None or kept.all() else kept, self.mode == "mean")

    def _check_offsets(self, offsets: IntArray, num_ids: int) -> IntArray:
        """Return int64[B] starts of the bags."""
        if self.include_last_offset:
            if offsets.size == 0:
                raise ValueError("offsets must end with the number of ids with include_last_offset=True, got no offset")
            bounds = offsets.copy()
        else:
            bounds = np.append(offsets, num_ids if offsets.size else 0)
        place = _native.first_bad_offset(bounds, num_ids)
        if place < 0:
            if bounds.size and bounds[-1] < num_ids:
                raise ValueError(
                    f"with include_last_offset=True offsets must end with the number of ids, {num_ids}, got "
                    f"{bounds[-1]}; torch has the ids after it in the last bag or in none, by mode and padding_idx"
                )
            return bounds[:-1]
        if bounds[0] != 0:
            raise ValueError(f"offsets must start with 0, got {bounds[0]}")
        if bounds[-1] > num_ids:
            raise ValueError(f"offsets must not pass the {num_ids} ids, got {bounds[-1]} at position {bounds.size - 1}")
        place = int(np.argmax(np.diff(bounds) < 0))
        raise ValueError(
            f"offsets must not decrease nor pass the {num_ids} ids, got {bounds[place]} at position {place}, "
            f"then {bounds[place + 1]}"
        )

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{padding}{self._table_repr()}"


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
