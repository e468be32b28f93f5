"""The device cache as its user meets it: what others see of its rows, its budget, and what is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.torch.device import window as window_module
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.records import DeviceRecords
from device_setup import (
    BATCH,
    DIM,
    NUM_ROWS,
    batches,
    bt,
    cache_of,
    contents,
    loss_of,
    make_layer,
    most_rows,
    torch,
    train,
)

#: The least that a device may be able to do.
LEAST = capabilities.Capabilities(has_streams=False, has_float64=False, has_bags=False, has_integers=False)


class Failing:
    """A table's core of which one call fails."""

    def __init__(self, native: Any, name: str, error: Exception) -> None:
        self._native, self._name, self.error = native, name, error
        self.times = 0

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._native, name)

        def fail(*args: Any) -> None:
            self.times += 1
            raise self.error

        return fail


def test_whoever_reads_the_table_sees_the_newest_rows(tmp_path: Path) -> None:
    stream = batches(10)
    layer, plain = make_layer(tmp_path / "t", ram="1MiB", device_cache="1MiB"), make_layer()
    train(layer, stream)
    train(plain, stream)
    ids = np.arange(NUM_ROWS)
    assert layer.table.stats()["device_dirty"] > 0
    assert layer.table.lookup(ids, touch=False).tobytes() == plain.table.lookup(ids).tobytes()
    assert layer.table.stats()["device_dirty"] == 0
    train(layer, stream)
    train(plain, stream)
    assert len(layer.table) == len(plain.table)
    scanned = {int(i): row.tobytes() for ids, rows in layer.table.scan() for i, row in zip(ids, rows, strict=True)}
    assert scanned == {
        int(i): row.tobytes() for ids, rows in plain.table.scan() for i, row in zip(ids, rows, strict=True)
    }
    query = np.ones(DIM, np.float32)
    assert layer.table.topk(query, 5)[0].tolist() == plain.table.topk(query, 5)[0].tolist()
    train(layer, stream)
    train(plain, stream)
    bags = layer.table.lookup_bags(ids[:20], [0, 3])
    assert bags.tobytes() == plain.table.lookup_bags(ids[:20], [0, 3]).tobytes()
    layer.table.close()
    plain.table.close()


def test_evaluation_brings_no_row_to_the_device() -> None:
    layer = make_layer(device_cache="1MiB")
    train(layer, batches(3))
    resident = layer.table.stats()["device_resident"]
    layer.eval()
    everything = torch.arange(NUM_ROWS)
    with torch.no_grad():
        rows = layer(everything)
    assert layer.table.stats()["device_resident"] == resident < NUM_ROWS
    layer.train()
    assert rows.numpy().tobytes() == layer.table.get(np.arange(NUM_ROWS)).tobytes()
    layer.anchor.requires_grad = False
    layer(everything)
    assert layer.table.stats()["device_resident"] == NUM_ROWS, "a lookup in training does, of a frozen table too"
    layer.table.close()


def test_a_batch_that_cannot_fit_says_how_much_is_needed() -> None:
    layer = make_layer(device_cache=cache_of(10))
    train(layer, [torch.arange(10)])
    before = contents(layer)
    with pytest.raises(MemoryError, match=r"wants 11 rows.*960 B holds 10; give at least 1056 bytes \(1.1 KiB\)"):
        layer(torch.arange(11))
    assert contents(layer) == before
    train(layer, [torch.arange(5, 15)])
    layer.table.close()
    with pytest.raises(MemoryError, match=r"holds not one record of 96 bytes"):
        make_layer(device_cache=95)


def test_accumulated_rows_may_be_more_than_the_cache_holds() -> None:
    found = []
    for cache in (None, cache_of(30)):
        layer = make_layer(device_cache=cache)
        opt = bt.Optimizer(layer)
        for start in range(3):
            opt.zero_grad()
            for shift in range(0, 200, 25):
                loss_of(layer, (torch.arange(30) + shift + start) % NUM_ROWS).backward()
            opt.step()
        found.append(contents(layer))
        layer.table.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("device", [capabilities.CPU, LEAST], ids=["cpu", "least"])
