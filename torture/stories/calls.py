"""Calls that are features: functions of `features.Story` with the same effect on its table and on the oracle."""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
from contextlib import suppress
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed.io.formats import FORMATS
from bunkbed.testing import philox
from bunkbed.testing.compare import assert_same_bits
from bunkbed.testing.sweeps import assert_same_sweep
from bunkbed.window import Window
from torture.stories.features import BATCH, CALLS, Story, assert_same_rows_of_reader, call, copied, must_raise

# ---- Reading


@call("lookup")
def _(s: Story) -> None:
    ids = s.ids()
    assert_same_bits(s.table.lookup(ids), s.oracle.lookup(ids))


@call("lookup touch")
def _(s: Story) -> None:
    ids = s.ids(96)
    assert_same_bits(s.table.lookup(ids, touch=False), s.oracle.lookup(ids))


@call("lookup out")
def _(s: Story) -> None:
    ids = s.ids().reshape(2, -1)
    out = np.empty((*ids.shape, s.table.dim), np.float32)
    assert s.table.lookup(ids, out=out) is out
    assert_same_bits(out, s.oracle.lookup(ids))


@call("lookup 16-bit out")
def _(s: Story) -> None:
    ids = s.ids()
    out = np.empty((len(ids), s.table.dim), np.uint16 if s.table.dtype == "bfloat16" else np.float16)
    if s.table.dtype == "float32":
        must_raise(ValueError, "out", s.table.lookup, ids, out=out)
        return
    expected = s.oracle.lookup(ids, out=out.copy())
    assert s.table.lookup(ids, out=out).tobytes() == expected.tobytes()


@call("lookup_bags")
def _(s: Story) -> None:
    ids = s.ids()
    offsets = np.append(0, np.sort(s.rng.integers(0, len(ids) + 1, 5)))
    for pooling in ("sum", "mean", "sqrtn", "none"):
        weights = s.rng.random(len(ids), dtype=np.float32) if s.rng.random() < 0.5 else None
        expected = s.oracle.lookup_bags(ids, offsets, pooling=pooling, weights=weights)
        out = np.empty_like(expected)
        s.table.lookup_bags(ids, offsets, pooling=pooling, weights=weights, touch=False, out=out)
        assert_same_bits(out, expected, pooling)


@call("get")
def _(s: Story) -> None:
    for slot in ("weight", *s.oracle.slots):
        ids = s.ids(60)
        assert_same_bits(s.table.get(ids, slot=slot), s.oracle.get(ids, slot=slot), slot)


@call("contains")
def _(s: Story) -> None:
    assert s.table.contains(s.all).tolist() == s.oracle.contains(s.all).tolist()


@call("scan")
def _(s: Story) -> None:
    for slot in ("weight", *s.oracle.slots):
        s.compare_scan(s.table.scan(slot=slot, chunk=50), slot)


@call("topk")
def _(s: Story) -> None:
    queries, exclude = s.floats(2, s.table.dim), [s.ids(5), s.ids(5)]
    for ids in (None, s.ids(40)):
        ours = s.table.topk(queries, 4, ids=ids, exclude=exclude)
        for found, expected in zip(ours, s.oracle.topk(queries, 4, ids=ids, exclude=exclude), strict=True):  # type: ignore[arg-type]
            assert found.tobytes() == expected.tobytes()


@call("neighbors")
def _(s: Story) -> None:
    if not len(s.oracle):
        s.train()
    at = list(s.oracle._places)[:2]
    rows = s.oracle.lookup(at)
    ours = bb.neighbors(s.table, at, k=3)
    for found, expected in zip(ours, s.oracle.topk(rows, 3, exclude=[[i] for i in at]), strict=True):  # type: ignore[arg-type]
        assert found.tobytes() == expected.tobytes()
    bb.neighbors(s.table, at, k=3, metric="cosine")


