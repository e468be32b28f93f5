"""Row gradients of one table between backward and step, and the anchor that represents them.

A table's rows are never a `Parameter`, so torch's GradScaler, gradient clipping, zero_grad and accumulation do
not see the rows. They see the *anchor* instead, a `Parameter` with one element for each table. The
protocol:

1. A lookup makes the anchor an input of its autograd function and takes the next number of the forward order.
2. The function's backward hands over ids and gradients (`Pending.hold`) and returns -0.0 for the anchor.
3. When one backward call has reached every lookup, autograd accumulates those zeros into ``anchor.grad`` and
   calls our hook (`Pending.accept`). It first reads what happened to the previous value (step 4), then adds
   the new rows and writes the norm of all pending rows, duplicates summed, into ``anchor.grad``.
4. `Pending.reconcile` reads how ``anchor.grad`` was changed: None or zero drops the rows; another value v
   scales the rows by v / norm; any other change is an error.
5. ``Optimizer.step`` reconciles, then updates the table once with the summed rows. As with any ``.grad``,
   the rows stay until zero_grad.

Rows are summed in forward order, then by batch position, one by one (the order of `Table.update`), so the bits
of a step do not depend on the order in which backward visits the graph. -0.0 makes the protocol exact: x + -0.0
is x for every x. A norm of zero is written as -0.0, which clipping keeps and zero_grad(set_to_none=False)
replaces by 0.0. The norm is float64, so that scaled rows get exactly the factor of the dense gradients. On a
device without float64 it is float32, and the factor is right to about 1e-7.
"""

from __future__ import annotations

import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bunkbed import _native
from bunkbed.adapters.bag_gradients import BagGradients, FloatArray, IntArray
from bunkbed.adapters.gradient_parts import not_finite
from bunkbed.adapters.references import References
from bunkbed.core.budget import Budget
from bunkbed.errors import ReadOnlyError
from bunkbed.table.table import Table
from bunkbed.torch.base.checkpoint import PREFIX
from bunkbed.torch.base.gradients import HostRows, Part, Rows
from bunkbed.torch.base.groups import after_reduction
from bunkbed.torch.base.types import Device, RowsBatch
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.tiers import Tier, make_tier
from bunkbed.torch.making import Maker
from bunkbed.torch.ranks.rows import RankRows

#: The remedy that errors show.
ATTACH = "opt = bunkbed.torch.Optimizer(model, dense=torch.optim.AdamW(model.parameters()))"