def test_amp_scaling_clipping_and_padding(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "_forced", [device])
    found = []
    for cache in (None, "8KiB", "1MiB"):
        layer = make_layer(device_cache=cache, padding_idx=3)
        dense = torch.nn.Linear(DIM, 1)
        torch.nn.init.constant_(dense.weight, 0.5)
        torch.nn.init.zeros_(dense.bias)
        model = torch.nn.ModuleList([layer, dense])
        opt = bt.Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, ids in enumerate(batches(12)):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = dense(layer(ids)).float().pow(2).mean() + layer(ids[:4]).sum()
            if number == 5:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
        found.append((layer.table.step, layer.table.get(np.arange(NUM_ROWS)), layer.table.get([3]).any()))
        layer.table.close()
    assert [step for step, _, _ in found] == [11, 11, 11], "the step with infinite gradients is skipped"
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-6)
    assert found[1][1].tobytes() == found[2][1].tobytes()
    assert not any(padding for _, _, padding in found)


def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing() -> None:
    layer = make_layer(device_cache="8KiB")
    opt = train(layer, batches(3))
    before = contents(layer)
    opt.zero_grad()
    rows = layer(torch.tensor([7, 9]))
    rows.backward(torch.tensor([[1.0] * DIM, [float("nan")] * DIM]))
    with pytest.raises(ValueError, match="gradient of id 9 is nan at column 0"):
        opt.step()
    assert contents(layer) == before
    layer.table.close()


def test_ids_are_checked_before_anything_is_done() -> None:
    layer = make_layer(device_cache="8KiB")
    with pytest.raises(IndexError, match=rf"id {NUM_ROWS} at position 1 is outside"):
        layer(torch.tensor([1, NUM_ROWS]))
    with pytest.raises(TypeError, match="int64 or int32"):
        layer(torch.tensor([1.0]))
    opt = bt.Optimizer(layer)
    seen = []
    with pytest.raises(IndexError, match="id -1 at position 0"):
        for ids in bt.lookahead(
            [torch.tensor([1]), torch.tensor([2]), torch.tensor([-1])], layer, ids=lambda i: {layer: i}
        ):
            opt.zero_grad()
            loss_of(layer, ids).backward()
            opt.step()
            seen.append(int(ids[0]))
    assert seen == [1, 2]
    layer.table.close()


def test_tables_share_a_budget_of_device_memory() -> None:
    budget = bb.Budget(20_000)
    user = make_layer(device_cache=budget)
    train(user, batches(2))
    alone = user.table.stats()["device_bytes"]
    item = bt.Embedding(50, DIM, seed=1, device_cache=budget)
    train(user, batches(2, 1))
    train(item, [ids % 50 for ids in batches(2, 2)])
    shared = [layer.table.stats()["device_bytes"] for layer in (user, item)]
    assert alone <= 20_000 and sum(shared) <= 20_000 and shared[0] < alone
    assert shared[1] == 50 * item.table.record_bytes, "no more than it can use"
    plain = make_layer()
    train(plain, [*batches(2), *batches(2, 1)])
    assert user.table.get(np.arange(NUM_ROWS)).tobytes() == plain.table.get(np.arange(NUM_ROWS)).tobytes()
    for layer in (user, item, plain):
        layer.table.close()
    del user, item
    assert budget.used_bytes == 0


def test_the_error_of_a_shared_cache_names_the_least_that_all_tables_need_together() -> None:
    """With the bytes that it names the batch trains; with one less it does not."""

    def attempt(total: int) -> None:
        budget = bb.Budget(total)
        dims = {"small": (12, DIM), "wide": (NUM_ROWS, 2 * DIM), "user": (NUM_ROWS, DIM)}
        layers = [bt.Embedding(rows, dim, seed=1, device_cache=budget) for rows, dim in dims.values()]
        try:
            layers[-1](torch.arange(40))
        finally:
            for layer in layers:
                layer.table.close(commit=False)

    with pytest.raises(MemoryError, match=r"wants 40 rows, .* of 7\.8 KiB for 3 tables holds") as error:
        attempt(8_000)
    least = int(str(error.value).split("give at least ")[1].split(" bytes")[0])
    attempt(least)
    with pytest.raises(MemoryError, match=f"give at least {least} bytes"):
        attempt(least - 1)


