"""torch checkpoints: an `nn.Embedding`'s weight by name, and the state of the optimizer that trained it.

Read through ``torch.load(weights_only=True, mmap=True)``, which runs no code from the file and maps its tensors. Names
are paths with dots through whatever nesting the file has: ``model.user.weight``, ``optimizer.state.0``.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from bunkbed.io.dense import FileRows, fill
from bunkbed.io.exporting import Writing
from bunkbed.io.source import Chunk, Reading, Source, check_rows, need, the_array_meant
from bunkbed.optim import Adagrad, Adam

_INSTALL = '"bunkbed[torch]"'


def read(reading: Reading) -> Source:
    """Rows of a tensor by position, with state where it is known to be that tensor's."""
    torch = need("torch", "a torch checkpoint", _INSTALL)
    path = reading.path
    reading.refuse(ids=reading.id_column)
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"{path} is not a torch checkpoint of tensors alone: {reason}") from None
    tensors: dict[str, Any] = {}
    optimizers: dict[str, Any] = {}
    _walk(torch, content, "", tensors, optimizers)
    name = _named(reading, tensors)
    weight = tensors[name]
    found = {"weight": weight}
    entry, entry_name = _state_of(reading, name, tensors, optimizers, content)
    for slot in reading.slots:
        if slot != "weight" and slot in entry:
            found[slot] = entry[slot]
    found = {slot: tensor for slot, tensor in found.items() if slot in reading.slots}
    for slot, tensor in found.items():
        where = f"{path}: {name if slot == 'weight' else f'{entry_name}.{slot}'}"
        check_rows(where, tuple(tensor.shape), _dtype(tensor), reading.length(slot))
        if len(tensor) != len(weight):
            raise ValueError(f"{where} has {len(tensor)} rows, {name} has {len(weight)}")
    step = entry.get("step")
    chunk = reading.rows_of()

    def chunks() -> Iterator[Chunk]:
        for begin in range(0, len(weight), chunk):
            yield (
                None,
                {slot: tensor[begin : begin + chunk].float().contiguous().numpy() for slot, tensor in found.items()},
            )

    return Source(len(weight), tuple(found), chunks, None if step is None else int(step))


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _walk(torch: Any, value: Any, name: str, tensors: dict[str, Any], optimizers: dict[str, Any]) -> None:
    """Collects tensors outside optimizers, and optimizers' state_dicts, by name."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return
    if isinstance(value, Mapping):
        if {"state", "param_groups"} <= set(value):
            optimizers[name] = value
            return
        parts = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(str(at), one) for at, one in enumerate(value)]
    else:
        return
    for key, one in parts:
        _walk(torch, one, f"{name}.{key}" if name else key, tensors, optimizers)


def _named(reading: Reading, tensors: dict[str, Any]) -> str:
    """The one tensor that is meant."""
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2 and tensor.is_floating_point()}
    listed = ", ".join(f"{name} [{tensor.shape[0]}, {tensor.shape[1]}]" for name, tensor in matrices.items()) or "none"
    return the_array_meant(reading, tensors, matrices, listed, separator=".", what="tensor")


def _state_of(
    reading: Reading, name: str, tensors: dict[str, Any], optimizers: dict[str, Any], content: Any
) -> tuple[dict[str, Any], str]:
    """The optimizer's entry for a tensor, and its name; empty where there is none.

    A state_dict numbers its parameters. The entry is taken where the caller names it, where the optimizer was given
    named parameters, or where only one tensor has its shape: another's state would train on without a word.
    """
    if reading.state is not None:
        value: Any = content
        for key in reading.state.split("."):
            if isinstance(value, (list, tuple)) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, Mapping):
                value = value.get(key, value.get(int(key)) if key.isdecimal() else None)
            else:
                value = None
        if not isinstance(value, Mapping) or not set(value) & set(reading.slots):
            raise ValueError(
                f"{reading.path} has no optimizer state {reading.state!r} with one of {', '.join(reading.slots)}; "
                f"its optimizers are: {', '.join(optimizers) or 'none'}"
            )
        return dict(value), reading.state
    if not set(reading.slots) - {"weight"}:
        return {}, ""
    shape = tensors[name].shape
    alike = sum(tensor.shape == shape for tensor in tensors.values())
    entries: dict[str, Any] = {}
    for optimizer, value in optimizers.items():
        names: dict[Any, str] = {}
        for group in value["param_groups"]:
            names.update(zip(group["params"], group.get("param_names", ()), strict=False))
        for index, entry in value["state"].items():
            path = f"{optimizer}.state.{index}" if optimizer else f"state.{index}"
            if index in names:
                fits = name == names[index] or name.endswith(f".{names[index]}")
            else:
                fits = any(getattr(one, "shape", None) == shape for one in entry.values())
            if fits and set(entry) & set(reading.slots):
                entries[path] = (entry, index in names)
    if not entries:
        return {}, ""
    if len(entries) > 1 or (alike > 1 and not next(iter(entries.values()))[1]):
        raise ValueError(
            f"{reading.path} does not say which optimizer state is that of {name}; say it with state=, such as "
            f'{next(iter(entries))!r}, or leave state out with slots=("weight",)'
        )
    path, (entry, _) = next(iter(entries.items()))
    return dict(entry), path


def write(writing: Writing) -> int:
    """Every id in ``[0, num_rows)``: a state_dict; with state, ``{"model": ..., "optimizer": ...}``.

    torch writes a tensor whole, so the rows are first brought into order in a file, which is then mapped.
    """
    torch = need("torch", "a torch checkpoint", _INSTALL)
    table, name = writing.table, writing.name or "weight"
    rows = writing.every_row()
    if "weight" not in writing.lengths:
        raise ValueError(f"{writing.target}: a torch checkpoint holds the weights; name them among slots")
    group = _group(torch, writing, name) if writing.state else None
    tensors = {}
    for at, (slot, length) in enumerate(writing.lengths.items()):
        file = writing.scratch / f"{slot}.data"
        aside = writing.scratch / f"{slot}.aside"
        aside.mkdir()

        def report(done: int, total: int, at: int = at) -> None:
            writing.report((at * total + done) // len(writing.lengths), total)

        with file.open("w+b") as out:
            out.truncate(4 * rows * length)
            fill(table, slot, length, FileRows(out.fileno(), 0, length), aside, report)
        flat = torch.from_file(str(file), shared=True, size=rows * length, dtype=torch.float32)
        tensors[slot] = flat.reshape(rows, length)
    content: dict[str, Any] = {name: tensors["weight"]}
    if group is not None:
        state = {"step": table.step, **{slot: tensors[slot] for slot in writing.state}}
        content = {"model": content, "optimizer": {"state": {0: state}, "param_groups": [group]}}
    torch.save(content, str(writing.file))
    return rows


def _group(torch: Any, writing: Writing, name: str) -> dict[str, Any]:
    """The param_group of the torch optimizer that goes on with this state."""
    optimizer = writing.table.optimizer
    if set(writing.state) != set(optimizer.slots):
        raise ValueError(
            f"{writing.target}: torch's optimizers load all of {', '.join(optimizer.slots)} or nothing, got "
            f"{', '.join(writing.state)}"
        )
    parameter = [(name, torch.nn.Parameter(torch.zeros(1, writing.table.dim)))]
    if isinstance(optimizer, Adam):
        made = torch.optim.SparseAdam(parameter, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
    elif isinstance(optimizer, Adagrad):
        made = torch.optim.Adagrad(
            parameter,
            lr=optimizer.lr,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            initial_accumulator_value=optimizer.initial_accumulator,
        )
    else:
        raise ValueError(
            f"{writing.target}: torch has no optimizer with the state of {type(optimizer).__name__}; export it to "
            ".parquet, or weights alone"
        )
    group: dict[str, Any] = made.state_dict()["param_groups"][0]
    return group
