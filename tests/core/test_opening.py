"""Threads of one process that make, open and close the same tables."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.table.table import Table

THREADS = 6
ROUNDS = 12
FACTS: dict[str, Any] = {"dim": 2, "num_rows": THREADS, "optimizer": bb.SGD(lr=1.0), "init": bb.Zeros()}
#: Seconds that a thread is given to do what it must not do yet.
A_WHILE_S = 0.3


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def plain(path: Path) -> Any:
    return bb.open(path, ram="16MiB", create=FACTS)


def sharded(path: Path) -> Any:
    return bb.ShardedTable.open(path, ram="32MiB", create=dict(FACTS, shards=2))


def count(table: Any, row: int) -> None:
    """Add 1 to a row."""
    table.update(np.array([row]), np.full((1, 2), -1.0, np.float32))


def all_of(work: Callable[[int], None]) -> None:
    """Run `work` in every thread at once; raise the error of any call."""
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        start.wait(60)
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        for one in [pool.submit(run, number) for number in range(THREADS)]:
            one.result(120)


@pytest.mark.parametrize("opened", [plain, sharded])
def test_threads_that_open_and_close_one_path_lose_no_row(opened: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "user"

    def work(number: int) -> None:
        for _ in range(ROUNDS):
            with opened(path) as table:
                count(table, number)

    all_of(work)
    with bb.open(path, mode="r") as table:
        assert table.lookup(np.arange(THREADS))[:, 0].tolist() == [ROUNDS] * THREADS
    assert [problem.severity for problem in bb.check(path)] == []


@pytest.mark.parametrize("opened", [plain, sharded])
def test_a_path_opens_again_only_after_its_last_close(
    opened: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "user"
    close_core = Table.release
    second: list[Any] = []
    other = threading.Thread(target=lambda: second.append(opened(path)))

    def close_slowly(table: Table) -> None:
        if not other.ident:
            other.start()
            other.join(A_WHILE_S)
        close_core(table)

    with opened(path) as table:
        count(table, 3)
        monkeypatch.setattr(Table, "release", close_slowly)
    other.join(60)
    count(second[0], 3)
    second[0].close()
    assert second[0] is not table
    with bb.open(path, mode="r") as table:
        assert table.lookup(np.array([3]))[0, 0] == 2


@pytest.mark.parametrize("opened", [plain, sharded])
def test_a_close_that_another_opener_outlives_is_durable(opened: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "user"
    first, second = opened(path), opened(path)
    assert first is second
    count(first, 1)
    first.close()
    with bb.open(path, mode="r") as reader:
        assert reader.lookup(np.array([1]))[0, 0] == 1
    count(second, 1)
    second.close(commit=False)
    assert second.closed
    with bb.open(path, mode="r") as reader:
        assert reader.lookup(np.array([1]))[0, 0] == 1


def test_a_close_whose_commit_fails_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "user"
    first, second = plain(path), plain(path)
    count(first, 1)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> int:
            raise OSError("no space left on device")

        patch.setattr(Table, "_commit", fail)
        with pytest.raises(OSError, match="no space left"):
            first.close()
    first.close()
    assert not second.closed
    count(second, 1)
    second.close()
    with bb.open(path, mode="r") as reader:
        assert reader.lookup(np.array([1]))[0, 0] == 2


def test_threads_that_make_one_path_agree_on_one_table(tmp_path: Path) -> None:
    made: list[Any] = []
    refused: list[str] = []

    def work(number: int) -> None:
        if number % 2:
            made.append(plain(tmp_path / "user"))
            return
        try:
            made.append(bb.create(tmp_path / "user", ram="16MiB", **FACTS))
        except FileExistsError as error:
            refused.append(str(error))

    all_of(work)
    assert len({id(table) for table in made}) == 1
    assert len(made) + len(refused) == THREADS
    for table in made:
        assert not table.closed
        table.close()
    assert table.closed


def test_closing_one_table_does_not_hold_up_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Table._commit
    is_opened = threading.Event()

    def commit_slowly(table: Table, meta: Any, keep: Any) -> int:
        assert table.name != "slow" or is_opened.wait(60), "another path was not opened during this commit"
        return commit(table, meta, keep)

    monkeypatch.setattr(Table, "_commit", commit_slowly)
    slow = plain(tmp_path / "slow")
    count(slow, 0)
    closing = threading.Thread(target=slow.close)
    closing.start()
    with plain(tmp_path / "quick") as quick:
        count(quick, 0)
    is_opened.set()
    closing.join(60)
    assert slow.closed


# ---- a shared budget


def test_a_table_that_is_closing_is_not_asked_for_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = bb.Budget("64MiB")
    closing, stays = (bb.create(tmp_path / name, ram=budget, **FACTS) for name in ("closing", "stays"))
    leave = bb.Budget.leave
    made: list[Any] = []
    is_first = True

    def leave_late(self: bb.Budget, member: Any) -> None:  # the core is closed by now
        nonlocal is_first
        if is_first and member is closing:
            is_first = False
            made.append(bb.create(tmp_path / "new", ram=budget, **FACTS))
            assert budget.used_bytes <= budget.total_bytes
        leave(self, member)

    monkeypatch.setattr(bb.Budget, "leave", leave_late)
    closing.close()
    assert [table.name for table in made] == ["new"]
    assert budget.used_bytes == stays.ram_bytes + made[0].ram_bytes <= budget.total_bytes
    stays.close()
    made[0].close()
    assert budget.used_bytes == 0


def test_a_table_waits_for_the_bytes_of_one_that_is_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dict(FACTS, num_rows=None)  # takes all that there is
    with bb.create(tmp_path / "probe", ram="64MiB", **facts) as probe:
        budget = bb.Budget(probe.spec.minimum_ram(0, True) * 3 // 2)
    closing = bb.create(tmp_path / "closing", ram=budget, **facts)
    with pytest.raises(MemoryError, match="too small for 2 tables"):
        bb.create(tmp_path / "refused", ram=budget, **facts)
    leave = bb.Budget.leave
    made: list[Any] = []
    other = threading.Thread(target=lambda: made.append(bb.create(tmp_path / "new", ram=budget, **facts)))

    def leave_late(self: bb.Budget, member: Any) -> None:
        if member is closing:
            other.start()
            other.join(A_WHILE_S)
            assert not made
        leave(self, member)

    monkeypatch.setattr(bb.Budget, "leave", leave_late)
    closing.close()
    other.join(60)
    assert [table.name for table in made] == ["new"]
    made[0].close()


def test_threads_that_share_a_budget_make_and_close_tables(tmp_path: Path) -> None:
    budget = bb.Budget("96MiB")
    is_over = threading.Event()
    most = 0

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.001):
            most = max(most, budget.used_bytes)

    watching = threading.Thread(target=watch)
    watching.start()

    def work(number: int) -> None:
        for turn in range(ROUNDS // 2):
            with bb.create(tmp_path / f"{number}-{turn}", ram=budget, **FACTS) as table:
                count(table, number)

    try:
        all_of(work)
    finally:
        is_over.set()
        watching.join(60)
    assert 0 < most <= budget.total_bytes
    assert budget.used_bytes == 0


def test_tables_being_opened_do_not_have_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dict(FACTS, num_rows=None)
    budget = bb.Budget("64MiB")
    given: dict[str, int] = {}
    create = bb._native.create

    def create_slowly(path: str, name: str, spec: Any, ram_bytes: int, *others: Any) -> Any:
        given[name] = ram_bytes
        if name == "first":
            other.start()
            other.join(A_WHILE_S)
        native = create(path, name, spec, ram_bytes, *others)
        if name == "second":  # both cores are there, before it has joined
            assert is_made.wait(60)
            shares[name] = ram_bytes + made["first"].stats()["ram_budget_bytes"]
        return native

    made: dict[str, Any] = {}
    shares: dict[str, int] = {}
    is_made = threading.Event()

    def make(name: str) -> None:
        made[name] = bb.create(tmp_path / name, ram=budget, **facts)

    other = threading.Thread(target=make, args=("second",))
    monkeypatch.setattr(bb._native, "create", create_slowly)
    make("first")
    is_made.set()
    other.join(60)
    assert 0 < shares["second"] <= budget.total_bytes
    for table in made.values():
        table.close()


def test_a_budget_gets_back_the_bytes_of_a_table_that_could_not_be_opened(tmp_path: Path) -> None:
    budget = bb.Budget("64MiB")
    with bb.create(tmp_path / "user", ram=budget, **FACTS):
        pass
    with pytest.raises(ValueError, match="dim is 2"):
        bb.open(tmp_path / "user", ram=budget, create={"dim": 3})
    with pytest.raises(FileExistsError):
        bb.create(tmp_path / "user", ram=budget, **FACTS)
    assert budget.used_bytes == 0


def test_a_table_closes_although_a_full_disk_keeps_another_from_growing(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"dim": 16, "num_rows": 50_000, "init": bb.Zeros(), "optimizer": bb.SGD(lr=1.0)}
    budget = bb.Budget("8MiB")
    ids = np.arange(facts["num_rows"])
    vfs = bb._native.FaultVfs()
    bb._native.use_vfs(vfs)
    try:
        user = bb.create(tmp_path / "user", ram=budget, **facts)
        item = bb.create(tmp_path / "item", ram=budget, **facts)
        for part in np.split(ids, 50):
            item.update(part, np.ones((len(part), 16), np.float32))
        share = item.stats()["ram_budget_bytes"]
        vfs.set_fault(1, "error", errno.ENOSPC)
        vfs.repeat_every(1)
        user.close(commit=False)
    finally:
        vfs.heal()
        bb._native.use_vfs(None)
    assert vfs.struck() > 0
    assert user.closed
    assert item.stats()["ram_budget_bytes"] == share
    item.close()
    assert budget.used_bytes == 0
    with bb.open(tmp_path / "item", mode="r", ram="8MiB") as table:
        assert (table.lookup(ids) == -1).all()


CREATE = """
import subprocess
import sys
import bunkbed as bb

