"""What `test_device_kernels` runs in a process of its own: the kernels, compiled for cards that are not here.

Each is launched as a device cache launches it, on CPU tensors, up to the point where a card would run it. So launches
must fit their kernels, the compiler must accept them, and the assembly shows what no interpreter can: products and sums
that round on their own, exact roots and quotients, subnormals that are kept, no atomic additions.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import bunkbed as bb
from bunkbed.torch.device.kernels import code, operations
from bunkbed.torch.device.kernels.operations import Gather, Operation, Scatter, SumPieces, update_of

KERNELS = ("gather", "scatter", "sum_pieces", "update", "update_rowwise")
STEPS = [
    bb.SGD(lr=0.1, weight_decay=0.1),
    bb.Adagrad(lr=0.1, weight_decay=0.1, decoupled=True),
    bb.RowwiseAdagrad(lr=0.1, weight_decay=0.1),
    bb.Adam(lr=0.01, weight_decay=0.1),
    bb.Adam(lr=0.01, weight_decay=0.1, decoupled=True),
]
OPERATIONS = [
    Gather(192, 64, torch.float32),
    Gather(101, 101, torch.int32),
    Scatter(192),
    SumPieces(100),
    *[update_of(optimizer, 64) for optimizer in STEPS],
    update_of(STEPS[2], 100),
]


class Card:
    """As much of Triton's driver as the compiler asks."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """In place of a kernel: keeps the assembly of what would be launched."""

    def __init__(self, kernel: Any, kept: list[str]) -> None:
        self.kernel, self.kept = kernel, kept

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def compile_it(*args: Any, **options: Any) -> None:
            self.kept.append(self.kernel.warmup(*args, grid=grid, **options).asm["ptx"])

        return compile_it


@pytest.fixture(params=[80, 90, 100], ids=lambda capability: f"sm_{capability}")
def assembly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(operations, "_rows", lambda words: 300)
    kept: list[str] = []
    for name in KERNELS:
        monkeypatch.setattr(code, name, Compiled(getattr(code, name), kept))
    driver.set_active(Card(request.param))
    return kept


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_operation_compiles_and_rounds_as_torch_does(operation: Operation, assembly: list[str]) -> None:
    operation.kernel(*operation.sample(np.random.default_rng(0)))
    assert len(assembly) == (2 if isinstance(operation, SumPieces) else 1)
    found = " ".join(assembly)
    instructions = set(re.findall(r"^\s*(?:@\S+ )?([a-z][a-z_0-9.]+)\s", found, re.MULTILINE))
    arithmetic = {name for name in instructions if "f32" in name or "f64" in name}
    # Without .rn, add and mul may be fused later on.
    known = re.compile(r"(add|sub|mul|div|sqrt)\.rn\.f32(x2)?|(selp|mov)\.f32")
    assert all(known.fullmatch(name) for name in arithmetic), arithmetic
    assert not [name for name in instructions if re.match(r"fma|mad\..*f|atom|red\.|.*(ftz|approx|full)", name)]
    if isinstance(operation, operations.Update):
        assert {"mul.rn.f32", "sub.rn.f32"} <= arithmetic
        assert ({"sqrt.rn.f32", "div.rn.f32"} <= arithmetic) == (operation.rule != "sgd")
    if not isinstance(operation, Gather | Scatter):
        assert arithmetic
    else:
        assert not arithmetic


def test_a_fused_product_would_be_seen(assembly: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `test_every_operation...` looks for is there once the compiler may do as it likes."""
    from bunkbed.torch.device.kernels import launch

    monkeypatch.setitem(launch.OPTIONS, "enable_fp_fusion", True)
    operation = update_of(STEPS[0], 64)
    assert operation is not None
    operation.kernel(*operation.sample(np.random.default_rng(0)))
    assert "fma.rn.f32" in assembly[0] or re.search(r"\bmul\.f32", assembly[0])


def test_numbers_of_rows_are_not_compiled_in(assembly: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of every size, 1 too, run what was compiled for the first."""
    operation = Gather(192, 64, torch.float32)
    source, index = operation.sample(np.random.default_rng(0))
    for count in (300, 1, 17, 64, 16):
        operation.kernel(source, index[:count].clone())
    assert len(assembly) == 5 and len(set(assembly)) == 1
