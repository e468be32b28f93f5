"""Readers that follow the writer: of tables, sharded tables and runs."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.table.following import Pins

ROWS = 40
EVERY = np.arange(ROWS)
FACTS: dict[str, Any] = {"dim": 2, "num_rows": ROWS, "init": bb.Zeros(), "optimizer": bb.SGD(lr=1.0)}
PLACES = ("table", "sharded", "run")


class Pair:
    """A writer and the paths of its readers. `commit` sets all rows to the number of the commit."""

    def __init__(self, place: str, path: Path) -> None:
        self.place, self.path, self.number = place, path, 0
        if place == "run":
            self.writer: Any = bb.Run(path, ram="64MiB")
            shards = {"item": {}, "user": {"shards": 2}}
            self.tables = [self.writer.table(name, create={**FACTS, **more}) for name, more in shards.items()]
        else:
            make = bb.create if place == "table" else bb.ShardedTable.create
            more = {} if place == "table" else {"shards": 2}
            self.writer = make(path, ram="16MiB", **FACTS, **more)  # type: ignore[operator]
            self.tables = [self.writer]
        self.commit()

    def commit(self, keep: str | None = None) -> None:
        self.number += 1
        for table in self.tables:
            table.set(EVERY, np.full((ROWS, 2), self.number, np.float32))
        files = {"files": {"dense": str(self.number).encode()}} if self.place == "run" else {}
        assert self.writer.commit(keep=keep, **files) == self.number

    @contextlib.contextmanager
    def reader(self, **more: Any) -> Iterator[Any]:
        opened = bb.Run(self.path, mode="r", ram="64MiB", **more) if self.place == "run" else None
        reader = opened or bb.open(self.path, mode="r", ram="16MiB", **more)
        with reader:
            yield reader

    def seen(self, reader: Any) -> set[float]:
        """Return the numbers of the commits that the reader's rows and files show."""
        tables = [reader.table("item"), reader.table("user")] if self.place == "run" else [reader]
        found = {float(value) for table in tables for value in np.unique(table.lookup(EVERY))}
        return found | ({float(reader.read("dense"))} if self.place == "run" else set())


