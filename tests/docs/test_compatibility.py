"""Rows of docs/compatibility.md that no other test shows, and that the tests named there and in other pages exist."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

ROOT = Path(__file__).resolve().parents[2]
_TEST = re.compile(r"`(tests/\w+/\w+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("name", ["compatibility", "optimizers", "security"])
def test_tests_that_pages_name_exist(name: str) -> None:
    named = _TEST.findall((ROOT / f"docs/{name}.md").read_text())
    assert len(named) >= 5
    for path, test in named:
        assert (ROOT / path).is_file(), path
        functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if is_test(node)}
        assert functions and (not test or test in functions), f"{path} has no {test}"


def is_test(node: Any) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


def test_every_row_of_the_compatibility_table_says_what_shows_it() -> None:
    rows = [line for line in (ROOT / "docs/compatibility.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.endswith("| shown by |")]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(rows) >= 30
    for row in rows:
        shown = row.rstrip("| ").rpartition("|")[2]
        made = re.fullmatch(r" `make (.+)`", shown)
        assert _TEST.search(shown) or (made is not None and made[1] in targets), row


def filesystem_of(path: Path) -> str:
    """By /proc/mounts: of the mount point that lies deepest above the path."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(len(point), kind) for point, kind in mounts if path.is_relative_to(point)]
    return max(above)[1]


def check_a_table_in(folder: Path) -> None:
    """Evicted, closed, checked and opened again there, it has the rows of one in RAM."""
    found = []
    for path, ram in ((folder / "table", "1MiB"), (None, None)):
        rng = np.random.default_rng(0)
        table = bb.create(path, dim=32, num_rows=10_000, ram=ram, seed=1)
        for _ in range(8):
            table.update(rng.integers(0, 10_000, 2_000), np.ones((2_000, 32), np.float32))
        if path is not None:
            assert table.stats()["evictions"] > 0
            table.close()
            assert bb.check(path) == []
            table = bb.open(path, ram=ram)
        found.append(table.get(np.arange(10_000)).tobytes())
        table.close()
    assert found[0] == found[1]


def test_a_table_on_tmpfs() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or filesystem_of(shm) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        check_a_table_in(Path(folder))


def test_a_file_system_without_direct_reads(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "ramfs", "none", str(tmp_path)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a ramfs, which knows no O_DIRECT")
    try:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="Invalid argument"):
            os.close(os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT))
        check_a_table_in(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_system_that_cannot_lock(tmp_path: Path) -> None:
    """As some mounts of NFS are: `flock` is made to say so, in a process of its own."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make such a flock with")
    source = tmp_path / "flock.c"
    source.write_text("#include <errno.h>\nint flock(int file, int how) { errno = ENOLCK; return -1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(tmp_path / "flock.so"), str(source)], check=True)
    with bb.create(tmp_path / "there", dim=2, optimizer=bb.SGD()) as table:
        table.set([1], np.ones((1, 2), np.float32))
    program = """
import sys
import bunkbed as bb
for name, options in (("new", {"create": {"dim": 2}}), ("there", {})):
    try:
        bb.open(f"{sys.argv[1]}/{name}", **options)
    except OSError as error:
        print(error)
with bb.open(f"{sys.argv[1]}/there", mode="r") as reader:
    print(reader.lookup([1]).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "LD_PRELOAD": str(tmp_path / "flock.so")},
        capture_output=True,
        text=True,
        check=True,
    )
    new, there, row = done.stdout.splitlines()
    assert "No locks available" in new and str(tmp_path / "new") in new
    assert "No locks available" in there and str(tmp_path / "there") in there
    assert row == "[[1.0, 1.0]]"
    assert bb.check(tmp_path / "there") == []


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_other_systems_are_refused(tmp_path: Path, system: str) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no CMake here")
    # As if this machine's compiler made programs for that system.
    options = [f"-DCMAKE_SYSTEM_NAME={system}", "-DCMAKE_CXX_COMPILER_FORCED=ON"]
    done = subprocess.run(
        [cmake, "-S", str(ROOT), "-B", str(tmp_path), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert f"Bunkbed runs on Linux, not on {system}: use a Linux machine" in " ".join(done.stderr.split())


def test_accelerate_trains_as_a_plain_loop_does() -> None:
    """`prepare`, `accumulate`, `backward` and `clip_grad_norm_` of Accelerate on one process, bit for bit."""
    torch = pytest.importorskip("torch")
    accelerate = pytest.importorskip("accelerate")
    from bunkbed.torch import Embedding, Optimizer

    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(16) % 5, torch.ones(16)), batch_size=4
    )

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Embedding(20, 4, optimizer=bb.Adam(lr=0.1), seed=0), torch.nn.Linear(4, 1))
        return model, Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_of(model: Any, ids: Any, wanted: Any) -> Any:
        return ((model(ids)[:, 0] - wanted) ** 2).mean()

    plain, optimizer = make()
    for index, batch in enumerate(batches):
        (loss_of(plain, *batch) / 2).backward()
        if index % 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*make(), batches)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, *batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert model[0].table.step == plain[0].table.step == 2
    everything = np.arange(20)
    assert model[0].table.get(everything).tobytes() == plain[0].table.get(everything).tobytes()
    assert torch.equal(model[1].weight, plain[1].weight)