@call("facts")
def _(s: Story) -> None:
    s.table.explain(since=s.table.stats())
    before = s.table.stats()
    assert before["hits"] + before["misses"] + before["first_touches"] == before["unique_rows"]
    if s.table.num_rows is None and not before["stored_rows"]:
        must_raise(ValueError, "its size is unknown", bb.suggest_blocks, [s.table], ram="2GiB")
    else:
        assert bb.suggest_blocks([s.table], ram="2GiB") == 1
    rows, bound = len(s.table), 1 << 40 if s.table.num_rows is None else s.table.num_rows
    given = {"optimizer": s.table.optimizer, "dtype": s.table.dtype, "num_rows": bound}
    assert bb.minimum_ram(rows, s.table.dim, **given) <= bb.minimum_ram(bound, s.table.dim, **given)
    for name in ("closed", "dim", "dtype", "durability", "epoch", "init", "meta", "mode", "name", "nbytes", "num_rows"):
        assert getattr(s.table, name) is not None or name == "num_rows"
    for name in ("path", "ram_bytes", "record_bytes", "run", "seed", "slots", "step", "uuid"):
        getattr(s.table, name)
    assert s.table.is_dirty or not s.oracle.is_dirty
    if s.run is not None:
        s.settle()
        assert s.run.table_names == ["t"] and not s.run.closed and s.run.sharding is None
        assert s.run.meta == s.oracle.meta and set(s.run.snapshots()) == set(s.oracle.snapshots())
    if "sharded" in s.options:
        assert set(s.table.shards_of(s.all).tolist()) <= set(range(s.table.num_shards)) and s.table.directories
    must_raise(TypeError, "cannot be pickled", copy.copy, s.table)


@call("threads")
def _(s: Story) -> None:
    before = bb.get_num_threads()
    bb.set_num_threads(3 - min(before, 2))
    try:
        s.train()
        ids = s.ids(90)
        assert_same_bits(s.table.lookup(ids), s.oracle.lookup(ids))
    finally:
        bb.set_num_threads(before)


# ---- Writing


@call("update")
def _(s: Story) -> None:
    s.train()


@call("update lr")
def _(s: Story) -> None:
    s.train(lr=0.3)


@call("update step")
def _(s: Story) -> None:
    s.train(step=s.oracle.step + 3)


@call("update nothing")
def _(s: Story) -> None:
    s.train(np.zeros(0, np.int64), lr=0.5)


@call("update refused")
def _(s: Story) -> None:
    grads = s.floats(BATCH, s.table.dim)
    grads[7, 3] = np.nan
    must_raise(ValueError, "position 7", s.table.update, s.ids(), grads)


@call("update_batch")
def _(s: Story) -> None:
    ids = s.ids()
    grads = s.floats(len(ids), s.table.dim)
    if s.layer is not None or "sharded" in s.options:
        return s.train(ids)
    batch = s.table.batch(ids)
    assert_same_bits(s.table.lookup_batch(batch, len(ids), touch=False), s.oracle.lookup(ids))
    s.table.update_batch(batch, batch.sum(grads)[0], lr=0.05, step=s.oracle.step + 1)
    s.oracle.update(ids, grads, lr=0.05)
    return None


@call("set")
def _(s: Story) -> None:
    for slot in ("weight", *s.oracle.slots):
        ids = s.ids(9)
        values = s.rng.random((9, s.oracle.get(ids, slot).shape[-1]), dtype=np.float32)
        s.table.set(ids, values, slot=slot)
        s.oracle.set(ids, values, slot=slot)


@call("delete")
def _(s: Story) -> None:
    ids = s.ids(9)
    assert s.table.delete(ids) == s.oracle.delete(ids)


@call("sweep")
def _(s: Story) -> None:
    if not s.oracle.retention.removes:
        must_raise(ValueError, "no rule by which rows go", s.table.sweep)
        return
    if s.oracle.retention.clock == "event":
        s.table.clock = s.oracle.clock = s.oracle.clock + int(s.rng.integers(3))
        must_raise(ValueError, "clock", setattr, s.table, "clock", -1)
    if len(s.oracle):  # as the padding row of a layer
        row = min(s.oracle._places)
        s.table.spare(row)
        s.oracle.spare(row)
    assert_same_sweep(s.table, s.oracle, dry_run=True)
    assert_same_sweep(s.table, s.oracle)


