"""Keras on torch: lookups, gradients and token of the same layer in torch. Needs no TensorFlow.

Keras's own optimizers step variables here too, and clear gradients at each step. A gradient that accumulates over
several batches must outlive ``zero_grad``, so the protocol is that of `bunkbed.keras.base.pending`, not the anchor of
`bunkbed.torch`. The backward of a lookup returns a number for the token that identifies its gradients, and autograd
adds these numbers exactly. Gradients that ``zero_grad`` drops, or that no optimizer gets, are never applied.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from bunkbed.adapters.bag_gradients import FloatArray, IntArray
from bunkbed.errors import ReadOnlyError
from bunkbed.keras.base.bags import Bags
from bunkbed.keras.base.caller import caller_locals
from bunkbed.keras.base.rows_layer import RowsLayer
from bunkbed.keras.base.stepping import SteppedVariable
from bunkbed.keras.base.types import DType, Layer, LookupOptions, Shared, Tensor
from bunkbed.table.table import Table
from bunkbed.torch.base.gradients import grad_array
from bunkbed.torch.base.ranges import ranged
from bunkbed.torch.base.types import Context
from bunkbed.torch.layer import id_array
from bunkbed.torch.pending import require_one_process

__all__ = [
    "IdsLayer",
    "Token",
    "answer_with_error",
    "as_scalar",
    "bags_of",
    "call",
    "is_eager",
    "is_recorded",
    "outside_graph",
    "require_one_process",
    "rows_of",
]

#: torch traces no graph that a call would have to leave.
outside_graph = contextlib.nullcontext


def is_eager() -> bool:
    """Return True: compilation and export are refused, see `_require_eager`."""
    return True


def as_scalar(value: Tensor) -> Tensor:
    """Return `value`, whose shape is known already."""
    return value


def is_recorded(value: Tensor) -> bool:
    """Return whether autograd would compute a gradient of a variable or tensor."""
    value = value.value if isinstance(value, keras.Variable) else value
    return bool(torch.is_grad_enabled() and value.requires_grad)


def call(what: str, table: str, function: Callable[..., Tensor], inputs: Sequence[Any], dtypes: DType) -> Tensor:
    """Return ``function(*inputs)``, called with NumPy arrays, as a tensor; `dtypes` is not used."""
    arrays = [keras.ops.convert_to_numpy(each) for each in inputs]
    return torch.as_tensor(ranged(what, table, function, *arrays))


class Token(SteppedVariable):
    """The variable that the optimizer gets instead of the rows; its gradient encodes which row gradients it got.

    See `bunkbed.keras.base.pending` for the protocol. Its value is always 0.
    """

    strategy = None

    def __init__(self, owner: Shared, name: str) -> None:
        self._owner = weakref.ref(owner)
        super().__init__(name)

    def assign(self, value: Tensor) -> Tensor:
        """Take the optimizer's step: update the table with the row gradients that the token's gradient encodes."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the table of this token is closed")
        by = self.assigned_by(value, caller_locals())
        if by.optimizer is not None or owner.has_table:  # set_weights() assigns it too
            owner.settle(by.gradient.detach().reshape(1), by.optimizer, by.scaling)
        return value


class EpochParameter(torch.nn.Parameter):  # type: ignore[misc]  # torch is untyped here
    """The value of a `KeptEpoch`, for ``state_dict()`` and ``load_state_dict()``, which iterate over parameters.

    They read a parameter by ``detach``, which commits the table, and set it by ``copy_``, which rewinds the table.
    """

    _variable: weakref.ref[keras.Variable] | None = None

    @classmethod
    def of(cls, variable: keras.Variable) -> EpochParameter:
        """Return the parameter of a `KeptEpoch`."""
        made = cls(torch.zeros((), dtype=torch.int64, device="cpu"), requires_grad=False)
        made._variable = weakref.ref(variable)
        return made

    def _alive(self) -> keras.Variable:
        return None if self._variable is None else self._variable()

    def detach(self) -> Tensor:
        """Commit the table, keep the epoch, and return its number, int64[]."""
        variable = self._alive()
        return torch.tensor(int(variable.saved())) if variable is not None else super().detach()

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        """Rewind the table to the epoch whose number is `src`."""
        variable = self._alive()
        if variable is not None:
            variable.assign(src.item())
        return self