class Pending:
    """The gradients of one table that wait for a step. All layers on the table share it and its anchor.

    Owns only these gradients. Not thread-safe, like a module. It is deleted with the last layer and optimizer.
    """

    def __init__(self, table: Table, device: Device = None, device_cache: int | str | Budget | None = None) -> None:
        #: Makes the table again with another rule; None: its rule was given, and does not follow an optimizer.
        self.maker: Maker | None = None
        #: Where several processes share the table (`bunkbed.torch.rank_pending`): its rows.
        self.rank_rows: RankRows | None = None
        #: Whether each of several processes shall have a table of its own (``placement="local"``).
        self.is_local = False
        self.order = itertools.count()
        # Autograd graphs hold this weak reference: a graph that is kept until exit must not keep the table open.
        self.ref = weakref.ref(self)
        #: The cache of hot rows on the anchor's device, or None.
        self.tier: Tier | None = None
        self.device_cache = device_cache
        self.batch: RowsBatch = None  # the rows, each once
        self.sums: Tensor = None  # their summed gradients, which `update` applies
        self._is_finite = True  # whether every sum is finite
        self._norm = 0.0  # the value written to anchor.grad
        self._written: Tensor = None  # the tensor that `_norm` was written to
        self._is_first = False  # whether the present backward call is the first after the anchor's grad was None
        self._has_warned = False
        self._is_in_ddp = False  # whether `DistributedDataParallel` has run the model
        self._parts: list[Part] = []
        self._arrived: list[Part] = []
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._trained: list[weakref.ref[torch.nn.Module]] = []  # the layers that it was given

        # torch's default dtype, as in any layer: outputs must match the layers that use them.
        self.anchor = self._new_anchor(torch.zeros(1, device=device), requires_grad=table.mode != "r")
        #: Whether `copy.deepcopy` made this, of another table.
        self.is_copy = False
        self.note_anchor()
        self._no_change = torch.full((1,), -0.0, dtype=grad_dtype(self.anchor.device), device=self.anchor.device)
        self.use(table)

    def use(self, table: Table) -> None:
        """Take this table, at first or in place of one that was closed; no gradients may be pending."""
        self.table = table
        self.name: str = table.name
        self.references = self._new_references(table)
        self.rows: Rows = HostRows(table)
        if self.device_cache is not None:
            this = self.ref  # weak: `self` owns the cache

            def anchor() -> Tensor:
                pending = this()
                return None if pending is None else pending.anchor

            self.rows = self.tier = make_tier(table, self.device_cache, anchor)
        #: Whether a call of the core may look up this table together with others: no shards, and no device cache.
        self.is_joined = self.tier is None and isinstance(table.core, _native.Table)
        #: Whether a call of the core may step this table together with others.
        self.steps_joined = self.is_joined
        self.core = table.plain_core  # requires `steps_joined`

    def _new_references(self, table: Table) -> References:
        return References(table, PREFIX, "state_dict", can_hold_also=True)

    def require_tier(self) -> Tier:
        """Return the device cache of a table that has one."""
        assert self.tier is not None
        return self.tier

    # ---- the anchor

    def _new_anchor(self, value: Tensor, *, requires_grad: bool) -> Tensor:
        anchor = torch.nn.Parameter(value)  # torch registers hooks only on tensors that require gradients
        # Any: the norm does not have the anchor's dtype, and tools write zeros of that dtype, as get_state_dict of
        # torch.distributed.checkpoint does.
        anchor.grad_dtype = None
        this = self.ref  # the hook must not keep the table alive: anchor -> hook -> table -> anchor

        def accept(anchor: Tensor) -> None:
            pending = this()
            if pending is not None:
                pending.accept(anchor)

        anchor.register_post_accumulate_grad_hook(accept)
        anchor.requires_grad = requires_grad
        return anchor

    def move_anchor(self, moved: Tensor) -> None:
        """Give the anchor the device and dtype of `moved`; its gradient moves to the device and keeps its precision."""
        anchor = self.anchor
        if moved.device == anchor.device and moved.dtype == anchor.dtype:
            return
        if moved.is_meta and not anchor.is_meta:
            self.reconcile()  # a meta tensor has no value to reconcile with later
        grad = anchor.grad
        anchor.grad = None
        value = torch.zeros(1, device=moved.device, dtype=moved.dtype)
        if torch._has_compatible_shallow_copy_type(anchor, value):
            anchor.data = value
            anchor.grad_dtype = None
        else:  # to or from the meta device: keep the Python object, replace its contents
            torch.utils.swap_tensors(anchor, self._new_anchor(value, requires_grad=anchor.requires_grad))
        self.note_anchor()
        dtype = grad_dtype(moved.device)
        self._no_change = torch.full((1,), -0.0, dtype=dtype, device=moved.device)
        if grad is not None:
            ours = grad is self._written
            if grad.is_meta:
                grad = torch.tensor([self._norm or -0.0], dtype=torch.float64)
            anchor.grad = grad.cpu().to(dtype).to(moved.device)
            if ours:
                self._written = anchor.grad
                self._norm = rounded(self._norm, dtype)

    def note_anchor(self) -> None:
        """Accept the anchor as it is; `require_unwritten` finds later changes."""
        # A tensor of inference mode does not count its changes.
        self._counted = None if self.anchor.is_inference() else self.anchor
        self._version = 0 if self._counted is None else self._counted._version

    def require_unwritten(self) -> None:
        """Raise RuntimeError if code that walks over parameters wrote the anchor, which changes no row.

        An initialiser is seen by the value, as that of an anchor is 0. Averaging (EMA, SWA) writes 0 again, and is seen
        in a copy alone: others write 0 in place, too, as `DistributedDataParallel` at its start.
        """
        if self._counted is None or self._counted._version == self._version:
            return
        value = self.anchor.item() if not self.anchor.is_meta else 0.0
        if value != 0.0:
            raise RuntimeError(
                f"table {self.name!r}: code over model.parameters() wrote {value:g} into its anchor, which changes no "
                "row; leave out bunkbed.torch.anchors(model), set the anchor back to 0, and initialise rows with "
                "Embedding(..., init=bunkbed.Normal(std=...)) or layer.table.set(ids, values)"
            )
        if self.is_copy:
            raise RuntimeError(
                f"table {self.name!r}: code over the parameters of this copy of a model (an average of weights: EMA, "
                "SWA?) wrote its anchor, which changes no row, so its rows would stay those of the moment of the copy; "
                "average the other parameters, leaving out bunkbed.torch.anchors(copy), and load rows with "
                "load_state_dict"
            )
        self.note_anchor()

    def require_anchor(self, anchor: Tensor) -> None:
        """Raise RuntimeError if the module's anchor was replaced by another tensor."""
        if anchor is not self.anchor:
            raise RuntimeError(
                f"table {self.name!r}: its anchor was swapped for another tensor (torch.func.functional_call does "
                "that), so gradients would be lost; leave anchors out of the parameters you swap"
            )

    # ---- the optimizer that steps this table

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The attached `Optimizer`; None if there is none or it was deleted."""
        return None if self._optimizer is None else self._optimizer()

    def require_free(self, *, replace: bool = False) -> None:
        """Raise if an optimizer may not be attached: another one is attached, or the table is a reader."""
        if self.table.mode == "r":
            raise ReadOnlyError(f"table {self.name!r} is open with mode='r'; open it for writing to train it")
        if replace or self.optimizer is None:
            return
        # An LR scheduler makes a reference cycle with its optimizer, and hooks with a model: both may be unreachable.
        gc.collect()
        is_stale = bool(self._trained) and all(layer() is None for layer in self._trained)
        if self.optimizer is not None and not is_stale:
            raise RuntimeError(
                f"table {self.name!r} already has an Optimizer, and two would both step its rows; keep using the "
                "first, release it with `first.detach()`, or make this one with replace=True"
            )

    def attach(self, optimizer: torch.optim.Optimizer, layers: Iterable[torch.nn.Module] = ()) -> None:
        """Let an optimizer step this table. Another one may replace it when all of these `layers` are gone."""
        self._optimizer = weakref.ref(optimizer)
        self._trained = [weakref.ref(layer) for layer in layers]

    def detach(self) -> None:
        self._optimizer = None
        self._trained = []

    # ---- backward

    def require_first_order(self) -> None:
        """Raise RuntimeError in a backward with create_graph=True."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"table {self.name!r}: backward with create_graph=True reached its rows, which have no second "
                "derivative; take torch.autograd.grad with respect to the layer's output instead"
            )

    def hold(
        self,
        order: int,
        ids: IntArray,
        grads: Tensor,
        padding: int | None = None,
        *,
        batch: RowsBatch = None,
        bags: BagGradients | None = None,
        summed: tuple[FloatArray, float] | None = None,
    ) -> None:
        """Add the gradients of one lookup: int64[N], float32[N, dim]; ids equal to `padding` get none.

        `batch` is ``table.batch(ids)`` if the lookup made it. With `bags` (see bag.py) the gradients are those of
        bags, float32[B, dim]. Without `padding`, `summed` may be the sums in the order of `batch` and their norm.

        Raises:
            RuntimeError: no `Optimizer` is attached, or torch.distributed has more than one process.
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
        self.require_group()
        self._is_first = self.anchor.grad is None
        if padding is not None:
            kept = ids != padding
            if not kept.all():
                ids, grads, batch = ids[kept], self.rows.select(grads, kept), None
        task = torch._C._current_graph_task_id()
        self._arrived.append(Part(order=order, ids=ids, grads=grads, batch=batch, bags=bags, task=task, summed=summed))

    def require_group(self) -> None:
        """Raise RuntimeError in one of several processes, unless the table is meant to be this process's own."""
        if not self.is_local:
            require_one_process(self.name)

    def next_place(self) -> int:
        """Return the place of a lookup in the forward order."""
        if DistributedDataParallel._active_ddp_module is not None:
            self._is_in_ddp = True
        return next(self.order)

    def no_change(self) -> Tensor:
        """Return the anchor's gradient of a lookup, -0.0, in a new tensor: autograd may keep it as ``.grad``."""
        return self._no_change.clone()

    def accept(self, anchor: Tensor) -> None:
        """Add the gradients of a backward call that has reached all its lookups (hook of ``anchor.grad``)."""
        task = torch._C._current_graph_task_id()
        arrived, grad = self._arrived, anchor.grad
        # The usual case, made fast: one lookup, and nothing pending to reconcile.
        value = 0.0 if grad is None else grad.item()
        if self._is_first and value == 0.0 and math.copysign(1.0, value) > 0.0:
            self._warn_of_penalty()
        self._is_first = False
        if not self._parts and len(arrived) == 1 and arrived[0].task == task and value == 0.0:
            self._parts, self._arrived = arrived, []
            self._write_norm(grad)
            return
        self.reconcile()
        # Other tasks: an outer backward that still runs (reentrant checkpointing), or one that was aborted; see
        # `forget_aborted`.
        new = [part for part in self._arrived if part.task == task]
        self._arrived = [part for part in self._arrived if part.task != task]
        new.sort(key=lambda part: part.order)
        if self._parts and new and new[0].order > self._parts[-1].order:
            # New parts are later in the forward order, as in accumulation: add them to the sums so far.
            # That is bit-identical and frees the earlier gradients.
            ids = self.rows.unique(self.batch)
            self._parts = [Part(order=self._parts[-1].order, ids=ids, grads=self.sums), *new]
        else:
            self._parts = sorted([*self._parts, *new], key=lambda part: part.order)
        if not self._parts:
            return  # no lookup used the anchor, but for example an L2 term over all parameters
        self._write_norm(grad)

    def _warn_of_penalty(self) -> None:
        """Warn, once, of a term of the loss that has the anchor as a weight: lookups give it -0.0, others 0.0."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"table {self.name!r}: a term of the loss over model.parameters(), as an L2 penalty, reached its anchor, "
            "which does nothing to rows; give the layer's optimizer weight_decay=, or take it of the layer's output",
            stacklevel=2,
        )

    def _write_norm(self, grad: Tensor) -> None:
        """Sum the parts, and write the norm of the sums into ``anchor.grad``."""
        self.batch, self.sums, norm = self.rows.sum(self._parts)
        self._is_finite = math.isfinite(norm)
        self._norm = rounded(norm, grad.dtype)
        grad.fill_(self._norm if self._norm != 0.0 else -0.0)
        self._written = grad
        if self._is_in_ddp:
            self.anchor.grad = None  # DDP wants a gradient of the parameter's dtype, and reduces zeros for None
            after_reduction(lambda: setattr(self.anchor, "grad", grad))

    # ---- between backward and step

    def reconcile(self) -> bool:
        """Apply to the rows the changes of ``anchor.grad`` since it was written; return whether rows are pending.

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
            # Clipping by a NaN norm makes NaN from 0. It has no effect, as no rows are pending.
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
                f"{norm:g}), so the rows that it represents are unknown; scale it in place: anchor.grad.mul_(factor)"
            )
        if math.isnan(value) and math.isnan(norm):
            return True
        if norm == 0.0 or (math.isfinite(value) and not math.isfinite(norm)):
            raise RuntimeError(
                f"table {self.name!r}: anchor.grad was changed from {norm:g} to {value:g}, which is no scaling of "
                "the row gradients; it may only be multiplied (unscaling, clip_grad_norm_) or dropped (zero_grad)"
            )
        # Beyond 1e8, or in float32, the 1e-6 in clip_grad_norm_ is lost, and it may give its bound to the last digit.
        is_exact = grad.dtype is torch.float64 and norm < 1e8
        if is_exact and abs(value) < norm and is_short(value) and not is_short(norm):
            raise RuntimeError(
                f"table {self.name!r}: anchor.grad went from {norm:.9g} to exactly {value:g}, as clip_grad_value_ sets "
                "it; a table takes that for a scaling, and cannot clip each value; use clip_grad_norm_, or clip the "
                "parameters that are not in bunkbed.torch.anchors(model)"
            )
        ratio = value / norm
        self._is_finite = self.rows.scale(self.sums, ratio)  # `require_finite` reports others
        for part in self._parts:
            part.scale *= ratio
        self._norm = value
        return True

    def take_nothing(self) -> bool:
        """Return whether a step without rows is due: SparseAdam counts zeros of ``zero_grad(set_to_none=False)``."""
        grad = self.anchor.grad
        if self._parts or grad is None or grad.item() != 0.0:
            return False
        grads = self.rows.grads(torch.empty(0, self.table.dim, device=self.anchor.device))
        nothing = Part(order=next(self.order), ids=np.empty(0, np.int64), grads=grads)
        self.batch, self.sums, _ = self.rows.sum([nothing])
        self._is_finite = True
        return True

    def require_finite(self) -> None:
        """Raise ValueError with the first id whose gradient is not finite, before a step changes anything."""
        if self._is_finite:
            return
        row, column, value = self.rows.first_bad(self.sums)
        row_id = int(self.rows.unique(self.batch)[row])
        raise ValueError(not_finite(self.name, row_id, value, column, "torch.amp.GradScaler"))

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self.table.step

    def stepping(self, lr: float) -> AbstractContextManager[None]:
        """Return a context in which the table takes one step."""
        return nullcontext()

    def update(self, lr: float) -> None:
        """Take one step of the table with the summed rows."""
        with self.stepping(lr):
            self.rows.step(self.batch, self.sums, lr=lr, step=None)

    @staticmethod
    def update_together(steps: Sequence[tuple[Pending, float]]) -> None:
        """Take one step of each table, (`Pending`, lr), in one call of the core, which checks all tables first."""
        pendings = [pending for pending, _ in steps]
        with ExitStack() as contexts:
            for pending, lr in steps:
                if pending.rank_rows is not None:
                    contexts.enter_context(pending.stepping(lr))
            _native.update_many(
                [pending.core for pending in pendings],
                [pending.batch for pending in pendings],
                [pending.sums for pending in pendings],
                [lr for _, lr in steps],
                [None] * len(pendings),
            )

    @property
    def has_rows(self) -> bool:
        """True if a step would update rows."""
        return bool(self._parts) and self.anchor.grad is not None

    def drop(self) -> None:
        """Forget every pending gradient."""
        if self._parts:
            self._parts = []
            self.batch = self.sums = None
        self._norm = 0.0

    def forget_aborted(self) -> None:
        """Forget gradients of backward calls that did not accumulate (torch.autograd.grad, or an error)."""
        self._arrived.clear()


