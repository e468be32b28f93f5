"""Two wheels of the project in turns: is the new state as fast as the old one?

``python -m benchmarks.cases.wheels OLD.whl NEW.whl`` installs each wheel into a folder of its own and keeps a process
of each for every case. Both take the same steps, a turn each, and the order changes every round. A ratio above 1: the
new wheel is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

DIM, BATCH = 64, 16_384
#: Case -> (steps of a turn, rows, budget).
CASES = {
    "adam": (12, 1_000_000, "2GiB"),
    "lookup": (40, 1_000_000, "2GiB"),
    "beyond-ram": (6, 1_000_000, "96MiB"),
    "commit-stall": (6, 200_000, "1GiB"),
    "import": (2, 400_000, "96MiB"),
    "train": (1, 0, ""),
}


# ---- One side: a process with one of the wheels


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def steps_of(case: str, folder: Path, stack: ExitStack) -> Callable[[int], float]:
    """A function of the number of a step; it takes the step and returns its seconds."""
    if case == "train":
        return training(folder)
    import bunkbed as bb

    _, rows, ram = CASES[case]
    made = {"num_rows": rows, "dim": DIM, "optimizer": bb.Adam(1e-3), "ram": ram}
    if case == "import":
        source = folder / "rows.npy"
        np.save(source, np.zeros((rows, DIM), np.float32))

        def load(number: int) -> float:
            with bb.create(folder / f"import-{number}", **made) as table:
                return seconds_of(lambda: bb.import_rows(table, source))

        return load
    table = bb.create(folder / case, **made)
    stack.callback(table.close, commit=False)
    rng = np.random.default_rng(1)
    share = np.cumsum(1 / np.arange(1, rows + 1) ** 1.05)
    batches = [np.searchsorted(share, rng.random(BATCH) * share[-1]).astype(np.int64) for _ in range(64)]
    grads = np.full((BATCH, DIM), 1e-3, np.float32)
    for ids in np.array_split(np.arange(rows), 32):
        table.set(ids, np.zeros((len(ids), DIM), np.float32))
    table.commit()
    for ids in batches:
        table.update(ids, grads)

    def step(number: int) -> float:
        ids = batches[number % len(batches)]
        if case == "lookup":
            return seconds_of(lambda: table.lookup(ids, touch=True))
        if case != "commit-stall":
            return seconds_of(lambda: (table.lookup(ids, touch=True), table.update(ids, grads)))
        pending = table.begin_commit(meta={"number": number})  # the slowest of the steps next to it
        slowest = max(seconds_of(lambda: table.update(ids, grads)) for _ in range(20))
        pending.wait()
        return slowest

    return step


def training(folder: Path) -> Callable[[int], float]:
    """`bunkbed train` on generated pairs, in a process of its own."""
    rng = np.random.default_rng(2)
    pairs = np.unique(np.stack([rng.integers(0, 4000, 200_000), np.minimum(rng.zipf(1.3, 200_000), 3000)], 1), axis=0)
    np.savetxt(folder / "pairs.csv", pairs, "%d", ",", header="user,item", comments="")

    def step(number: int) -> float:
        command = [
            sys.executable,
            "-m",
            "bunkbed",
            "train",
            str(folder / "pairs.csv"),
            "--out",
            str(folder / f"run-{number}"),
        ]
        command += ["--epochs", "2", "--dim", "32", "--ram", "256MiB"]
        return seconds_of(lambda: subprocess.run(command, check=True, capture_output=True))

    return step


def serve(case: str) -> None:
    """Reads a number of steps a line, and answers with their seconds."""
    with tempfile.TemporaryDirectory(dir=os.environ["WHEELS_DIR"]) as folder, ExitStack() as stack:
        step, number = steps_of(case, Path(folder), stack), 0
        for line in sys.stdin:
            print(json.dumps([step(number + i) for i in range(int(line))]), flush=True)
            number += int(line)


# ---- Both sides in turns


class Side:
    """The process of one wheel for one case."""

    def __init__(self, packages: Path, case: str, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(packages), "PYTHONSAFEPATH": "1", "WHEELS_DIR": str(folder)}
        command = [sys.executable, __file__, "--serve", case]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
        )

    def turn(self, steps: int) -> float:
        """The median of so many steps."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(steps, file=self.process.stdin, flush=True)
        return statistics.median(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(case: str, packages: list[Path], folder: Path, rounds: int) -> str:
    """A line of the table: old over new, round by round."""
    sides = [Side(each, case, folder) for each in packages]
    found: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds = {which: sides[which].turn(CASES[case][0]) for which in order}
        if number > 0:  # the first round warms up
            for which in order:
                found[which].append(seconds[which])
    for side in sides:
        side.close()
    ratios = [old / new for old, new in zip(*found, strict=True)]
    old, new = (statistics.median(each) * 1e3 for each in found)
    return f"{case:13} {old:9.2f} {new:9.2f} {statistics.median(ratios):6.2f}  {min(ratios):.2f} to {max(ratios):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path, help="the old wheel and the new one")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each case (default 9)")
    parser.add_argument(
        "--cases", nargs="*", default=list(CASES), choices=list(CASES), help="which cases (default all)"
    )
    parser.add_argument("--dir", type=Path, help="where temporary files go")
    parser.add_argument("--serve", choices=list(CASES), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve is not None:
        return serve(chosen.serve)
    if len(chosen.wheels) != 2:
        parser.error("two wheels are wanted: the old one and the new one")
    with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
        packages = [Path(folder) / side for side in ("old", "new")]
        for wheel, target in zip(chosen.wheels, packages, strict=True):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
            subprocess.run(pip, check=True)
        print(f"{'case':13} {'old, ms':>9} {'new, ms':>9} {'ratio':>6}  range over {chosen.rounds} rounds", flush=True)
        for case in chosen.cases:
            print(compare(case, packages, Path(folder), chosen.rounds), flush=True)


if __name__ == "__main__":
    main()
