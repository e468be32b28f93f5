"""Jobs that W processes run together, and that one process runs alone: the bits must be equal.

`run` trains one case. In a rank it trains with this rank's batches; without a rank it runs the batches of all ranks one
after another, each loss divided by W. That is the contract of docs/design/ranks.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bunkbed as bb
import bunkbed.torch as bt

ROWS, DIM, SIZE, STEPS = 200, 12, 64, 8
#: Lookups of a model: (layers by name) -> function of (layers, ids) -> float32[SIZE, D].
Make = Callable[..., nn.Module]


@dataclass(frozen=True)
class Case:
    """One job. `kind` names the model; the rest, how it is trained."""

    kind: str = "embedding"
    optimizer: Any = field(default_factory=lambda: bb.Adam(lr=1e-2))
    dtype: str = "float32"
    ddp: tuple[str, ...] = ()  # options of DistributedDataParallel
    micro: int = 1  # backward calls of a step
    clips: bool = False
    scales: bool = False
    overflows: bool = False  # on the last rank, in steps 3 and 5
    losses: int = 1  # backward calls over one forward
    parts: bool = False  # a backward call for each lookup of a forward
    ahead: bool = False
    window: int | None = None
    lacks: bool = False  # rank 0 has an empty batch in step 2
    sums: bool = False  # gradients of ranks are added, so that W need not be a power of two
    shards: int = 1  # for each rank
    ram: str | None = None  # with it, the table has files
    host: str = "DDP"  # what wraps the model
    reopens: bool = False  # commits and opens the table again in the middle
    seed: int = 0  # of the batches
    admit: float | None = None  # with it, the table takes any id

    @property
    def trains_dense(self) -> bool:
        """Whether the hook `_in_rank_order` gives dense gradients the bits of one process; if not, they are frozen."""
        return self.host == "DDP" and self.micro == self.losses == 1 and not self.sums and not self.parts


def cases() -> dict[str, Case]:
    """Return the cases that have the bits of one process where W is a power of two."""
    one = Case()
    found = {
        "plain": one,
        "gradient_as_bucket_view": Case(ddp=("gradient_as_bucket_view",)),
        "find_unused_parameters": Case(ddp=("find_unused_parameters",)),
        "static_graph": Case(ddp=("static_graph",)),
        "accumulation": Case(micro=3),
        "clip": Case(clips=True),
        "scaler": Case(scales=True, clips=True),
        "scaler, Inf on one rank": Case(scales=True, clips=True, overflows=True),
        "scaler, Inf, accumulation": Case(scales=True, overflows=True, micro=2),
        "two losses on one forward": Case(losses=2),
        "two losses, accumulation, clip": Case(losses=2, micro=2, clips=True),
        "a loss for each lookup": Case(parts=True, micro=2),
        "ids ahead": Case(ahead=True),
        "ids ahead, a window of 3": Case(ahead=True, window=3, micro=2),
        "an empty batch on a rank": Case(lacks=True),
        "16-bit rows": Case(dtype="bfloat16"),
        "SGD": Case(optimizer=bb.SGD(lr=0.1)),
        "Adagrad": Case(optimizer=bb.Adagrad(lr=0.1)),
        "RowwiseAdagrad": Case(optimizer=bb.RowwiseAdagrad(lr=0.1)),
        "files": Case(ram="64MiB", reopens=True),
        "files, 3 shards for each rank": Case(ram="64MiB", shards=3, reopens=True, clips=True),
        "files, ids ahead": Case(ram="64MiB", ahead=True, window=2),
        "admission": Case(admit=0.2, clips=True),
        "admission by the second step": Case(admit=2, clips=True),
        "admission by the second step, files": Case(admit=2, ram="64MiB", shards=2, ahead=True, window=2, reopens=True),
        "admission, files": Case(admit=0.2, ram="64MiB", shards=2, ahead=True, window=2, reopens=True),
    }
    for kind in MODELS:
        if kind != "embedding":
            found[kind] = Case(kind, clips=True)
    found["bags, ids ahead"] = Case("weighted bags", ahead=True)
    found["collection, ids ahead"] = Case("collection", ahead=True)
    return found


# ---- Models


class _Model(nn.Module):
    """Layers, the rows that they look up side by side, and two dense layers."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict(self.made(make))
        self.dense = nn.Sequential(nn.Linear(DIM * self.columns, 8), nn.Tanh(), nn.Linear(8, 1))

    columns = 2

    def made(self, make: Make) -> dict[str, nn.Module]:
        return {"rows": make(bt.Embedding)}

    def wanted(self, batch: Batch) -> dict[Any, Any]:
        """Return the ids of each layer, for `lookahead`."""
        return {self.layers["rows"]: [batch.first, batch.second]}

    def looked_up(self, batch: Batch) -> list[Tensor]:
        rows = self.layers["rows"]
        return [rows(batch.first), rows(batch.second)]

    def forward(self, batch: Batch) -> Tensor:
        output: Tensor = self.dense(torch.cat(self.looked_up(batch), -1)).squeeze(-1)
        return output


