"""A device cache with threads that commit or write, interrupts, budgets, forks, and tables that outlive it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.torch.device import tier as tier_module
from bunkbed.torch.device.records import DeviceRecords
from device_setup import DIM, NUM_ROWS, batches, bt, cache_of, contents, loss_of, make_layer, most_rows, torch, train

EVERYTHING = np.arange(NUM_ROWS)


@pytest.mark.parametrize("spare", [4, NUM_ROWS])
def test_commits_of_other_threads_hold_whole_steps(tmp_path: Path, spare: int) -> None:
    stream = batches(160, 7)
    oracle, at_step = make_layer(), {0: make_layer().table.get(EVERYTHING).tobytes()}
    opt = bt.Optimizer(oracle)
    for ids in stream:
        train(oracle, [ids], opt)
        at_step[oracle.table.step] = oracle.table.get(EVERYTHING).tobytes()
    layer = make_layer(tmp_path / "t", ram="1MiB", device_cache=cache_of(most_rows(stream) + spare))
    is_over, errors = threading.Event(), []

    def commit(name: str) -> None:
        count = 0
        while not is_over.is_set() and count < 12:
            try:
                layer.table.commit(keep=f"{name}-{count}")
                layer.table.get(EVERYTHING[:9])
            except Exception as error:
                errors.append(error)
                return
            count += 1

    threads = [threading.Thread(target=commit, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    train(layer, stream, depth=2)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert contents(layer) == contents(oracle)
    layer.table.close()
    oracle.table.close()
    snapshots = bb.snapshots(tmp_path / "t")
    assert len(snapshots) > 4
    for name in snapshots:
        with bb.open(tmp_path / "t", mode="r", snapshot=name) as reader:
            assert reader.lookup(EVERYTHING).tobytes() == at_step[reader.step], f"{name} tears step {reader.step}"


@pytest.mark.parametrize("is_lasting", [False, True])
def test_an_interrupted_step_is_finished_or_refused(monkeypatch: pytest.MonkeyPatch, is_lasting: bool) -> None:
    stream = batches(6)
    layer, plain = make_layer(device_cache="64KiB"), make_layer()
    opt, plain_opt = train(layer, stream), train(plain, stream)
    store, calls = DeviceRecords.store, []

    def interrupted(self: Any, frames: Any, fields: list[Any]) -> None:
        calls.append(1)
        if len(calls) == 1 or is_lasting:
            self._views[0].index_copy_(0, frames, fields[0])  # the weights, and not their state
            raise KeyboardInterrupt
        store(self, frames, fields)

    monkeypatch.setattr(DeviceRecords, "store", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(layer, stream[:1], opt)
    monkeypatch.undo()
    train(plain, stream[:1], plain_opt)
    if is_lasting:
        with pytest.raises(bb.BunkbedError, match="interrupted half-way"):
            layer.table.commit()
        layer.table.close(commit=False)
    else:
        opt.zero_grad()
        assert contents(layer) == contents(plain)
        layer.table.close()
    plain.table.close()


@pytest.mark.parametrize("batches_held", [4, 0])
@pytest.mark.parametrize("change", ["set", "update", "go back"])
def test_a_table_changed_while_batches_are_staged(change: str, batches_held: int) -> None:
    stream = batches(24, 9)
    found = []
    for is_cached in (False, True):
        size = batches_held and cache_of(batches_held * most_rows(stream))
        layer = make_layer(**({"device_cache": size} if is_cached else {}))
        opt = train(layer, stream[:4])
        kept = layer.state_dict()
        loader = bt.lookahead(stream, layer, ids=lambda i, layer=layer: {layer: i}, depth=3)
        for number, ids in enumerate(loader):
            opt.zero_grad()
            loss_of(layer, ids).backward()
            opt.step()
            opt.zero_grad()
            if number % 6 == 5:
                rows = stream[number + 1].unique().numpy() if number + 1 < len(stream) else np.arange(3)
                if change == "set":
                    layer.table.set(rows, np.full((rows.size, DIM), number, np.float32))
                elif change == "update":
                    layer.table.update(rows, np.full((rows.size, DIM), 0.5, np.float32))
                else:
                    layer.load_state_dict(kept)
        found.append(contents(layer))
        layer.table.close()
    assert found[0] == found[1]


def test_copies_sent_while_another_thread_writes_are_sent_again() -> None:
    layer = make_layer(device_cache=0)
    tier: Any = layer._pending.require_tier()
    batch = tier.deduped(np.array([1, 2, 3]))
    with layer.table._writing():
        tier.place(batch)  # by the window's thread, before the write below
        layer.table.core.set(np.array([2]), 0, np.full((1, DIM), 9, np.float32))
    tier.present = [(np.array([1, 2, 3]), batch)]
    assert (layer(torch.tensor([1, 2, 3]))[1] == 9).all()
    layer.table.close()


def test_copies_sent_long_ago_are_sent_again() -> None:
    layer, plain = make_layer(device_cache=0), make_layer()
    tier: Any = layer._pending.require_tier()
    ids = torch.arange(6)
    early = tier.deduped(ids.numpy())
    tier.place(early)
    for one in (layer, plain):
        opt = train(one, [ids])
        train(one, batches(12), opt)
    tier.present = [(ids.numpy(), early)]
    assert torch.equal(layer(ids), plain(ids))
    layer.table.close()
    plain.table.close()


def test_rows_are_written_back_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_CHUNK_BYTES", 5 * 96)
    layer, plain = make_layer(device_cache="64KiB"), make_layer()
    train(layer, batches(8))
    train(plain, batches(8))
    assert layer.table.stats()["device_dirty"] > 20
    assert contents(layer) == contents(plain)
    layer.table.close()
    plain.table.close()


def test_a_table_outlives_its_layer_with_the_rows_trained_above() -> None:
    table = bb.create(None, dim=DIM, num_rows=NUM_ROWS, optimizer=bb.Adam(lr=0.01), init=bb.Normal(std=0.1), seed=3)
    plain = make_layer()
    layer = bt.Embedding(NUM_ROWS, DIM, table=table, device_cache="64KiB")
    for one in (layer, plain):
        train(one, batches(8))
    assert table.stats()["device_dirty"] > 0
    del layer
    assert table.get(EVERYTHING).tobytes() == plain.table.get(EVERYTHING).tobytes()
    table.commit()
    again = bt.Embedding(NUM_ROWS, DIM, table=table, device_cache="32KiB")
    train(again, batches(3))
    table.close()
    plain.table.close()


@pytest.mark.parametrize("commit", [True, False])
def test_a_closed_table_gives_memory_and_budget_back(commit: bool) -> None:
    budget = bb.Budget("20KiB")
    layer = make_layer(device_cache=budget)
    train(layer, batches(3))
    assert budget.used_bytes > 0
    layer.table.close(commit=commit)
    tier: Any = layer._pending.require_tier()
    assert tier._records is None and budget.used_bytes == 0
    with pytest.raises(bb.TableClosedError):
        layer(torch.tensor([1]))
    other = make_layer(device_cache=budget)
    train(other, batches(3))
    other.table.close()


def test_the_map_counts_in_the_tables_ram(tmp_path: Path) -> None:
    layer = bt.Embedding(100_000, DIM, path=tmp_path / "t", ram="4MiB", device_cache="1MiB")
    opt = bt.Optimizer(layer)
    rng = np.random.default_rng(0)
    for _ in range(30):
        opt.zero_grad()
        layer(torch.from_numpy(rng.integers(0, 100_000, 2_000))).sum().backward()
        opt.step()
    stats = layer.table.stats()
    assert stats["device_write_backs"] > 10_000
    assert stats["ram_bytes"] + stats["device_map_bytes"] <= 4 << 20
    layer.table.close()
    small = bt.Embedding(1_000_000, DIM, path=tmp_path / "small", ram="16MiB", device_cache="64MiB")
    with pytest.raises(MemoryError, match=r"its device cache's id map takes \d+ of the 16777216 bytes"):
        small(torch.tensor([1]))
    small.table.close()


def test_rows_that_could_not_be_stored_later_are_refused_before_they_are_trained(tmp_path: Path) -> None:
    layer = bt.Embedding(None, DIM, path=tmp_path / "t", ram="2MiB", device_cache="256KiB", optimizer=bb.SGD(lr=0.1))
    opt = bt.Optimizer(layer)
    rng = np.random.default_rng(0)
    steps = 0
    with pytest.raises(MemoryError, match=r"rows of its device cache .* open it with ram=\d+ or more"):
        for _ in range(200):
            opt.zero_grad()
            layer(torch.from_numpy(rng.integers(0, 2**62, 1_000))).sum().backward()
            opt.step()
            steps += 1
    layer.table.commit()
    assert len(layer.table) == 1_000 * steps
    layer.table.close()


def test_a_forked_child_is_told_instead_of_waiting_for_a_lock() -> None:
    layer = make_layer(device_cache="64KiB")
    train(layer, batches(2))
    tier: Any = layer._pending.require_tier()
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with tier._lock:
            held.set()
            free.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that never stops waiting is killed, and fails the test
        refused = 0
        for use in (lambda: layer(torch.tensor([1])), lambda: layer.table.get([1])):
            try:
                use()
            except bb.BunkbedError:
                refused += 1
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    free.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 2
    layer.table.close()


def test_a_model_that_moves_between_backward_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is only one device here: the test releases the frames as a move does, and the step finds its rows again."""
    layer, plain = make_layer(device_cache="64KiB"), make_layer()
    stream = batches(6)
    for one in (layer, plain):
        opt = bt.Optimizer(one)
        for ids in stream:
            opt.zero_grad()
            loss_of(one, ids).backward()
            if one is layer:
                tier: Any = layer._pending.require_tier()
                with tier._lock:
                    tier._give_memory_back()
            opt.step()
    assert contents(layer) == contents(plain)
    layer.table.close()
    plain.table.close()


def test_a_lookup_waits_for_frames_that_another_thread_releases() -> None:
    """The thread of `lookahead` takes the frames from a batch, and releases them a little later."""
    layer = make_layer(device_cache=cache_of(8))
    tier = layer._pending.require_tier()
    _, batch = tier.lookup(np.arange(8))
    is_releasing, plan = threading.Event(), batch.plan

    class Slow:
        def release(self) -> None:
            is_releasing.set()
            time.sleep(0.2)
            plan.release()

    batch.plan = Slow()
    thread = threading.Thread(target=tier.release, args=([batch],))
    thread.start()
    assert is_releasing.wait(60)
    found, other = tier.lookup(np.arange(8, 16))
    thread.join(60)
    assert found.numpy().tobytes() == layer.table.lookup(np.arange(8, 16)).tobytes()
    other.let_go()
    layer.table.close()