@pytest.fixture(params=PLACES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(request.param, tmp_path / "t")
    yield pair
    pair.writer.close(commit=False)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the reader did not move within a minute"
        time.sleep(0.01)


def watching() -> int:
    """Return the number of threads that follow."""
    return sum(thread.name == "bunkbed-watch" for thread in threading.enumerate())


def test_refresh_moves_all_together_and_says_how_far_it_was_behind(pair: Pair) -> None:
    with pair.reader() as reader:
        assert pair.seen(reader) == {1} and reader.behind == 0
        pair.commit()
        assert pair.seen(reader) == {1} and reader.behind == 1
        pair.commit()
        assert reader.behind == 2 and reader.version == 1
        if pair.place == "run":
            with pytest.raises(FileNotFoundError, match=r"collected by its writer meanwhile; call refresh\(\)"):
                reader.read("dense")
        assert reader.refresh() == 3 and reader.version == 3 and reader.behind == 0 and pair.seen(reader) == {3}
    assert pair.writer.behind == 0 and pair.writer.age_s == 0


def test_age_counts_from_the_last_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, now = Pair("table", tmp_path / "t"), [100.0]
    monkeypatch.setattr("bunkbed.table.following.time.monotonic", lambda: now[0])
    with pair.reader() as reader:
        now[0] += 5
        assert reader.age_s == 5
        reader.refresh()  # nothing is new, but it has looked
        assert reader.age_s == 0
    pair.writer.close()


def test_a_reader_that_watches_follows_by_itself(pair: Pair) -> None:
    with pair.reader() as reader:
        if pair.place == "run":
            reader.table("item")  # the other is opened while the thread follows
        reader.watch(max_age_s=0.04)
        pair.commit()
        wait_for(lambda: reader.version == 2)
        assert pair.seen(reader) == {2}
        reader.watch(None)
        pair.commit()
        assert pair.seen(reader) == {2} and reader.behind == 1


def test_a_snapshot_reader_moves_with_the_name(pair: Pair) -> None:
    pair.commit(keep="best")
    with pair.reader(snapshot="best") as reader:
        pair.commit()
        assert reader.refresh() == 2 and reader.behind == 0 and pair.seen(reader) == {2}
        pair.commit(keep="best")
        assert reader.behind == 2 and reader.refresh() == 4 and pair.seen(reader) == {4}
        pair.writer.drop("best")
        with pytest.raises(ValueError, match="no snapshot 'best'"):
            reader.refresh()
        assert pair.seen(reader) == {4}


def test_a_reader_follows_a_writer_that_went_back(pair: Pair) -> None:
    pair.commit(keep="two")
    pair.commit()
    with pair.reader() as reader:
        pair.writer.rewind("two")
        assert pair.seen(reader) == {3}
        assert reader.refresh() == 4 and pair.seen(reader) == {2}


def test_rows_that_may_be_too_old_raise(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    hidden = pair.path.with_name("hidden")
    with pair.reader() as reader, caplog.at_level(logging.WARNING, logger="bunkbed"):
        pair.seen(reader)
        reader.watch(max_age_s=0.04)
        pair.path.rename(hidden)
        wait_for(lambda: reader.age_s > 0.4 and "could not move to a newer commit" in caplog.text)
        assert caplog.text.count("could not move") == 1  # while the error lasts
        table = reader.table("user") if pair.place == "run" else reader
        with pytest.raises(bb.BunkbedError, match=r"may be out of date for .* more than max_age_s=0.04.*watch\(None\)"):
            table.lookup([1])
        with pytest.raises(bb.BunkbedError, match="may be out of date"), reader.pinned():
            pass
        hidden.rename(pair.path)
        wait_for(lambda: reader.age_s <= 0.04)
        assert (table.lookup(EVERY) == 1).all()
        pair.path.rename(hidden)
        reader.watch(None)
        assert (table.lookup(EVERY) == 1).all()
        hidden.rename(pair.path)


def test_a_run_that_moved_half_way_refuses_use_until_it_has_moved(tmp_path: Path) -> None:
    pair = Pair("run", tmp_path / "t")
    other = pair.writer.table("zoo", create=FACTS)
    pair.tables.append(other)
    pair.commit()
    hidden = tmp_path / "hidden"
    with pair.reader() as reader:
        item, zoo = reader.table("item"), reader.table("zoo")
        pair.commit()
        (pair.path / "tables" / "zoo").rename(hidden)
        with pytest.raises((OSError, bb.BunkbedError)):
            reader.refresh()
        for table in (item, zoo):
            with pytest.raises(bb.BunkbedError, match=r"moving to commit 3 failed half-way.*refresh\(\)"):
                table.lookup([1])
        with pytest.raises(bb.BunkbedError, match="failed half-way"), reader.pinned():
            pass
        reader.watch(None)  # does not allow use
        with pytest.raises(bb.BunkbedError, match="failed half-way"):
            item.lookup([1])
        hidden.rename(pair.path / "tables" / "zoo")
        assert reader.refresh() == 3
        assert item.lookup([1])[0, 0] == zoo.lookup([1])[0, 0] == 3
    pair.writer.close()


def test_a_table_that_is_not_in_the_commit_to_move_to(tmp_path: Path) -> None:
    pair = Pair("run", tmp_path / "t")
    with pair.reader() as reader:
        pair.seen(reader)
        pair.writer.close()
        pair.path.rename(tmp_path / "old")
        with bb.Run(pair.path, ram="64MiB") as other:
            other.table("user", create=FACTS)
            for _ in range(3):
                other.commit()
        with pytest.raises(bb.FormatError, match="commit 3 has no table 'item'; open it again"):
            reader.refresh()


@pytest.mark.parametrize("place", ["sharded", "run"])
def test_another_run_at_the_same_path_with_the_same_number(place: str, tmp_path: Path) -> None:
    pair = Pair(place, tmp_path / "t")
    with pair.reader() as reader:
        pair.seen(reader)
        reader.watch(0.04)
        reader.refresh()  # the thread knows this commit
        pair.writer.close()
        shutil.rmtree(pair.path)
        Pair(place, tmp_path / "t").writer.close()
        with pytest.raises(bb.FormatError, match="another"):
            reader.refresh()
        wait_for(lambda: reader.age_s > 0.04)
        with pytest.raises(bb.BunkbedError, match="another"):
            pair.seen(reader)


def test_tables_keep_a_run_that_watches(tmp_path: Path) -> None:
    pair = Pair("run", tmp_path / "t")

    def opened() -> tuple[bb.Table]:
        run = bb.Run(pair.path, mode="r", ram="64MiB")
        run.watch(0.04)
        return (run.table("item"),)

    tables = list(opened())
    for _ in range(3):
        gc.collect()
    pair.commit()
    wait_for(lambda: all(table.lookup([1])[0, 0] == 2 for table in tables))
    tables.clear()
    wait_for(lambda: gc.collect() >= 0 and watching() == 0)
    pair.writer.close()


def test_every_call_that_reads_rows_asks_for_the_age(pair: Pair) -> None:
    query = np.ones(2, np.float32)
    with pair.reader() as reader:
        tables = [reader.table("item"), reader.table("user")] if pair.place == "run" else [reader]
        reader.watch(600)
        reader._max_age_s = 0.0  # every call finds it too old
        pair.commit()
        pair.path.rename(pair.path.with_name("hidden"))
        for table in tables:
            batch = table.batch(EVERY)
            calls: dict[str, Callable[[], Any]] = {
                "lookup": lambda table=table: table.lookup(EVERY),
                "lookup_batch": lambda table=table, batch=batch: table.lookup_batch(batch, ROWS),
                "lookup_bags": lambda table=table: table.lookup_bags(EVERY, [0]),
                "get": lambda table=table: table.get(EVERY),
                "contains": lambda table=table: table.contains(EVERY),
                "scan": lambda table=table: list(table.scan()),
                "topk": lambda table=table: table.topk(query, 2),
                "topk of ids": lambda table=table: table.topk(query, 2, ids=EVERY),
                "neighbors": lambda table=table: bb.neighbors(table, 1, 2),
                "len": lambda table=table: len(table),
            }
            for name, call in calls.items():
                with pytest.raises(bb.BunkbedError, match="may be out of date"):
                    print(name, call())
        pair.path.with_name("hidden").rename(pair.path)


def test_topk_and_neighbors_are_of_one_commit(pair: Pair) -> None:
    over = threading.Event()
    with pair.reader() as reader:
        tables = [reader.table("item"), reader.table("user")] if pair.place == "run" else [reader]

        def move() -> None:
            while not over.is_set():
                pair.commit()
                reader.refresh()

        thread = threading.Thread(target=move)
        thread.start()
        for _ in range(40):
            for table in tables:
                _, scores = table.topk(np.ones(2, np.float32), 5, ids=EVERY)
                assert np.unique(scores).size == 1
                _, scores = bb.neighbors(table, 3, 5)
                assert np.unique(np.sqrt(scores / 2)).size == 1 and (np.sqrt(scores / 2) % 1 == 0).all()
        over.set()
        thread.join()


def test_topk_of_many_ids_is_of_one_commit(tmp_path: Path) -> None:
    rows, movers = 3_000, list[threading.Thread]()
    every = np.arange(rows)
    with bb.create(tmp_path / "t", **{**FACTS, "num_rows": rows}) as table, bb.open(tmp_path / "t", mode="r") as reader:
        table.set(every, np.ones((rows, 2), np.float32))
        table.commit()
        reader.refresh()
        lookup = reader.lookup

        def while_it_moves(*arguments: Any, **options: Any) -> Any:
            found = lookup(*arguments, **options)
            table.set(every, np.full((rows, 2), 2 + len(movers), np.float32))
            table.commit()
            movers.append(threading.Thread(target=reader.refresh))
            movers[-1].start()
            movers[-1].join(0.2)  # it waits for the call
            return found

        reader.lookup = while_it_moves  # type: ignore[method-assign]
        _, scores = reader.topk(np.ones((16_384, 2), np.float32), 3_000, ids=every)  # chunks of 1,024 ids
        assert len(movers) == 3 and np.unique(scores).tolist() == [2.0]
        for thread in movers:
            thread.join()
        assert reader.version == table.version


def test_a_look_without_news_does_not_wait_for_a_long_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bunkbed.table.following._PATIENCE_S", 60.0)
    with pair.reader() as reader:
        reader.watch(max_age_s=0.1)
        inside, over = threading.Event(), threading.Event()

        def hold() -> None:
            with reader.pinned():
                inside.set()
                over.wait(250)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait()
        wait_for(lambda: reader.age_s < 0.1)
        began = time.monotonic()
        for _ in range(50):  # the thread looks as often
            with reader.pinned():
                assert pair.seen(reader) == {1}
            time.sleep(0.02)
        over.set()
        thread.join()
        assert time.monotonic() - began < 60, "a call waited for the thread that looks"


def test_a_thread_that_a_pinned_one_waits_for_does_not_hang(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bunkbed.table.following._PATIENCE_S", 0.2)
    with pair.reader() as reader, ThreadPoolExecutor(1) as pool:
        pair.seen(reader)
        with reader.pinned():
            reader.watch(max_age_s=0.02)
            pair.commit()
            time.sleep(0.1)  # the thread waits to move
            table = reader.table("item") if pair.place == "run" else reader
            with pytest.raises(bb.BunkbedError, match=r"another thread has been in pinned\(\) for 0.2 s"):
                pool.submit(table.lookup, [1]).result(60)
            reader._max_age_s = 600.0
            assert pool.submit(table.lookup, [1]).result(60)[0, 0] == 1
        wait_for(lambda: reader.version == 2)


def test_stopping_within_pinned_stops(pair: Pair) -> None:
    with pair.reader() as reader:
        reader.watch(max_age_s=0.02)
        with reader.pinned():
            pair.commit()
            wait_for(lambda: bool(reader._pins._waiting))
            reader.watch(None)
        time.sleep(0.1)
        assert reader.version == 1


def test_a_pin_that_is_left_in_another_thread(pair: Pair) -> None:
    with pair.reader() as reader:
        pin = reader.pinned()
        pin.__enter__()
        thread = threading.Thread(target=lambda: pin.__exit__(None, None, None))
        thread.start()
        thread.join()
        pair.commit()
        assert reader.refresh() == 2


def test_an_age_beyond_what_a_wait_may_take(pair: Pair) -> None:
    with pair.reader() as reader:
        reader.watch(1e300)
        time.sleep(0.05)
        assert watching() >= 1


def test_a_table_of_a_run_does_not_move_alone(tmp_path: Path) -> None:
    pair = Pair("run", tmp_path / "t")
    with pair.reader() as reader:
        pair.commit()
        for table in (reader.table("item"), reader.table("user")):
            for call in (table.refresh, table.watch, table.pinned, lambda table=table: table.behind):
                with pytest.raises(ValueError, match="is part of a run, whose tables move together"):
                    call()
        assert pair.seen(reader) == {1}
    pair.writer.close()


def test_calls_within_pinned_see_one_commit(pair: Pair) -> None:
    with pair.reader() as reader:
        reader.watch(max_age_s=0.02)
        with reader.pinned(), reader.pinned():
            pair.commit()
            time.sleep(0.1)  # the thread would have moved five times
            assert pair.seen(reader) == {1} and reader.version == 1
            with pytest.raises(bb.BunkbedError, match=r"refresh\(\) within pinned\(\)"):
                reader.refresh()
        wait_for(lambda: reader.version == 2)


def test_batches_of_several_threads_are_of_one_commit(pair: Pair) -> None:
    errors: list[BaseException] = []
    over = threading.Event()

    def read(reader: Any) -> None:
        try:
            while not over.is_set():
                with reader.pinned(), contextlib.suppress(FileNotFoundError):  # a run's files may be collected
                    assert len(pair.seen(reader)) == 1
        except BaseException as error:
            errors.append(error)

    with pair.reader() as reader:
        reader.watch(max_age_s=0.01)
        threads = [threading.Thread(target=read, args=(reader,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            pair.commit(keep=None if pair.number % 4 else "kept")
        over.set()
        for thread in threads:
            thread.join()
        assert not errors, errors
        wait_for(lambda: reader.version == pair.number)


@pytest.mark.parametrize("name", ["item", "user"])
def test_threads_that_open_a_table_at_once_get_one_that_moves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair("run", tmp_path / "t")
    both_open, open_table = threading.Barrier(2), bb.Run._open_table

    def slowly(run: bb.Run, *args: Any, **more: Any) -> bb.Table:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_open.wait(0.2)  # the other thread would be here, too
        return open_table(run, *args, **more)

    with pair.reader() as reader, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(bb.Run, "_open_table", slowly)
        one, other = (each.result() for each in [pool.submit(reader.table, name) for _ in range(2)])
        assert one is other
        pair.commit()
        reader.refresh()
        assert set(np.unique(one.lookup(EVERY))) == {2}
    pair.writer.close()


def test_who_waits_to_move_goes_before_new_readers() -> None:
    pins, order = Pins(), list[str]()
    started, first_over = threading.Event(), threading.Event()

    def move() -> None:
        with pins.moving():
            order.append("move")

    def read() -> None:
        with pins.held():
            order.append("read")

    def hold() -> None:
        with pins.held():
            started.set()
            first_over.wait()
            with pins.held():  # a nested one does not wait for the thread that waits for it
                order.append("nested")

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    started.wait()
    for work in (move, read):
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        wait_for(lambda: bool(pins._waiting))
        time.sleep(0.05)
    first_over.set()
    for thread in threads:
        thread.join()
    assert order == ["nested", "move", "read"]


def test_a_closed_and_a_forgotten_reader_have_no_thread(pair: Pair) -> None:
    wait_for(lambda: gc.collect() >= 0 and watching() == 0)  # those of earlier tests
    with pair.reader() as reader:
        reader.watch(max_age_s=0.02)
        reader.watch(max_age_s=0.04)  # in place of the first
        wait_for(lambda: watching() == 1)
    wait_for(lambda: watching() == 0)
    with pytest.raises(bb.TableClosedError):
        reader.watch()
    forgotten: Any = bb.open(pair.path, mode="r") if pair.place != "run" else bb.Run(pair.path, mode="r")
    forgotten.watch(max_age_s=0.02)
    gone = weakref.ref(forgotten)
    del forgotten
    wait_for(lambda: gc.collect() >= 0 and gone() is None and watching() == 0)


@pytest.mark.parametrize("value", [0, -1.5, float("nan")])
def test_bad_ages(pair: Pair, value: float) -> None:
    with pair.reader() as reader:
        with pytest.raises(ValueError, match="max_age_s must be above 0 seconds, got"):
            reader.watch(value)
        with pytest.raises(TypeError, match="max_age_s must be a number or None, got 'soon'"):
            reader.watch("soon")
    for call in (pair.writer.watch, pair.writer.refresh, pair.writer.pinned):
        with pytest.raises(ValueError, match=r"for readers"):
            call()