@call("rules change")
def _(s: Story) -> None:
    rules = dataclasses.replace(s.oracle.retention, max_rows=int(s.rng.integers(30, 90)), evict="oldest", keep=5)
    if not s.oracle.retention.removes:
        must_raise(ValueError, "made without", setattr, s.table, "retention", rules)
        rules = s.oracle.retention
    admit = int(s.rng.integers(2, 5)) if s.rng.integers(2) else float(s.rng.uniform(0.3, 0.9))
    admits = dataclasses.replace(rules, admit=admit)
    if s.table.num_rows is not None or s.layer is not None:
        must_raise(ValueError, "for a table of any id|with a device cache", setattr, s.table, "retention", admits)
        admits = rules
    s.table.retention = s.oracle.retention = admits


@call("changes", scratch="scratch", files=True)
def _(s: Story) -> None:
    """Bring a consumer with a cursor up to date, and another one that names a commit."""
    if s.path is not None:
        s.commit()
    where: dict[str, Any] = {"table": "t"} if s.run is not None else {}
    version = (s.run or s.table).epoch
    for change in bb.changes(s.path, version, **where):  # type: ignore[arg-type]
        raise AssertionError(f"rows {change.ids.tolist()} changed after the newest commit")
    for chunk, ram in ((7, "1KiB"), (1000, "1MiB")):
        try:
            for change in bb.changes(s.path, "story", chunk=chunk, ram=ram, **where):  # type: ignore[arg-type]
                assert change.version == version
                s.delivered |= dict(zip(change.ids.tolist(), change.rows, strict=True))
                for row in change.deleted.tolist():
                    s.delivered.pop(row, None)
            break
        except ValueError as error:
            assert "was undone" in str(error), error
            bb.drop_cursor(s.path, "story", **where)  # type: ignore[arg-type]
            s.delivered = {}
    assert sorted(s.delivered) == sorted(s.oracle._places), "rows are missing, or were deleted"
    for row, weights in s.delivered.items():
        assert_same_bits(weights, s.oracle.get([row])[0])
    assert bb.cursors(s.path, **where) == {"story": version}  # type: ignore[arg-type]
    if version % 2:
        bb.drop_cursor(s.path, "story", **where)  # type: ignore[arg-type]
        s.delivered = {}


@call("stage")
def _(s: Story) -> None:
    s.table.stage(s.ids())


@call("window")
def _(s: Story) -> None:
    with Window(s.table, depth=2, batches=6) as window:
        coming = [s.ids() for _ in range(3)]
        for ids in coming:
            window.push(ids)
        for ids in coming:
            window.advance()
            assert_same_bits(s.table.lookup(ids), s.oracle.lookup(ids))
            s.train(ids)


@call("evict everything")
def _(s: Story) -> None:
    for start in range(0, len(s.all), 60):
        s.table.lookup(s.all[start : start + 60])


@call("optimizer changes")
def _(s: Story) -> None:
    s.oracle.optimizer = dataclasses.replace(s.oracle.optimizer, lr=0.01 + s.rng.random() / 10)  # type: ignore[call-arg]
    s.table.optimizer = s.oracle.optimizer


# ---- Commits


@call("commit")
def _(s: Story) -> None:
    s.commit()


@call("commit meta")
def _(s: Story) -> None:
    s.commit(meta={"at": s.oracle.step})
    assert (s.run or s.table).meta == s.oracle.meta


@call("commit keep", scratch="snapshots|scratch")
def _(s: Story) -> None:
    s.commit(keep=str(s.rng.choice(["a", "b", "c"])))
    assert (s.run or s.table).snapshots() == s.table.snapshots() or s.run is not None
    assert set((s.run or s.table).snapshots()) == set(s.oracle.snapshots())


@call("commit refused")
def _(s: Story) -> None:
    s.settle()
    must_raise(TypeError, "JSON", (s.run or s.table).commit, meta={"a": object()})


@call("begin_commit")
def _(s: Story) -> None:
    s.settle()
    can_keep = "scratch" not in s.options and "disk" not in s.limits
    meta, keep = {"at": s.oracle.step}, can_keep and s.rng.random() < 0.3
    arguments: dict[str, Any] = {"meta": meta, **({"keep": "background"} if keep else {})}
    if s.run is not None:
        s.dense = s.rng.bytes(30)
        s.pending = s.run.begin_commit(files={"dense": s.dense}, **arguments)
    else:
        s.pending = s.table.begin_commit(**arguments)
    s.commit_oracle(**arguments)


