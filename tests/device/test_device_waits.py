"""Over a link whose copies land only when they are waited for, rows are those of a table without a device cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bunkbed.torch.device import rows, tier, transfer
from bunkbed.torch.device.base.link import Link
from device_deferred import DeferredLink, WatchedRecords
from device_setup import NUM_ROWS, batches, bt, cache_of, contents, make_layer, most_rows, torch, train
from test_device_schedules import ACTIONS, run

STREAM = batches(50, 8)


@pytest.fixture(autouse=True)
def deferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeferredLink]]:
    """Every link is a `DeferredLink`; at the end, when tables are closed, nothing was overtaken or left under way."""
    monkeypatch.setattr(DeferredLink, "links", [])
    monkeypatch.setattr(WatchedRecords, "without_link", [])
    for module in (rows, tier, transfer):
        monkeypatch.setattr(module, "Link", DeferredLink)
    monkeypatch.setattr(tier, "DeviceRecords", WatchedRecords)
    yield DeferredLink.links
    for link in DeferredLink.links:
        assert not link.overtaken, "copies took frames that the model may still have been using"
        assert not link.pending, "copies were under way when their memory was given back"


@pytest.mark.parametrize("lookahead", [{}, {"depth": 1}, {"depth": 3}], ids=["plain", "depth 1", "depth 3"])
@pytest.mark.parametrize(
    ("batches_held", "dtype"), [(1, "float32"), (4, "float32"), (0, "float32"), (1, "bfloat16"), (4, "bfloat16")]
)
def test_rows_trained_over_copies_that_are_late(
    deferred: list[DeferredLink], batches_held: int, lookahead: dict[str, int], dtype: str
) -> None:
    found = []
    everything = torch.arange(NUM_ROWS)
    for is_cached in (False, True):
        args: dict[str, Any] = {"dtype": dtype}
        if is_cached:
            args["device_cache"] = batches_held and cache_of(batches_held * most_rows(STREAM), args)
        layer = make_layer(**args)
        opt = train(layer, STREAM[:25], **lookahead)
        layer.eval()
        with torch.no_grad():
            read = layer(everything).numpy().tobytes()
        layer.train()
        layer.table.commit()
        train(layer, STREAM[25:], opt, **lookahead)
        found.append((read, contents(layer)))
        layer.table.close()
    assert found[0] == found[1]
    assert sum(link.landed for link in deferred) >= len(STREAM), "copies must have been late"


@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_over_copies_that_are_late(seed: int) -> None:
    draw = random.Random(seed)
    schedule = [("step", 0), *((draw.choice(ACTIONS), draw.randrange(6)) for _ in range(10))]
    lookahead = draw.choice([None, {"depth": 1}, {"depth": 2, "window": 4}])
    spare = draw.choice([None, 0, 9, 150])
    least = max(most_rows(batches(6, seed)) for seed in range(6))
    plain, cached = make_layer(), make_layer(device_cache=0 if spare is None else cache_of(least + spare))
    assert run(cached, schedule, lookahead) == run(plain, schedule, None)
    plain.table.close()
    cached.table.close()


def test_a_batch_placed_again_for_its_step_is_waited_for() -> None:
    plain, cached = make_layer(), make_layer(device_cache=cache_of(most_rows(STREAM)))
    for layer in (plain, cached):
        opt = bt.Optimizer(layer)
        for first, second in zip(STREAM[:20:2], STREAM[1:20:2], strict=True):
            opt.zero_grad()
            loss = layer(first).pow(2).sum()
            layer(second)  # takes the first one's frames
            loss.backward()
            opt.step()
    assert contents(cached) == contents(plain)
    plain.table.close()
    cached.table.close()


def test_evaluation_waits_for_rows_that_are_staged() -> None:
    plain, cached = make_layer(), make_layer(device_cache="64KiB")
    everything = torch.arange(NUM_ROWS)
    read: list[list[bytes]] = []
    for layer, loader in ((plain, STREAM), (cached, bt.lookahead(STREAM, cached, ids=lambda i: {cached: i}, depth=3))):
        opt, seen = bt.Optimizer(layer), []
        for ids in loader:
            layer.eval()
            with torch.no_grad():
                seen.append(layer(everything).numpy().tobytes())
            layer.train()
            opt.zero_grad()
            layer(ids).pow(2).sum().backward()
            opt.step()
        read.append(seen)
        layer.table.close()
    assert read[0] == read[1]


@pytest.mark.parametrize("is_moved", [False, True])
def test_memory_is_given_back_after_the_copies_into_it(deferred: list[DeferredLink], is_moved: bool) -> None:
    layer = make_layer(device_cache="64KiB")
    at_device: Any = layer._pending.require_tier()
    batch = at_device.deduped(np.arange(40))
    at_device.expect(batch)  # makes the map
    assert at_device.place(batch)
    link = deferred[-1]
    assert link.pending > 0
    if is_moved:
        at_device.leave()
    else:
        layer.table.close()
    assert link.pending == 0
    layer.table.close()


class Stream:
    """Simulates a device's stream: notes which events it waits for, and records its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []
        self.wait_event = self.waited.append

    def record_event(self) -> str:
        return self.name

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_copy_waits_for_uses_on_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads train and commit on streams of their own."""
    link, copies, current = Link(torch.device("cpu")), Stream("copies"), [Stream("")]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current[0])
    link._stream = copies
    for name in ("training", "commit"):
        current[0] = Stream(name)
        link.used()
    link.used()
    with link.copying():
        assert copies.waited == ["training", "commit"]
    link.wait(link.ready())
    assert current[0].waited == ["copies"], "the event at the end of the copies"
