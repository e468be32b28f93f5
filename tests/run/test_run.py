"""`bb.Run`: several tables and dense files, committed as one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.testing import ReferenceTable
from bunkbed.testing.conformance import assert_same_rows

USER: dict[str, Any] = {
    "dim": 8,
    "num_rows": 500,
    "optimizer": bb.Adam(lr=0.01),
    "init": bb.Normal(0.1),
    "seed": 1,
}
ITEM: dict[str, Any] = {
    "dim": 4,
    "num_rows": None,
    "optimizer": bb.Adagrad(lr=0.1),
    "init": bb.Zeros(),
    "seed": 2,
}
EVERY = np.arange(500)


class Trial:
    """A run of two tables with their oracles."""

    def __init__(self, path: Path, **kwargs: Any) -> None:
        self.run = bb.Run(path, **{"ram": "48MiB", **kwargs})
        self.tables = [self.run.table("user", create=USER), self.run.table("item", create=ITEM)]
        self.oracles = [ReferenceTable(**USER), ReferenceTable(**ITEM)]

    def train(self, seed: int, *, only_first: bool = False) -> None:
        rng = np.random.default_rng(seed)
        for table, oracle in list(zip(self.tables, self.oracles, strict=True))[: 1 if only_first else 2]:
            ids = rng.integers(0, 500, 100)
            grads = rng.standard_normal((100, table.dim)).astype(np.float32)
            table.update(ids, grads)
            oracle.update(ids, grads)

    def check(self) -> None:
        for table, oracle in zip(self.tables, self.oracles, strict=True):
            assert_same_rows(table, oracle, EVERY)

    def each(self, action: str, *arguments: Any) -> None:
        for oracle in self.oracles:
            getattr(oracle, action)(*arguments)


def test_tables_and_files_commit_together(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "run")
    assert trial.run.version == trial.run.epoch == 0 and trial.run.meta == {}
    trial.train(1)
    epoch = trial.run.commit(files={"dense.pt": b"weights 1", "note.txt": b"n"}, meta={"step": 1})
    assert epoch == trial.run.epoch > 0
    trial.run.close()

    again = bb.Run(tmp_path / "run", ram="48MiB")
    assert again.read("dense.pt") == b"weights 1" and again.meta == {"step": 1}
    trial.run, trial.tables = again, [again.table("user"), again.table("item")]
    assert set(again.tables) == {"user", "item"}
    trial.check()
    again.close()


def test_training_goes_on_while_a_run_commits(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "run")
    for seed in range(3):
        trial.train(seed)
        contents = bytearray(b"weights")
        pending = trial.run.begin_commit(files={"dense.pt": contents}, meta={"seed": seed}, keep="background")
        contents[:] = b"changed"
        trial.each("commit", None, "background")
        trial.train(seed + 10)
        trial.check()
    assert pending.wait() == trial.run.epoch == 3 and pending.done
    assert trial.run.meta == {"seed": 2} and trial.run.read("dense.pt") == b"weights"
    trial.run.rewind("background")
    trial.each("rewind", "background")
    trial.check()
    trial.run.close()


def test_a_commit_in_the_background_that_fails_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tmp_path / "run")
    trial.train(1)
    trial.run.commit()
    trial.train(2)
    with monkeypatch.context() as patched:
        patched.setattr(trial.run.folder, "publish", lambda manifest: (_ for _ in ()).throw(OSError("disk full")))
        pending = trial.run.begin_commit()
        with pytest.raises(OSError, match="disk full"):
            pending.wait()
        trial.run.begin_commit()  # without a wait for this commit
        with pytest.raises(OSError, match="disk full"):
            trial.run.close()
    assert trial.run.epoch == 1 and not trial.run.closed
    trial.run.close()  # the tables' own commits are durable: the run's must still be made
    trial.each("commit")
    again = bb.Run(tmp_path / "run", ram="48MiB")
    assert again.epoch == 2
    trial.run, trial.tables = again, [again.table("user"), again.table("item")]
    trial.check()
    again.close()


def test_files_not_named_again_carry_over(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run") as run:
        run.commit(files={"a": b"1", "b": b"2"})
        run.commit(files={"b": b"3"})
        assert (run.read("a"), run.read("b")) == (b"1", b"3")
        with pytest.raises((FileNotFoundError, KeyError), match=r"c.*a"):
            run.read("c")


def test_what_was_not_committed_is_gone_from_all(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "run")
    trial.train(1)
    trial.run.commit(files={"dense.pt": b"1"})
    trial.each("commit")
    trial.train(2)
    trial.run.close(commit=False)
    trial.each("revert")
    trial.run = bb.Run(tmp_path / "run", ram="48MiB")
    trial.tables = [trial.run.table("user"), trial.run.table("item")]
    trial.check()
    trial.run.close(commit=False)


def test_a_block_left_by_an_exception_does_not_commit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), bb.Run(tmp_path / "run") as run:
        table = run.table("user", create=USER)
        run.commit(files={"dense.pt": b"1"})
        table.update([1], np.ones((1, 8), np.float32))
        raise RuntimeError("boom")
    with bb.Run(tmp_path / "run") as run:
        assert len(run.table("user")) == 0 and run.read("dense.pt") == b"1"
        run.table("user").update([1], np.ones((1, 8), np.float32))
    with bb.Run(tmp_path / "run", mode="r") as run:
        assert len(run.table("user")) == 1


def test_rewind_takes_everything_back(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "run")
    trial.train(1)
    trial.run.commit(files={"dense.pt": b"best"}, meta={"epoch": 1}, keep="best")
    trial.each("commit", None, "best")
    trial.train(2)
    trial.run.commit(files={"dense.pt": b"worse"}, meta={"epoch": 2})
    trial.each("commit")
    assert set(trial.run.snapshots()) == {"best"}
    trial.run.rewind("best")
    trial.each("rewind", "best")
    trial.check()
    assert trial.run.read("dense.pt") == b"best" and trial.run.meta == {"epoch": 1}
    trial.train(3)
    trial.check()
    with pytest.raises((KeyError, ValueError), match=r"worst.*best"):
        trial.run.rewind("worst")
    trial.run.close()


def test_only_the_run_commits_its_tables(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run") as run:
        table = run.table("user", create=USER)
        with pytest.raises(bb.BunkbedError, match=r"run\.commit"):
            table.commit()
        table.update([1], np.ones((1, 8), np.float32))


def test_a_reader_follows_the_manifest_not_the_tables(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "run")
    trial.train(1)
    trial.run.commit(files={"dense.pt": b"1"})
    trial.each("commit")
    trial.train(2)
    with bb.Run(tmp_path / "run", mode="r", ram="48MiB") as reader:
        tables = [reader.table("user"), reader.table("item")]
        for table, oracle in zip(tables, trial.oracles, strict=True):
            committed = oracle._commits[oracle.epoch]
            assert len(table) == len(committed["places"])
        with pytest.raises(bb.ReadOnlyError, match="read"):
            reader.commit()
        with pytest.raises(bb.ReadOnlyError, match="read"):
            tables[0].update([1], np.ones((1, 8), np.float32))
    trial.run.close()


def test_tables_unlike_their_definition_are_refused(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run") as run:
        run.table("user", create=USER)
        run.commit()
    with bb.Run(tmp_path / "run") as run:
        with pytest.raises(ValueError, match=r"dim.*(8.*16|16.*8)"):
            run.table("user", create={**USER, "dim": 16})
        with pytest.raises((FileNotFoundError, KeyError, ValueError), match=r"item"):
            run.table("item")


@pytest.mark.parametrize("name", ["", "..", "a/b", "/abs", "x" * 300])
def test_names_that_cannot_be(tmp_path: Path, name: str) -> None:
    with bb.Run(tmp_path / "run") as run:
        with pytest.raises(ValueError, match=r"name"):
            run.table(name, create=USER)
        with pytest.raises(ValueError, match=r"name|file"):
            run.commit(files={name: b""})
        assert run.tables == {}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("five years")
    with pytest.raises((bb.FormatError, FileExistsError), match="mine"):
        bb.Run(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with pytest.raises((FileNotFoundError, bb.FormatError), match="nowhere"):
        bb.Run(tmp_path / "nowhere", mode="r")
    assert not (tmp_path / "nowhere").exists()


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40
    with bb.Run(tmp_path / "run") as run:
        run.commit(files={"dense.pt": content})
    hit = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and content in p.read_bytes()]
    assert len(hit) == 1
    hit[0].write_bytes(hit[0].read_bytes().replace(content, content[:-1] + b"!"))
    with pytest.raises(bb.CorruptionError, match=r"dense\.pt"), bb.Run(tmp_path / "run", mode="r") as run:
        run.read("dense.pt")


def test_a_second_writer_of_a_run(tmp_path: Path) -> None:
    code = """
        import sys
        import bunkbed as bb
        try:
            bb.Run(sys.argv[1])
        except bb.TableLockedError as error:
            print("locked", error)
    """
    with bb.Run(tmp_path / "run") as run:
        run.table("user", create=USER)
        run.commit()
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run")],
            capture_output=True,
            text=True,
        )
        assert done.stdout.startswith("locked"), done.stderr


@pytest.mark.parametrize("kills", range(6))
def test_killed_at_any_time_it_opens_at_one_commit(tmp_path: Path, kills: int) -> None:
    """A process that commits over and over is killed; tables and file must be of the same commit."""
    code = """
        import sys
        import numpy as np
        import bunkbed as bb
        run = bb.Run(sys.argv[1])
        tables = [
            run.table(name, create=dict(dim=2, num_rows=300, optimizer=bb.SGD(lr=1.0), init=bb.Zeros()))
            for name in ("a", "b")
        ]
        for step in range(1, 100_000):
            for table in tables:
                table.update(np.arange(300), -np.ones((300, 2), np.float32))
            run.commit(files={"step": str(step).encode()}, meta={"step": step})
            print(step, flush=True)
    """
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    acknowledged = 0
    for _ in range(2 + 3 * kills):
        acknowledged = int(process.stdout.readline())
    process.kill()
    acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
    process.wait()
    process.stdout.close()
    with bb.Run(path) as run:
        step = run.meta["step"]
        assert step in (acknowledged, acknowledged + 1)  # durable before it could say so
        assert run.read("step") == str(step).encode()
        for name in ("a", "b"):
            table = run.table(name)
            assert table.step == step
            assert (table.lookup(np.arange(300)) == step).all()
            assert bb.check(table.path) == []