def grad_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without float64."""
    return torch.float64 if device.type == "meta" or capabilities.of(device).has_float64 else torch.float32


def rounded(norm: float, dtype: torch.dtype) -> float:
    """Return the norm as ``anchor.grad`` stores it, so that the value read back is equal."""
    return norm if dtype is torch.float64 else float(torch.tensor(norm, dtype=dtype))


def is_short(value: float) -> bool:
    """Return whether a value of a gradient has four digits at most, as people write a bound, and hardly a norm has."""
    return float(f"{value:.4g}") == value


def alive(pending: weakref.ref[Pending]) -> Pending:
    """Return the `Pending` of a lookup at its backward.

    Raises:
        RuntimeError: its layers and optimizer were deleted.
    """
    found = pending()
    if found is None:
        raise RuntimeError(
            "a backward reached a table whose layers and Optimizer are gone; keep the model until after backward"
        )
    return found


def require_one_process(name: str) -> None:
    """Raise RuntimeError for a writable table under torch.distributed with more than one process.

    Each rank would train a copy of its own, or the ranks would compete for the lock of one table.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    world = torch.distributed.get_world_size()
    if world > 1:
        raise RuntimeError(
            f"table {name!r} is of this process alone, and torch.distributed has {world} processes, so every rank "
            "would train its own copy; let the layer make the table after init_process_group (path= instead of "
            "table=), or give placement='local', or open the table with mode='r' for inference"
        )
