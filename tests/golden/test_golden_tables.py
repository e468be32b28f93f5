"""Tables that earlier releases wrote open with the same bits, and training goes on from them with the same bits."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bunkbed as bb

GOLDEN = Path(__file__).parent
RELEASES = sorted(path.name for path in GOLDEN.iterdir() if (path / "digests.json").exists())
CASES = [
    (release, name)
    for release in RELEASES
    for name in sorted(json.loads((GOLDEN / release / "digests.json").read_text()))
    if name != "run"
]


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", GOLDEN / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(release: str, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((GOLDEN / release / "digests.json").read_text())[name]
    return facts


def unpack(release: str, name: str, folder: Path) -> None:
    with tarfile.open(GOLDEN / release / "tables.tar.xz") as archive:
        members = [entry for entry in archive if Path(entry.name).parts[0] == name]
        # Python 3.11.4 and later ask for a filter; the archive is our own.
        archive.extractall(folder, members, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def test_there_are_golden_tables_and_they_are_small() -> None:
    assert RELEASES and "0.1.0" in RELEASES
    for release in RELEASES:
        size = sum(path.stat().st_size for path in (GOLDEN / release).rglob("*") if path.is_file())
        assert size < 200 << 10, f"golden tables of {release} are {size} bytes"


@pytest.mark.parametrize(("release", "name"), CASES)
def test_a_table_of_an_earlier_release(make: ModuleType, release: str, name: str, tmp_path: Path) -> None:
    facts = expected(release, name)
    path = tmp_path / name
    unpack(release, name, tmp_path)
    assert bb.check(path) == [] and bb.check(path).leftovers == []
    with bb.open(path, mode="r", ram="8MiB") as reader:
        assert make.facts_of(reader) == facts["newest"]
    kept = facts.get("snapshots", {})
    assert set(bb.snapshots(path)) == set(kept)
    for snapshot, then in kept.items():
        with bb.open(path, snapshot=snapshot, ram="8MiB") as reader:
            assert make.facts_of(reader) == then
    with bb.open(path, ram="8MiB") as table:
        assert (table.epoch, table.meta) == (facts["epoch"], facts["meta"])
        assert make.facts_of(table) == facts["newest"]
        assert make.after_a_step(table) == facts["next"], "training goes on with other bits"
        table.commit()
        for snapshot, then in kept.items():
            table.rewind(snapshot)
            assert make.facts_of(table) == then
    assert bb.check(path) == []


@pytest.mark.parametrize("release", RELEASES)
def test_a_run_of_an_earlier_release(make: ModuleType, release: str, tmp_path: Path) -> None:
    facts = expected(release, "run")
    path = tmp_path / "run"
    unpack(release, "run", tmp_path)
    assert bb.check(path) == []
    with bb.Run(path, ram="16MiB") as run:
        assert (run.epoch, run.meta, run.snapshots()) == (facts["epoch"], facts["meta"], facts["snapshots"])
        assert {name: hashlib.sha256(run.read(name)).hexdigest() for name in run.files} == facts["files"]
        for name in sorted(facts["tables"]):
            table = run.table(name)
            assert make.facts_of(table) == facts["tables"][name]
            assert make.after_a_step(table) == facts["next"][name]
        run.commit()
    assert bb.check(path) == []


def test_golden_tables_are_never_written_again(make: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="golden tables are made once and never written again"):
        make.make(GOLDEN / RELEASES[0])
    before = expected(RELEASES[-1], "adam-float32")
    make.make(tmp_path / "new")
    again = json.loads((tmp_path / "new" / "digests.json").read_text())
    assert again["adam-float32"] == before, "this release makes other bits of the same steps"
    size = sum(path.stat().st_size for path in (tmp_path / "new").rglob("*") if path.is_file())
    assert size < 200 << 10
