"""Random training programs, once with `torch.nn` and once with ours: losses, outputs and rows must agree.

A program is a list of operations, drawn by seed: layers (embeddings and bags, padding, one table for two layers), an
optimizer with a rate for each layer, that ours follow or that they have of their own, a scheduler of either optimizer,
accumulation, clipping by norm, rates set by hand, freezing, layers that a step leaves out, evaluation, checkpoints that
are loaded again, a model that is made again in the middle, and at the end a frozen copy. Tables are in RAM, in files
with the least RAM, so that rows are evicted, or have a device cache on the CPU.

Rules whose torch version moves every row (Adam) are left out; `SparseAdam` is their exact counterpart.
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

import bunkbed as bb
from bunkbed.table.definition import Definition
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer, freeze
from torture.parts import Clock, Progress, Result, Size, folder, in_processes

_PROGRAMS = 10_000
_CLOSE = {"rtol": 1e-3, "atol": 1e-4}

_RULES: dict[str, tuple[Any, Any]] = {
    "SGD": (torch.optim.SGD, bb.SGD),
    "Adagrad": (torch.optim.Adagrad, bb.Adagrad),
    "SparseAdam": (torch.optim.SparseAdam, bb.Adam),
}


@dataclass
class _Layer:
    """A layer of both models."""

    rows: int
    dim: int
    lr: float
    padding: int | None = None
    mode: str | None = None  # of bags; None: an embedding
    shares: int | None = None  # the layer whose table it has
    place: str = "ram"


@dataclass
class Program:
    """A program; `operations` are (name, arguments) that both sides carry out."""

    seed: int
    rule: str
    follows: bool
    schedule: str
    layers: list[_Layer] = field(default_factory=list)
    operations: list[tuple[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int) -> Program:
        """Return the program of a seed."""
        chance = np.random.default_rng(seed)
        follows = bool(chance.random() < 0.7)
        rule = str(chance.choice(["SGD", "Adagrad"] if follows else list(_RULES)))
        schedule = str(chance.choice(["none", "ours", "dense"] if follows else ["none", "ours"]))
        program = cls(seed, rule, follows, schedule)
        for number in range(int(chance.integers(1, 4))):
            program.layers.append(program._layer(chance, number))
        program._script(chance)
        return program

    def _layer(self, chance: np.random.Generator, number: int) -> _Layer:
        lr = float(np.round(chance.uniform(0.01, 0.3), 3))
        mode = None if chance.random() < 0.6 else str(chance.choice(["sum", "mean"]))
        if number and chance.random() < 0.25 and self.layers[0].shares is None:
            first = self.layers[0]
            return _Layer(first.rows, first.dim, first.lr, first.padding, mode, 0, first.place)
        place = str(chance.choice(["ram", "files", "device"], p=[0.5, 0.35, 0.15]))
        rows = int(chance.integers(3000, 6000)) if place == "files" else int(chance.integers(3, 40))
        padding = int(chance.integers(0, rows)) if chance.random() < 0.3 else None
        return _Layer(rows, int(chance.integers(1, 9)) if place != "files" else 16, lr, padding, mode, None, place)

    def _script(self, chance: np.random.Generator) -> None:
        add = self.operations.append
        for step in range(int(chance.integers(4, 12))):
            add(("zero", bool(chance.random() < 0.7)))
            if chance.random() < 0.1:
                add(("freeze", (int(chance.integers(len(self.layers))), bool(chance.random() < 0.5))))
            if step and chance.random() < 0.12:
                add((str(chance.choice(["save", "load", "again"])), None))
            for _ in range(int(chance.choice([1, 1, 2, 3]))):
                add(("backward", [self._lookup(chance, layer) for layer in self._used(chance)]))
            if self.rule != "SparseAdam" and chance.random() < 0.3:
                add(("clip", float(chance.choice([0.1, 1.0, 5.0]))))
            if self.follows and self.schedule != "ours" and chance.random() < 0.15:
                add(("rate", (int(chance.integers(len(self.layers) + 1)), float(chance.uniform(0.01, 0.3)))))
            if chance.random() < 0.08:  # what has a gradient is stepped, though it is frozen
                add(("stop", int(chance.integers(len(self.layers)))))
            add(("step", None))
            if self.schedule != "none":
                add(("schedule", None))
            if chance.random() < 0.2:
                add(("evaluate", [self._lookup(chance, layer) for layer in range(len(self.layers))]))

    def _used(self, chance: np.random.Generator) -> list[int]:
        used = [number for number in range(len(self.layers)) if chance.random() < 0.8]
        return used or [0]

    def _lookup(self, chance: np.random.Generator, number: int) -> tuple[int, list[Any], Any]:
        """Return a layer, the arguments of its call, and factors of its output."""
        layer = self.layers[number]
        is_flat = layer.mode is not None and chance.random() < 0.5
        shape = tuple(int(size) for size in chance.integers(1, 6, 1 if is_flat else 2))
        if layer.mode is None and chance.random() < 0.1:
            shape = (0,)
        ids = torch.from_numpy((layer.rows * chance.random(shape) ** 1.5).astype(np.int64))
        arguments = [ids]
        size: tuple[int, ...] = (*shape, layer.dim)
        if is_flat:
            bags = int(chance.integers(1, 4))
            inner = np.sort(chance.integers(0, len(ids) + 1, bags - 1))
            arguments.append(torch.from_numpy(np.concatenate([[0], inner]).astype(np.int64)))
            size = bags, layer.dim
        elif layer.mode is not None:
            size = shape[0], layer.dim
        return number, arguments, torch.from_numpy(chance.standard_normal(size, np.float32))


class _Side:
    """One of the two: a model of the program's layers, one head for each, and its optimizers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.seen: list[Any] = []
        self.saved: Any = None
        self.frozen: dict[int, bool] = {}

    def groups(self) -> list[dict[str, Any]]:
        """Return a parameter group of each layer with a table of its own, and last that of the heads."""
        layers = self.program.layers
        found = [
            {"params": list(self.layers[number].parameters()), "lr": layer.lr if layer.shares is None else 0.5}
            for number, layer in enumerate(layers)
        ]
        for number, layer in enumerate(layers):
            if layer.shares is not None:
                found[number]["params"] = [torch.nn.Parameter(torch.zeros(1))]
        return [*found, {"params": list(self.heads.parameters()), "lr": 0.05}]

    def loss(self, lookups: list[Any]) -> Any:
        total = torch.zeros(())
        for number, arguments, factors in lookups:
            rows = self.layers[number](*arguments)
            total = total + (rows * factors).sum() + 0.1 * self.heads[number](rows).square().sum()
        return total

    def run(self, name: str, argument: Any) -> None:
        getattr(self, f"_{name}")(argument)

    def _backward(self, lookups: list[Any]) -> None:
        loss = self.loss(lookups)
        self.seen.append(loss.item())
        if loss.requires_grad:
            loss.backward()

    def _evaluate(self, lookups: list[Any]) -> None:
        with torch.no_grad():
            self.seen.append(self.loss(lookups).item())

    def _clip(self, most: float) -> None:
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), most)))

    def parameters(self) -> list[Any]:
        return [*self.layers.parameters(), *self.heads.parameters()]

    def _schedule(self, _: None) -> None:
        for one in self.schedulers:
            one.step()

    def _save(self, _: None) -> None:
        self.saved = self.state()

    def _load(self, _: None) -> None:
        if self.saved is not None:
            self.restore(self.saved)


