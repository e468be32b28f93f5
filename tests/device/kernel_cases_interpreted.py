"""What `test_device_kernels` runs with TRITON_INTERPRET=1, which a process cannot change: the kernels in NumPy.

The interpreter shows whether a kernel reads, adds and writes what it should in the order it should. It cannot tell
whether a compiler fuses or approximates; kernel_cases_compiled.py can.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.base.batches import PIECE
from bunkbed.torch.device.base.update_rules import step_constants
from bunkbed.torch.device.kernels import launch, operations
from bunkbed.torch.device.kernels.choice import chooser
from bunkbed.torch.device.kernels.operations import Gather, Operation, Scatter, SumPieces, pieces_of, update_of
from device_setup import batches, cache_of, contents, loss_of, make_layer, most_rows, torch, train

OPTIMIZERS = [
    bb.SGD(lr=0.1),
    bb.SGD(lr=0.1, weight_decay=0.1),
    bb.SGD(lr=0.1, weight_decay=0.1, decoupled=True),
    bb.Adagrad(lr=0.1),
    bb.Adagrad(lr=0.1, weight_decay=0.01, decoupled=True),
    bb.RowwiseAdagrad(lr=0.1),
    bb.RowwiseAdagrad(lr=0.1, weight_decay=0.01),
    bb.RowwiseAdagrad(lr=0.1, weight_decay=0.01, decoupled=True),
    bb.Adam(lr=0.01),
    bb.Adam(lr=0.01, weight_decay=0.1),
    bb.Adam(lr=0.01, weight_decay=0.1, decoupled=True),
]
DIMS = (1, 7, 64, 100, 256, 300)
#: No multiple of any tile's rows.
ROWS = 45


def both(operation: Operation, *args: Any) -> tuple[Any, Any]:
    """What comes of either version, each on copies of its own: int32 tensors."""
    found = []
    for run in (operation.plain, operation.kernel):
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in args]
        found.append(operation.finish(run(*copies), *copies).contiguous().view(torch.int32))
        for given, copy in list(zip(args, copies, strict=True))[1:]:
            assert not isinstance(given, torch.Tensor) or torch.equal(given, copy), "an argument was changed"
    return found[0], found[1]


def floats(rng: np.random.Generator, *shape: int) -> Any:
    return torch.from_numpy((rng.standard_normal(shape) * 10.0 ** rng.integers(-12, 4, shape)).astype(np.float32))


#: Every dim with each kernel; of the other optimizers, which differ by a flag, one.
STEPS = [(o, d) for o in OPTIMIZERS for d in (DIMS[:-1] if o in OPTIMIZERS[6::3] else DIMS[1:2])]


@pytest.mark.parametrize(("optimizer", "dim"), STEPS, ids=lambda value: str(value).partition("(")[0])
def test_updates(optimizer: Any, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_rows", lambda words: ROWS)
    operation = update_of(optimizer, dim)
    assert operation is not None
    records, frames, grads, _ = operation.sample(np.random.default_rng(dim))
    few = frames[: ROWS // 2]
    for step, lr in ((1, optimizer.lr), (1000, 1e-5)):
        constants = step_constants(optimizer, lr, step)
        plain, kernel = both(operation, records, few, grads[: len(few)], constants)
        assert torch.equal(kernel, plain)
        assert torch.equal(kernel[frames[len(few) :]], records[frames[len(few) :]]), "rows that were not meant"
        assert not torch.equal(kernel, records)
    for nothing in both(operation, records, frames[:0], grads[:0], constants):
        assert torch.equal(nothing, records)


@pytest.mark.parametrize("dim", DIMS)
def test_sums(dim: int) -> None:
    rng = np.random.default_rng(dim)
    for lengths in (
        np.ones(40, np.int64),
        np.array([1, PIECE, 2, PIECE - 1]),
        np.array([1, PIECE + 1, 3, 3 * PIECE, 1, 5 * PIECE - 2, 1]),
        np.array([7]),
    ):
        bounds = np.append(0, np.cumsum(lengths))
        first, again = pieces_of(bounds)
        is_cut = lengths.max() > PIECE
        assert (len(first) > len(lengths)) == is_cut
        rows = torch.from_numpy(rng.integers(0, 90, bounds[-1]))  # of bags: they repeat
        grads = floats(rng, 90, dim)
        grads[3] = -0.0
        args = [torch.from_numpy(first), torch.from_numpy(again) if is_cut else None]
        plain, kernel = both(SumPieces(dim), grads, rows, *args)
        assert torch.equal(kernel, plain), lengths


@pytest.mark.parametrize("words", [1, 2, 7, 65, 300, 768])
def test_moving_rows(words: int) -> None:
    rng = np.random.default_rng(words)
    whole = torch.from_numpy(rng.integers(-(2**31), 2**31, (ROWS, words), dtype=np.int32))
    for dtype, width in ((torch.int32, words), (torch.float32, max(1, words // 3))):
        source = whole.view(dtype)[:, :width]
        for count in (0, 1, 200):
            index = torch.from_numpy(rng.integers(0, ROWS, count))
            operation = Gather(words, width, dtype)
            found = operation.plain(source, index), operation.kernel(source, index)  # as views, uncopied
            assert found[1].is_contiguous() and found[1].dtype == dtype
            assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))
    for count in (0, 1, 23):
        frames = torch.from_numpy(rng.permutation(ROWS)[:count])
        rows = torch.from_numpy(rng.integers(-(2**31), 2**31, (count, words), dtype=np.int32))
        plain, kernel = both(Scatter(words), whole, frames, rows)
        assert torch.equal(kernel, plain)


def test_samples_are_what_a_trial_needs() -> None:
    """Long rows to sum, repeated rows to gather, distinct ones to write; and a bound on their bytes."""
    for dim in (1, 64, 1024):
        made = [Gather(3 * dim, dim, torch.float32), Scatter(3 * dim), SumPieces(dim), update_of(bb.Adam(lr=0.1), dim)]
        args = [operation.sample(np.random.default_rng(0)) for operation in made if operation is not None]
        for sample in args:
            assert sum(v.nbytes for v in sample if isinstance(v, torch.Tensor)) <= 16 << 20
        assert args[0][0].stride(0) == 3 * dim and args[0][1].unique().numel() < args[0][1].numel() / 2
        assert args[1][1].unique().numel() == args[1][1].numel()
        assert args[2][3] is not None
        assert args[3][1].unique().numel() == args[3][1].numel()


@pytest.mark.parametrize("optimizer", [bb.Adam(lr=0.01), bb.RowwiseAdagrad(lr=0.1, weight_decay=0.1)], ids=repr)
def test_training_through_kernels_alone(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small cache, whose rows come and go; on this device sums are cut, as they are on others."""
    launched: dict[str, int] = {}

    def counted(name: str) -> Any:
        real = getattr(launch, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            launched[name] = launched.get(name, 0) + 1
            return real(*args, **kwargs)

        return count

    for name in ("gather", "scatter", "sum_pieces", "update"):
        monkeypatch.setattr(launch, name, counted(name))
    stream = batches(6, size=150)
    found = []
    for is_kernel in (False, True):
        layer = make_layer(optimizer=optimizer, device_cache=cache_of(most_rows(stream), {"optimizer": optimizer}))
        with chooser.forced(is_kernel), capabilities.forced(capabilities.Capabilities(has_streams=False)):
            train(layer, stream)
            with torch.no_grad():
                outputs = loss_of(layer, stream[0]).numpy().tobytes()
            found.append((contents(layer), outputs))
        assert layer.table.stats()["device_evictions"] > 0
        layer.table.close()
        assert bool(launched) == is_kernel
    assert found[0] == found[1]
    assert set(launched) == {"gather", "scatter", "sum_pieces", "update"} and min(launched.values()) >= len(stream)