class _Padded(_Model):
    def made(self, make: Make) -> dict[str, nn.Module]:
        return {"rows": make(bt.Embedding, padding_idx=1)}


class _TwoLayers(_Model):
    """Two layers on one table, of which the one skips the gradient of a row."""

    def made(self, make: Make) -> dict[str, nn.Module]:
        first = make(bt.Embedding)
        return {"rows": first, "again": bt.Embedding(ROWS, DIM, padding_idx=2, table=first.table)}

    def looked_up(self, batch: Batch) -> list[Tensor]:
        return [self.layers["again"](batch.first), self.layers["rows"](batch.second)]


class _TwoTables(_Model):
    def made(self, make: Make) -> dict[str, nn.Module]:
        return {"rows": make(bt.Embedding), "other": make(bt.Embedding, name="other", seed=8)}

    def wanted(self, batch: Batch) -> dict[Any, Any]:
        return {self.layers["rows"]: batch.first, self.layers["other"]: batch.second}

    def looked_up(self, batch: Batch) -> list[Tensor]:
        return [self.layers["other"](batch.second), self.layers["rows"](batch.first)]


class _SumBags(_Model):
    mode = "sum"

    def made(self, make: Make) -> dict[str, nn.Module]:
        return {"rows": make(bt.EmbeddingBag, mode=self.mode)}

    def looked_up(self, batch: Batch) -> list[Tensor]:
        return [self.layers["rows"](ids, batch.offsets) for ids in (batch.first, batch.second)]


class _MeanBags(_SumBags):
    mode = "mean"