class _Theirs(_Side):
    def __init__(self, program: Program, start: list[Any], heads: Any) -> None:
        super().__init__(program)
        made: list[Any] = []
        for number, layer in enumerate(program.layers):
            arguments: dict[str, Any] = {"padding_idx": layer.padding, "sparse": program.rule == "SparseAdam"}
            if layer.mode is None:
                one: Any = torch.nn.Embedding(layer.rows, layer.dim, **arguments)
            else:
                one = torch.nn.EmbeddingBag(layer.rows, layer.dim, mode=layer.mode, **arguments)
            if layer.shares is None:
                one.weight.data.copy_(start[number])
            else:
                one.weight = made[layer.shares].weight
            made.append(one)
        self.layers, self.heads = torch.nn.ModuleList(made), copy.deepcopy(heads)
        theirs = _RULES[program.rule][0]
        if program.follows:
            self.optimizers = [theirs(self.groups())]
        else:
            self.optimizers = [theirs(group["params"], lr=group["lr"]) for group in self.groups()[:-1]]
            self.optimizers.append(torch.optim.Adam(self.heads.parameters(), lr=0.05))
        every = self.optimizers if program.schedule != "none" else []
        self.schedulers = [lr_scheduler.ExponentialLR(one, 0.8) for one in every]

    def _zero(self, to_none: bool) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none=to_none)

    def _step(self, _: None) -> None:
        for one in self.optimizers:
            one.step()

    def _rate(self, argument: tuple[int, float]) -> None:
        group, lr = argument
        self.optimizers[0].param_groups[group]["lr"] = lr

    def _freeze(self, argument: tuple[int, bool]) -> None:
        self.layers[argument[0]].weight.requires_grad = argument[1]
        if not argument[1]:
            self.layers[argument[0]].weight.grad = None

    def _stop(self, number: int) -> None:
        self.layers[number].weight.requires_grad = False

    def state(self) -> Any:
        every = [self.layers, self.heads, *self.optimizers, *self.schedulers]
        return copy.deepcopy([one.state_dict() for one in every])

    def restore(self, saved: Any) -> None:
        every = [self.layers, self.heads, *self.optimizers, *self.schedulers]
        for one, state in zip(every, copy.deepcopy(saved), strict=True):
            one.load_state_dict(state)

    def _again(self, _: None) -> None:
        """Forget gradients: a model that is made again, and loaded, goes on as this one without them."""
        self._zero(True)


