"""Devices that can do less than a CPU: what is found out about them, and that rows are the same bits by longer ways.

`Lesser` simulates such a device: a CPU on which some operations raise or are wrong, as they are missing or wrong on
real backends. The tests that compare rows also show that no missing operation is used, because it would raise.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import bunkbed as bb
from bunkbed.torch.device import sums
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.base.capabilities import CPU, Capabilities
from bunkbed.torch.device.base.update_rules import step_constants
from bunkbed.torch.device.records import DeviceRecords
from device_setup import NUM_ROWS, batches, bt, cache_of, contents, make_layer, most_rows, torch, train
from test_device_schedules import ACTIONS, run

HERE = torch.device("cpu")
#: The least that a device may be able to do; and that of Apple's MPS in torch 2.11.
LEAST = Capabilities(has_streams=False, has_float64=False, has_bags=False, has_integers=False)
MPS = Capabilities(has_streams=False, has_float64=False)
STREAM = batches(40)


class Lesser(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """A CPU that lacks some of what `LACKS` names.

    float64 it has for a tensor of shape (1,) alone: the anchor's gradient, which is no business of the tier's.
    """

    def __init__(self, *lacks: str) -> None:
        super().__init__()
        self.lacks = lacks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_embedding_bag" in name and "bags" in self.lacks:
            raise NotImplementedError(f"The operator '{name}' is not currently implemented for this device")
        made = func(*args, **(kwargs or {}))
        first = made[0] if isinstance(made, tuple | list) and made else made
        if not isinstance(first, torch.Tensor):
            return made
        if "float64" in self.lacks and first.dtype == torch.float64 and first.shape != (1,):
            raise TypeError("Cannot convert a Tensor to float64 dtype as the framework doesn't support float64")
        if "right bags" in self.lacks and "_embedding_bag" in name:
            first.mul_(2)
        if "products" in self.lacks and name == "aten.mul.Tensor" and first.dtype == torch.int64:
            first.bitwise_and_(0xFFFFFFFF)
        if "subnormals" in self.lacks and name == "aten.index_select.default" and first.is_floating_point():
            first[first.abs() < torch.finfo(first.dtype).tiny] = 0
        return made


@pytest.mark.parametrize(
    ("lacks", "wanted"),
    [
        ((), Capabilities(has_streams=False, adds_in_order=True)),
        (("float64",), Capabilities(has_streams=False, has_float64=False, adds_in_order=True)),
        (("bags",), Capabilities(has_streams=False, has_bags=False, adds_in_order=True)),
        (("right bags",), Capabilities(has_streams=False, has_bags=False, adds_in_order=True)),
        (("products",), Capabilities(has_streams=False, has_integers=False, adds_in_order=True)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_device_lacks_is_found_out_and_not_used(lacks: tuple[str, ...], wanted: Capabilities) -> None:
    with Lesser(*lacks):
        found = capabilities.probe(HERE)
    assert found == wanted
    args: dict[str, Any] = {"optimizer": bb.Adam(lr=0.01), "dtype": "bfloat16"}
    plain = make_layer(**args)
    train(plain, STREAM[:15])
    others = []
    for cache in (most_rows(STREAM), NUM_ROWS, 0):
        layer = make_layer(**args, device_cache=cache and cache_of(cache, args))
        # Of integers the device's alone are wrong, and here it is the host too.
        lesser: Any = contextlib.nullcontext() if "products" in lacks else Lesser(*lacks)
        with lesser, capabilities.forced(found):
            train(layer, STREAM[:15])
        others.append(contents(layer))
        layer.table.close()
    assert others[0] == others[1]
    if found.has_bags:  # the other way is another order of additions
        assert others[0] == others[2] == contents(plain)
    plain.table.close()


@pytest.mark.parametrize("lack", ["float64", "bags"])
def test_the_stand_in_bites(lack: str) -> None:
    layer = make_layer(device_cache="64KiB")
    with Lesser(lack), pytest.raises((TypeError, NotImplementedError)):
        train(layer, STREAM[:1])
    layer.table.close()


def test_a_device_that_changes_what_it_moves_is_refused() -> None:
    with Lesser("subnormals"), pytest.raises(bb.BunkbedError, match="does not move the records of a device cache unch"):
        capabilities.probe(HERE)


def test_cpu_and_cuda_are_known_and_others_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def probe(device: Any) -> Capabilities:
        asked.append(device)
        return LEAST

    monkeypatch.setattr(capabilities, "probe", probe)
    monkeypatch.setattr(capabilities, "_found", {})
    assert capabilities.of(HERE) == CPU == capabilities.probe.__globals__["CPU"]
    assert capabilities.of(torch.device("cuda:3")).has_streams and not asked
    for _ in range(2):
        assert capabilities.of(torch.device("xpu:1")) is LEAST
    assert asked == [torch.device("xpu:1")]


OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": bb.SGD(lr=0.001, weight_decay=0.1)},
    {"optimizer": bb.RowwiseAdagrad(lr=0.1)},
    {"optimizer": bb.Adam(lr=0.01)},
    {"optimizer": bb.Adam(lr=0.01, state_dtype="bfloat16"), "dtype": "float16"},
]


@pytest.mark.parametrize("device", [MPS, LEAST], ids=["mps", "least"])
@pytest.mark.parametrize("args", OPTIMIZERS, ids=lambda args: repr(args["optimizer"]))
def test_the_same_bits_with_every_size_of_cache(args: dict[str, Any], device: Capabilities) -> None:
    plain = make_layer(**args)
    train(plain, STREAM)
    found = []
    with capabilities.forced(device):
        for rows, lookahead in ((most_rows(STREAM), {}), (most_rows(STREAM), {"depth": 2}), (NUM_ROWS, {"depth": 1})):
            layer = make_layer(**args, device_cache=cache_of(rows, args))
            train(layer, STREAM, **lookahead)
            assert layer.table.stats()["device_write_backs"] > len(STREAM) or rows == NUM_ROWS
            found.append((contents(layer), layer.table.get(np.arange(NUM_ROWS))))
            layer.table.close()
    assert found[0][0] == found[1][0] == found[2][0]
    if "dtype" not in args:
        np.testing.assert_allclose(found[0][1], plain.table.get(np.arange(NUM_ROWS)), rtol=0, atol=1e-6)
    plain.table.close()


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    schedule=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=1, max_size=10),
    spare=st.sampled_from([0, 9]),
    lookahead=st.sampled_from([None, {"depth": 2, "window": 4}]),
)
def test_any_schedule(schedule: list[tuple[str, int]], spare: int, lookahead: dict[str, int] | None) -> None:
    least = max(most_rows(batches(6, seed)) for seed in range(6))
    whole, small = make_layer(device_cache=cache_of(NUM_ROWS)), make_layer(device_cache=cache_of(least + spare))
    with capabilities.forced(LEAST):
        assert run(small, schedule, lookahead) == run(whole, schedule, None)
    whole.table.close()
    small.table.close()


@pytest.mark.parametrize("device", [MPS, LEAST], ids=["mps", "least"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_and_clipping_by_norm(mode: str, device: Capabilities) -> None:
    """Empty bags, weights, a padding id, and norms that clip every step."""
    found: list[Any] = []
    for cache, able in ((None, CPU), (96 * 40, device), (96 * NUM_ROWS, device), (0, device)):
        rng = np.random.default_rng(1)
        bag = bt.EmbeddingBag(
            NUM_ROWS, 8, padding_idx=5, mode=mode, device_cache=cache, optimizer=bb.Adam(lr=0.01),
            init=bb.Normal(std=0.1), seed=3,
        )  # fmt: skip
        opt, outputs = bt.Optimizer(bag), []
        with capabilities.forced(able):
            for _ in range(15):
                ids = torch.from_numpy(rng.zipf(1.3, 50) % NUM_ROWS)
                weights = torch.from_numpy(rng.random(50).astype(np.float32)) if mode == "sum" else None
                out = bag(ids, torch.tensor([0, 7, 7, 20, 50]), weights)
                opt.zero_grad()
                (out * out * torch.arange(1, 6)[:, None]).sum().backward()
                torch.nn.utils.clip_grad_norm_(bag.parameters(), 0.5)
                opt.step()
                outputs.append(out.detach().numpy())
        found.append((np.stack(outputs), bag.table.get(np.arange(NUM_ROWS))))
        bag.table.close()
    plain, small, large, none = found
    for index in range(2):
        np.testing.assert_allclose(small[index], plain[index], rtol=1e-5, atol=1e-6)
        assert small[index].tobytes() == large[index].tobytes() == none[index].tobytes()


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 19, 256])
def test_norms_in_float32_are_those_in_float64(dim: int) -> None:
    rng = np.random.default_rng(dim)
    for power in (0, 30, -30, 37, -37):
        values = (rng.standard_normal((300, dim)) * 10.0 ** (power + rng.integers(-3, 1, (300, 1)))).astype(np.float32)
        values[7] = 0
        wanted = float(np.sqrt(np.sum(values.astype(np.float64) ** 2)))
        with capabilities.forced(MPS):
            assert math.isclose(sums.norm(torch.from_numpy(values)), wanted, rel_tol=1e-6)
    with capabilities.forced(MPS):
        assert sums.norm(torch.zeros(4, dim)) == 0.0 == sums.norm(torch.zeros(0, dim))
        for bad in (math.inf, -math.inf, math.nan):
            values = torch.ones(5, dim)
            values[3, dim // 2] = bad
            assert not math.isfinite(sums.norm(values))
        assert sums.norm(torch.full((2, dim), 3e38)) > 4e38, "no overflow where the norm has none"


def test_the_host_rounds_where_integers_are_wrong() -> None:
    """On the meta device, off which nothing can be copied: so it shows where the rounding is done."""
    meta = torch.device("meta")
    records = DeviceRecords(9, [("weight", 8)], "bfloat16", "float32", meta)
    optimizer = bb.SGD(lr=0.1)
    frames = torch.arange(3, device=meta)

    def step() -> Any:
        grads, constants = torch.ones(3, 8, device=meta), step_constants(optimizer, 0.1, 1)
        return records.stepped(optimizer, constants, frames, grads, seed=1, ids=frames, number=1)

    with capabilities.forced(MPS):
        assert step()[0].device == meta and step()[0].dtype == torch.bfloat16
    with capabilities.forced(LEAST), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        step()
