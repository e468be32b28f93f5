"""A device that goes or has no memory left, devices that are mixed, workers: no more is lost than is said."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.base.capabilities import Capabilities
from bunkbed.torch.device.records import DeviceRecords
from device_setup import DIM, NUM_ROWS, batches, bt, contents, make_layer, torch, train


def gone(*args: Any) -> Any:
    raise RuntimeError("device-side fault")


def test_a_table_whose_device_is_gone_can_be_closed_and_gives_its_budget_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = bb.Budget("20KiB")
    layer = make_layer(tmp_path / "t", ram="1MiB", device_cache=budget)
    opt = train(layer, batches(5))
    layer.table.commit()
    committed = contents(layer)
    train(layer, batches(3, 1), opt)
    tier: Any = layer._pending.require_tier()
    monkeypatch.setattr(tier.link, "down", gone)
    monkeypatch.setattr(tier.link, "finish", gone)  # so does every call after a fault
    with pytest.raises(bb.BunkbedError, match=r"reopened at its last commit, 1: .*close it with close\(commit=False\)"):
        layer.table.commit()
    layer.table.close(commit=False)
    assert tier._records is None and budget.used_bytes == 0
    again = make_layer(tmp_path / "t", ram="1MiB")
    assert contents(again) == committed
    again.table.close()


def test_rows_are_written_back_in_smaller_parts_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full device refuses the copy of many rows: fewer at a time will do, and no row is lost for it."""
    layer, plain = make_layer(device_cache="64KiB"), make_layer()
    for one in (layer, plain):
        train(one, batches(8))
    dirty = layer.table.stats()["device_dirty"]
    read, sizes = DeviceRecords.read, []

    def short(self: DeviceRecords, frames: Any) -> Any:
        sizes.append(len(frames))
        if len(frames) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")
        return read(self, frames)

    monkeypatch.setattr(DeviceRecords, "read", short)
    assert contents(layer) == contents(plain)
    assert sizes[0] == dirty > 3
    layer.table.close()
    plain.table.close()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_no_row_is_given_up_for_memory_that_is_short_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    layer, plain = make_layer(device_cache="64KiB"), make_layer()
    opts = [train(one, batches(8)) for one in (layer, plain)]

    def full(*args: Any) -> Any:
        raise kind("MPS backend out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(DeviceRecords, "read", full)
        with pytest.raises(MemoryError, match=r"no memory on cpu to write back \d+ rows.*free some.*out of memory"):
            layer.table.commit()
    for one, opt in zip((layer, plain), opts, strict=True):
        train(one, batches(8, 1), opt)
    assert contents(layer) == contents(plain)
    layer.table.close()
    plain.table.close()


@pytest.mark.parametrize("when", ["load", "evict", "step"])
def test_a_lookup_or_step_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    layer, plain = make_layer(device_cache=96 * 60), make_layer()
    opts = [train(one, batches(8)) for one in (layer, plain)]

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    name = {"load": "write", "evict": "read", "step": "stepped"}[when]
    with monkeypatch.context() as patched:
        patched.setattr(DeviceRecords, name, full)
        with pytest.raises(torch.OutOfMemoryError):
            train(layer, [torch.arange(300, 355)], opts[0])
    opts[0].zero_grad()
    assert layer.table.step == plain.table.step
    for one, opt in zip((layer, plain), opts, strict=True):
        train(one, batches(8, 1), opt)
    assert contents(layer) == contents(plain)
    layer.table.close()
    plain.table.close()


def test_ram_reserved_for_a_cache_that_could_not_be_made_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(tmp_path / "t", ram="1MiB", device_cache="64KiB")
    reserved: list[int] = []
    reserve = layer.table.reserve_ram
    monkeypatch.setattr(layer.table, "reserve_ram", lambda n: (reserved.append(n), reserve(n)))

    def full(*args: Any) -> Any:
        raise MemoryError("std::bad_alloc")

    with monkeypatch.context() as patched:
        patched.setattr("bunkbed.torch.device.tier._native.DeviceMap", full)
        with pytest.raises(MemoryError, match="bad_alloc"):
            layer(torch.tensor([1]))
    assert len(reserved) == 2 and sum(reserved) == 0
    train(layer, batches(2))
    layer.table.close()


def test_one_budget_for_two_devices_is_refused_and_moving_the_model_is_not() -> None:
    budget = bb.Budget("64KiB")
    user = make_layer(device_cache=budget)
    item = bt.Embedding(50, DIM, seed=1, device_cache=budget, device="meta")
    # The first lookup after the move, or the first one of all: whichever layer it is of.
    for layer, mine, other in ((user, "cpu", "meta"), (item, "meta", "cpu")):
        message = rf"share a budget of device memory.* on {mine} .* on {other},.*a Budget of its own"
        with pytest.raises(ValueError, match=message):
            layer(torch.tensor([1]))
    assert user.table.stats()["device_bytes"] == 0
    item.to_empty(device="cpu")
    for layer in (user, item):
        layer(torch.tensor([1]))
        layer.table.close()


def test_a_worker_is_told_even_of_rows_that_are_staged() -> None:
    """A forked DataLoader worker raises although the rows of the current batch are in the parent's frames."""
    layer = make_layer(device_cache="64KiB")
    ids = torch.arange(5)
    for _ in bt.lookahead([ids, ids + 5], layer, ids=lambda i: {layer: i}):
        assert layer._pending.require_tier().present
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            code = 1
            try:
                layer(ids)
            except bb.TableClosedError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        break
    layer.table.close()


def test_layers_on_two_devices_need_no_cache_in_common() -> None:
    """Two caches, each on its own device, are no mixture: only torch's operations on both rows are, and say so."""
    user, item = make_layer(device_cache="64KiB"), bt.Embedding(50, DIM, device_cache="1KiB", device="cpu")
    assert user(torch.tensor([1])).device == item(torch.tensor([1])).device
    with pytest.raises(ValueError, match="share one anchor, on cpu"):
        bt.Embedding(NUM_ROWS, DIM, table=user.table, device="meta")
    np.testing.assert_array_equal(user.table.get([1])[0], user(torch.tensor([1])).detach().numpy()[0])
    user.table.close()
    item.table.close()


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("cache", ["64KiB", 0])
def test_a_first_lookup_in_inference_mode_leaves_rows_that_train(cache: Any, is_training: bool) -> None:
    """As Lightning's check before training does it: memory that is made there must not be an inference tensor."""
    layer, plain = make_layer(device_cache=cache), make_layer()
    layer.train(is_training)
    stream = batches(6)
    with torch.inference_mode():
        before = layer(stream[0]).clone()
    layer.train()
    assert torch.equal(before, plain(stream[0]))
    for one in (layer, plain):
        opt = bt.Optimizer(one)
        for step, ids in enumerate(stream):
            if step == 3:  # in between, with rows that steps have changed
                with torch.inference_mode():
                    one(stream[5])
            train(one, [ids], opt)
    assert contents(layer) == contents(plain)
    layer.table.close()
    plain.table.close()


@pytest.mark.parametrize("device", [None, Capabilities(has_streams=False, has_float64=False, has_bags=False)])
@pytest.mark.parametrize("cache", ["64KiB", 0])
def test_batches_of_nothing(cache: Any, device: Capabilities | None) -> None:
    layer = make_layer(device_cache=cache)
    bag = bt.EmbeddingBag(NUM_ROWS, DIM, table=layer.table, mode="mean")
    opt = bt.Optimizer(torch.nn.ModuleList([layer, bag]))
    nothing = torch.empty(0, dtype=torch.int64)
    with capabilities.forced(device or capabilities.CPU):
        for ids in (nothing, torch.arange(4), nothing):
            opt.zero_grad()
            rows, pooled = layer(ids), bag(nothing, torch.tensor([0, 0]))
            assert rows.shape == (len(ids), DIM) and not pooled.any() and pooled.shape == (2, DIM)
            (rows.sum() + pooled.sum()).backward()
            opt.step()
    assert layer.table.step >= 1
    layer.table.close()


@pytest.mark.parametrize("cache", ["8KiB", 0])
@pytest.mark.parametrize("is_asked", [False, True])
def test_torchs_default_device_is_no_business_of_the_hosts_memory(cache: Any, is_asked: bool) -> None:
    """As after ``torch.set_default_device("cuda")``; here a device that would hold no values."""
    layer, plain = make_layer(device_cache=cache, device="cpu"), make_layer(device="cpu")
    stream, grad = batches(6), torch.ones(48, DIM)
    for one in (layer, plain):
        opt = bt.Optimizer(one)
        with torch.device("meta" if one is layer else "cpu"):
            if is_asked:  # a device that is not known is asked then
                assert capabilities.probe(torch.device("cpu")) == capabilities.CPU
            for ids in stream:
                opt.zero_grad()
                one(ids).backward(grad)
                opt.step()
    assert contents(layer) == contents(plain)
    layer.table.close()
    plain.table.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (-1, ValueError, r"table 'table': device_cache: a size must be above 0 bytes, got -1"),
        ("x", ValueError, r"table 'table': device_cache: cannot read the size 'x'"),
        ("0GiB", ValueError, r"device_cache: .*got '0GiB'; 0, a number, keeps no rows on the device"),
        (True, TypeError, r"device_cache: a size is a number of bytes"),
    ],
)
def test_a_size_that_is_none_is_named(size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_layer(device_cache=size)
    gc.collect()  # the half-initialised device cache is freed without a warning