@call("drop", scratch="snapshots|scratch")
def _(s: Story) -> None:
    name = s.kept()
    s.settle()
    (s.run or s.table).drop(name)
    s.oracle.drop(name)


@call("rewind", scratch="snapshots|scratch")
def _(s: Story) -> None:
    name = s.kept()
    s.settle()
    (s.run or s.table).rewind(name)
    s.oracle.rewind(name)
    s.dense = s.run.read("dense") if s.run is not None and s.run.files else b""
    s.oracle.optimizer = s.table.optimizer
    s.remember()


@call("compact")
def _(s: Story) -> None:
    s.table.compact()


@call("drop_snapshot", scratch="snapshots|scratch", files=True)
def _(s: Story) -> None:
    name = s.kept()
    s.settle()
    assert name in bb.snapshots(s.path)
    assert name in {kept.name for kept in bb.describe_snapshots(s.path)}
    if s.run is not None:
        return
    bb.drop_snapshot(s.path, name)
    s.oracle.drop(name)


# ---- Opening


@call("reopen", scratch="scratch", files=True)
def _(s: Story) -> None:
    s.reopen(commit=bool(s.rng.integers(2)))


@call("reopen with another optimizer", scratch="scratch", files=True)
def _(s: Story) -> None:
    s.close(commit=True)
    s.oracle.optimizer = dataclasses.replace(s.oracle.optimizer, lr=0.05)  # type: ignore[call-arg]
    s.table = s._open(optimizer=s.oracle.optimizer)


@call("open twice", files=True)
def _(s: Story) -> None:
    s.settle()
    create = {key: value for key, value in s.facts.items() if key != "optimizer"}
    if s.run is not None:
        assert s.run.table("t", create=create) is s.table
        return
    with bb.open(s.path, create=create) as again:
        assert again is s.table
    s.commit_oracle()


@call("exception in a with block", scratch="scratch", files=True)
def _(s: Story) -> None:
    s.settle()
    try:
        with s.run or s.table:
            s.train()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    s.reopen(commit=False)


@call("left open", scratch="scratch", files=True)
def _(s: Story) -> None:
    s.settle()
    s.layer = s.trainer = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bb.UncommittedWarning)
        s.table = s.run = None
        gc.collect()
    s.oracle.revert()
    s.table = s._open()


@call("reader", scratch="scratch", files=True)
def _(s: Story) -> None:
    s.settle()
    if s.reader is None:
        if s.is_durable:
            s.commit()
        s.reader = s.open_reader()
        s.mover = s.reader if s.run is None else s.reader_run
        s.seen = copied(s.committed)
    else:
        s.mover.watch(max_age_s=600.0)
        with s.mover.pinned():
            assert_same_bits(s.reader.lookup(s.all), s.seen.lookup(s.all))
        s.mover.watch(None)
        s.mover.refresh()
        assert s.mover.behind == 0 and s.mover.age_s < 600
        s.seen = copied(s.committed)
    s.compare_scan(s.reader.scan(chunk=70), "weight", s.seen)
    ids = s.ids()
    assert_same_bits(s.reader.lookup(ids), s.seen.lookup(ids))


@call("snapshot reader", scratch="scratch", files=True)
def _(s: Story) -> None:
    if s.path is None:
        s.open_reader()
    name = s.kept()
    s.settle()
    old = copied(s.oracle)
    old.rewind(name)
    with s.open_reader(snapshot=name) as reader:
        assert_same_rows_of_reader(reader, old, s.all)


@call("check", files=True)
def _(s: Story) -> None:
    s.settle()
    assert bb.check(s.path) == []


@call("repair", scratch="scratch", files=True)
def _(s: Story) -> None:
    s.close(commit=True)
    assert bb.check(s.path, repair=True, ram="8MiB") == []
    s.table = s._open()


@call("copy", scratch="scratch", files=True)
def _(s: Story) -> None:
    if s.is_durable:
        s.commit()
    target = s.file("-copy")
    bb.copy(s.path, target, link=bool(s.rng.integers(2)))
    assert bb.check(target) == []
    copied = target / "tables" / "t" if s.run is not None else target
    with bb.open(copied, mode="r", ram="8MiB") as reader:
        assert_same_rows_of_reader(reader, s.committed, s.all)
    must_raise(ValueError, "no snapshot|no commit", bb.copy, s.path, s.file("-none"), snapshot="none")


