"""What a caller or a disk gets wrong: each a clear error naming the value, nothing is changed.

Ids and gradients are in `TableTests`, the training command's files in the tests of the command line.
"""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.testing import ReferenceTable
from bunkbed.testing.conformance import assert_same_rows

KWARGS: dict[str, Any] = {
    "dim": 8,
    "num_rows": 1000,
    "optimizer": bb.Adam(lr=0.01),
    "init": bb.Normal(std=0.1),
    "seed": 5,
}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` and its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def train(table: Any, *, steps: int = 3, seed: int = 0, size: int = 200) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = rng.integers(0, KWARGS["num_rows"], size)
        table.update(ids, rng.standard_normal((size, KWARGS["dim"])).astype(np.float32))


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, ReferenceTable]:
    """A committed, closed table and what it holds."""
    oracle = ReferenceTable(**KWARGS)
    with bb.create(tmp_path / "user", ram="16MiB", **KWARGS) as table:
        train(table)
    train(oracle)
    return tmp_path / "user", oracle


# ---- arguments of create


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"dim": 0}, ValueError, r"dim.*0"),
        ({"dim": -3}, ValueError, r"dim.*-3"),
        ({"dim": 2.5}, TypeError, r"dim.*2\.5"),
        ({"dim": True}, TypeError, r"dim.*True"),
        ({"num_rows": -1}, ValueError, r"num_rows.*-1"),
        ({"num_rows": 10.0}, TypeError, r"num_rows.*10\.0"),
        ({"num_rows": 2**64}, ValueError, r"num_rows.*18446744073709551616"),
        ({"dtype": "float64"}, ValueError, r"dtype.*float64"),
        ({"dtype": "int8"}, ValueError, r"dtype.*int8"),
        ({"optimizer": "adam"}, TypeError, r"optimizer.*bb\.Adam.*'adam'"),
        ({"optimizer": bb.Adam}, TypeError, r"optimizer.*Adam"),
        ({"init": "normal"}, TypeError, r"init.*bb\.Normal.*'normal'"),
        ({"init": 0.5}, TypeError, r"init.*0\.5"),
        ({"seed": -1}, ValueError, r"seed.*-1"),
        ({"seed": 1.5}, TypeError, r"seed.*1\.5"),
        ({"seed": 2**64}, ValueError, r"seed.*18446744073709551616"),
        ({"ram": "lots"}, ValueError, r"'lots'"),
        ({"ram": 0}, ValueError, r"0"),
        ({"ram": -5}, ValueError, r"-5"),
        ({"ram": 1.5}, ValueError, r"1\.5"),
        ({"ram": "3 parsecs"}, ValueError, r"parsecs"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("on_disk", [True, False])
def test_create_refuses(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], message: str, on_disk: bool
) -> None:
    path = tmp_path / "table" if on_disk else None
    with pytest.raises(kind, match=message):
        bb.create(path, **{**KWARGS, **arguments})
    assert list(tmp_path.iterdir()) == [], "something was left behind"


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: bb.Adam(lr=-1.0), ValueError, r"Adam: lr .*-1\.0"),
        (lambda: bb.Adam(lr=float("nan")), ValueError, r"Adam: lr .*nan"),
        (lambda: bb.Adam(betas=(0.9, 1.0)), ValueError, r"betas\[1\].*1\.0"),
        (lambda: bb.Adam(betas=(0.9,)), ValueError, r"betas.*two"),
        (lambda: bb.Adam(eps=float("inf")), ValueError, r"eps.*inf"),
        (lambda: bb.SGD(lr="0.1"), TypeError, r"SGD: lr .*'0\.1'"),
        (lambda: bb.Adagrad(initial_accumulator=-0.1), ValueError, r"initial_accumulator.*-0\.1"),
        (lambda: bb.SGD(weight_decay=-1e-4), ValueError, r"weight_decay.*-0\.0001"),
        (lambda: bb.Normal(std=-1.0), ValueError, r"Normal: std .*-1\.0"),
        (lambda: bb.Uniform(low=1.0, high=0.0), ValueError, r"low=1\.0, high=0\.0"),
        (lambda: bb.Budget("all of it"), ValueError, r"'all of it'"),
    ],
)
def test_definitions_refuse(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_create_on_a_table_is_file_exists(stored: tuple[Path, ReferenceTable]) -> None:
    path, _ = stored
    before = tree(path)
    with pytest.raises(FileExistsError, match=r"user.*bb\.open"):
        bb.create(path, **KWARGS)
    assert tree(path) == before


def test_create_in_a_folder_of_other_things_leaves_them_alone(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("five years")
    with pytest.raises((FileExistsError, bb.FormatError, ValueError), match="mine"):
        bb.create(folder, **KWARGS)
    assert tree(folder) == {"thesis.txt": b"five years"}


# ---- opening


def test_open_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere"):
        bb.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("content", [None, "hello.txt"])
def test_open_a_folder_that_is_not_a_table(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content:
        (folder / content).write_text("hello")
    before = tree(folder)
    for mode in ("w", "r"):
        with pytest.raises((bb.FormatError, FileNotFoundError), match=r"(is not a bunkbed|no) table"):
            bb.open(folder, mode=mode)
    assert tree(folder) == before


def test_open_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    with pytest.raises((bb.FormatError, NotADirectoryError), match="file"):
        bb.open(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"x" * 5000


@pytest.mark.parametrize(
    ("create", "message"),
    [
        ({"dim": 16}, r"dim.*(8.*16|16.*8)"),
        ({"num_rows": 500}, r"num_rows.*(1000.*500|500.*1000)"),
        ({"dtype": "bfloat16"}, r"dtype.*(float32.*bfloat16|bfloat16.*float32)"),
        ({"seed": 6}, r"seed.*(5.*6|6.*5)"),
        ({"init": bb.Normal(std=0.5)}, r"init.*0\.5"),
        ({"optimizer": bb.SGD()}, r"(slot|optimizer).*"),
        ({"optimizer": bb.RowwiseAdagrad()}, r"(slot|optimizer).*"),
        (
            {"optimizer": bb.Adam(state_dtype="bfloat16")},
            r"state_dtype is 'float32' in the table, 'bfloat16' was asked for",
        ),
    ],
    ids=repr,
)
def test_open_or_create_names_both_values(
    stored: tuple[Path, ReferenceTable], create: dict[str, Any], message: str
) -> None:
    path, oracle = stored
    before = tree(path)
    with pytest.raises(ValueError, match=message):
        bb.open(path, create={**KWARGS, **create})
    assert tree(path) == before
    with bb.open(path, create=KWARGS) as table:
        assert_same_rows(table, oracle, np.arange(1000))


def test_open_or_create_creates(tmp_path: Path) -> None:
    with bb.open(tmp_path / "new", create=KWARGS, ram="16MiB") as table:
        assert table.dim == 8 and len(table) == 0
    with bb.open(tmp_path / "new", create={"dim": 8}) as table:
        assert table.num_rows == 1000


def test_the_states_dtype_is_the_tables(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"dim": 4, "num_rows": 10, "ram": "4MiB"}
    narrow = bb.Adam(lr=0.1, state_dtype="bfloat16")
    with bb.create(tmp_path / "user", optimizer=narrow, **kwargs) as table:
        table.update([3], np.ones((1, 4), np.float32))
        with pytest.raises(ValueError, match=r"'bfloat16' in the table, 'float32' was asked for"):
            table.optimizer = bb.Adam(lr=0.2)
        table.optimizer = dataclasses.replace(narrow, lr=0.2)
    with pytest.raises(ValueError, match=r"'bfloat16' in the table, 'float32' was asked for"):
        bb.open(tmp_path / "user", optimizer=bb.Adam(lr=0.1))
    with bb.open(tmp_path / "user") as table:
        assert table.optimizer == bb.Adam(lr=0.2, state_dtype="bfloat16") and table.step == 1


@pytest.mark.parametrize("make", [bb.Adam, bb.Adagrad, bb.RowwiseAdagrad])
@pytest.mark.parametrize("wrong", ["float16", "bf16", 2, None])
def test_an_unknown_state_dtype_lists_the_choices(make: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"state_dtype must be one of float32, bfloat16, got"):
        make(state_dtype=wrong)


@pytest.mark.parametrize(
    ("dtype", "init"),
    [
        ("float16", bb.Normal(std=12_000.0)),
        ("float16", bb.Uniform(-70_000.0, 0.0)),
        ("bfloat16", bb.Normal(std=1e38)),
        ("float32", bb.Uniform(0.0, 1e39)),
    ],
    ids=repr,
)
def test_initial_values_beyond_the_dtype_are_refused(tmp_path: Path, dtype: str, init: Any) -> None:
    with pytest.raises(ValueError, match=rf"init=.*beyond the largest {dtype}"):
        bb.create(tmp_path / "user", dim=4, num_rows=10, dtype=dtype, init=init)
    assert not (tmp_path / "user").exists()


def test_hyperparameters_may_change_on_opening(stored: tuple[Path, ReferenceTable]) -> None:
    path, _ = stored
    changed = bb.Adam(lr=0.5, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)
    with bb.open(path, create={**KWARGS, "optimizer": changed}) as table:
        assert table.optimizer == changed
        train(table, steps=1)
    with bb.open(path) as table:
        assert table.optimizer == changed


@pytest.mark.parametrize("mode", ["a", "rw", "", None, 1])
def test_open_with_an_unknown_mode(stored: tuple[Path, ReferenceTable], mode: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"mode"):
        bb.open(stored[0], mode=mode)


def test_open_an_unknown_snapshot_lists_those_there_are(stored: tuple[Path, ReferenceTable]) -> None:
    path, _ = stored
    with bb.open(path) as table:
        table.commit(keep="epoch-3")
    with pytest.raises((KeyError, ValueError), match=r"epoch-4.*epoch-3"):
        bb.open(path, mode="r", snapshot="epoch-4")
    assert list(bb.snapshots(path)) == ["epoch-3"]


@pytest.mark.parametrize("name", ["", 3, b"best"])
def test_snapshot_names_that_cannot_be(stored: tuple[Path, ReferenceTable], name: Any) -> None:
    path, oracle = stored
    with bb.open(path) as table:
        with pytest.raises((ValueError, TypeError), match=r"keep"):
            table.commit(keep=name)
        assert_same_rows(table, oracle, np.arange(1000))


@pytest.mark.parametrize("name", ["a/b", "..", "x" * 300, "größte", "new\nline", "C:\\"])
def test_snapshot_names_name_no_file(stored: tuple[Path, ReferenceTable], name: str) -> None:
    path, oracle = stored
    outside = sorted(path.parent.iterdir())
    with bb.open(path) as table:
        table.commit(keep=name)
        train(table)
        table.rewind(name)
        assert_same_rows(table, oracle, np.arange(1000))
    assert list(bb.snapshots(path)) == [name]
    assert sorted(path.parent.iterdir()) == outside


def test_meta_must_be_json(stored: tuple[Path, ReferenceTable]) -> None:
    path, oracle = stored
    with bb.open(path) as table:
        with pytest.raises(TypeError, match=r"meta"):
            table.commit(meta={"step": object()})
        assert_same_rows(table, oracle, np.arange(1000))


def test_damaged_bytes_are_an_error_never_a_vector(stored: tuple[Path, ReferenceTable]) -> None:
    path, oracle = stored
    intact = tree(path)
    everything = np.arange(1000)
    good = oracle.lookup(everything).tobytes()
    found = 0
    for name, content in intact.items():
        for place in range(0, len(content), max(1, len(content) // 40)):
            damaged = bytearray(content)
            damaged[place] ^= 0x40
            (path / name).write_bytes(bytes(damaged))
            try:
                with bb.open(path, mode="r", ram="16MiB") as reader:
                    assert reader.lookup(everything).tobytes() == good, f"byte {place} of {name}: a wrong vector"
            except (bb.CorruptionError, bb.FormatError) as error:
                found += 1
                assert str(error), "an error without words"
        (path / name).write_bytes(content)
    assert found > 10, "hardly any damage was noticed: the test damages bytes that are never read"
    assert bb.check(path) == []


def test_check_names_the_damage(stored: tuple[Path, ReferenceTable]) -> None:
    path, _ = stored
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 3] ^= 1
    largest.write_bytes(bytes(content))
    problems = bb.check(path)
    assert problems and any(largest.name in problem for problem in problems)


def test_check_of_what_is_not_a_table(tmp_path: Path) -> None:
    try:
        problems = bb.check(tmp_path)
    except (bb.FormatError, FileNotFoundError):
        return
    assert problems


# ---- writers


CHILD_OPENS = """
import sys
import bunkbed as bb

try:
    bb.open(sys.argv[1], mode=sys.argv[2])
except bb.BunkbedError as error:
    print(type(error).__name__, error)
else:
    print("opened")
"""


def opens_elsewhere(path: Path, mode: str) -> str:
    done = subprocess.run([sys.executable, "-c", CHILD_OPENS, str(path), mode], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_writer_in_another_process(stored: tuple[Path, ReferenceTable]) -> None:
    path, _ = stored
    with bb.open(path, ram="16MiB"):
        answer = opens_elsewhere(path, "w")
        assert answer.startswith("TableLockedError") and "user" in answer and "mode='r'" in answer.replace('"', "'")
        assert opens_elsewhere(path, "r") == "opened\n"
    assert opens_elsewhere(path, "w") == "opened\n"


def test_a_second_writer_in_this_process_is_the_same_table(stored: tuple[Path, ReferenceTable]) -> None:
    path, oracle = stored
    first = bb.open(path, ram="16MiB")
    second = bb.open(path)
    assert second is first
    first.close(commit=False)
    assert not second.closed, "the other opener still uses it"
    assert_same_rows(second, oracle, np.arange(1000))
    second.close(commit=False)
    assert second.closed


def test_a_child_after_a_fork_is_refused(stored: tuple[Path, ReferenceTable]) -> None:
    path, oracle = stored
    with bb.open(path, ram="16MiB") as table:
        answers = multiprocessing.get_context("fork").SimpleQueue()
        pid = os.fork()
        if pid == 0:
            try:
                table.lookup([1])
                answers.put("a lookup was answered")
            except BaseException as error:
                answers.put(f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        answer = answers.get()
        assert answer.startswith("TableClosedError") and "fork" in answer, answer
        train(table, steps=1, seed=4)
        train(oracle, steps=1, seed=4)
        assert_same_rows(table, oracle, np.arange(1000))


def test_a_forked_child_does_not_keep_the_lock(stored: tuple[Path, ReferenceTable]) -> None:
    path, _ = stored
    table = bb.open(path, ram="16MiB")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)  # lives until the parent closes the pipe
        os._exit(0)
    try:
        table.close()
        assert opens_elsewhere(path, "w") == "opened\n"
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(pid, 0)


# ---- the system


def test_a_read_only_directory(stored: tuple[Path, ReferenceTable], as_nobody: Callable[..., str]) -> None:
    path, _ = stored
    answer = as_nobody(
        path,
        f"""
        for call in (
            lambda: bb.open({str(path)!r}),
            lambda: bb.create({str(path.parent / "other")!r}, dim=4, num_rows=10),
        ):
            try:
                call()
            except OSError as error:
                print(type(error).__name__, error)
            else:
                print("no error")
        with bb.open({str(path)!r}, mode="r") as reader:
            print(len(reader.lookup([1, 2])))
        """,
    )
    writer, creator, reader = answer.splitlines()
    assert writer.startswith("PermissionError") and "user" in writer
    assert creator.startswith("PermissionError") and "other" in creator
    assert reader == "2"


@pytest.fixture
def as_nobody() -> Iterator[Callable[..., str]]:
    """Runs code in a process that may not write where `path` is, even when the tests run as root."""

    def run(path: Path, code: str) -> str:
        prelude = """
            import os
            import bunkbed as bb
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
        """
        for folder in (path, path.parent):
            folder.chmod(0o555)
        opened = []
        for folder in path.parents:  # root's temporary folders are closed to others
            mode = folder.stat().st_mode
            if not mode & 0o001 and os.geteuid() == 0:
                folder.chmod(mode | 0o011)
                opened.append((folder, mode))
        for file in path.rglob("*"):
            file.chmod(0o555 if file.is_dir() else 0o444)
        try:
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
                capture_output=True,
                text=True,
            )
        finally:
            for folder in (path, path.parent):
                folder.chmod(0o755)
            for folder, mode in opened:
                folder.chmod(mode)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run


def test_a_full_disk_loses_nothing_committed(tmp_path: Path) -> None:
    """A real file system of 24 MiB, filled by training: the error says so, and the last commit opens."""
    mount = tmp_path / "small"
    mount.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "bunkbed-test", str(mount)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        kwargs = {**KWARGS, "dim": 64, "num_rows": 200_000}
        oracle = ReferenceTable(**kwargs)
        table = bb.create(mount / "user", ram="8MiB", **kwargs)
        rng = np.random.default_rng(0)
        with pytest.raises(OSError, match=r"user|small") as raised:
            for start in range(0, 200_000, 2000):
                ids = np.arange(start, start + 2000)
                grads = rng.standard_normal((2000, 64)).astype(np.float32)
                table.update(ids, grads)
                committing = start == 4000
                oracle.update(ids, grads) if start <= 4000 else None
                if committing:
                    table.commit()
        assert raised.value.errno == errno.ENOSPC
        try:
            table.close(commit=False)
        except OSError as error:  # a failed background write is raised again on close
            assert error.errno == errno.ENOSPC
        with bb.open(mount / "user", mode="r", ram="16MiB") as reader:
            ids = np.arange(8000)
            assert reader.lookup(ids).tobytes() == oracle.lookup(ids).tobytes()
        assert bb.check(mount / "user") == []
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_file_size_limit_is_an_error_with_path_and_errno(tmp_path: Path) -> None:
    code = f"""
        import resource, signal, sys
        import numpy as np
        import bunkbed as bb
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        path = {str(tmp_path / "user")!r}
        table = bb.create(path, dim=64, num_rows=50_000, optimizer=bb.Adam(), ram="8MiB")
        table.update(np.arange(100), np.ones((100, 64), np.float32))
        table.commit()
        resource.setrlimit(resource.RLIMIT_FSIZE, (75 * 4096, resource.RLIM_INFINITY))
        try:
            for start in range(0, 50_000, 1000):
                table.update(np.arange(start, start + 1000), np.ones((1000, 64), np.float32))
            table.commit()
        except OSError as error:
            print(error.errno, error)
        try:
            table.close(commit=False)
        except OSError:
            pass
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with bb.open(path) as again:
            print(len(again), again.step)
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, after = done.stdout.splitlines()
    assert error.startswith(str(errno.EFBIG)) and "user" in error
    assert after == "100 1"


# ---- exports and imports


def test_import_of_the_wrong_shape_changes_nothing(stored: tuple[Path, ReferenceTable], tmp_path: Path) -> None:
    path, oracle = stored
    np.save(tmp_path / "wide.npy", np.ones((10, 9), np.float32))
    np.save(tmp_path / "long.npy", np.ones((1001, 8), np.float32))
    (tmp_path / "text.npy").write_text("not an array")
    with bb.open(path) as table:
        for name, message in (("wide", r"9.*8|8.*9"), ("long", r"1001.*1000|1000"), ("text", r"text\.npy")):
            with pytest.raises(ValueError, match=message):
                bb.import_rows(table, tmp_path / f"{name}.npy")
        with pytest.raises(FileNotFoundError, match=r"absent\.npy"):
            bb.import_rows(table, tmp_path / "absent.npy")
        with pytest.raises(ValueError, match=r"\.xls"):
            bb.export_rows(table, tmp_path / "rows.xls")
        assert_same_rows(table, oracle, np.arange(1000))


@pytest.mark.parametrize("suffix", [".npy", ".parquet", ".safetensors"])
def test_export_and_import_round_trip(stored: tuple[Path, ReferenceTable], tmp_path: Path, suffix: str) -> None:
    if suffix != ".npy":
        pytest.importorskip({".parquet": "pyarrow", ".safetensors": "safetensors"}[suffix])
    path, oracle = stored
    with bb.open(path) as table:
        bb.export_rows(table, tmp_path / f"rows{suffix}")
        other = bb.create(None, **{**KWARGS, "seed": 99})
        bb.import_rows(other, tmp_path / f"rows{suffix}")
        stored_ids = np.flatnonzero(oracle.contains(np.arange(1000)))
        assert other.lookup(stored_ids).tobytes() == oracle.lookup(stored_ids).tobytes()
        other.close()
