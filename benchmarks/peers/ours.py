"""Ours, through `bunkbed.torch`, with its defaults: `Embedding`, backward, `Optimizer.step`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import bunkbed as bb
from benchmarks.harness import common
from bunkbed.core import optim
from bunkbed.torch import Embedding, EmbeddingCollection, Optimizer

Step = Callable[[torch.Tensor], Any]

OPTIMIZERS: dict[str, optim.Optimizer] = {
    "adam": bb.Adam(lr=1e-3),
    "adagrad": bb.Adagrad(lr=1e-2),
    "rowwise-adagrad": bb.RowwiseAdagrad(lr=1e-2),
    "sgd": bb.SGD(lr=1e-2),
}


def stored_table(optimizer_name: str, num_rows: int, dim: int) -> Any:
    """A table in RAM whose every row is stored: untouched rows cost nothing and would flatter us."""
    table = bb.create(None, dim=dim, num_rows=num_rows, optimizer=OPTIMIZERS[optimizer_name], init=bb.Normal(1.0))
    common.fill(table)
    return table


def training(optimizer_name: str, num_rows: int, dim: int, grad: torch.Tensor) -> Step:
    """A step: lookup, backward of `grad`, optimizer step."""
    layer = Embedding(num_rows, dim, table=stored_table(optimizer_name, num_rows, dim))
    optimizer = Optimizer(layer)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(ids).backward(grad)
        optimizer.step()

    return step


def one_per_table(optimizer_name: str, tables: int, num_rows: int, dim: int) -> dict[str, Embedding]:
    """A layer for each of several tables of the same size."""
    make = functools.partial(stored_table, optimizer_name, num_rows, dim)
    return {f"C{n}": Embedding(num_rows, dim, table=make()) for n in range(1, tables + 1)}


def training_many(optimizer_name: str, tables: int, num_rows: int, dim: int, grad: torch.Tensor) -> Step:
    """A step of several tables: lookup, backward of `grad`, optimizer step; it takes int64[tables, samples] ids."""
    layers = EmbeddingCollection(one_per_table(optimizer_name, tables, num_rows, dim))
    optimizer = Optimizer(layers)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        rows = layers(dict(zip(layers, ids, strict=True)))
        torch.cat(list(rows.values()), 1).backward(grad)
        optimizer.step()

    return step


def training_one_by_one(optimizer_name: str, tables: int, num_rows: int, dim: int, grad: torch.Tensor) -> Step:
    """The same with a call of each layer."""
    layers = torch.nn.ModuleDict(one_per_table(optimizer_name, tables, num_rows, dim))
    optimizer = Optimizer(layers)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        rows = [layer(column) for layer, column in zip(layers.values(), ids, strict=True)]
        torch.cat(rows, 1).backward(grad)
        optimizer.step()

    return step


def lookup(num_rows: int, dim: int) -> Step:
    """A forward pass without gradients."""
    layer = Embedding(num_rows, dim, table=stored_table("sgd", num_rows, dim))

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return layer(ids)

    return step
