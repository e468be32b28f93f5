"""How does a server read rows while another process trains them?

    python examples/torch/online_reader.py                            # starts a trainer itself

    python examples/torch/online_reader.py --train --folder live      # or by hand, in two terminals
    python examples/torch/online_reader.py --follow --folder live

The trainer commits every few steps. The reader opens the same files while the trainer runs, and sees the last commit.
`refresh()` moves the reader to the newest complete commit, at a cost that grows with the changes. Several tables and
dense weights of the same moment need a `bunkbed.Run`, which a server reopens instead.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import bunkbed as bb

USERS, FEATURES, BATCH = 2_000, 8, 256
TASTE = np.random.default_rng(7).standard_normal((USERS, FEATURES)).astype(np.float32)


def clicks(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return users, the features of the shown items (float32[count, 8]), and clicks (float32[count])."""
    rng = np.random.default_rng(seed)
    users = rng.integers(0, USERS, count)
    shown = rng.standard_normal((count, FEATURES)).astype(np.float32)
    chance = 1 / (1 + np.exp(-(TASTE[users] * shown).sum(1)))
    return users, shown, (rng.random(count) < chance).astype(np.float32)


def log_loss(rows: np.ndarray, shown: np.ndarray, clicked: np.ndarray) -> float:
    logits = (rows * shown).sum(1)
    return float(np.mean(np.logaddexp(0, logits) - clicked * logits))


def train(folder: Path, commits: int, steps: int) -> None:
    """Train on the stream of clicks; the meta of each commit has the loss that the reader must find."""
    import torch

    from bunkbed.torch import Embedding, Optimizer

    torch.set_num_threads(1)
    users = Embedding(USERS, FEATURES, path=folder / "users", ram="16MiB", optimizer=bb.Adam(0.05), init=bb.Zeros())
    optimizer = Optimizer(users)
    seen = clicks(2_000, seed=0)
    for number in range(commits):
        for step in range(steps):
            ids, shown, clicked = (torch.from_numpy(part) for part in clicks(BATCH, seed=1 + number * steps + step))
            logits = (users(ids) * shown).sum(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        said = log_loss(users.table.get(seen[0]), *seen[1:])
        users.table.commit(meta={"step": users.table.step, "loss": said, "done": number + 1 == commits})
    users.table.close()


def follow(folder: Path, timeout_s: float) -> None:
    """Act as a server: answer from the current rows, and refresh between requests."""
    deadline = time.monotonic() + timeout_s
    reader = None
    while reader is None:
        try:
            reader = bb.open(folder / "users", mode="r", ram="4MiB")
        except (FileNotFoundError, bb.FormatError):  # not created yet, or being created
            wait(deadline)
    requests = clicks(2_000, seed=0)
    epoch = -1
    with reader:
        while True:
            if reader.refresh() == epoch or not reader.meta:
                wait(deadline)
                continue
            epoch = reader.epoch
            rows = reader.lookup(requests[0])  # the cache keeps the rows that requests want
            found, meta = log_loss(rows, *requests[1:]), reader.meta
            same = found == meta["loss"]
            print(f"epoch {epoch}: rows of step {meta['step']}, loss {found:.4f}, as committed: {same}", flush=True)
            if meta["done"]:
                return


def wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise SystemExit("the trainer has not committed for too long")
    time.sleep(0.01)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path)
    options.add_argument("--train", action="store_true", help="only train")
    options.add_argument("--follow", action="store_true", help="only follow")
    options.add_argument("--commits", type=int, default=10)
    options.add_argument("--steps", type=int, default=50, help="of each commit")
    options.add_argument("--timeout", type=float, default=120, help="seconds after which following ends in any case")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        if given.train:
            return train(folder, given.commits, given.steps)
        if given.follow:
            return follow(folder, given.timeout)
        counts = ["--commits", str(given.commits), "--steps", str(given.steps)]
        trainer = subprocess.Popen([sys.executable, __file__, "--train", "--folder", str(folder), *counts])
        try:
            follow(folder, given.timeout)
            if trainer.wait(given.timeout):
                raise SystemExit("the trainer failed")
        finally:
            trainer.kill()
            trainer.wait()


if __name__ == "__main__":
    main()
