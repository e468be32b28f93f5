"""torch checkpoints: an `nn.Embedding`'s weight by name, and the state of the optimizer that trained it.

Read by ``torch.load(weights_only=True, mmap=True)``, which runs no code from the file and maps its tensors. Names are
paths with dots through the nested containers of the file: ``model.user.weight``, ``optimizer.state.0``.
"""

from __future__ import annotations

import mmap
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from bunkbed.core.optim import Adagrad, Adam
from bunkbed.core.types import Json
from bunkbed.io.common.source import Chunk, Reading, Source, check_claim, check_rows, need, the_array_meant
from bunkbed.io.common.writing import Writing
from bunkbed.io.formats.dense import fill
from bunkbed.io.formats.zip_members import MemberRows, offset_of, set_checksums

#: A tensor, the content of a checkpoint, or the module torch, which is untyped here.
Torch: TypeAlias = Any

_INSTALL = '"bunkbed[torch]"'
#: Limits of the containers in a checkpoint.
_MOST_PARTS, _MOST_DEPTH = 1_000_000, 100


def read(reading: Reading) -> Source:
    """Return rows of a tensor by position, with state if it certainly belongs to that tensor."""
    torch = need("torch", "a torch checkpoint", _INSTALL)
    path = reading.path
    reading.refuse(ids=reading.id_column)
    try:
        content = _load(torch, str(path))
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"{path} is not a torch checkpoint of tensors alone: {reason}") from None
    tensors, optimizers = _walk(torch, content, path)
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
        # With strides of 0, every row of a tensor can be the same few bytes.
        check_claim(where, len(tensor), tensor.shape[1] * tensor.element_size(), path.stat().st_size)
    step = entry.get("step")
    chunk = reading.rows_of()

    def chunks() -> Iterator[Chunk]:
        for begin in range(0, len(weight), chunk):
            yield (
                None,
                {slot: tensor[begin : begin + chunk].float().contiguous().numpy() for slot, tensor in found.items()},
            )

    return Source(len(weight), tuple(found), chunks, None if step is None else int(step))


def _load(torch: Torch, path: str) -> Torch:
    _refuse_compressed(path)

    def load() -> Torch:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    try:
        return load()
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
    # Linux refuses a private mapping larger than memory, as all its pages might be written. This code writes none, so a
    # shared mapping works too. It is the second choice because torch opens the file for writing.
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return load()


def _refuse_compressed(path: str) -> None:
    """Raise ValueError if a member is compressed: torch writes none, and would expand a zip bomb to gigabytes."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                    raise ValueError(f"its {member.filename!r} is compressed, and torch compresses nothing")


def _dtype(tensor: Torch) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _walk(torch: Torch, content: Torch, path: Path) -> tuple[Json, Json]:
    """Return tensors outside optimizers, and optimizers' state_dicts, by name.

    Raises:
        ValueError: the file has too many parts, or they are nested too deep, as in a container that has itself.
    """
    tensors: Json = {}
    optimizers: Json = {}
    rest, count = [("", 0, content)], 0
    while rest:
        name, depth, value = rest.pop()
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            continue
        if isinstance(value, Mapping):
            if {"state", "param_groups"} <= set(value):
                optimizers[name] = value
                continue
            parts: Iterable[tuple[Torch, Torch]] = value.items()
        elif isinstance(value, (list, tuple)):
            parts = enumerate(value)
        else:
            continue
        count += len(value)
        if count > _MOST_PARTS or depth > _MOST_DEPTH:
            raise ValueError(
                f"{path} is no checkpoint: it has more than {_MOST_PARTS} parts, or parts nested more than "
                f"{_MOST_DEPTH} deep"
            )
        named = [(f"{name}.{key}" if name else str(key), depth + 1, one) for key, one in parts]
        rest.extend(reversed(named))  # in the order of the file
    return tensors, optimizers


def _named(reading: Reading, tensors: Json) -> str:
    """Return the name of the tensor to read."""
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2 and tensor.is_floating_point()}
    listed = ", ".join(f"{name} [{tensor.shape[0]}, {tensor.shape[1]}]" for name, tensor in matrices.items()) or "none"
    return the_array_meant(reading, tensors, matrices, listed, separator=".", what="tensor")


def _state_of(reading: Reading, name: str, tensors: Json, optimizers: Json, content: Torch) -> tuple[Json, str]:
    """Return the optimizer's entry for a tensor, and its name; empty if there is none.

    A state_dict numbers its parameters. The entry is used if the caller names it, if the optimizer has named
    parameters, or if only one tensor has its shape: the state of another tensor would be used without an error.
    """
    if reading.state is not None:
        value: Torch = content
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
    entries: Json = {}
    for optimizer, value in optimizers.items():
        names: dict[Torch, str] = {}
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
    """Write every id in ``[0, num_rows)``: a state_dict; with state, ``{"model": ..., "optimizer": ...}``.

    torch would write a tensor whole. Instead, ``torch.save`` makes the archive with room for the tensors, and rows are
    then written into the archive in any order, each once.
    """
    torch = need("torch", "a torch checkpoint", _INSTALL)
    table, name = writing.table, writing.name or "weight"
    rows = writing.every_row()
    if "weight" not in writing.lengths:
        raise ValueError(f"{writing.target}: a torch checkpoint holds the weights; name them among slots")
    group = _group(torch, writing, name) if writing.state else None
    slots = ("weight", *writing.state)  # the order in which torch writes them
    tensors = {slot: _room(torch, writing, slot, rows) for slot in slots}
    content: Json = {name: tensors["weight"]}
    if group is not None:
        state = {"step": table.step, **{slot: tensors[slot] for slot in writing.state}}
        content = {"model": content, "optimizer": {"state": {0: state}, "param_groups": [group]}}
    with torch.serialization.skip_data():
        torch.save(content, str(writing.file))
    with writing.file.open("r+b") as file:
        with zipfile.ZipFile(file) as archive:
            members = [one for one in archive.infolist() if one.filename.partition("/")[2].startswith("data/")]
        sizes = [4 * rows * writing.lengths[slot] for slot in slots]
        if [member.file_size for member in members] != sizes:  # skip_data is new and may change
            raise RuntimeError(
                f"torch {torch.__version__} left no room for the rows of {writing.target}; export to .safetensors"
            )
        targets = {
            slot: MemberRows(file.fileno(), offset_of(file, member), writing.lengths[slot])
            for slot, member in zip(slots, members, strict=True)
        }
        fill(table, targets, writing.scratch, writing.report)
        checksums = (target.checksum() for target in targets.values())
        set_checksums(file, dict(zip([member.filename for member in members], checksums, strict=True)))
    return rows


def _room(torch: Torch, writing: Writing, slot: str, rows: int) -> Torch:
    """Return a tensor that takes no memory and no disk: a mapped sparse file."""
    file = writing.scratch / f"{slot}.room"
    length = writing.lengths[slot]
    with file.open("wb") as room:
        room.truncate(4 * rows * length)
    tensor = torch.from_file(str(file), shared=True, size=rows * length, dtype=torch.float32).reshape(rows, length)
    file.unlink()
    return tensor


def _group(torch: Torch, writing: Writing, name: str) -> Json:
    """Return the param_group of the torch optimizer that can continue with this state."""
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
    group: Json = made.state_dict()["param_groups"][0]
    return group
