"""Whatever else happens between steps, a device cache holds no stale row: the same bits as a layer without one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_setup import NUM_ROWS, batches, bt, cache_of, contents, loss_of, make_layer, most_rows, torch

ACTIONS = [
    "step",
    "accumulate",
    "forward only",
    "evaluate",
    "get",
    "set",
    "update",
    "commit",
    "keep",
    "go back",
    "stop early",
    "fail",
]


def run(layer: Any, schedule: list[tuple[str, int]], lookahead: dict[str, int] | None) -> list[bytes]:
    """Plays a schedule of (action, seed); returns everything that was read on the way and the rows at the end."""
    opt = bt.Optimizer(layer)
    read: list[bytes] = []
    kept: Any = None
    for action, seed in schedule:
        stream = batches(6, seed)
        loader: Any = (
            stream if lookahead is None else bt.lookahead(stream, layer, ids=lambda i: {layer: i}, **lookahead)
        )
        if action in ("step", "stop early", "fail"):
            try:
                for number, ids in enumerate(loader):
                    if number == 3 and action != "step":
                        if action == "fail":
                            raise KeyError("the model's own error")
                        break
                    opt.zero_grad()
                    loss = loss_of(layer, ids)
                    read.append(loss.detach().numpy().tobytes())
                    loss.backward()
                    opt.step()
            except KeyError:
                pass
        elif action == "accumulate":
            opt.zero_grad()
            for ids in loader:
                loss_of(layer, ids).backward()
            opt.step()
        elif action == "forward only":
            read.append(layer(stream[0]).detach().numpy().tobytes())
        elif action == "evaluate":
            layer.eval()
            with torch.no_grad():
                for ids in loader:
                    read.append(layer(ids).numpy().tobytes())
            layer.train()
        elif action == "get":
            read.append(layer.table.get(stream[0].numpy(), "exp_avg").tobytes())
        elif action == "set":
            ids = np.unique(stream[1].numpy())
            layer.table.set(ids, np.full((ids.size, layer.embedding_dim), seed % 7, np.float32))
        elif action == "update":
            grads = np.random.default_rng(seed).random((stream[2].numel(), layer.embedding_dim), np.float32)
            layer.table.update(stream[2].numpy(), grads)
        elif action == "commit":
            layer.table.commit()
        elif action == "keep":
            kept = layer.state_dict()
        elif kept is not None:
            layer.load_state_dict(kept)
    return [*read, *contents(layer).values()]


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    schedule=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=1, max_size=12),
    spare=st.sampled_from([None, 0, 9, 150]),
    lookahead=st.sampled_from([None, {"depth": 1}, {"depth": 2, "window": 4}]),
)
def test_any_schedule(schedule: list[tuple[str, int]], spare: int | None, lookahead: dict[str, int] | None) -> None:
    least = max(most_rows(batches(6, seed)) for seed in range(6))
    plain, cached = make_layer(), make_layer(device_cache=0 if spare is None else cache_of(least + spare))
    assert run(cached, schedule, lookahead) == run(plain, schedule, None)
    plain.table.close()
    cached.table.close()


@pytest.mark.parametrize("batches_held", [4, 0])
def test_a_slow_link_gives_no_stale_row(batches_held: int) -> None:
    """10,000 steps over a link that delays each copy for a random time, so that staging overlaps steps in every way."""
    stream = batches(10_000 if batches_held else 2_000, seed=3, size=6)
    plain = make_layer()
    cached = make_layer(device_cache=batches_held and cache_of(batches_held * most_rows(stream)))
    draw = random.Random(0)
    cached._pending.require_tier().delay = lambda way: time.sleep(draw.choice([0, 0, 0, 1e-5, 3e-4]))
    for layer, lookahead in ((plain, False), (cached, True)):
        opt = bt.Optimizer(layer)
        loader: Any = bt.lookahead(stream, layer, ids=lambda i, layer=layer: {layer: i}) if lookahead else stream
        for ids in loader:
            opt.zero_grad(set_to_none=False)
            rows = layer(ids)
            rows.backward(rows.detach() + 0.5)
            opt.step()
    stats = cached.table.stats()
    if batches_held:
        assert stats["device_write_backs"] > 3_000 and stats["device_hits"] > 3_000
    assert contents(cached) == contents(plain)
    plain.table.close()
    cached.table.close()


@pytest.mark.parametrize("lookahead", [False, True])
def test_several_lookups_of_one_table_in_a_step(lookahead: bool) -> None:
    pairs = list(zip(batches(40, 1), batches(40, 2), strict=True))
    least = max(len(torch.unique(torch.cat(pair))) for pair in pairs)
    found = []
    for cache in (None, cache_of(least), cache_of(NUM_ROWS), 0):
        layer = make_layer(device_cache=cache)
        opt = bt.Optimizer(layer)
        loader: Any = pairs
        if lookahead:
            loader = bt.lookahead(pairs, layer, ids=lambda pair, layer=layer: {layer: list(pair)})
        for first, second in loader:
            opt.zero_grad()
            (loss_of(layer, first) * 0.5 + (layer(second) * layer(first)).sum()).backward()
            opt.step()
        found.append(contents(layer))
        layer.table.close()
    assert all(other == found[0] for other in found[1:])


def test_two_loops_at_once() -> None:
    stream = batches(20, 4)
    found = []
    for cache in (None, cache_of(3 * most_rows(stream))):
        layer = make_layer(device_cache=cache)
        opt = bt.Optimizer(layer)

        def look(layer: Any = layer) -> Iterator[Any]:
            return iter(bt.lookahead(stream, layer, ids=lambda i: {layer: i}))

        for ids, others in zip(look(), look(), strict=True):
            opt.zero_grad()
            (loss_of(layer, ids) + loss_of(layer, others)).backward()
            opt.step()
        found.append(contents(layer))
        layer.table.close()
    assert found[0] == found[1]


def test_an_id_changed_in_place_after_it_was_planned_for_is_looked_up_as_it_is() -> None:
    stream = batches(8, 6)
    plain, cached = make_layer(), make_layer(device_cache="64KiB")
    read = []
    for layer, loader in (
        (plain, iter([ids.clone() for ids in stream])),
        (cached, iter(bt.lookahead([ids.clone() for ids in stream], cached, ids=lambda i: {cached: i}))),
    ):
        opt = bt.Optimizer(layer)
        for ids in loader:
            ids.add_(1).remainder_(NUM_ROWS)
            opt.zero_grad()
            loss = loss_of(layer, ids)
            read.append(float(loss.detach()))
            loss.backward()
            opt.step()
    assert read[:8] == read[8:]
    assert contents(plain) == contents(cached)
    plain.table.close()
    cached.table.close()