def test_layers_on_one_table_share_its_cache() -> None:
    first = make_layer(device_cache="8KiB")
    second = bt.EmbeddingBag(NUM_ROWS, DIM, table=first.table, mode="sum")
    opt = bt.Optimizer(torch.nn.ModuleList([first, second]))
    plain = make_layer()
    other = bt.EmbeddingBag(NUM_ROWS, DIM, table=plain.table, mode="sum")
    plain_opt = bt.Optimizer(torch.nn.ModuleList([plain, other]))
    for layer, bag, optimizer in ((first, second, opt), (plain, other, plain_opt)):
        for ids in batches(5):
            optimizer.zero_grad()
            (loss_of(layer, ids) + (bag(ids.reshape(4, -1)) * 2).sum()).backward()
            optimizer.step()
    assert contents(first) == contents(plain)
    with pytest.raises(ValueError, match="share one device cache"):
        bt.Embedding(NUM_ROWS, DIM, table=first.table, device_cache="1MiB")
    first.table.close()
    plain.table.close()


def test_readers_and_sharded_tables_are_refused(tmp_path: Path) -> None:
    with bb.create(tmp_path / "t", dim=DIM, num_rows=NUM_ROWS):
        pass
    with bb.open(tmp_path / "t", mode="r") as reader, pytest.raises(ValueError, match="device_cache is for training"):
        bt.Embedding(NUM_ROWS, DIM, table=reader, device_cache="1MiB")
    shards = bb.ShardedTable.create(tmp_path / "s", shards=2, dim=DIM, num_rows=NUM_ROWS)
    with pytest.raises(ValueError, match="is sharded"):
        bt.Embedding(NUM_ROWS, DIM, table=shards, device_cache="1MiB")
    shards.close()


@pytest.mark.parametrize("call", ["gather_records", "scatter_records"])
def test_a_table_that_cannot_give_or_take_rows_leaves_the_device_as_it_was(call: str) -> None:
    layer, plain = make_layer(device_cache=cache_of(BATCH)), make_layer()
    stream = batches(12)
    opt = train(layer, stream[:6])
    native = layer.table.core
    layer.table.core = failing = Failing(native, call, OSError("no space left"))
    everything = torch.arange(BATCH)
    with pytest.raises(OSError, match="no space left"):
        layer(everything)
    assert failing.times == 1
    layer.table.core = native
    opt.zero_grad()
    train(layer, stream[6:], opt)
    train(plain, stream)
    assert contents(layer) == contents(plain)
    layer.table.close()
    plain.table.close()


def test_a_device_that_disappears_leaves_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(tmp_path / "t", ram="1MiB", device_cache="1MiB")
    opt = train(layer, batches(5))
    layer.table.commit()
    committed = contents(layer)
    train(layer, batches(5, 1), opt)
    tier = layer._pending.require_tier()

    def gone(values: Any) -> None:
        raise RuntimeError("device-side fault")

    monkeypatch.setattr(tier.link, "down", gone)
    with pytest.raises(
        bb.BunkbedError, match=r"reopened at its last commit, 1: .*rows that were updated.*device-side fault"
    ):
        layer.table.commit()
    with pytest.raises(bb.BunkbedError, match="refuses use until it is reopened"):
        layer(torch.tensor([1]))
    layer.table.close(commit=False)
    del layer, tier, opt
    again = make_layer(tmp_path / "t", ram="1MiB")
    assert contents(again) == committed
    again.table.close()


def test_device_memory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, *args: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(DeviceRecords, "__init__", full)
    layer = make_layer(device_cache="2GiB")
    with pytest.raises(MemoryError, match=r"device_cache of 2.0 GiB does not fit cpu: tried to allocate"):
        layer(torch.tensor([1]))
    layer.table.close()


def test_the_cache_takes_its_budget_and_no_more() -> None:
    layer = make_layer(device_cache=10_000)
    train(layer, batches(20))
    stats = layer.table.stats()
    assert stats["device_bytes"] == 10_000 // layer.table.record_bytes * layer.table.record_bytes
    assert stats["device_resident"] <= stats["device_frames"]
    layer.table.close()
    large = make_layer(device_cache="1GiB")
    train(large, batches(2))
    assert large.table.stats()["device_bytes"] == large.table.nbytes, "no more than the table"
    large.table.close()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_frames_are_released_after_their_step_also_where_it_comes_batches_later(every: int) -> None:
    """The thread of `lookahead` releases the frames of stepped batches, and a later step those of earlier batches."""
    stream = batches(24)
    caches = [None, cache_of(most_rows(stream) * (every + 3))]
    layers = [make_layer(device_cache=cache) for cache in caches]
    for layer in layers:
        optimizer = bt.Optimizer(layer)
        for number, ids in enumerate(bt.lookahead(stream, layer, ids=lambda ids, layer=layer: {layer: ids}), 1):
            loss_of(layer, ids).backward()
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert layers[1].table.stats()["device_pinned"] == 0
    found = [layer.table.get(np.arange(NUM_ROWS)) for layer in layers]
    assert found[0].tobytes() == found[1].tobytes()
    for layer in layers:
        layer.table.close()


