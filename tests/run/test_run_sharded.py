"""Sharded tables of a run in one process: the bits of tables that are not sharded, and one commit for all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.files.run_files import RunFiles, decode, encode

ROWS = 500
EVERY = np.arange(ROWS)


def _create(**more: Any) -> dict[str, Any]:
    return {"dim": 4, "num_rows": ROWS, "seed": 3, "optimizer": bb.Adam(lr=0.1), **more}


def _train(table: bb.Table, steps: int) -> None:
    for _ in range(steps):
        rng = np.random.default_rng(table.step)
        ids = rng.integers(0, ROWS, 200)
        table.lookup(ids)
        table.update(ids, rng.standard_normal((200, 4), np.float32))


def _made(place: Path, **more: Any) -> None:
    with bb.Run(place, ram="128MiB") as run:
        for name in ("user", "item"):
            _train(run.table(name, create=_create(**(more if name == "user" else {}))), 3)
        run.commit(files={"dense": b"1"}, meta={"step": 3}, keep="three")
        for table in run.tables.values():
            _train(table, 2)


def test_rows_have_the_bits_of_a_table_that_is_not_sharded(tmp_path: Path) -> None:
    _made(tmp_path / "plain")
    _made(tmp_path / "sharded", shards=3)
    assert not bb.check(tmp_path / "sharded")
    for snapshot in (None, "three"):
        with (
            bb.Run(tmp_path / "plain", mode="r", snapshot=snapshot) as one,
            bb.Run(tmp_path / "sharded", mode="r", snapshot=snapshot) as other,
        ):
            assert other.table_names == ["item", "user"] and other.read("dense") == b"1"
            plain, table = one.table("user"), other.table("user")
            assert list(other.tables) == ["user"] and "3 of 3 shards" in repr(table)
            assert (table.get(EVERY) == plain.get(EVERY)).all() and table.step == plain.step
            assert (table.lookup(EVERY) == plain.lookup(EVERY)).all() and len(table) == len(plain)
            scanned = dict(zip(*map(np.concatenate, zip(*table.scan(), strict=True)), strict=False))
            assert len(scanned) == len(plain)
            query = np.ones(4, np.float32)
            for part, expected in zip(table.topk(query, 5), plain.topk(query, 5), strict=True):
                assert (part == expected).all()
            with pytest.raises(bb.ReadOnlyError):
                table.set(EVERY[:1], np.zeros((1, 4), np.float32))
            with pytest.raises(ValueError, match="part of a run, whose tables move together"):
                table.refresh()


def test_a_run_with_a_sharded_table_goes_back_and_on(tmp_path: Path) -> None:
    _made(tmp_path / "run", shards=2)
    with bb.Run(tmp_path / "run", ram="128MiB") as run:
        table = run.table("user", create=_create(shards=2))
        assert table is run.table("user") and table.step == 5
        run.rewind("three")
        assert table.step == 3 and run.table("item").step == 3 and run.meta == {"step": 3}
        with pytest.raises(bb.BunkbedError, match=r"run\.commit\(\)"):
            table.commit()
        _train(table, 2)
        pending = run.begin_commit()
        _train(table, 1)  # part of the commit of close()
        pending.wait()
        run.drop("three")
    with bb.Run(tmp_path / "run", mode="r") as run:
        assert run.snapshots() == {} and run.table("user").step == 6 and run.table("item").step == 3
    assert not bb.check(tmp_path / "run")


def test_copies_keep_the_shards(tmp_path: Path) -> None:
    _made(tmp_path / "run", shards=3)
    bb.copy(tmp_path / "run", tmp_path / "same")
    bb.copy(tmp_path / "run", tmp_path / "narrow", dtype="bfloat16")
    for name in ("same", "narrow"):
        assert not bb.check(tmp_path / name)
    with (
        bb.Run(tmp_path / "run", mode="r") as one,
        bb.Run(tmp_path / "same", mode="r") as same,
        bb.Run(tmp_path / "narrow", mode="r") as narrow,
    ):
        rows = one.table("user").get(EVERY)
        assert (same.table("user").get(EVERY) == rows).all()
        assert np.abs(narrow.table("user").get(EVERY) - rows).max() < 0.01
        assert "3 of 3 shards" in repr(narrow.table("user"))


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    _made(tmp_path / "run", shards=3)
    with bb.Run(tmp_path / "run", ram="128MiB") as run:
        for name, create, text in (
            ("user", _create(shards=4), "has 3 shards, got shards=4"),
            ("item", _create(shards=4), "has no shards, got shards=4"),
            ("new", _create(shards=0), r"shards must be in \[1, 1024\]"),
            ("user.shard-0001", None, "is a shard; open its table, 'user', instead"),
            ("user", _create(dim=5), "dim"),
        ):
            with pytest.raises(ValueError, match=text):
                run.table(name, create=create)
        table = run.table("limited", create=_create(shards=3, disk="100MiB"))
        assert 0 <= (100 << 20) - table.stats()["disk_limit_bytes"] < 3
        assert run.table("limited", create=_create(disk=100 << 20)) is table
        with pytest.raises(ValueError, match="is open already with disk=104857600"):
            run.table("limited", create=_create(disk="200MiB"))
        with pytest.raises(MemoryError):
            run.table("large", create=_create(shards=1000))
        assert set(run.tables) == {"limited"}
        run.table("large", create=_create(shards=2))
        run.table("plain.shard-0000", create=_create())
        run.commit()
        with pytest.raises(ValueError, match=r"would have the shard 'plain\.shard-0000', which is a table"):
            run.table("plain", create=_create(shards=2))
    with bb.Run(tmp_path / "run", mode="r") as run:
        assert run.table_names == ["item", "large", "limited", "plain.shard-0000", "user"]


def test_shards_that_do_not_agree_are_not_committed(tmp_path: Path) -> None:
    _made(tmp_path / "run", shards=2)
    run = bb.Run(tmp_path / "run", ram="128MiB")
    table = run.table("user")
    rows = table.get(EVERY)
    real = table.core._cores[1]

    class Fails:
        def __getattr__(self, name: str) -> Any:
            if name == "set":
                raise OSError(5, "Input/output error")
            return getattr(real, name)

    table.core._cores[1] = Fails()
    with pytest.raises(bb.BunkbedError, match="after other shards had taken their part"):
        table.set(EVERY, np.zeros((ROWS, 4), np.float32))
    table.core._cores[1] = real
    for call in (run.commit, run.begin_commit, lambda: table.get(EVERY)):
        with pytest.raises(bb.BunkbedError, match="refuses use"):
            call()
    run.rewind(run.epoch)
    assert (table.get(EVERY) == rows).all()
    run.close()


def test_a_shard_of_another_table_is_found(tmp_path: Path) -> None:
    _made(tmp_path / "run", shards=2)
    tables = tmp_path / "run" / "tables"
    (tables / "user.shard-0000").rename(tables / "aside")
    (tables / "user.shard-0001").rename(tables / "user.shard-0000")
    (tables / "aside").rename(tables / "user.shard-0001")
    with bb.Run(tmp_path / "run", mode="r") as run, pytest.raises(bb.FormatError, match="were directories mixed up"):
        run.table("user")
    assert len(bb.check(tmp_path / "run")) == 2
    shutil.rmtree(tables / "user.shard-0001")
    with bb.Run(tmp_path / "run", mode="r") as run, pytest.raises((bb.BunkbedError, FileNotFoundError)):
        run.table("user")


def test_a_manifest_that_contradicts_itself_is_damaged(tmp_path: Path) -> None:
    _made(tmp_path / "run", shards=2)
    manifest = RunFiles(tmp_path / "run").load_newest()
    assert decode(encode(manifest), tmp_path) == manifest
    sharding = manifest.sharded["user"]
    del manifest.tables["user.shard-0001"]
    with pytest.raises(bb.CorruptionError, match=r"does not name 'user\.shard-0001'"):
        decode(encode(manifest), tmp_path)
    manifest.tables.update({"user.shard-0001": 1, "user": 1})
    with pytest.raises(bb.CorruptionError, match="both whole and divided"):
        decode(encode(manifest), tmp_path)
    del manifest.tables["user"]
    assert decode(encode(manifest), tmp_path).sharded == {"user": sharding}
    values = json.loads(encode(manifest).split(b"\n")[0])
    assert values["sharded"]["user"]["shards"] == list(sharding.shards)