class _Ours(_Side):
    def __init__(self, program: Program, place: Path, heads: Any) -> None:
        super().__init__(program)
        self._place, self._heads = place, heads
        self._make()

    def _make(self) -> None:
        program = self.program
        made: list[Any] = []
        for number, layer in enumerate(program.layers):
            arguments: dict[str, Any] = {"padding_idx": layer.padding}
            if layer.shares is not None:
                arguments["table"] = made[layer.shares].table
            else:
                arguments |= {"seed": program.seed + number, **self._table(number, layer)}
            if layer.mode is None:
                made.append(Embedding(layer.rows, layer.dim, **arguments))
            else:
                made.append(EmbeddingBag(layer.rows, layer.dim, mode=layer.mode, **arguments))
        self.layers, self.heads = torch.nn.ModuleList(made), copy.deepcopy(self._heads)
        whole = torch.nn.ModuleList([self.layers, self.heads])
        if program.follows:
            dense = _RULES[program.rule][0](self.groups())
        else:
            dense = torch.optim.Adam(self.heads.parameters(), lr=0.05)
        self.optimizer = Optimizer(whole, dense=dense, replace=True)
        scheduled = {"none": [], "ours": [self.optimizer], "dense": [dense]}[program.schedule]
        self.schedulers = [lr_scheduler.ExponentialLR(one, 0.8) for one in scheduled]

    def _table(self, number: int, layer: _Layer) -> dict[str, Any]:
        ours = _RULES[self.program.rule][1]
        found: dict[str, Any] = {} if self.program.follows else {"optimizer": ours(layer.lr)}
        if layer.place == "device":
            return {**found, "device_cache": "1MiB"}
        if layer.place == "files":
            # What a new table of the default rule needs, which has more state than the others.
            least = Definition(layer.dim, layer.rows, bb.Adam(1e-3)).spec(belongs_to_run=False)
            ram = least.minimum_ram(layer.rows, True) + (32 << 10)
            return {**found, "path": self._place / str(number), "ram": ram}
        return found

    def _zero(self, to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)

    def _step(self, _: None) -> None:
        self.optimizer.step()

    def _rate(self, argument: tuple[int, float]) -> None:
        group, lr = argument
        self.optimizer.param_groups[group]["lr"] = lr

    def _freeze(self, argument: tuple[int, bool]) -> None:
        self.layers[argument[0]].anchor.requires_grad = argument[1]
        if not argument[1]:
            self.layers[argument[0]].anchor.grad = None

    def _stop(self, number: int) -> None:
        self.layers[number].anchor.requires_grad = False

    def _all(self) -> list[Any]:
        return [self.layers, self.heads, self.optimizer, *self.schedulers]

    def state(self) -> Any:
        file = io.BytesIO()
        torch.save([one.state_dict() for one in self._all()], file)
        return file.getvalue()

    def restore(self, saved: Any) -> None:
        for one, state in zip(self._all(), torch.load(io.BytesIO(saved), weights_only=True), strict=True):
            one.load_state_dict(state)

    def _again(self, _: None) -> None:
        """Make the model again, as another process does, and load what was saved."""
        now, is_trained = self.state(), [layer.anchor.requires_grad for layer in self.layers]
        self.close()
        self._make()
        self.restore(now)
        for layer, trained in zip(self.layers, is_trained, strict=True):
            layer.anchor.requires_grad = trained

    def close(self) -> None:
        for layer in self.layers:
            layer.table.close(commit=False)


