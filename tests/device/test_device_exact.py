"""A device cache changes nothing of what is trained: the same bits with every size, with and without lookahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.testing import arithmetic, philox
from bunkbed.torch.device.base import capabilities, rounding, update_rules
from device_setup import DIM, NUM_ROWS, batches, bt, cache_of, contents, loss_of, make_layer, most_rows, torch, train

OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": bb.SGD(lr=0.1)},
    {"optimizer": bb.SGD(lr=0.1, weight_decay=0.1)},
    {"optimizer": bb.Adagrad(lr=0.1, initial_accumulator=0.1)},
    {"optimizer": bb.Adagrad(lr=0.1, weight_decay=0.01, decoupled=True)},
    {"optimizer": bb.RowwiseAdagrad(lr=0.1, weight_decay=0.01)},
    {"optimizer": bb.Adam(lr=0.01)},
    {"optimizer": bb.Adam(lr=0.01, weight_decay=0.1, decoupled=True)},
    {"optimizer": bb.SGD(lr=0.1), "dtype": "bfloat16"},
    {"optimizer": bb.RowwiseAdagrad(lr=0.1), "dtype": "float16"},
    {"optimizer": bb.Adam(lr=0.01, state_dtype="bfloat16"), "dtype": "bfloat16"},
    {"optimizer": bb.Adagrad(lr=0.1, state_dtype="bfloat16"), "dtype": "float32"},
]
STREAM = batches(60)


@pytest.fixture(scope="module")
def trained() -> dict[int, dict[str, bytes]]:
    """What the table's own updates make of the stream, for each of OPTIMIZERS."""
    found = {}
    for index, args in enumerate(OPTIMIZERS):
        layer = make_layer(**args)
        train(layer, STREAM)
        found[index] = contents(layer)
        layer.table.close()
    return found


