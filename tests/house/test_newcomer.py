"""The timed path of a newcomer: what it types is what the pages say."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def newcomer() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "packaging")
        return importlib.import_module("newcomer")


def test_the_first_lookup_is_the_readmes(newcomer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(newcomer.first_python(ROOT / "README.md"), names)
    assert getattr(names["rows"], "shape", None) == (3, 64)


def test_steps_are_taken_in_order_in_the_folder(newcomer: ModuleType, tmp_path: Path) -> None:
    steps = newcomer.take(["echo one > made", "test -s made && pwd > where"], tmp_path)
    assert [step.command for step in steps] == ["echo one > made", "test -s made && pwd > where"]
    assert Path((tmp_path / "where").read_text().strip()) == tmp_path.resolve()


def test_a_command_that_fails_ends_it_with_its_output(newcomer: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)no such thing.*ended with 3"):
        newcomer.take(["echo no such thing >&2; exit 3", "touch later"], tmp_path)
    assert not (tmp_path / "later").exists()


def test_the_commands_are_those_of_the_pages(newcomer: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    source = Path(newcomer.__file__).read_text(encoding="utf-8")
    for command in ("make demo", "train ratings.csv --user-col user --item-col item --ram 256MiB --out runs/first"):
        assert command in readme, command
    assert "-C bunkbed demo" in source and "--user-col user --item-col item --ram 256MiB --out runs/first" in source
