"""`Embedding`: `torch.nn.Embedding` over a table."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bunkbed.adapters.tables import Exist, TableOptions
from bunkbed.core.budget import Budget
from bunkbed.core.init import Initializer
from bunkbed.core.optim import Optimizer as UpdateRule
from bunkbed.core.retention import Retention
from bunkbed.table.table import Table
from bunkbed.torch.base.gradients import grad_array
from bunkbed.torch.base.ranges import is_profiling, ranged
from bunkbed.torch.base.types import Context, Device
from bunkbed.torch.layer import (
    TableLayer,
    as_leaf,
    id_array,
    outside_graph,
    pretrained_shape,
    refuse_transforms,
    require_live,
    values_of,
)
from bunkbed.torch.lookups import DeviceRequest, look_up_on_device
from bunkbed.torch.pending import alive
from bunkbed.torch.ranks.sharing import Sharing

#: Up to this many ids, copying repeated rows is cheaper than deduplicating the ids in forward.
FEW_IDS = 256


class _Lookup(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Lookup of rows; backward gives their gradients to `Pending`. The anchor is its differentiable input."""

    @staticmethod
    def forward(ctx: Context, anchor: Tensor, ids: Tensor, layer: Embedding) -> Tensor:
        pending = layer._pending
        if anchor is not pending.anchor:
            pending.require_anchor(anchor)
        if isinstance(ids, torch.Tensor) and ids.dtype is torch.int64 and ids.is_cpu:
            ctx.save_for_backward(ids)  # the caller's memory: torch detects a change before backward
            rows = values_of(ids)
        else:
            rows = ctx.rows = id_array(ids)
        ctx.pending = pending.ref
        ctx.order = pending.next_place()
        ctx.padding = layer.padding_idx
        if rows.size <= FEW_IDS or pending.rank_rows is not None:
            ctx.batch = None  # backward makes it, or the rows' owners do
            return layer._look_up(rows, touch=layer.training)
        # The ids are deduplicated once for this lookup, the sums of its gradients and the step.
        ctx.batch = pending.table.batch(rows)
        values = pending.table.lookup_batch(ctx.batch, rows.size, touch=layer.training)
        return layer._output(torch.from_numpy(values.reshape(*rows.shape, layer.embedding_dim)))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        pending = alive(ctx.pending)
        pending.require_first_order()
        saved = ctx.saved_tensors
        rows = saved[0].numpy() if saved else ctx.rows
        pending.hold(ctx.order, rows.reshape(-1), grad_array(grad, pending.table.dim), ctx.padding, batch=ctx.batch)
        return pending.no_change(), None, None


#: `_Lookup.apply` without its support of torch.func, which takes a tenth of a small lookup's time.
_apply = super(torch.autograd.Function, _Lookup).apply


