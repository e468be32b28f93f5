"""`save_portable`: a model and its tables in one folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from urllib.parse import quote

import torch
from torch import nn

import bunkbed as bb
from bunkbed.adapters.ram_rows import MOST_BYTES, bytes_of, is_in_ram
from bunkbed.adapters.removal import is_taken
from bunkbed.core.typed import typed
from bunkbed.files.durable import appearing, make_file, sync_directory, sync_file
from bunkbed.table.opening import resolve
from bunkbed.table.table import Table
from bunkbed.torch.base import checkpoint
from bunkbed.torch.layer import TableLayer
from bunkbed.torch.ranks.table import DistributedTable


@typed
def save_portable(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a model with all rows of its tables in a new folder, which may be moved to another machine.

    The folder has ``model.pt``, the model's ``state_dict()``, and for each layer with files ``tables/NAME``, its table
    with the optimizer state, where NAME is the layer's name in the model (``tables/user`` for ``model.user``). Layers
    on one table have one folder, named after the first. Rows of tables in RAM only are in ``model.pt``.

    To go on, or to serve, give each layer the path of its table in the folder, and load ``model.pt``.

    The folder appears in one step, and every record in it is verified. Where it is on the filesystem of the tables,
    hard links share files with them, as in `bunkbed.copy`. Tables are committed first. The state of the dense
    optimizer is not in the folder: save ``optimizer.state_dict()`` there.

    With several processes the call is collective, and rank 0 writes the folder.

    Args:
        model: a module; layers of `bunkbed.torch` in it may be anywhere.
        path: the folder to make; it may exist if it is empty.

    Raises:
        FileExistsError: there is something at `path`. ValueError: a table belongs to a run (`bunkbed.copy` copies a
        run); a table in RAM takes more than 1 GiB; a reader's commit is neither the last nor kept. OSError: the disk is
        full or failing. CorruptionError: a record fails its checksum. After an error there is nothing at `path`.

    >>> import tempfile, torch
    >>> from bunkbed.torch import Embedding, save_portable
    >>> folder = tempfile.mkdtemp()
    >>> model = torch.nn.ModuleDict({"user": Embedding(100, 4, path=folder + "/user", ram="8MiB")})
    >>> save_portable(model, folder + "/portable")
    >>> there = torch.nn.ModuleDict({"user": Embedding(100, 4, path=folder + "/portable/tables/user", ram="8MiB")})
    >>> there.load_state_dict(torch.load(folder + "/portable/model.pt"))
    <All keys matched successfully>
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save_portable: model must be a torch.nn.Module, got {type(model).__name__}")
    target = resolve(path)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, TableLayer)}
    shared = [layer.table.ranks for layer in layers.values() if isinstance(layer.table, DistributedTable)]
    if shared:
        shared[0].first("save_portable", lambda: _save(model, layers, target))
    else:
        _save(model, layers, target)


def _save(model: nn.Module, layers: dict[str, TableLayer], target: Path) -> None:
    if is_taken(target):
        raise FileExistsError(f"save_portable: {target} exists and would be overwritten; give another path")
    for layer in layers.values():
        _require_portable(layer.table)
    with appearing(target) as part:
        (part / "tables").mkdir(parents=True)
        with contextlib.ExitStack() as saving:
            for references in {layer.references for layer in layers.values()}:
                saving.enter_context(references.keeping_nothing())
            state = model.state_dict()
            with_files: dict[Path, str] = {}
            for name, layer in layers.items():
                if layer.table.path is not None:
                    with_files.setdefault(layer.table.path, name)
            for place, name in with_files.items():
                reference = checkpoint.reference_in(state[f"{name}.{checkpoint.KEY}" if name else checkpoint.KEY])
                assert reference is not None
                _copy(place, reference.epoch, part / "tables" / (quote(name, safe="") or place.name))
        with make_file(part / "model.pt") as file:
            torch.save(state, file)
        sync_file(part / "model.pt")
        sync_directory(part / "tables")
        sync_directory(part)


def _require_portable(table: Table) -> None:
    if table.run is not None:
        raise ValueError(
            f"save_portable: table {table.name!r} belongs to the run {table.run.path}, which has the dense weights, "
            "too; commit the run, and copy all of it: bunkbed.copy(run.path, path)"
        )
    if table.path is None and not (is_in_ram(table) and bytes_of(table) <= MOST_BYTES):
        raise ValueError(
            f"save_portable: table {table.name!r} is in RAM only, and model.pt has rows of one process, at most "
            f"{MOST_BYTES >> 20} MiB; give its layer a path="
        )


def _copy(place: Path, epoch: int, target: Path) -> None:
    """Copy the commit of a table to which the state refers."""
    names = {kept: name for name, kept in bb.snapshots(place).items()}
    copied = bb.copy(place, target, snapshot=names.get(epoch))
    if copied.epoch != epoch:
        raise ValueError(
            f"save_portable: the reader of {place} is at commit {epoch}, and the last is {copied.epoch}; refresh() the "
            "table, or open it with snapshot="
        )