def mismatch(program: Program, place: Path) -> str:
    """Run a program on both sides; return how they differ, empty where they agree."""
    torch.manual_seed(program.seed)
    heads = torch.nn.ModuleList([torch.nn.Linear(layer.dim, 1) for layer in program.layers])
    ours = _Ours(program, place, heads)
    start = [torch.from_numpy(one.table.get(np.arange(one.num_embeddings))) for one in ours.layers]
    theirs = _Theirs(program, start, heads)
    for number, (name, argument) in enumerate(program.operations):
        theirs.run(name, argument)
        try:
            ours.run(name, argument)
        except Exception as error:
            return f"operation {number}, {name}: {type(error).__name__}: {error}"
        for one, other in zip(ours.seen, theirs.seen, strict=True):
            if not np.allclose(one, other, **_CLOSE, equal_nan=True):
                return f"operation {number}, {name}: {one} and not {other}"
    frozen = freeze(ours.layers)
    for number, layer in enumerate(program.layers):
        live = ours.layers[number].table.get(np.arange(layer.rows))
        expected = theirs.layers[number].weight.detach().numpy()
        if not np.allclose(live, expected, **_CLOSE):
            row = int(np.argmax(np.abs(live - expected).max(axis=1)))
            return f"layer {number}, row {row} ends as {live[row]} and not {expected[row]}"
        if not np.array_equal(frozen[number].weight.numpy(), live):
            return f"layer {number}: a frozen copy has other rows"
    ours.close()
    return ""


def run(size: Size) -> list[Result]:
    """Return the figure."""
    total = size.of(_PROGRAMS, 20)

    def work(index: int, send: Any) -> None:
        torch.set_num_threads(1)
        logging.disable()
        warnings.simplefilter("ignore")
        result, clock = Result("random programs with the losses and rows of torch.nn"), Clock(size.seconds)
        progress = Progress("programs", total, index)
        for number in range(index, total, size.processes):
            if clock.is_over:
                break
            with folder() as place:
                program = Program.of(size.seed * total + number)
                result.tried += 1
                why = mismatch(program, place)
                result.passed += not why
                if why:
                    result.fail(f"program {program.seed} ({program.rule}, {program.schedule}): {why}")
            progress.show(number)
        send(result)

    whole = Result("random programs with the losses and rows of torch.nn", wanted=total)
    for found in in_processes(work, size.processes, size.seconds + 60):
        whole.add(found)
    return [whole]
