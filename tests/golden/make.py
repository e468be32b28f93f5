"""Makes the golden tables of a release: ``python tests/golden/make.py RELEASE``.

Run once for each release that changes what is written, with that release; later ones must open the folder as it is and
find the same bits (``tests/golden/test_golden_tables.py``). An existing folder is never written again.

``tables.tar.xz`` holds the folders of the tables, ``digests.json`` what each must hold: facts, SHA-256 of every slot's
bytes at each commit that is kept, and of the rows one training step later.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb

RAM = "8MiB"
#: Ids looked at in a table that takes any id.
WIDE = np.array([0, 1, 5, 2**20, 2**33 + 7, 10**15, 2**62, 2**63 - 1], np.int64)


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def ids_of(table: bb.Table) -> Any:
    return WIDE if table.num_rows is None else np.arange(table.num_rows)


def facts_of(table: bb.Table) -> dict[str, Any]:
    """What a later release must find again."""
    ids = ids_of(table)
    return {
        "dim": table.dim,
        "num_rows": table.num_rows,
        "dtype": table.dtype,
        "optimizer": repr(table.optimizer),
        "init": repr(table.init),
        "seed": table.seed,
        "step": table.step,
        "stored_rows": len(table),
        "record_bytes": table.record_bytes,
        "contains": digest(table.contains(ids)),
        "slots": {slot: digest(table.get(ids, slot)) for slot in ("weight", *table.slots)},
    }


def train(table: bb.Table, seed: int, share: float = 0.5) -> None:
    """A step on some of the ids; the gradients are whole numbers / 8, made without a generator that may change."""
    ids = ids_of(table)
    mixed = (np.arange(len(ids), dtype=np.uint64) + np.uint64(seed * 7919)) * np.uint64(0x9E3779B97F4A7C15)
    chosen = ids[(mixed >> np.uint64(40)) % np.uint64(1000) < np.uint64(int(share * 1000))]
    words = (np.arange(len(chosen) * table.dim, dtype=np.uint64) + np.uint64(seed)) * np.uint64(0xD6E8FEB86659FD93)
    values = ((words >> np.uint64(48)) % np.uint64(33)).astype(np.float32) / 8 - 2
    table.update(chosen, values.reshape(len(chosen), table.dim))


def after_a_step(table: bb.Table) -> dict[str, str]:
    """Digests of every slot after one more step, which is how training goes on from here."""
    train(table, 99)
    return {slot: digest(table.get(ids_of(table), slot)) for slot in ("weight", *table.slots)}


def make_plain(path: Path, **spec: Any) -> dict[str, Any]:
    with bb.create(path, ram=RAM, **spec) as table:
        for seed in (1, 2, 3):
            train(table, seed)
        table.commit(meta={"made": "for ever", "step": 3})
        facts = {"newest": facts_of(table), "epoch": table.epoch, "meta": table.meta}
        facts["next"] = after_a_step(table)
        table.close(commit=False)
    return facts


def make_snapshot(path: Path) -> dict[str, Any]:
    with bb.create(path, ram=RAM, dim=6, num_rows=50, optimizer=bb.Adam(lr=0.01), seed=3) as table:
        train(table, 1)
        table.commit(keep="first")
        kept = {"first": facts_of(table)}
        train(table, 2)
        table.commit(meta={"x": [1, None]})
        train(table, 3)
        table.commit(keep="third")
        kept["third"] = facts_of(table)
        train(table, 4)
        table.commit()
        facts = {"newest": facts_of(table), "epoch": table.epoch, "meta": table.meta, "snapshots": kept}
        facts["next"] = after_a_step(table)
        table.close(commit=False)
    return facts


def make_compacted(path: Path) -> dict[str, Any]:
    # A log is compacted from a quarter of a mebibyte on; whole numbers make it small in the archive.
    with bb.create(path, ram=RAM, dim=12, num_rows=1500, optimizer=bb.SGD(lr=1.0), init=bb.Zeros()) as table:
        for turn in range(20):  # half of the rows each time, of the others a few: segments that are mostly dead stay
            ids = np.concatenate([np.arange(0, 1500, 2), np.arange(2 * turn + 1, 1500, 40)])
            table.update(ids, np.full((len(ids), 12), turn + 1, np.float32))
            table.commit()
        moved = table.stats()["compacted_records"] + table.compact()
        if moved < 100:
            raise RuntimeError(f"{moved} records were moved by compaction: make more commits")
        table.commit(meta={"moved": True})
        facts = {"newest": facts_of(table), "epoch": table.epoch, "meta": table.meta}
        facts["next"] = after_a_step(table)
        table.close(commit=False)
    return facts


def make_run(path: Path) -> dict[str, Any]:
    with bb.Run(path, ram="16MiB") as run:
        user = run.table("user", create={"dim": 4, "num_rows": 30, "optimizer": bb.Adam(), "seed": 1})
        item = run.table("item", create={"dim": 4, "num_rows": 40, "optimizer": bb.RowwiseAdagrad(), "seed": 2})
        for seed in (1, 2):
            train(user, seed)
            train(item, seed)
            run.commit(files={"dense.pt": b"dense %d" % seed}, meta={"seed": seed}, keep="first" if seed == 1 else None)
        facts = {
            "epoch": run.epoch,
            "meta": run.meta,
            "files": {name: hashlib.sha256(run.read(name)).hexdigest() for name in run.files},
            "snapshots": run.snapshots(),
            "tables": {name: facts_of(table) for name, table in run.tables.items()},
        }
        facts["next"] = {name: after_a_step(table) for name, table in sorted(run.tables.items())}
        run.close(commit=False)
    return facts


PLAIN: dict[str, dict[str, Any]] = {
    "adam-float32": {"dim": 7, "num_rows": 64, "optimizer": bb.Adam(lr=0.01), "init": bb.Normal(std=0.1), "seed": 5},
    "rowwise-bfloat16": {
        "dim": 9,
        "num_rows": 64,
        "optimizer": bb.RowwiseAdagrad(lr=0.05),
        "dtype": "bfloat16",
        "seed": 2**63 + 11,
    },
    "adam-float16-narrow-state": {
        "dim": 6,
        "num_rows": 40,
        "optimizer": bb.Adam(lr=0.02, state_dtype="bfloat16", weight_decay=0.01, decoupled=True),
        "dtype": "float16",
    },
    "any-id": {"dim": 3, "num_rows": None, "optimizer": bb.SGD(lr=0.5, weight_decay=0.1), "init": bb.Zeros()},
}


def _plain_entry(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out owner names and locks: a lock holds a process number, and every writer makes it again."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if Path(entry.name).name == "lock" else entry


def make(folder: Path) -> None:
    """Both files, in a folder that must not exist."""
    if folder.exists():
        raise SystemExit(f"{folder} exists: golden tables are made once and never written again; give another release")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        digests: dict[str, Any] = {name: make_plain(place / name, **spec) for name, spec in PLAIN.items()}
        digests["snapshots"] = make_snapshot(place / "snapshots")
        digests["compacted"] = make_compacted(place / "compacted")
        digests["run"] = make_run(place / "run")
        folder.mkdir(parents=True)
        with tarfile.open(folder / "tables.tar.xz", "w:xz") as archive:
            for path in sorted(place.iterdir()):
                archive.add(path, path.name, filter=_plain_entry)
    (folder / "digests.json").write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1] or "/" in sys.argv[1]:
        raise SystemExit("usage: python tests/golden/make.py RELEASE")
    make(Path(__file__).parent / sys.argv[1])