# ---- Lookups


def rows_of(shared: Shared, ids: Tensor, *, train: bool, touch: bool, is_certain: bool) -> Tensor:
    """Return float32[..., dim] rows of an int64[...] tensor of ids; see `bunkbed.keras.shared.lookups.rows_of`."""
    _require_eager(shared.name)
    table = shared.for_lookup()
    if train:
        _require_zero(shared)
        return ranged("lookup", shared.name, _Lookup.apply, shared.token.value, ids, None, shared, touch, is_certain)
    rows = torch.from_numpy(ranged("lookup", shared.name, _plain, table, id_array(ids), touch))
    return rows.to(shared.token.value.device)


def _plain(table: Table, ids: IntArray, touch: bool) -> FloatArray:
    rows: FloatArray = table.lookup(ids, touch=touch)
    return rows


class _Lookup(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """A lookup of ids, or of bags; backward gives its gradients to `Pending`, and their number to the token."""

    @staticmethod
    def forward(
        ctx: Context, token: Tensor, ids: Tensor, bags: Bags | None, shared: Shared, touch: bool, is_certain: bool
    ) -> Tensor:
        table = shared.table
        if bags is None:
            ctx.save_for_backward(ids)  # may be the caller's memory: torch detects a change before backward
            array = id_array(ids)
            batch = table.batch(array)
            values = table.lookup_batch(batch, array.size, touch=touch).reshape(*array.shape, table.dim)
        else:
            values, batch = bags.lookup(table, touch=touch), table.batch(bags.ids)
        ctx.bags, ctx.shared, ctx.order = bags, weakref.ref(shared), (0, shared.next_place())
        ctx.handle = shared.pending.began(batch, 0, is_certain=is_certain)
        ctx.device = token.device
        return torch.from_numpy(values).to(token.device)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        shared, bags = _of_backward(ctx.shared), ctx.bags
        ids, gradients = id_array(ctx.saved_tensors[0]).reshape(-1) if bags is None else bags.ids, None
        if bags is not None:
            gradients = bags.gradients()
        value = shared.pending.push(ctx.handle, ctx.order, ids, grad_array(grad, shared.dim), bags=gradients)
        return torch.tensor(value, dtype=torch.float64, device=ctx.device), None, None, None, None, None


def bags_of(
    shared: Shared,
    ids: Tensor,
    splits: Tensor,
    weights: Tensor,
    combiner: str,
    *,
    skip_zero: bool,
    train: bool,
    touch: bool,
    is_certain: bool,
) -> Tensor:
    """Return float32[B, dim] pooled rows of int64[N] ids, int64[B + 1] row splits and float32[N] weights or None."""
    _require_eager(shared.name)
    table = shared.for_lookup()
    # Copies: the caller may change ids and weights before backward.
    factors = None if weights is None else weights.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
    bags = Bags(id_array(ids).copy(), splits.numpy(), factors, combiner, skip_zero)
    if train:
        _require_zero(shared)
        return ranged("bags", shared.name, _Lookup.apply, shared.token.value, None, bags, shared, touch, is_certain)
    pooled = torch.from_numpy(ranged("bags", shared.name, lambda: bags.lookup(table, touch=touch)))
    return pooled.to(shared.token.value.device)


def answer_with_error(shared: Shared, rows: Tensor) -> Tensor:
    """Return `rows` that cannot be trained, although gradients are enabled: a backward through them raises an error."""
    return _Unanswerable.apply(shared.token.value, rows, shared)


class _Unanswerable(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Context, token: Tensor, rows: Tensor, shared: Shared) -> Tensor:
        ctx.shared = weakref.ref(shared)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        shared = _of_backward(ctx.shared)
        if shared.has_table and shared.table.mode == "r":
            raise ReadOnlyError(
                f"table {shared.name!r} is open with mode='r' and cannot be trained; set layer.trainable = False, or "
                "open the table for writing"
            )
        raise RuntimeError(
            f"table {shared.name!r}: a backward reached rows that were looked up before it was known which optimizer "
            "steps them; call model.compile(optimizer=...), or layer.follow(optimizer), before the lookup, or give the "
            "layer its own: Embedding(..., optimizer=bunkbed.Adam(lr=1e-3))"
        )


def _of_backward(shared: weakref.ref[Shared]) -> Shared:
    found = shared()
    if found is None:
        raise RuntimeError("a backward reached a table whose layers are gone; keep the model until after backward")
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"table {found.name!r}: backward with create_graph=True reached its rows, which have no second "
            "derivative; take torch.autograd.grad with respect to the layer's output instead"
        )
    return found