for number in range(60):
    bb.create(f"{sys.argv[1]}/{number}", dim=2, num_rows=10, ram="4MiB").close()
    print(number + 1, flush=True)
"""


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [("r", "a reader waits until its writer has made it"), ("w", "make one with bb.create, or give")],
)
def test_where_nothing_is_the_error_says_what_to_do(mode: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no table at .*none; {remedy}"):
        bb.open(tmp_path / "none", mode=mode, ram="4MiB")  # type: ignore[arg-type]


def test_a_table_that_another_process_is_making_is_not_there_yet(tmp_path: Path) -> None:
    opened, coming = 0, [0]
    with subprocess.Popen([sys.executable, "-c", CREATE, str(tmp_path)], stdout=subprocess.PIPE) as process:
        following = threading.Thread(target=lambda: coming.extend(int(line) for line in process.stdout or ()))
        following.start()
        while process.poll() is None:
            try:
                bb.open(tmp_path / str(coming[-1]), mode="r", ram="4MiB").close()
                opened += 1
            except FileNotFoundError as error:
                assert "no table at" in str(error)
        following.join(60)
    assert process.returncode == 0
    assert opened > 0


def test_a_folder_of_other_things_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with pytest.raises(FileNotFoundError, match="it holds no commit yet; make one"):
        bb.open(tmp_path, mode="r")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(bb.FormatError, match="is not a bunkbed table: it holds no manifest"):
        bb.open(tmp_path, mode="r")
