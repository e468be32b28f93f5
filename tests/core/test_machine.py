"""Probes: measured once, remembered, nothing left behind. No figure is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.machine import rates as machine


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bunkbed" / "machine.json"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Probes that take no time; the list says which ran."""
    ran: list[str] = []
    for name, result in (("probe_memory", 2e10), ("probe_writes", (2e9, 1 << 20)), ("probe_reads", (9e4, 512))):
        monkeypatch.setattr(_native, name, lambda *_, name=name, result=result: ran.append(name) or result)
    return ran


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_measured_once_then_remembered(quick: list[str], place: Path, own_cache: Path) -> None:
    assert machine.remembered(place) is None and machine.remembered() is None
    found = machine.measure(place)
    assert (found.memory_bytes_per_s, found.read_iops, found.write_bytes_per_s) == (2e10, 9e4, 2e9)
    assert (found.read_bytes_per_s, found.read_gap) == (9e4 * (256 << 10), 256 << 10)
    assert (found.read_unit, found.processors > 0, found.measured > 0) == (512, True, True)
    assert set(quick) == {"probe_memory", "probe_writes", "probe_reads"}
    quick.clear()
    assert machine.measure(place) == found == machine.remembered(place)
    assert quick == []
    machine.measure(place, again=True)
    assert quick
    assert not list(place.iterdir()), "the temporary file stayed behind"
    assert [path.name for path in own_cache.parent.iterdir()] == ["machine.json"]


def test_a_directory_to_come_stands_for_its_parent(quick: list[str], place: Path) -> None:
    found = machine.measure(place / "tables" / "user")
    assert machine.remembered(place) == found
    assert not (place / "tables").exists()


def test_without_a_directory_only_memory_is_known(quick: list[str], place: Path) -> None:
    machine.measure(place)
    found = machine.remembered()
    assert found is not None
    assert (found.memory_bytes_per_s, found.read_iops, found.write_bytes_per_s) == (2e10, None, None)
    assert (found.read_bytes_per_s, found.read_gap) == (None, None)


def test_rates_without_large_reads_are_measured_again(quick: list[str], place: Path, own_cache: Path) -> None:
    whole = machine.measure(place)
    machine._save({machine._key(place): replace(whole, read_bytes_per_s=None)})
    content = json.loads(own_cache.read_text())
    del content["machines"][machine._key(place)]["read_bytes_per_s"]  # as an earlier release wrote it
    own_cache.write_text(json.dumps(content))
    known = machine.remembered(place)
    assert known is not None and (known.read_iops, known.read_gap) == (9e4, None)
    quick.clear()
    assert machine.measure(place).read_gap == whole.read_gap
    assert "probe_reads" in quick


@pytest.mark.parametrize("field", ["_host", "_key"])
def test_another_machine_or_disk_is_measured_anew(
    field: str, quick: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.measure(place)
    quick.clear()
    monkeypatch.setattr(machine, field, lambda *_: "elsewhere")
    assert machine.remembered(place) is None
    machine.measure(place)
    assert quick


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 99, "machines": {}}',
        '{"format": 1, "machines": 3}',
        '{"format": 1, "machines": {"HERE": {"read_iops": "many", "read_bytes_per_s": 2e9}}}',
        '{"format": 1, "machines": {"HERE": {"read_iops": 9e4, "read_bytes_per_s": Infinity}}}',
        '{"format": 1, "machines": {"HERE": {"read_iops": NaN, "read_bytes_per_s": 2e9}}}',
        '{"format": 1, "machines": {"HERE": {"read_iops": 0, "read_bytes_per_s": 2e9}}}',
    ],
)
def test_a_broken_cache_is_written_anew(content: str, quick: list[str], place: Path, own_cache: Path) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(content.replace("HERE", machine._key(place)))
    assert machine.remembered(place) is None
    bb.create(place / "table", dim=2, num_rows=10, ram="1MiB").close()
    found = machine.measure(place)
    assert machine.remembered(place) == found
    assert json.loads(own_cache.read_text())["format"] == 1


def test_where_nothing_can_be_remembered(quick: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "file"))
    assert machine.measure(place).read_iops == 9e4
    assert machine.remembered(place) is None


def test_where_nothing_can_be_written() -> None:
    with pytest.raises(OSError, match="cannot write here to measure the disk") as caught:
        machine.measure("/proc/self")
    assert caught.value.filename == "/proc/self"


def test_a_full_disk(quick: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(OSError, match=r"1\.0 MiB free is too little to measure this disk with; it takes 128\.0 MiB"):
        machine.measure(place)


def test_a_failed_probe_leaves_no_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        assert [path.name.startswith(".bunkbed-measure-") for path in place.iterdir()] == [True]
        raise OSError(5, "gone")

    monkeypatch.setattr(_native, "probe_writes", fail)
    with pytest.raises(OSError, match="gone"):
        machine.measure(place)
    assert not list(place.iterdir())


def test_the_probes_themselves(place: Path) -> None:
    file = place / "file"
    assert machine.sequential_writes(file, num_bytes=4 << 20) > 0
    assert file.stat().st_size == 4 << 20
    reads, unit = machine.random_reads([file], seconds=0.05)
    assert reads > 0 and unit >= 1
    assert machine.large_reads([file], seconds=0.05) > 0
    with pytest.raises(FileExistsError):
        machine.sequential_writes(file, num_bytes=1 << 20)
    with pytest.raises(FileNotFoundError):
        machine.random_reads([place / "none"], seconds=0.05)
    (place / "small").write_bytes(bytes(8192))
    with pytest.raises(ValueError, match="no whole block"):
        machine.large_reads([place / "small"], seconds=0.05)
    (place / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="no whole block"):
        machine.random_reads([place / "empty"], seconds=0.05)
    assert machine.filesystem(place).endswith(")")