def _require_zero(shared: Shared) -> None:
    value = shared.token.value.item()
    if value != 0.0:
        raise RuntimeError(
            f"table {shared.name!r}: its token's value was changed to {value:g} and no row was updated: an optimizer "
            "of torch.optim stepped it; leave layer.token.value out of its parameters, and give the Keras optimizer "
            "that trains the rows the token: optimizer.apply([layer.token.value.grad], [layer.token])"
        )


def _require_eager(name: str) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"table {name!r}: its lookups run in this process and cannot be compiled or exported; leave jit_compile "
            'out, or serve rows from a reader, bunkbed.open(path, mode="r"), next to the rest of the model'
        )


# ---- The layer


class IdsLayer(RowsLayer):
    """A layer from ids to rows, or to pooled rows with a combiner, of torch's tensors."""

    _shared: Shared

    def _rows(self, ids: Tensor, options: LookupOptions) -> Tensor:
        """Return float32[..., output_dim] rows of int64[...] ids."""
        raise NotImplementedError

    def _bags(self, ids: Tensor, splits: Tensor, weights: Tensor, options: LookupOptions) -> Tensor:
        """Return float32[B, output_dim] pooled rows of int64[N] ids, int64[B + 1] splits, float32[N] weights/None."""
        raise NotImplementedError

    def _look_up(self, inputs: Tensor, weights: Tensor, options: LookupOptions) -> Tensor:
        """Return rows of ids, in the layer's compute dtype; `_rows` and `_bags` get `options`."""
        entry = self._get_call_context().entry_layer
        if weights is not None and self.combiner is None:
            raise ValueError("Embedding: weights of ids need a combiner: Embedding(..., combiner='sum')")
        inputs = keras.ops.convert_to_tensor(inputs)
        if inputs.is_meta:  # Keras computes only shapes, before the first batch
            return keras.ops.cast(inputs.new_empty(self._output(inputs.shape)), self.compute_dtype)
        ids = self._as_ids(inputs, entry)
        if self.combiner is None:
            return keras.ops.cast(self._rows(ids, options), self.compute_dtype)
        self._output(ids.shape)  # raises for a rank that no combiner takes
        if weights is not None:
            weights = torch.as_tensor(weights)
            if tuple(weights.shape) != tuple(ids.shape):
                raise ValueError(
                    f"Embedding: weights of ids must have their shape {list(ids.shape)}, got {list(weights.shape)}"
                )
            if is_recorded(weights):
                raise ValueError(
                    "Embedding: weights of ids get no gradient; pass weights.detach(), or pool by hand what the layer "
                    "gives without a combiner"
                )
            weights = weights.reshape(-1)
        bags, length = int(np.prod(ids.shape[:-1])), ids.shape[-1]
        splits = torch.arange(bags + 1, dtype=torch.int64, device="cpu") * length
        pooled = self._bags(ids.reshape(-1), splits, weights, options)
        return keras.ops.cast(pooled.reshape(self._output(ids.shape)), self.compute_dtype)

    def _as_ids(self, ids: Tensor, entry: Layer) -> Tensor:
        """Return int64 ids; raise TypeError if their dtype may have changed the caller's ids."""
        if self._ids_are_float(str(ids.dtype).removeprefix("torch."), entry):
            bad = torch.nonzero(ids != torch.floor(ids))
            if len(bad):
                place = tuple(bad[0].tolist())
                raise ValueError(f"Embedding: ids must be whole numbers, got {ids[place].item()} at position {place}")
        return ids.to(torch.int64)

    # ---- torch.nn.Module

    def __getattr__(self, name: str) -> Tensor:
        if name == "embeddings":  # torch.nn.Module would hide the property's message
            return type(self).embeddings.fget(self)
        return super().__getattr__(name)
