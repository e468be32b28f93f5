"""What a newcomer waits for, command by command: ``python packaging/newcomer.py``.

Two paths, each in an empty folder, with the commands that the README and the pages name:

1. a first trained model: a clone, ``make demo`` (which trains one twice and compares), then `bunkbed train` on a file
   of one's own and `bunkbed recommend`;
2. a first lookup: a wheel, as a release has it, into a fresh virtual environment, then the README's lines of Python.

Packages come from pip's index and cache as they are configured; what is already cached makes it faster.
The clone is of this repository as committed. A step that fails ends the run with its output.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Step:
    """One command and what it took."""

    command: str
    seconds: float


def first_python(readme: Path) -> str:
    """The README's first lookup, as it stands there."""
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.M | re.S)
    return next(block for block in blocks if "bb.create" in block)


def take(commands: Sequence[str], folder: Path) -> list[Step]:
    """Runs shell commands one after another, as a newcomer types them."""
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    steps = []
    for command in commands:
        print(f"$ {command}", flush=True)
        begin = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        steps.append(Step(command, time.monotonic() - begin))
        if done.returncode != 0:
            sys.exit(f"{done.stdout}\n`{command}` ended with {done.returncode} after {steps[-1].seconds:.0f} s")
        print(f"  {steps[-1].seconds:.1f} s", flush=True)
    return steps


def write_ratings(path: Path) -> None:
    """30,000 pairs of 1,000 users and 500 items, a newcomer's own file."""
    rng = np.random.default_rng(0)
    pairs = np.unique(np.stack([rng.integers(0, 1_000, 30_000), rng.integers(0, 500, 30_000)], 1), axis=0)
    with path.open("w", encoding="utf-8") as file:
        file.write("user,item\n")
        file.writelines(f"{user},{item}\n" for user, item in pairs.tolist())


def trained_model(folder: Path) -> list[Step]:
    """From nothing to recommendations of one's own model."""
    write_ratings(folder / "ratings.csv")
    bunkbed = "bunkbed/.venv/bin/bunkbed"
    return take(
        [
            f"git clone --quiet {REPOSITORY} bunkbed",
            "make -C bunkbed demo",
            f"{bunkbed} train ratings.csv --user-col user --item-col item --ram 256MiB --out runs/first",
            f"{bunkbed} recommend runs/first --user 42 -k 10",
        ],
        folder,
    )


def lookup(folder: Path, wheel: Path) -> list[Step]:
    """From a wheel to rows."""
    (folder / "first.py").write_text(first_python(REPOSITORY / "README.md"), encoding="utf-8")
    return take(
        [f"{sys.executable} -m venv env", f"env/bin/pip install --quiet {wheel}", "env/bin/python first.py"], folder
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bunkbed-newcomer-") as name:
        folder = Path(name)
        paths = {"clone to a first trained model": trained_model(folder)}
        wheels = list((folder / "bunkbed" / "dist").glob("*.whl"))
        paths["install to a first lookup"] = lookup(folder, wheels[0])
    for title, steps in paths.items():
        total = sum(step.seconds for step in steps)
        print(f"{title}: {len(steps)} commands, {total:.0f} s")
        for step in steps:
            print(f"  {step.seconds:6.1f} s  {step.command}")


if __name__ == "__main__":
    main()
