"""Base class of `Embedding` and `EmbeddingBag`: the table, the anchor, checkpoints and argument checks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

import bunkbed as bb
from bunkbed.adapters.bag_gradients import IntArray
from bunkbed.adapters.ram_rows import Facts, Rows, is_in_ram, is_other, no_rows, why_not, with_rows
from bunkbed.adapters.references import References
from bunkbed.adapters.removal import is_taken
from bunkbed.adapters.tables import TableOptions, require_same
from bunkbed.core.budget import Budget
from bunkbed.core.types import Json
from bunkbed.table.table import Table
from bunkbed.torch.base import checkpoint
from bunkbed.torch.base.types import Device
from bunkbed.torch.making import Maker
from bunkbed.torch.pending import require_one_process
from bunkbed.torch.pendings import copy_of_pending, follow, pending_of, replace_table
from bunkbed.torch.ranks.sharing import Sharing
from bunkbed.torch.ranks.table import DistributedTable

#: Rows per `Table.set` when weights are imported.
IMPORT_CHUNK = 65_536

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def id_array(ids: Tensor, what: str = "input") -> IntArray:
    """Return an integer tensor as an int64[...] NumPy array, which is a view unless dtype or device differ.

    Raises:
        TypeError: not a tensor, or neither int64 nor int32.
    """
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{what} must be an int64 or int32 tensor, got {type(ids).__name__}")
    if ids.dtype is not torch.int64:
        if ids.dtype is not torch.int32:
            name = str(ids.dtype).removeprefix("torch.")
            raise TypeError(f"{what} must be an int64 or int32 tensor, got {name}{list(ids.shape)}")
        ids = ids.long()
    return values_of(ids, what)


def values_of(ids: Tensor, what: str = "input") -> IntArray:
    """Return an int64 tensor as an array, which is a view if the tensor is on the CPU.

    Raises:
        TypeError: NumPy cannot see its values.
    """
    try:
        array: IntArray = (ids if ids.is_cpu else ids.cpu()).numpy()
        return array
    except (RuntimeError, TypeError):
        _require_plain(ids, what)
        raise


def _is_wrapped(tensor: Tensor) -> bool:
    active = torch._C._are_functorch_transforms_active()
    return bool(active and torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _require_plain(ids: Tensor, what: str) -> None:
    """Raise TypeError for a tensor whose values NumPy cannot see."""
    if ids.is_meta:
        kind, remedy = "a tensor on the meta device, which has no values", "give the ids themselves"
    elif _is_wrapped(ids):
        kind = "a tensor of a torch.func transform (vmap, grad)"
        remedy = "look rows up outside it, or transform bunkbed.torch.freeze(model)"
    elif ids.is_nested:
        kind, remedy = "a nested tensor of strided layout", "use layout=torch.jagged"
    elif ids.layout is not torch.strided:
        kind, remedy = "a sparse tensor", "use to_dense()"
    else:
        return  # a subclass, as Parameter
    raise TypeError(f"{what} is {kind}; {remedy}")


def require_live(layer: TableLayer) -> None:
    """Raise RuntimeError in `torch.jit.trace` and `torch.export`, whose graphs cannot hold a table."""
    how = "torch.export" if torch.compiler.is_exporting() else "torch.jit.trace" if torch.jit.is_tracing() else ""
    if how:
        raise RuntimeError(_no_graph(layer, how))


def refuse_transforms(layer: TableLayer) -> NoReturn:
    """Raise RuntimeError for a lookup that trains rows within a transform of torch.func."""
    raise RuntimeError(
        f"{type(layer).__name__}: rows of table {layer.table.name!r} are no part of a torch.func transform (vmap, "
        "grad); look rows up outside it, or transform bunkbed.torch.freeze(model)"
    )


def _no_graph(layer: TableLayer, how: str) -> str:
    return (
        f"{type(layer).__name__}: {how} makes a graph without tables, and the rows are in table {layer.table.name!r}; "
        "make it of a copy that has them: bunkbed.torch.freeze(model, rows=None, max_bytes=...)"
    )


# Under torch.compile a layer is a graph break. `forward` calls this only then: the wrapper costs as much as a
# small lookup, and importing torch._dynamo takes a second.
@torch._disable_dynamo  # type: ignore[untyped-decorator]
def outside_graph(layer: torch.nn.Module, *inputs: Any) -> Tensor:
    """Return ``layer.forward(*inputs)``, never traced by torch.compile."""
    return layer.forward(*inputs)


def as_leaf(layer: torch.nn.Module, *inputs: Tensor) -> Tensor:
    """Return the call of a layer in a graph of torch.fx, which keeps the layer as it is."""
    tracer = next(one for one in inputs if isinstance(one, torch.fx.Proxy)).tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), inputs, {})


class TableLayer(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Base of the layers: a `torch.nn.Module` whose rows are in a table.

    It owns the anchor (shared by all layers on one table) and keeps the table open. The table closes with its
    last user. Rows are durable once committed (``state_dict()`` or ``table.commit()``).
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        scale_grad_by_freq: bool,
        *,
        options: TableOptions,
        dtype: str | torch.dtype | None,
        table: Table | None,
        device: Device,
        device_cache: int | str | Budget | None,
        keep_checkpoints: int | None,
        sharing: Sharing,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        if max_norm is not None:
            raise ValueError(
                f"{kind}: max_norm={max_norm!r} is not supported, since a lookup never changes rows; normalise the "
                "output instead: torch.nn.functional.normalize(layer(ids), dim=-1)"
            )
        if scale_grad_by_freq:
            raise ValueError(
                f"{kind}: scale_grad_by_freq=True is not supported; scale the loss of each id by hand, or leave it out"
            )
        # A seed is drawn even if a stored table has its own, so that weights made after this layer do not
        # depend on whether the table existed. torch's generator draws it: torch.manual_seed decides, and two
        # layers differ.
        drawn = int(torch.randint(2**62, (), device="cpu").item())
        _require_size(kind, "embedding_dim", embedding_dim)
        if num_embeddings is not None:
            _require_size(kind, "num_embeddings", num_embeddings)
        sharing.require_valid(kind)
        dims = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        maker: Maker | None = None
        if table is None:
            ranks = sharing.ranks(kind)
            if ranks is not None:
                drawn = ranks.gather("making a layer", lambda: drawn)[0]
            options = replace(options, dtype=_dtype_name(kind, dtype))
            arguments = options.arguments(
                kind, dims, "init", num_rows=num_embeddings, dim=embedding_dim, init=bb.Normal(std=1.0), seed=drawn
            )
            maker = Maker(arguments, sharing, ranks)
            table = maker.make(options.optimizer)
        else:
            if table.mode != "r" and sharing.placement != "local" and not isinstance(table, DistributedTable):
                require_one_process(table.name)
            replace(options, dtype=dtype).require_none(kind)
            sharing.require_none(kind)
            require_same(kind, table, **dims)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _padding_row(kind, padding_idx, num_embeddings)
        self._pending = pending_of(table, device, device_cache, maker)
        if options.optimizer is not None:
            self._pending.maker = None
        self._pending.is_local = self._pending.is_local or sharing.placement == "local"
        self.anchor = self._pending.anchor
        if keep_checkpoints is not None and keep_checkpoints < 1:
            raise ValueError(f"{kind}: keep_checkpoints must be at least 1, or None for all, got {keep_checkpoints}")
        self._pending.references.keep_at_least(keep_checkpoints)
        self._zero_padding = False
        self._set_padding()

    # ---- the table

    @property
    def table(self) -> Table:
        """The `bunkbed.Table` that holds the rows."""
        return self._pending.table

    # Internal.
    @property
    def references(self) -> References:
        return self._pending.references

    @property
    def keep_checkpoints(self) -> int | None:
        """How many epochs kept by ``state_dict()`` stay loadable; None keeps all. Named ones always stay."""
        return self._pending.references.keep

    @keep_checkpoints.setter
    def keep_checkpoints(self, value: int | None) -> None:
        self._pending.references.keep = value

    def reset_parameters(self) -> None:
        """Make every row of a table in RAM only untouched again, with a seed that torch's generator draws.

        Raises:
            RuntimeError: the table has files, or several processes share it.
        """
        table = self.table
        if not is_in_ram(table):
            raise RuntimeError(
                f"{type(self).__name__}.reset_parameters: the rows of table {table.name!r} are in files; to start over "
                'give the layer exist="new"'
            )
        self._pending.drop()
        self.anchor.grad = None
        facts = replace(Facts.of(table), step=0, seed=int(torch.randint(2**62, (), device="cpu").item()))
        replace_table(self._pending, with_rows(table, no_rows(table), facts))
        self._set_padding()

    def _take_pretrained(self, embeddings: Tensor, *, freeze: bool) -> Self:
        """Set all rows to float[num_embeddings, dim] `embeddings`; outputs have their dtype, as torch's do."""
        self._import(embeddings)
        self.to(embeddings.dtype)
        self.anchor.requires_grad = not freeze
        return self

    def _set_padding(self) -> None:
        """Store zeros in the padding row unless the row is stored already, as torch does for a new layer."""
        row, table = self.padding_idx, self.table
        if row is None:
            return
        is_stored = bool(table.contains(np.array([row], np.int64))[0])
        if table.mode == "r":
            self._zero_padding = not is_stored  # a reader cannot store zeros: lookups write them into their output
            return
        if not is_stored:
            table.put(np.array([row], np.int64), np.zeros((1, self.embedding_dim), np.float32), 0)
        table.spare(row)

    def _import(self, weight: Tensor) -> None:
        """Overwrite rows ``0 .. len(weight) - 1`` with a float[num_embeddings, dim] tensor, chunk by chunk."""
        for start in range(0, weight.shape[0], IMPORT_CHUNK):
            chunk = weight[start : start + IMPORT_CHUNK].detach().to("cpu", torch.float32).contiguous()
            self.table.set(np.arange(start, start + len(chunk), dtype=np.int64), chunk.numpy())

    def _look_up(self, rows: IntArray, *, touch: bool) -> Tensor:
        """Return the rows of int64[...] ids as the layer outputs them, [..., dim].

        The table aligns them to 64 bytes: MKL's kernels give other bits at other alignments, so a model's losses would
        depend on the address of the rows.
        """
        out = torch.from_numpy(self._pending.table.lookup(rows, touch=touch))
        return self._output(out)

    # Internal: the int64[N] ids that ``forward`` looks up for its arguments.
    def looked_up(self, ids: Tensor, *_: Tensor) -> IntArray:
        return id_array(ids).reshape(-1)

    def _output(self, values: Tensor) -> Tensor:
        """Return a float32 CPU tensor on the anchor's device and in its dtype."""
        anchor = self._parameters["anchor"]
        if anchor.dtype is not torch.float32 or not anchor.is_cpu:
            values = values.to(anchor.device, anchor.dtype)
        return values

    # ---- torch.nn.Module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Tensor:
        # Hide the anchor from the base class, which would cast its gradient too and may replace the Parameter.
        parameters = self._parameters
        anchor, parameters["anchor"] = parameters["anchor"], None
        try:
            super()._apply(fn, recurse)
        finally:
            parameters["anchor"] = anchor
        with torch.no_grad():
            moved = fn(anchor.detach())
        self._pending.move_anchor(moved)
        return self

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in checkpoint.save(self._pending.references).items():
            destination[prefix + name] = value

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        reference, weight = state_dict.get(prefix + checkpoint.KEY), state_dict.get(prefix + "weight")
        saved = checkpoint.rows_in(state_dict, prefix)
        ours = {
            prefix + name for name in (checkpoint.KEY, "weight", "anchor", *(checkpoint.ROWS + key for key in saved))
        }
        # The anchor's value has no meaning, but the Parameter must stay the same object (assign=True replaces it).
        rest = {key: value for key, value in state_dict.items() if key not in ours}
        rest[prefix + "anchor"] = self.anchor.detach().clone()
        super()._load_from_state_dict(
            rest, prefix, {**local_metadata, "assign_to_params_buffers": False}, strict,
            missing_keys, unexpected_keys, error_msgs,
        )  # fmt: skip
        self._pending.note_anchor()
        if reference is not None:
            references = self._pending.references
            error = self._load_rows(saved, reference) if saved else checkpoint.load(references, reference)
            if error is not None:
                error_msgs.append(error)
            self._set_padding()
        elif weight is not None:
            expected = (
                weight.shape[0] if self.num_embeddings is None else self.num_embeddings,
                self.embedding_dim,
            )
            if tuple(weight.shape) != expected:
                error_msgs.append(
                    f"size mismatch for {prefix}weight: the checkpoint has {tuple(weight.shape)}, table "
                    f"{self.table.name!r} has {expected}."
                )
            else:
                self._import(weight)
        else:
            missing_keys.append(prefix + checkpoint.KEY)

    def _load_rows(self, saved: Rows, reference: Tensor) -> str | None:
        """Take over saved rows, with the rule that trained them; return the reason if that is not possible."""
        facts = checkpoint.facts_in(reference)
        if facts is None or "ids" not in saved:
            return checkpoint.damaged(self.table)
        pending = self._pending
        # An attached Optimizer has decided the rule, and shows its values in the table's group.
        if pending.maker is not None and pending.optimizer is None and pending.maker.can_make_again(self.table):
            follow(pending, facts.optimizer)
        why = why_not(self.table, saved, facts)
        if why:
            return f"table {self.table.name!r}: {why}"
        if pending.has_rows and is_other(self.table, facts):
            return f"table {self.table.name!r}: gradients wait for a step; take it, or zero_grad(), before loading"
        replace_table(pending, with_rows(self.table, saved, facts))
        return None

    def __getattr__(self, name: str) -> Tensor:
        if name == "weight":
            raise AttributeError(_no_weight(self))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "weight":
            raise AttributeError(_no_weight(self))
        if name == "anchor" and "anchor" in self.__dict__.get("_parameters", ()) and value is not self.anchor:
            raise AttributeError(
                f"{type(self).__name__}.anchor represents table {self.table.name!r} and cannot be replaced; to share "
                "a table between layers give table=other.table; for FSDP write "
                "fully_shard(model, ignored_params=bunkbed.torch.anchors(model))"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the layer and its table, which must be in RAM only; layers on one table share the copy.

        Raises:
            TypeError: the table has files, or several processes share it.
        """
        if not is_in_ram(self.table):
            raise TypeError(
                f"{type(self).__name__} cannot be copied: table {self.table.name!r} has one writer; share it with "
                "table=layer.table, or keep `layer.state_dict()`, which refers to the table's present rows"
            )
        made = memo.get(id(self._pending))
        if made is None:
            made = memo[id(self._pending)] = copy_of_pending(self._pending)
            memo[id(self.anchor)] = made.anchor
        layer = self.__new__(type(self))
        memo[id(self)] = layer
        layer.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return layer

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: table {self.table.name!r} stays in its files; save "
            "`model.state_dict()`, and open the table by path where the model is loaded"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which calls this."""
        raise RuntimeError(_no_graph(self, "torch.jit.script"))

    def _table_repr(self) -> str:
        table = self.table
        where = "ram only" if table.path is None else f"path={str(table.path)!r}"
        text = f", {where}, optimizer={type(table.optimizer).__name__}"
        return text if table.dtype == "float32" else f"{text}, dtype={table.dtype}"


def anchors(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the anchors of the layers of a model: the parameters that tools must leave whole on each process.

    Args:
        model: any module; modules in it that are no layers of `bunkbed.torch` are passed over.

    >>> from bunkbed.torch import Embedding
    >>> model = torch.nn.Sequential(Embedding(10, 4), torch.nn.Linear(4, 1))
    >>> anchors(model) == {model[0].anchor}
    True

    With FSDP::

        fully_shard(model, ignored_params=anchors(model))
    """
    return {layer.anchor for layer in model.modules() if isinstance(layer, TableLayer)}


def _no_weight(layer: TableLayer) -> str:
    kind = type(layer).__name__
    return (
        f"{kind!r} has no attribute 'weight': the rows live in table {layer.table.name!r}, larger than one tensor "
        "may be; read rows with layer.table.get(ids), all rows with layer.table.scan(), the best by dot product "
        "with layer.table.topk(queries, k), write rows with layer.table.set(ids, values), and initialise with "
        f"{kind}(..., init=bunkbed.Normal(std=...))"
    )


def _require_size(kind: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{kind}: {name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{kind}: {name} must be at least 1, got {value}")


def _padding_row(kind: str, padding_idx: int | None, num_embeddings: int | None) -> int | None:
    if padding_idx is None:
        return None
    if num_embeddings is None:
        if padding_idx < 0:
            raise ValueError(f"{kind}: padding_idx={padding_idx} counts from the end, but num_embeddings is None")
        return padding_idx
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(
            f"{kind}: padding_idx={padding_idx} is outside [-{num_embeddings}, {num_embeddings}), the ids of the layer"
        )
    return padding_idx + num_embeddings if padding_idx < 0 else padding_idx


def _dtype_name(kind: str, dtype: str | torch.dtype | None) -> str | None:
    if isinstance(dtype, torch.dtype):
        if dtype not in _DTYPES:
            raise ValueError(f"{kind}: dtype must be float32, bfloat16 or float16, got {dtype}")
        return _DTYPES[dtype]
    return dtype


def pretrained_shape(kind: str, embeddings: Tensor, ours: Json) -> tuple[int, int]:
    """Return (rows, dim) of float[rows, dim] `embeddings`; refuse to overwrite rows that exist.

    Raises:
        ValueError: another number of dimensions, or `table=` is given.
        FileExistsError: the path is a directory that is not empty.
    """
    if embeddings.dtype not in _DTYPES:
        raise TypeError(
            f"{kind}.from_pretrained: embeddings must be float32, bfloat16 or float16, as rows are stored, got "
            f"{embeddings.dtype}; give embeddings.float() to have them in float32"
        )
    if embeddings.dim() != 2:
        raise ValueError(f"{kind}.from_pretrained: embeddings must be [rows, dim], got {list(embeddings.shape)}")
    if ours.get("table") is not None:
        raise ValueError(f"{kind}.from_pretrained: table= has rows of its own; write into it with table.set")
    path = ours.get("path")
    if path is not None and ours.get("exist") != "new" and is_taken(Path(path).expanduser()):
        raise FileExistsError(
            f"{kind}.from_pretrained: {str(path)!r} exists and its rows would be overwritten; open it with "
            f'{kind}(..., path=...), replace it with exist="new", or give another path'
        )
    rows, dim = embeddings.shape
    return int(rows), int(dim)