class Embedding(TableLayer):
    """`torch.nn.Embedding` whose rows are in a table that may be larger than RAM.

    The constructor, ``forward`` and `from_pretrained` take the arguments of `torch.nn.Embedding`; additional arguments
    are keyword-only. Training needs a `bunkbed.torch.Optimizer`.

    It owns one `Parameter` with one element, ``anchor``, which represents the table where torch iterates over
    parameters. Output has the anchor's device and dtype: 16-bit rows widen to float32, and ``model.bfloat16()`` makes
    outputs bfloat16 and does not change the rows. ``anchor.requires_grad = False`` freezes the table. ``anchor.grad``
    is the norm of the pending row gradients; scaling or dropping it scales or drops these gradients.

    The table closes with its last layer. ``state_dict()`` and ``table.commit()`` make rows durable; later changes are
    lost, as those of a module that was not saved. A ``state_dict()`` holds a reference to its epoch, and loading it
    rewinds the table to that epoch. A table without `path` ends with its process. Not thread-safe.

    Args:
        num_embeddings: ids are in ``[0, num_embeddings)``; None: ids are any non-negative int64.
        embedding_dim: length of a row.
        padding_idx: its row gets no gradient and is zeros unless set otherwise; negative counts from the end.
        max_norm, scale_grad_by_freq: must keep their defaults; other values are a ValueError.
        norm_type: belongs to `max_norm`, unused.
        sparse: accepted and unused: gradients are always per row.
        path: folder of the table, created or opened; None: the table is in RAM only.
        ram: bytes, ``"2GiB"`` or a `bunkbed.Budget`.
        exist: where a table is at `path`: ``"open"`` goes on with its rows (a warning of the log says so), ``"error"``
            raises, ``"new"`` removes it with its kept commits; layers that have it open raise `TableClosedError`.
        optimizer: the rows' update rule. None follows the parameter group of the dense optimizer that `Optimizer` is
            given (rule, rate, betas, weight decay); without one it is ``bunkbed.Adam(lr=1e-3)`` for a new table, its
            own for a stored one.
        init: None is torch's N(0, 1) for a new table.
        seed: of `init`; None draws one from torch's generator.
        dtype: how rows are stored: ``"float32"`` (default), ``"bfloat16"``, ``"float16"``, or the torch dtype.
        durability: None is ``"durable"`` for a new table. ``"scratch"``: the table is deleted when it closes
            (`bunkbed.create`): every run begins with untouched rows, and ``state_dict()`` is an error.
        disk: most bytes the table's files may take, as ``"20GiB"`` (`bunkbed.create`); None: no limit. The epochs that
            ``state_dict()`` keeps count.
        retention: the rules of a table of any id (``num_embeddings=None``) by which ``table.sweep()`` removes rows, as
            `bunkbed.Retention`; None: a stored table has its own, and a new one keeps every row.
        table: use this table (a `bunkbed.Table`, or another layer's ``.table``) instead of opening one.
        device: of the anchor, and so of the output.
        device_cache: device memory for hot rows, as ``"2GiB"``, or a `bunkbed.Budget` of device memory that several
            tables share. The rows of a batch are trained on the anchor's device, with their optimizer state, until they
            are evicted to RAM. It must hold the rows of the largest batch. 0: rows are trained in RAM; each batch
            copies its rows to the device once, ahead of time under `lookahead`. None: every lookup copies its output
            to the device. Every size gives the same rows.
        keep_checkpoints: how many commits kept by ``state_dict()`` stay loadable; None: all, so that every file loads.
            A warning says when one is dropped, or when they take much more than the rows. The ``state_dict()`` of a
            table in RAM only has its rows (up to 1 GiB), and needs no kept commit.
        placement: where torch.distributed runs several processes: ``"sharded"``: they train one table, whose rows are
            divided among them by a hash of the id, and `ram` and `disk` are those of the host. Every process makes the
            layer after ``init_process_group``, and looks up, steps and loads as often as the others; any one alone may
            save. ``"local"``: this process has a table of its own.
        shards: number of shards of a table with a path; None: one for each process, and one process has a table without
            shards. A stored table must have as many; `bunkbed.reshard` changes it.
        process_group: the processes that share the table; None: all.
        gradients: ``"mean"``: each process's gradients count 1 / W, as under `DistributedDataParallel`; ``"sum"``: 1.

    Raises:
        ValueError: an argument out of range, unsupported, or contradicting the stored table (names both values).
        RuntimeError: a table that this process alone has opened is given in one of several processes, or
            torch.distributed is not initialised in one of several processes.

    >>> emb = Embedding(1000, 4, padding_idx=0, seed=1)
    >>> emb(torch.tensor([[0, 7, 7]])).shape
    torch.Size([1, 3, 4])
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
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
        self.sparse = sparse

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **ours: Any,
    ) -> Self:
        """Return a layer on a new table with float[num_embeddings, dim] `embeddings`; frozen by default.

        Rows are stored, and outputs are, in the dtype of `embeddings` (float32, bfloat16 or float16).

        `ours` are the keywords that torch does not have (``path``, ``ram``, ``optimizer``, ...).

        Raises:
            ValueError: `embeddings` is not 2-dimensional. TypeError: its dtype is not float32, bfloat16 or float16.
            FileExistsError: there is a table at `path` already; ``exist="new"`` replaces it.

        >>> Embedding.from_pretrained(torch.eye(3))(torch.tensor([2]))
        tensor([[0., 0., 1.]])
        """
        rows, dim = pretrained_shape(cls.__name__, embeddings, ours)
        ours.setdefault("dtype", embeddings.dtype)
        layer = cls(rows, dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, **ours)
        return layer._take_pretrained(embeddings, freeze=freeze)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., embedding_dim] rows of int64 or int32[...] ids, as a copy; empty input gives empty output.

        Raises:
            TypeError: `input` is not an int64 or int32 tensor.
            IndexError: an id outside the table; the message has the id and its position.
        """
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            require_live(self)
            return outside_graph(self, input)
        if type(input) is not torch.Tensor:
            if isinstance(input, torch.fx.Proxy):
                return as_leaf(self, input)
            if isinstance(input, torch.Tensor) and input.layout is torch.jagged:
                return torch.nested.nested_tensor_from_jagged(self(input.values()), input.offsets())
        return ranged("lookup", self._pending.name, self._rows, input) if is_profiling() else self._rows(input)

    def _rows(self, input: torch.Tensor) -> torch.Tensor:
        grad = torch.is_grad_enabled()
        anchor = self._parameters["anchor"]
        pending = self._pending
        pending.require_unwritten()
        if pending.tier is not None:
            pending.require_anchor(anchor)
            touch = grad and self.training
            ids = id_array(input)
            request = DeviceRequest(ids.reshape(-1).copy(), self.padding_idx)  # the caller may change its ids
            values = look_up_on_device(self, request, None, touch=touch)
            return values.reshape(*ids.shape, self.embedding_dim)
        if grad and anchor.requires_grad:
            if torch._C._are_functorch_transforms_active():
                refuse_transforms(self)
            return _apply(anchor, input, self)
        rows = id_array(input)
        values = self._look_up(rows, touch=grad and self.training)
        if self._zero_padding:
            values[torch.as_tensor(rows == self.padding_idx)] = 0.0
        return values

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{self._table_repr()}"
