"""`EmbeddingCollection`: several layers that are looked up in one call of the core.

A model with a table for each of many columns spends its step on calls, not on rows. The collection makes one call of
the core for a forward pass, one autograd node, and one call for the sums of its backward. `Optimizer.step` updates all
tables in one call, whether their layers are in a collection or not. Bits are those of the layers called one by one, in
the order of the collection.

Some layers are called by themselves: those on a sharded table or a device cache, bags whose weights need a gradient,
and layers with hooks or a ``forward`` of their own. Other layers on the same table then are, too, which keeps the order
of its lookups.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bunkbed import _native
from bunkbed.adapters.bag_gradients import BagGradients, FloatArray, IntArray
from bunkbed.torch.bag import EmbeddingBag
from bunkbed.torch.base.gradients import grad_array
from bunkbed.torch.base.ranges import is_profiling, ranged
from bunkbed.torch.base.types import Context
from bunkbed.torch.embedding import Embedding
from bunkbed.torch.layer import TableLayer, id_array, outside_graph, refuse_transforms, require_live
from bunkbed.torch.pending import Pending, alive

#: What `EmbeddingCollection.forward` takes for one layer: the layer's argument, or a tuple of its arguments.
Inputs: TypeAlias = Mapping[str, Tensor | tuple[Tensor, ...]]
#: Bags as the core takes them: offsets, pooling and weights.
_CoreBags: TypeAlias = tuple[IntArray, int, Any] | None

_POOLINGS = {"sum": 0, "mean": 1}
#: Floats of a cache line: each layer's output starts at one, as MKL's kernels give other bits at other alignments.
_LINE = 16


@dataclass(slots=True, eq=False)
class _Lookup:
    """One layer's part of a call. Graphs keep it, so it must not keep the table or the layer alive.

    Attributes:
        name: of the layer in the collection.
        pending: of the layer's table.
        ids: int64[N], of the bags if the layer pools.
        shape: of the output.
        padding: the id that gets no gradient; None with bags, which have no such id.
        anchor, order, batch: if the rows get gradients: the place of the table's anchor among the node's inputs, the
            lookup's place in the forward order, and the ids' batch.
    """

    name: str
    pending: weakref.ref[Pending]
    ids: Any
    shape: tuple[int, ...]
    padding: int | None
    bags: BagGradients | None
    core_bags: _CoreBags
    anchor: int = 0
    order: int = 0
    batch: _native.Batch | None = None


class _Rows(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The rows of all layers that train; backward gives their gradients to each table's `Pending`."""

    @staticmethod
    def forward(ctx: Context, lookups: list[_Lookup], values: list[Tensor], *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a layer that the loss does not depend on gets no gradient
        ctx.lookups = lookups
        ctx.num_anchors = len(anchors)
        return tuple(values)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, ...]:
        anchors: list[Pending | None] = [None] * ctx.num_anchors
        parts: list[tuple[_Lookup, Pending, FloatArray]] = []
        batches: list[Any] = []
        arrays: list[FloatArray] = []
        bags: list[_CoreBags] = []
        for lookup, grad in zip(ctx.lookups, grads, strict=True):
            if grad is None:
                continue
            pending = alive(lookup.pending)
            anchors[lookup.anchor] = pending
            array = _rows_of(grad, lookup)
            parts.append((lookup, pending, array))
            # `Pending` leaves out ids of the padding row, and makes the sums of such a lookup.
            if lookup.padding is None or not (lookup.ids == lookup.padding).any():
                batches.append(lookup.batch)
                arrays.append(array)
                bags.append(lookup.core_bags)
            else:
                batches.append(None)
        if parts:
            parts[0][1].require_first_order()
        sums = iter(_native.sum_many([batch for batch in batches if batch is not None], arrays, bags))
        for (lookup, pending, array), batch in zip(parts, batches, strict=True):
            if batch is None:
                pending.hold(lookup.order, lookup.ids, array, lookup.padding)
            else:
                pending.hold(lookup.order, lookup.ids, array, batch=batch, bags=lookup.bags, summed=next(sums))
        return (None, None, *_no_changes(anchors))


#: `_Rows.apply` without its support of torch.func; see `bunkbed.torch.embedding`.
_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Rows).apply


def _rows_of(grad: Tensor, lookup: _Lookup) -> FloatArray:
    """Return a gradient as float32[N, dim]. A view if possible, also of columns: a model often concatenates rows."""
    dim = lookup.shape[-1]
    if lookup.bags is None and grad.dim() == 2 and grad.dtype is torch.float32 and grad.is_cpu:
        apart, adjacent = grad.stride()
        if adjacent == 1 and apart % dim == 0:
            array: FloatArray = grad.numpy()
            return array
    return grad_array(grad, dim)