@pytest.mark.parametrize(
    "lookahead", [{}, {"depth": 1}, {"depth": 3, "window": 8}], ids=["plain", "depth 1", "depth 3"]
)
@pytest.mark.parametrize("share", ["smallest", "5 %", "all", "none"])
@pytest.mark.parametrize("index", range(len(OPTIMIZERS)), ids=lambda i: repr(OPTIMIZERS[i]))
def test_rows_are_those_of_the_table_to_the_last_bit(
    trained: dict[int, dict[str, bytes]], index: int, share: str, lookahead: dict[str, int]
) -> None:
    least = most_rows(STREAM)
    rows = {"smallest": least, "5 %": max(least, NUM_ROWS // 20) + 7, "all": NUM_ROWS, "none": 0}[share]
    layer = make_layer(**OPTIMIZERS[index], device_cache=rows and cache_of(rows, OPTIMIZERS[index]))
    train(layer, STREAM, **lookahead)
    stats = layer.table.stats()
    if share != "none":
        assert stats["device_frames"] == rows
        assert stats["device_hits"] > 0
    if share == "smallest":
        assert stats["device_write_backs"] > len(STREAM), "rows must have come and gone"
    assert contents(layer) == trained[index]
    layer.table.close()


@pytest.mark.parametrize("lookahead", [{}, {"depth": 2}], ids=["plain", "lookahead"])
def test_three_tiers_and_commits_and_reopening(tmp_path: Path, lookahead: dict[str, int]) -> None:
    """Device, RAM and disk, each too small, with commits in between; then the files alone, and on from them."""
    stream = batches(90, seed=5)
    oracle = make_layer()
    opt = train(oracle, stream[:60])
    after_60 = contents(oracle)
    train(oracle, stream[60:], opt)

    size = cache_of(most_rows(stream) + 3)
    ram = {"ram": "1MiB"}
    layer = make_layer(tmp_path / "t", **ram, device_cache=size)
    opt = train(layer, stream[:20], **lookahead)
    layer.table.commit()
    opt = train(layer, stream[20:40], opt, **lookahead)
    pending = layer.table.begin_commit()
    train(layer, stream[40:60], opt, **lookahead)
    pending.wait()
    assert contents(layer) == after_60
    layer.table.close()
    with bb.open(tmp_path / "t", mode="r") as reader:
        ids = np.arange(NUM_ROWS)
        assert reader.lookup(ids).tobytes() == after_60["weight"]

    layer = make_layer(tmp_path / "t", **ram, device_cache=size)
    train(layer, stream[60:], **lookahead)
    assert contents(layer) == contents(oracle)
    layer.table.close()
    oracle.table.close()


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_bags(mode: str, is_weighted: bool) -> None:
    if is_weighted and mode == "mean":
        pytest.skip("per_sample_weights are for sum")
    rng = np.random.default_rng(1)
    found: list[Any] = []
    args: dict[str, Any] = {"optimizer": bb.Adam(lr=0.01), "init": bb.Normal(std=0.1), "seed": 3, "mode": mode}
    for cache in (None, 96 * 60, 96 * 200, 0):
        rng = np.random.default_rng(1)
        bag = bt.EmbeddingBag(NUM_ROWS, DIM, padding_idx=5, device_cache=cache, **args)
        opt = bt.Optimizer(bag)
        outputs, weight_grads = [], []
        for _ in range(40):
            ids = torch.from_numpy(rng.zipf(1.3, 50) % NUM_ROWS)
            offsets = torch.tensor([0, 7, 7, 20, 33])
            weights = torch.from_numpy(rng.random(50).astype(np.float32)).requires_grad_() if is_weighted else None
            out = bag(ids, offsets, weights)
            opt.zero_grad()
            (out * out * torch.arange(1, 6)[:, None]).sum().backward()
            opt.step()
            outputs.append(out.detach().numpy())
            weight_grads.append(np.zeros(0) if weights is None else weights.grad.numpy())
        found.append((np.stack(outputs), np.stack(weight_grads), bag.table.get(np.arange(NUM_ROWS))))
        bag.table.close()
    for plain, cached in zip(found[0], found[1], strict=True):
        np.testing.assert_allclose(cached, plain, rtol=1e-5, atol=1e-6)
    for small, large, none in zip(*found[1:], strict=True):
        assert small.tobytes() == large.tobytes() == none.tobytes()


def test_update_rules_and_rounding_are_the_oracles_to_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    ids = np.concatenate([rng.integers(0, 2**62, 40), [0, 1, 9_999_999_999]])
    seed, shape = 0x0123456789ABCDEF, (ids.size, 19)
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-44, 38, shape)).astype(np.float32)
    values[0, :6] = [np.inf, -np.inf, 3.4e38, 65519, -65519, 1e-7]
    for field, step in ((0, 1), (2, 4_294_967_303)):
        random = rounding.random_halves(seed, torch.from_numpy(ids), step, field, 19)
        for dtype, rounded in (
            ("bfloat16", rounding.round_to_bfloat16(torch.from_numpy(values), random).view(torch.bfloat16)),
            ("float16", rounding.round_to_float16(torch.from_numpy(values), random).view(torch.float16)),
        ):
            wanted = philox.narrow_stochastic(dtype, values, seed=seed, ids=ids, step=step, field=field)
            assert rounded.float().numpy().tobytes() == wanted.tobytes(), (dtype, field, step)
    for args in OPTIMIZERS[:7]:
        for dim in (64, 19):
            optimizer = args["optimizer"]
            weight = rng.standard_normal((50, dim)).astype(np.float32)
            widths = arithmetic.optimizer_slots(optimizer, dim)
            slots = {name: rng.random((50, width)).astype(np.float32) for name, (width, _) in widths.items()}
            ours = torch.from_numpy(weight.copy()), [torch.from_numpy(slot.copy()) for slot in slots.values()]
            for step in (1, 2, 77):
                grad = rng.standard_normal((50, dim)).astype(np.float32)
                constants = update_rules.step_constants(optimizer, optimizer.lr, step)
                update_rules.update_rows(optimizer, constants, torch.from_numpy(grad.copy()), *ours)
                arithmetic.apply_optimizer(optimizer, lr=optimizer.lr, step=step, grad=grad, weight=weight, slots=slots)
            assert ours[0].numpy().tobytes() == weight.tobytes(), (optimizer, dim)
            for mine, wanted in zip(ours[1], slots.values(), strict=True):
                assert mine.numpy().tobytes() == wanted.tobytes(), (optimizer, dim)


def test_long_rows_are_summed_in_pieces_as_other_devices_do() -> None:
    """On a device that is no CPU a frequent id's gradients are added in pieces; here both ways."""
    from bunkbed.torch.device import sums

    layer = make_layer(device_cache="1MiB")
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, 9, 700))
    grads = torch.randn(700, DIM, generator=torch.Generator().manual_seed(1))
    tier = layer._pending.tier
    batch = tier.deduped(ids.numpy())
    plain = sums.sum_rows(batch, grads)
    with capabilities.forced(capabilities.Capabilities(has_streams=False)):
        cut = sums.sum_rows(tier.deduped(ids.numpy()), grads)
        few = sums.sum_rows(tier.deduped(np.arange(5)), grads[:5])
    np.testing.assert_allclose(cut.numpy(), plain.numpy(), rtol=1e-5, atol=1e-5)
    assert cut.numpy().tobytes() != plain.numpy().tobytes(), "another order of additions"
    assert few.numpy().tobytes() == grads[:5].numpy().tobytes()
    loss_of(layer, ids)
    layer.table.close()
