"""Row gradients of one table between backward and step, and the anchor that stands for them.

A table's rows never become a `Parameter`, so torch's own machinery (GradScaler, gradient clipping, zero_grad,
accumulation) would not see them. It sees the *anchor*, one `Parameter` with one element per table. The
protocol:

1. A lookup makes the anchor an input of its autograd function and takes the next number of the forward order.
2. The function's backward hands over ids and gradients (`Pending.hold`) and returns -0.0 for the anchor.
3. When one backward call has reached every lookup, autograd accumulates those zeros into ``anchor.grad`` and
   calls our hook (`Pending.accept`). It first reads what happened to the previous value (step 4), then adds
   the new rows and writes the norm of all pending rows, duplicates summed, into ``anchor.grad``.
4. Whatever changed ``anchor.grad`` since (`Pending.reconcile`): None or zero drops the rows; another value v
   scales them by v / norm; what cannot be read as a ratio is an error.
5. ``Optimizer.step`` reconciles, then updates the table once with the summed rows. As with any ``.grad``,
   they stay until zero_grad.

Rows are summed in forward order, then batch position, one by one (the order `Table.update` uses), so a step
is bit-identical however backward visited the graph. -0.0 is what makes the protocol exact: x + -0.0 is x for
every x, and a norm that is really zero is written as -0.0, which clipping keeps and
zero_grad(set_to_none=False) does not. The norm is float64, so that a ratio survives a round trip and scaled
rows get exactly the factor the dense gradients got. On a device without float64 it is float32, and the factor
right to about 1e-7.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from bunkbed.adapters.references import References
from bunkbed.errors import ReadOnlyError
from bunkbed.torch.base.checkpoint import PREFIX
from bunkbed.torch.base.gradients import HostRows, IntArray, Part, Rows
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.tiers import Tier, make_tier

#: How the fix looks in errors.
ATTACH = "opt = bunkbed.torch.Optimizer(model, dense=torch.optim.AdamW(model.parameters()))"


class Pending:
    """The gradients of one table that wait for a step; every layer on the table shares it, and its anchor.

    Owns nothing but those gradients. Not thread-safe, like a module. It dies with the last layer and
    optimizer.
    """

    def __init__(self, table: Any, device: Any = None, device_cache: Any = None) -> None:
        self.table = table
        self.name: str = table.name
        self.references = References(table, PREFIX, "state_dict")
        self.order = itertools.count()
        # What graphs hold: one kept in a global until exit must not keep the table open.
        self.ref = weakref.ref(self)
        #: The cache of hot rows on the anchor's device, or None.
        self.tier: Tier | None = None
        self.rows: Rows = HostRows(table)
        self.batch: Any = None  # rows, each once,
        self.sums: Any = None  # and their sums: what step applies
        self._is_finite = True  # every sum
        self._norm = 0.0  # what we wrote to anchor.grad
        self._written: Any = None  # the tensor we wrote it to
        self._parts: list[Part] = []
        self._arrived: list[Part] = []
        self._optimizer: weakref.ref[Any] | None = None

        # torch's default dtype, as any layer's: outputs must fit the layers around.
        self.anchor = self._new_anchor(torch.zeros(1, device=device), requires_grad=table.mode != "r")
        self._no_change = torch.full((1,), -0.0, dtype=_grad_dtype(self.anchor.device), device=self.anchor.device)
        if device_cache is not None:
            this = self.ref  # as above

            def anchor() -> Any:
                pending = this()
                return None if pending is None else pending.anchor

            self.rows = self.tier = make_tier(table, device_cache, anchor)

    def require_tier(self) -> Tier:
        """The device cache of a table that has one."""
        assert self.tier is not None
        return self.tier

    # ---- the anchor

    def _new_anchor(self, value: Any, *, requires_grad: bool) -> Any:
        anchor = torch.nn.Parameter(value)  # torch registers hooks only on what requires gradients
        # Grad in float64 whatever the anchor's dtype is, so that the anchor may follow model.half() and so on.
        anchor.grad_dtype = _grad_dtype(anchor.device)
        this = self.ref  # the hook must not keep the table alive: anchor -> hook -> table -> anchor

        def accept(anchor: Any) -> None:
            pending = this()
            if pending is not None:
                pending.accept(anchor)

        anchor.register_post_accumulate_grad_hook(accept)
        anchor.requires_grad = requires_grad
        return anchor

    def move_anchor(self, moved: Any) -> None:
        """Gives the anchor the device and dtype of `moved`; its gradient follows to the device, in float64."""
        anchor = self.anchor
        if moved.device == anchor.device and moved.dtype == anchor.dtype:
            return
        if moved.is_meta and not anchor.is_meta:
            self.reconcile()  # no value shows there what was done to the gradient
        grad = anchor.grad
        anchor.grad = None
        value = torch.zeros(1, device=moved.device, dtype=moved.dtype)
        if torch._has_compatible_shallow_copy_type(anchor, value):
            anchor.data = value
            anchor.grad_dtype = _grad_dtype(value.device)
        else:  # to or from the meta device: the same Python object with other insides
            torch.utils.swap_tensors(anchor, self._new_anchor(value, requires_grad=anchor.requires_grad))
        dtype = _grad_dtype(moved.device)
        self._no_change = torch.full((1,), -0.0, dtype=dtype, device=moved.device)
        if grad is not None:
            ours = grad is self._written
            if grad.is_meta:
                grad = torch.tensor([self._norm or -0.0], dtype=torch.float64)
            anchor.grad = grad.cpu().to(dtype).to(moved.device)
            if ours:
                self._written = anchor.grad
                self._norm = _rounded(self._norm, dtype)

    def require_anchor(self, anchor: Any) -> None:
        """Raises RuntimeError where the module's anchor was swapped for another tensor."""
        if anchor is not self.anchor:
            raise RuntimeError(
                f"table {self.name!r}: its anchor was swapped for another tensor (torch.func.functional_call does "
                "that), so gradients would be lost; leave anchors out of the parameters you swap"
            )

    # ---- who steps this table

    @property
    def optimizer(self) -> Any:
        """The attached `Optimizer`, or None; a dead one does not count."""
        return None if self._optimizer is None else self._optimizer()

    def require_free(self, *, replace: bool = False) -> None:
        """Raises where an optimizer may not be attached: another one lives, or the table is a reader."""
        if self.table.mode == "r":
            raise ReadOnlyError(f"table {self.name!r} is open with mode='r'; open it for writing to train it")
        if replace or self.optimizer is None:
            return
        gc.collect()  # an optimizer that had an LR scheduler is part of a cycle, and may be dead already
        if self.optimizer is not None:
            raise RuntimeError(
                f"table {self.name!r} already has an Optimizer, and two would both step its rows; keep using the "
                "first, release it with `first.detach()`, or make this one with replace=True"
            )

    def attach(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def detach(self) -> None:
        self._optimizer = None

    # ---- backward

    def require_first_order(self) -> None:
        """Raises RuntimeError in a backward that records a graph of its own."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"table {self.name!r}: backward with create_graph=True reached its rows, which have no second "
                "derivative; take torch.autograd.grad with respect to the layer's output instead"
            )

    def hold(
        self,
        order: int,
        ids: IntArray,
        grads: Any,
        padding: int | None = None,
        *,
        batch: Any = None,
        bags: Any = None,
    ) -> None:
        """Takes the gradients of one lookup: int64[N], float32[N, dim]; rows of `padding` get none.

        `batch` is ``table.batch(ids)`` where the lookup made it. With `bags` (see bag.py) the gradients are those of
        bags, float32[B, dim].

        Raises:
            RuntimeError: no `Optimizer` is attached, or more than one process.
            ReadOnlyError: the table is a reader.
        """
        if self._optimizer is None or self._optimizer() is None:
            if self.table.mode == "r":
                raise ReadOnlyError(
                    f"table {self.name!r} is open with mode='r' and cannot be trained; set "
                    "layer.anchor.requires_grad = False, or open the table for writing"
                )
            raise RuntimeError(
                f"table {self.name!r}: a backward reached its rows but no Optimizer steps them; write\n"
                f"    {ATTACH}\nand step that, or freeze the table: layer.anchor.requires_grad = False"
            )
        require_one_process(self.name)
        if padding is not None:
            kept = ids != padding
            if not kept.all():
                ids, grads, batch = ids[kept], self.rows.select(grads, kept), None
        self._arrived.append(Part(order, torch._C._current_graph_task_id(), ids, grads, batch=batch, bags=bags))

    def no_change(self) -> Any:
        """What a backward returns for the anchor: -0.0; a new tensor, since autograd may keep it as ``.grad``."""
        return self._no_change.clone()

    def accept(self, anchor: Any) -> None:
        """The hook after autograd accumulated into ``anchor.grad``: one backward call reached all its lookups."""
        self.reconcile()
        task = torch._C._current_graph_task_id()
        # Other tasks: an outer backward still running (reentrant checkpointing), or an aborted one; see `drop`.
        new = [part for part in self._arrived if part.task == task]
        self._arrived = [part for part in self._arrived if part.task != task]
        new.sort(key=lambda part: part.order)
        if self._parts and new and new[0].order > self._parts[-1].order:
            # Later in the forward order than everything pending, as in plain accumulation: go on from the
            # sums so far, which is bit-identical and lets the earlier gradients go.
            self._parts = [Part(self._parts[-1].order, -1, self.rows.unique(self.batch), self.sums), *new]
        else:
            self._parts = sorted([*self._parts, *new], key=lambda part: part.order)
        if not self._parts:
            return  # something else than a lookup used the anchor, such as an L2 term over all parameters
        self._sum()
        grad = anchor.grad
        self._norm = _rounded(self._norm, grad.dtype)
        grad.fill_(self._norm if self._norm != 0.0 else -0.0)
        self._written = grad

    def _sum(self) -> None:
        self.batch, self.sums, self._norm = self.rows.sum(self._parts)
        self._is_finite = math.isfinite(self._norm)

    # ---- between backward and step

    def reconcile(self) -> bool:
        """Does to the rows what was done to ``anchor.grad`` since it was written; True if rows are pending.

        Raises:
            RuntimeError: the value cannot be read as a ratio to the norm.
        """
        grad = self.anchor.grad
        if grad is None:
            self.drop()
            return False
        value = grad.item()
        norm = self._norm
        if not self._parts:
            # NaN: clipping by a NaN norm made it from 0; there is no row it could spoil.
            if value != 0.0 and not math.isnan(value):
                raise RuntimeError(
                    f"table {self.name!r}: anchor.grad holds {value:g} but no row gradients are pending; it cannot "
                    "be set by hand: scale it in place, or set it to None to drop the rows"
                )
            return False
        if value == norm and norm != 0.0:
            return True
        if value == 0.0:
            if norm == 0.0 and math.copysign(1.0, value) < 0 and grad is self._written:
                return True
            self.drop()
            return False
        if grad is not self._written:
            raise RuntimeError(
                f"table {self.name!r}: anchor.grad was replaced by another tensor ({value:g}, the norm was "
                f"{norm:g}), so which rows it stands for is unknown; scale it in place: anchor.grad.mul_(factor)"
            )
        if math.isnan(value) and math.isnan(norm):
            return True
        if norm == 0.0 or (math.isfinite(value) and not math.isfinite(norm)):
            raise RuntimeError(
                f"table {self.name!r}: anchor.grad was changed from {norm:g} to {value:g}, which is no scaling of "
                "the row gradients; it may only be multiplied (unscaling, clip_grad_norm_) or dropped (zero_grad)"
            )
        ratio = value / norm
        self._is_finite = self.rows.scale(self.sums, ratio)  # what is not finite is step's to report
        for part in self._parts:
            part.scale *= ratio
        self._norm = value
        return True

    def require_finite(self) -> None:
        """Raises ValueError naming the first id whose gradient is not finite, before a step changes anything."""
        if self._is_finite:
            return
        row, column, value = self.rows.first_bad(self.sums)
        raise ValueError(
            f"table {self.name!r}: the gradient of id {self.rows.unique(self.batch)[row]} is {value} at column "
            f"{column}; nothing was changed; find where the loss stops being finite, or let torch.amp.GradScaler "
            "skip such steps"
        )

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self.references.step

    def update(self, lr: float) -> None:
        """One step of the table with the summed rows."""
        self.rows.step(self.batch, self.sums, lr=lr, step=self.references.next_step)
        self.references.step_was_taken()

    @property
    def has_rows(self) -> bool:
        """True if a step would update rows."""
        return bool(self._parts) and self.anchor.requires_grad and self.anchor.grad is not None

    def drop(self) -> None:
        """Forgets every pending gradient."""
        if self._parts:
            self._parts = []
            self.batch = self.sums = None
        self._norm = 0.0

    def forget_aborted(self) -> None:
        """Forgets gradients of backward calls that never finished (torch.autograd.grad, or an error half way)."""
        self._arrived.clear()


def _grad_dtype(device: Any) -> Any:
    """float64, or float32 where the device has no other."""
    return torch.float64 if device.type == "meta" or capabilities.of(device).has_float64 else torch.float32


def _rounded(norm: float, dtype: Any) -> float:
    """The norm as ``anchor.grad`` holds it: what is read back must be equal."""
    return norm if dtype is torch.float64 else float(torch.tensor(norm, dtype=dtype))


_pendings: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()


def pending_of(table: Any, device: Any = None, device_cache: Any = None) -> Pending:
    """The one `Pending` of `table`, made when first asked for.

    Keyed by identity: a `Pending` holds its table, so the number stays the table's while the entry lives.
    """
    pending = _pendings.get(id(table))
    if pending is None:
        pending = Pending(table, device, device_cache)
        _pendings[id(table)] = pending
    elif device_cache is not None:
        raise ValueError(
            f"table {pending.name!r}: its layers share one device cache, which the first of them decides; leave "
            "device_cache= out of the others"
        )
    elif device is not None and torch.device(device) != pending.anchor.device:
        raise ValueError(
            f"table {pending.name!r}: its layers share one anchor, on {pending.anchor.device}; got device={device!r}"
        )
    return pending


def alive(pending: weakref.ref[Pending]) -> Pending:
    """The `Pending` of a lookup at its backward.

    Raises:
        RuntimeError: layer and optimizer are gone.
    """
    found = pending()
    if found is None:
        raise RuntimeError(
            "a backward reached a table whose layers and Optimizer are gone; keep the model until after backward"
        )
    return found


def anchors() -> dict[int, Pending]:
    """id(anchor) -> its `Pending`, of every table that has a layer."""
    return {id(pending.anchor): pending for pending in list(_pendings.values())}


def distinct(pendings: Iterable[Pending]) -> list[Pending]:
    """Without repetitions, in first-seen order."""
    return list({id(pending): pending for pending in pendings}.values())


def require_one_process(name: str) -> None:
    """Raises RuntimeError for a writable table under torch.distributed with more than one process.

    Each rank would train a private copy, or fight over one; neither is what the user asked for.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    world = torch.distributed.get_world_size()
    if world > 1:
        raise RuntimeError(
            f"table {name!r}: a writable table cannot be used under torch.distributed with {world} processes yet, as "
            "every rank would train its own copy; train in one process, or open the table with mode='r' for "
            "inference"
        )
