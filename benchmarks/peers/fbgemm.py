"""FBGEMM's table-batched embedding on the CPU (`SplitTableBatchedEmbeddingBagsCodegen`).

Its optimizers are fused into the backward pass and there is no Adam among those of the CPU. It must start its
backward from a tensor that requires a gradient, so a step's backward runs exactly its fused kernel. Rows come one
to a bag (``offsets`` count up by one): the CPU kernels know no unpooled lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import peers

Step = Callable[[torch.Tensor], Any]

OPTIMIZERS = {"adagrad": "EXACT_ADAGRAD", "rowwise-adagrad": "EXACT_ROWWISE_ADAGRAD", "sgd": "EXACT_SGD"}


def make(num_rows: int, dim: int, *, tables: int = 1, optimizer_name: str = "sgd", pooling: str = "SUM") -> Any:
    """The module, of one table or of several of the same size, its weights filled at random.

    Raises:
        peers.Missing: `fbgemm_gpu` is not installed.
    """
    install = '"torch==2.13.0" && pip install --no-deps fbgemm-gpu-cpu==1.8.0'
    training = peers.load("fbgemm_gpu.split_table_batched_embeddings_ops_training", install)
    shared = peers.load("fbgemm_gpu.split_table_batched_embeddings_ops_common", install)
    configs = peers.load("fbgemm_gpu.split_embedding_configs", install)
    module = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(num_rows, dim, shared.EmbeddingLocation.HOST, training.ComputeDevice.CPU)] * tables,
        optimizer=getattr(configs.EmbOptimType, OPTIMIZERS[optimizer_name]),
        pooling_mode=getattr(shared.PoolingMode, pooling),
        learning_rate=1e-2,
        # Ids are known to be good: checking them costs it a pass of its own.
        bounds_check_mode=shared.BoundsCheckMode.NONE,
    )
    module.init_embedding_weights_uniform(-0.05, 0.05)
    return module


def settings() -> str:
    """For the report."""
    version = peers.load("fbgemm_gpu", "fbgemm-gpu-cpu==1.8.0").__version__
    return f"FBGEMM {version}, host placement, no bounds check"


def training(optimizer_name: str, num_rows: int, dim: int, grad: torch.Tensor) -> Step:
    """A step: lookup and backward of `grad`, the optimizer fused into it."""
    module = make(num_rows, dim, optimizer_name=optimizer_name)
    offsets = torch.arange(len(grad) + 1)

    def step(ids: torch.Tensor) -> None:
        module(ids, offsets).backward(grad)

    return step


def training_many(optimizer_name: str, tables: int, num_rows: int, dim: int, grad: torch.Tensor) -> Step:
    """The same of several tables in one call; a step takes int64[tables, samples] ids."""
    module = make(num_rows, dim, tables=tables, optimizer_name=optimizer_name)
    offsets = torch.arange(tables * len(grad) + 1)

    def step(ids: torch.Tensor) -> None:
        module(ids.view(-1), offsets).backward(grad)

    return step


def lookup(num_rows: int, dim: int, batch: int) -> Step:
    """A forward pass without gradients."""
    module = make(num_rows, dim)
    offsets = torch.arange(batch + 1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return module(ids, offsets)

    return step