@call("copy rewriting", scratch="scratch", files=True)
def _(s: Story) -> None:
    if s.is_durable:
        s.commit()
    target = s.file("-copy")
    dtype = "bfloat16" if s.facts["dtype"] == "float32" else "float32"
    bb.copy(s.path, target, dtype=dtype, optimizer=bb.SGD(lr=0.1), ram="32MiB")
    copied = target / "tables" / "t" if s.run is not None else target
    with bb.open(copied, mode="r", ram="8MiB") as reader:
        stored = s.all[s.committed.contains(s.all)]  # initial values depend on the copy's dtype
        assert_same_bits(reader.lookup(stored), philox.narrow_nearest(dtype, s.committed.lookup(stored)))


@call("reshard", scratch="scratch", files=True)
def _(s: Story) -> None:
    if s.is_durable:
        s.commit()
    target = s.file("-resharded")
    bb.copy(s.path, target)
    for shards in (3, 2):
        bb.reshard(target, shards=shards, drop_snapshots=True, ram="64MiB")
        assert bb.check(target) == []
        if s.run is None:
            with bb.open(target, mode="r", ram="32MiB") as reader:
                assert_same_rows_of_reader(reader, s.committed, s.all)
        else:
            with bb.Run(target, mode="r", ram="32MiB") as run:
                assert_same_rows_of_reader(run.table("t"), s.committed, s.all)


# ---- Memory


@call("budget changes")
def _(s: Story) -> None:
    """Let another table join the budget and leave it."""
    if s.budget is None:
        if "sharded" not in s.options:
            before = s.table.ram_bytes
            s.table.apply_share(before and before + (256 << 10))
            s.train()
            s.table.apply_share(before)
        return
    with bb.create(s.path and s.file("-other"), dim=4, num_rows=50, optimizer=bb.SGD(), ram=s.budget) as other:
        other.update([1, 2], np.ones((2, 4), np.float32))
        assert s.budget.used_bytes <= s.budget.total_bytes
        s.train()


# ---- Files


def _export(s: Story, name: str, end: str, is_whole: bool, has_state: bool) -> None:
    """Export, import into another table, and import into the table itself."""
    path = s.file(end)
    slots = ("weight", *s.oracle.slots) if has_state else ("weight",)
    if not len(s.oracle):
        s.train()
    if name == "usearch":
        with suppress(MemoryError):  # the export is made within the table's ram
            bb.export_rows(s.table, path)
        return
    bb.export_rows(s.table, path, slots=slots, format=name, chunk=70, overwrite=True)
    words = {"ids": "word"} if name.startswith(("word2vec", "projector")) else {}
    facts = {**s.facts, "dtype": "float32", "optimizer": dataclasses.replace(s.oracle.optimizer)}
    with bb.create(None, **facts) as other:
        if other.clock < 0:
            must_raise(
                ValueError, r"assign table\.clock", bb.import_rows, other, path, format=name, slots=slots, **words
            )
            other.clock = 0
        bb.import_rows(other, path, format=name, slots=slots, chunk=50, **words)
        stored = s.all if is_whole else s.all[s.oracle.contains(s.all)]
        assert other.contains(s.all).tolist() == [bool(x) for x in np.isin(s.all, stored)]
        for slot in slots:
            assert_same_bits(other.get(stored, slot), s.oracle.get(stored, slot), f"{slot} from {name}")
    # With the smallest `disk=`, a call has no room for all rows at once.
    bb.import_rows(s.table, path, format=name, slots=("weight",), chunk=250, **words)
    s.oracle.set(stored, s.oracle.lookup(stored))


def _add_formats() -> None:
    for one in FORMATS:
        if one.can_export:
            end = one.suffixes[0] if one.suffixes else ".bin"
            CALLS[f"export {one.name}"] = lambda s, one=one, end=end: _export(  # type: ignore[misc]
                s, one.name, end, one.every_row, one.has_state
            )


_add_formats()