@pytest.mark.parametrize("lookahead", [{}, {"depth": 2}], ids=["plain", "lookahead"])
def test_rows_brought_from_below_count_in_the_tables_own_hit_rate(tmp_path: Path, lookahead: dict[str, int]) -> None:
    """Each row that the device asks for is wanted once, wherever it was; writing back adds nothing."""
    stream = batches(60)
    make_layer(tmp_path / "t", ram="1MiB").table.close()
    with bb.open(tmp_path / "t", ram="1MiB") as table:
        half = np.arange(NUM_ROWS // 2)
        table.set(half, np.ones((half.size, DIM), np.float32))
    layer = make_layer(tmp_path / "t", ram="1MiB", device_cache=cache_of(most_rows(stream) + 8))
    train(layer, stream, **lookahead)
    stats = layer.table.stats()
    assert stats["device_write_backs"] > 100
    if lookahead:  # what was staged may have come up meanwhile, for another batch: then it was read for nothing
        assert stats["unique_rows"] >= stats["device_misses"]
    else:
        assert stats["unique_rows"] == stats["device_misses"]
    assert stats["hits"] + stats["misses"] + stats["first_touches"] == stats["unique_rows"]
    seen = np.unique(torch.cat(stream).numpy())
    assert stats["misses"] >= (seen < half.size).sum()
    assert stats["first_touches"] >= (seen >= half.size).sum()
    assert stats["hits"] > 100, "rows written back are in RAM when they come again"
    layer.table.close()


def test_a_staged_record_is_counted_once_and_a_written_one_not_at_all(tmp_path: Path) -> None:
    ids = np.arange(20)
    with bb.create(tmp_path / "t", dim=DIM, num_rows=NUM_ROWS, ram="1MiB") as table:
        table.set(ids, np.ones((20, DIM), np.float32))
    table = bb.open(tmp_path / "t", ram="1MiB")
    core = table.core
    records = np.empty((20, core.payload_bytes()), np.uint8)

    def counts() -> tuple[int, int, int]:
        stats = core.stats()
        assert stats["hits"] + stats["misses"] + stats["first_touches"] == stats["unique_rows"]
        return stats["hits"], stats["misses"], stats["first_touches"]

    core.gather_records(ids, records)
    assert counts() == (0, 20, 0)
    table.stage(ids)
    core.gather_records(ids, records)
    assert counts() == (0, 40, 0), "read once, by staging"
    core.gather_records(ids, records)
    assert counts() == (20, 40, 0)
    core.gather_records(ids + 100, np.empty_like(records))
    assert counts() == (20, 40, 20)
    core.scatter_records(ids, records)  # all in RAM
    core.scatter_records(ids + 200, records)  # none
    assert counts() == (20, 40, 20)
    with pytest.raises(IndexError):
        core.gather_records(ids + NUM_ROWS, records)
    assert counts() == (20, 40, 20)
    table.close(commit=False)


def test_deduplication_counts_as_time_the_model_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes only while the tier is asked for something; plans are another thread's work."""
    layer = make_layer(device_cache="64KiB")
    tier: Any = layer._pending.require_tier()
    clock = [0.0]

    def taking(seconds: float, call: Any) -> Any:
        def slow(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                clock[0] += seconds
            return call(*args)

        return slow

    monkeypatch.setattr(window_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(tier, "deduped", taking(1.0, tier.deduped))
    monkeypatch.setattr(tier, "expect", taking(100.0, tier.expect))
    stream = batches(8)
    for _ in bt.lookahead(stream, layer, ids=lambda ids: {layer: ids}, depth=1):
        pass  # nothing else asks the tier: no lookup
    assert layer.table.stats()["device_stall_s"] == 8 * 1.0
    layer.table.close()


def test_a_closed_table_lets_its_device_memory_go() -> None:
    layer = make_layer(device_cache="1MiB")
    train(layer, batches(2))
    layer.table.close()
    with pytest.raises(bb.TableClosedError):
        layer(torch.tensor([1]))