class _WeightedBags(_SumBags):
    """Bags whose weights get a gradient too."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def looked_up(self, batch: Batch) -> list[Tensor]:
        weights = self.scale * batch.weights
        return [
            self.layers["rows"](ids, batch.offsets, per_sample_weights=weights) for ids in (batch.first, batch.second)
        ]


class _Collection(_Model):
    """Layers in one call, some on one table."""

    columns = 3

    def made(self, make: Make) -> dict[str, nn.Module]:
        first = make(bt.Embedding)
        layers = {
            "one": first,
            "bags": make(bt.EmbeddingBag, name="bags", seed=9, mode="mean"),
            "two": bt.Embedding(ROWS, DIM, table=first.table),
        }
        return {"all": bt.EmbeddingCollection(layers)}

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        return {"one": batch.first, "bags": (batch.second, batch.offsets), "two": batch.second}

    def wanted(self, batch: Batch) -> dict[Any, Any]:
        return {self.layers["all"]: self._inputs(batch)}

    def looked_up(self, batch: Batch) -> list[Tensor]:
        found = self.layers["all"](self._inputs(batch))
        return [found["bags"], found["two"], found["one"]]


MODELS: dict[str, type[_Model]] = {
    "embedding": _Model,
    "padding": _Padded,
    "two layers on one table": _TwoLayers,
    "two tables": _TwoTables,
    "sum bags": _SumBags,
    "mean bags": _MeanBags,
    "weighted bags": _WeightedBags,
    "collection": _Collection,
}


# ---- Batches


@dataclass
class Batch:
    first: Tensor  # int64[N]
    second: Tensor
    offsets: Tensor  # int64[N]: the bags, of which some are empty
    weights: Tensor  # float32[N]
    targets: Tensor


def batch_of(seed: int, step: int, micro: int, rank: int, size: int = SIZE) -> Batch:
    """Return a batch of ordinary ids: few come often, so the order of additions shows in the bits."""
    rng = np.random.default_rng([step, micro, rank, seed])

    def ids() -> Tensor:
        return torch.from_numpy((rng.zipf(1.3, size) - 1) % ROWS)

    return Batch(
        first=ids(),
        second=ids(),
        offsets=torch.from_numpy(np.sort(rng.integers(0, size, size)) * (np.arange(size) > 0)),
        weights=torch.from_numpy(rng.standard_normal(size).astype(np.float32)),
        targets=torch.from_numpy(rng.standard_normal(size).astype(np.float32)),
    )


# ---- Training


def run(case: Case, world: int, rank: int | None, folder: Path | None = None) -> dict[str, Any]:
    """Train; return the bits of everything: rows and state of each table, dense weights, norms, steps."""
    job = _Job(case, world, rank, folder)
    half = STEPS // 2
    job.train(range(half))
    if case.reopens and rank is not None:
        job.reopen()
    job.train(range(half, STEPS))
    return job.found()


class _Job:
    def __init__(self, case: Case, world: int, rank: int | None, folder: Path | None) -> None:
        self._case, self._world, self._rank, self._folder = case, world, rank, folder
        self._norms: list[float] = []
        self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4, enabled=case.scales)
        self._build()

    def _build(self) -> None:
        case = self._case

        def make(kind: Any, *, name: str = "rows", seed: int = 3, **more: Any) -> nn.Module:
            places: dict[str, Any] = {"placement": "local"}
            if self._rank is not None:
                places = {"shards": case.shards * self._world, "gradients": "sum" if case.sums else "mean"}
                if case.ram is not None:
                    assert self._folder is not None
                    places |= {"path": self._folder / name, "ram": case.ram}
            if case.admit is not None:
                more["retention"] = bb.Retention(admit=case.admit)
            rows = ROWS if case.admit is None else None
            layer: nn.Module = kind(rows, DIM, seed=seed, optimizer=case.optimizer, dtype=case.dtype, **places, **more)
            return layer

        self._core = MODELS[case.kind](make)
        self._model: nn.Module = self._core
        if self._rank is not None:
            self._model = HOSTS[case.host](self._core, case.ddp)
        dense = torch.optim.AdamW(self._core.dense.parameters(), lr=1e-3 if case.trains_dense else 0.0)
        if case.kind == "weighted bags":
            dense.add_param_group({"params": [self._core.scale]})
        self._optimizer = bt.Optimizer(self._model, dense=dense)

    def tables(self) -> dict[str, Any]:
        found = {
            name: layer.table
            for name, layer in self._core.named_modules()
            if isinstance(layer, bt.Embedding | bt.EmbeddingBag)
        }
        return {name: table for name, table in found.items() if name != "layers.again"}

    def train(self, steps: range) -> None:
        case = self._case
        batches: Iterator[Any] = iter(steps)
        if case.ahead and self._rank is not None:
            rank = self._rank
            batches = iter(
                bt.lookahead(
                    steps,
                    self._model,
                    ids=lambda step: self._ids([self._batch(step, micro, rank) for micro in range(case.micro)]),
                    window=case.window,
                )
            )
        for step in batches:
            self._step(step)

    def _ids(self, batches: list[Batch]) -> dict[Any, Any]:
        """Return the ids of the micro-batches of a step."""
        wanted = [self._core.wanted(batch) for batch in batches]
        if len(wanted) == 1:
            return wanted[0]
        each = [{layer: ids if isinstance(ids, list) else [ids] for layer, ids in one.items()} for one in wanted]
        return {layer: [ids for one in each for ids in one[layer]] for layer in each[0]}

    def _batch(self, step: int, micro: int, rank: int) -> Batch:
        is_empty = self._case.lacks and step == 2 and rank == 0
        return batch_of(self._case.seed, step, micro, rank, 0 if is_empty else SIZE)

    def _step(self, step: int) -> None:
        case = self._case
        ranks = range(self._world) if self._rank is None else [self._rank]
        share = 1.0 if self._rank is not None or case.sums else 1.0 / self._world
        for micro in range(case.micro):
            is_last = micro == case.micro - 1
            with contextlib.nullcontext() if self._rank is None or is_last else self._model.no_sync():
                for rank in ranks:
                    batch = self._batch(step, micro, rank)
                    if case.parts:
                        for one in self._core.looked_up(batch):
                            (one.square().sum() * share).backward()
                        continue
                    loss = self._loss(batch)
                    if case.overflows and step in (3, 5) and rank == self._world - 1:
                        loss = loss * float("inf")
                    loss = self._scaler.scale(loss * share)
                    for number in range(case.losses):
                        is_kept = number < case.losses - 1
                        (loss * 0.5**number).backward(retain_graph=is_kept)
        if case.clips:
            self._scaler.unscale_(self._optimizer)
            clipped = self._model if case.trains_dense else self._core.layers
            self._norms.append(float(nn.utils.clip_grad_norm_(clipped.parameters(), 0.05)))
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

    def _loss(self, batch: Batch) -> Tensor:
        # Multiplied, not divided by the size, so an empty batch is not NaN.
        return (self._model(batch) - batch.targets).square().sum() * (1.0 / SIZE)

    def reopen(self) -> None:
        """Save the model, close its tables, and open them in another model."""
        dense = [parameter.detach().clone() for parameter in self._core.dense.parameters()]
        state = self._optimizer.state_dict()
        saved = self._core.state_dict()
        for table in {id(table): table for table in self.tables().values()}.values():  # layers may share one
            table.compact()
            table.close()
        del self._core, self._model, self._optimizer
        self._build()
        self._core.load_state_dict(saved)
        self._optimizer.load_state_dict(state)
        for new, old in zip(self._core.dense.parameters(), dense, strict=True):
            assert torch.equal(new, old)

    def found(self) -> dict[str, Any]:
        ids = np.arange(ROWS)
        found: dict[str, Any] = {"norms": self._norms}
        for name, table in self.tables().items():
            found[f"{name} step"] = table.step
            for slot in ("weight", *table.slots):
                values = table.get(ids, slot=slot)
                found[f"{name} {slot}"] = np.ascontiguousarray(values).view(np.uint32)
        for name, parameter in self._core.named_parameters():
            if "anchor" not in name and self._case.trains_dense:
                found[name] = parameter.detach().numpy().view(np.uint32)
        return found


def _ddp(model: nn.Module, options: tuple[str, ...]) -> nn.Module:
    whole = DistributedDataParallel(model, **dict.fromkeys(options, True))
    whole.register_comm_hook(None, _in_rank_order)
    return whole


def _fsdp(model: nn.Module, _: tuple[str, ...]) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params=bt.anchors(model))
    return model


def _accelerate(model: nn.Module, _: tuple[str, ...]) -> nn.Module:
    from accelerate import Accelerator

    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    whole: nn.Module = Accelerator(cpu=True).prepare(model)
    assert isinstance(whole, DistributedDataParallel)
    return whole


def _compiled(model: nn.Module, options: tuple[str, ...]) -> nn.Module:
    whole: nn.Module = torch.compile(_ddp(model, options), backend="eager")
    return whole


HOSTS = {"DDP": _ddp, "FSDP": _fsdp, "Accelerate": _accelerate, "torch.compile": _compiled}


def _in_rank_order(_, bucket):  # torch wants its own classes as annotations, and not their names
    """Reduce dense gradients in the order of ranks, as one process adds them: then their bits are equal too."""
    world = dist.get_world_size()
    own = bucket.buffer() / world
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(total)
    return done