def _no_changes(pendings: Sequence[Pending | None]) -> Sequence[Tensor]:
    """Return the anchors' gradients, as `Pending.no_change`; None for an anchor whose rows got no gradient."""
    if any(p is None or not p.anchor.is_cpu for p in pendings):
        return [None if pending is None else pending.no_change() for pending in pendings]
    changes: Sequence[Tensor] = torch.full((len(pendings), 1), -0.0, dtype=torch.float64).unbind()
    return changes


class EmbeddingCollection(torch.nn.ModuleDict):  # type: ignore[misc]  # torch is untyped here
    """Several layers, by name, whose tables are looked up in one call and updated in one call.

    A `torch.nn.ModuleDict` of `Embedding` and `EmbeddingBag` layers, with a ``forward``. Checkpoints, anchors,
    ``to()``, ``train()`` and ``eval()`` are those of the layers; `Optimizer` and `lookahead` find the layers in it.
    Rows, gradients and bits are those of the layers called one by one in the collection's order. Layers may share a
    table. Not thread-safe.

    Args:
        layers: the layers by name.

    Raises:
        TypeError: `layers` is not a mapping, or a value is not a layer of `bunkbed.torch`.

    >>> emb = EmbeddingCollection({"user": Embedding(9, 2), "tags": EmbeddingBag(9, 2)})
    >>> rows = emb({"user": torch.tensor([1, 5]), "tags": (torch.tensor([3, 4, 4]), torch.tensor([0, 2]))})
    >>> {name: list(values.shape) for name, values in rows.items()}
    {'user': [2, 2], 'tags': [2, 2]}
    """

    def __init__(self, layers: Mapping[str, TableLayer]) -> None:
        if not isinstance(layers, Mapping):
            raise TypeError(f"EmbeddingCollection: layers must be {{name: layer}}, got {type(layers).__name__}")
        super().__init__(layers)

    def add_module(self, name: str, module: torch.nn.Module) -> None:
        """Add a layer, as ``collection[name] = layer`` does."""
        if not isinstance(module, TableLayer):
            raise TypeError(
                f"EmbeddingCollection: {name!r} must be an Embedding or EmbeddingBag of bunkbed.torch, got "
                f"{type(module).__name__}"
            )
        super().add_module(name, module)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return {name: rows}, in the collection's order, as each layer returns them.

        Every table's ids are checked before a row is looked up. The ids are copied.

        Args:
            inputs: for each layer its ids, int64 or int32[...]. Of an `EmbeddingBag` also a tuple, ``(ids, offsets)``
                or ``(ids, offsets, per_sample_weights)``.

        Raises:
            TypeError, ValueError: a name is missing or unknown, or an argument has a wrong type or shape.
            IndexError: an id outside its table; the message has the table, the id and its position.
        """
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            for layer in self.values():
                require_live(layer)
            rows: dict[str, Tensor] = outside_graph(self, inputs)
            return rows
        self.require_names(inputs)
        if is_profiling():
            rows = ranged("lookup", ", ".join(self), self._rows, inputs)
            return rows
        return self._rows(inputs)

    # Internal: for `lookahead`, too.
    def require_names(self, inputs: Inputs) -> None:
        """Raise TypeError or ValueError if `inputs` does not have the names of the layers."""
        if not isinstance(inputs, Mapping):
            raise TypeError(f"EmbeddingCollection: inputs must be {{name: ids}}, got {type(inputs).__name__}")
        if inputs.keys() == self._modules.keys():
            return
        missing = [name for name in self._modules if name not in inputs]
        unknown = [name for name in inputs if name not in self._modules]
        what = f"no ids for {missing[0]!r}" if missing else f"ids for {unknown[0]!r}, which is not one of its layers"
        raise ValueError(f"EmbeddingCollection: got {what}; give ids for each of {', '.join(self._modules)}")

    def _rows(self, inputs: Inputs) -> dict[str, Tensor]:
        grad = torch.is_grad_enabled()
        lookups: list[_Lookup] = []
        alone: set[str] = set()
        self._announce(inputs)
        for name, layer in self._modules.items():
            lookup = _lookup_of(name, layer, inputs[name], grad)
            if lookup is None:
                alone.add(name)
            else:
                lookups.append(lookup)
        if not alone:
            return self._look_up(lookups, grad) if lookups else {}
        tables = {id(self._modules[name].table) for name in alone}
        alone.update(lookup.name for lookup in lookups if id(self._modules[lookup.name].table) in tables)
        lookups = [lookup for lookup in lookups if lookup.name not in alone]
        rows = self._look_up(lookups, grad) if lookups else {}
        return {
            name: layer(*_arguments(inputs[name])) if name in alone else rows[name]
            for name, layer in self._modules.items()
        }

    def _announce(self, inputs: Inputs) -> None:
        """Let one exchange serve all layers whose tables several ranks share."""
        by_ranks: dict[int, list[tuple[Any, IntArray]]] = {}
        for name, layer in self._modules.items():
            rows = layer._pending.rank_rows
            if rows is not None:
                wanted = by_ranks.setdefault(id(rows.exchange), [])
                wanted.append((rows, layer.looked_up(*_arguments(inputs[name]))))
        for wanted in by_ranks.values():
            wanted[0][0].exchange.want(wanted)

    def _look_up(self, lookups: list[_Lookup], grad: bool) -> dict[str, Tensor]:
        """Look up all parts in one call; return {name: rows}."""
        layers = [self._modules[lookup.name] for lookup in lookups]
        pendings: list[Pending] = [layer._pending for layer in layers]
        trains = [grad and pending.anchor.requires_grad for pending in pendings]
        sizes, ends, places, end = [], [], [], 0
        for lookup in lookups:
            sizes.append(lookup.ids.numel())
            size = math.prod(lookup.shape)
            places.append(end)
            ends.append(end + size)
            end += -(-size // _LINE) * _LINE
        flat = _native.empty_rows(1, end)
        # A copy: the caller may change its ids before backward.
        ids: IntArray = torch.cat([lookup.ids for lookup in lookups]).numpy()
        batches = _native.lookup_many(
            [pending.core for pending in pendings], ids, sizes, [grad and layer.training for layer in layers],
            trains, [lookup.core_bags for lookup in lookups], flat, places,
        )  # fmt: skip
        line = flat[0]
        rows: dict[str, Tensor] = {}
        anchors: dict[Pending, int] = {}
        training: list[_Lookup] = []
        begin = 0
        for lookup, layer, pending, size, place, stop, batch in zip(
            lookups, layers, pendings, sizes, places, ends, batches, strict=True
        ):
            own = ids[begin : begin + size]
            begin += size
            values = torch.from_numpy(line[place:stop].reshape(lookup.shape))
            if batch is not None:
                lookup.ids = own
                if lookup.bags is not None:
                    lookup.bags.ids = own
                lookup.batch, lookup.order = batch, pending.next_place()
                lookup.anchor = anchors.setdefault(pending, len(anchors))
                training.append(lookup)
            elif layer._zero_padding and lookup.bags is None:
                values[torch.from_numpy((own == layer.padding_idx).reshape(lookup.shape[:-1]))] = 0.0
            rows[lookup.name] = layer._output(values)
        if training:
            if torch._C._are_functorch_transforms_active():
                refuse_transforms(layers[0])
            names = [lookup.name for lookup in training]
            outputs = _apply(training, [rows[name] for name in names], *[pending.anchor for pending in anchors])
            rows.update(zip(names, outputs, strict=True))
        return rows


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _lookup_of(name: str, layer: TableLayer, value: Any, grad: bool) -> _Lookup | None:
    """Return a layer's part of a call; None if the layer must be called by itself."""
    pending = layer._pending
    if not pending.is_joined or layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return None
    if layer._parameters["anchor"] is not pending.anchor:
        pending.require_anchor(layer._parameters["anchor"])
    pending.require_unwritten()
    kind = type(layer)
    if kind is Embedding:
        if not (isinstance(value, torch.Tensor) and value.dtype is torch.int64 and value.is_cpu):
            value = torch.from_numpy(id_array(value, f"inputs[{name!r}]"))
        shape = (*value.shape, layer.embedding_dim)
        return _Lookup(name, pending.ref, value.reshape(-1), shape, layer.padding_idx, None, None)
    if kind is not EmbeddingBag:
        return None
    arguments = _arguments(value)
    if not 1 <= len(arguments) <= 3:
        raise ValueError(
            f"EmbeddingCollection: inputs[{name!r}] must be ids, (ids, offsets) or (ids, offsets, per_sample_weights), "
            f"got a tuple of {len(arguments)}"
        )
    bags = layer.bags_of(*arguments)
    if grad and len(arguments) == 3 and bags.wanted_weights(arguments[2]) is not None:
        return None
    core_bags = (bags.offsets, _POOLINGS["mean" if bags.is_mean else "sum"], bags.weights)
    shape = (bags.offsets.size, layer.embedding_dim)
    return _Lookup(name, pending.ref, torch.from_numpy(bags.ids), shape, None, bags, core_bags)
