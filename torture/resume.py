"""A training run with PyTorch that is repeatedly killed and resumed ends with the bits of an uninterrupted run."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from torture.parts import Child, Progress, Result, Size, folder

ROWS = 400
DIM = 16
BATCH = 64
COMMIT_EVERY = 7


def _train(path: Path, steps: int, send: Callable[[Any], None]) -> bytes:
    """Train from the run's last commit to the end; return all bytes of the final state."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from bunkbed.torch import Embedding, Optimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with bb.Run(path, ram="400KiB") as run:
        layers = [
            Embedding(
                ROWS,
                DIM,
                table=run.table(name, create={"dim": DIM, "num_rows": ROWS, "optimizer": optimizer, "dtype": dtype}),
            )
            for name, optimizer, dtype in [
                ("user", bb.Adam(lr=0.01), "bfloat16"),
                ("item", bb.Adagrad(lr=0.1), "float32"),
            ]
        ]
        model = torch.nn.Sequential(torch.nn.Linear(DIM, DIM), torch.nn.ReLU(), torch.nn.Linear(DIM, 1))
        whole = torch.nn.ModuleList([*layers, model])
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = Optimizer(whole, dense=dense)
        first = 0
        if "dense.pt" in run.files:
            saved = torch.load(io.BytesIO(run.read("dense.pt")), weights_only=True)
            model.load_state_dict(saved["model"])
            dense.load_state_dict(saved["dense"])
            first = saved["step"]
        for step in range(first, steps):
            rng = np.random.default_rng(step)
            ids = torch.from_numpy((ROWS * rng.random((2, BATCH)) ** 2).astype(np.int64))
            wanted = torch.from_numpy(rng.standard_normal((BATCH, 1), dtype=np.float32))
            loss = torch.nn.functional.mse_loss(model(layers[0](ids[0]) * layers[1](ids[1])), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            send(step)
            if (step + 1) % COMMIT_EVERY == 0 or step + 1 == steps:
                out = io.BytesIO()
                torch.save({"model": model.state_dict(), "dense": dense.state_dict(), "step": step + 1}, out)
                run.begin_commit(files={"dense.pt": out.getvalue()})
        parts = [p.detach().numpy().tobytes() for p in model.parameters()]
        for name in ("user", "item"):
            table = run.table(name)
            parts += [table.get(np.arange(ROWS), slot=slot).tobytes() for slot in ("weight", *table.slots)]
        return b"".join(parts)


def run(size: Size) -> list[Result]:
    kills = size.of(20, least=3)
    steps = 12 * kills + 30
    import torch  # noqa: F401  # imported once, not in every child

    result = Result("training killed and resumed: the same bits at the end")
    survived = Result("kills of a training run survived", tried=kills)
    with folder() as root:
        child = Child(lambda send: _train(root / "undisturbed", steps, send), size.seconds)
        if child.wait() != 0:
            raise RuntimeError(f"the undisturbed run ended: {child.sent[-1:]}")
        wanted = child.sent[-1]
        chance = random.Random(size.seed)
        far = 0
        progress = Progress("resume", kills)
        for number in range(kills):
            progress.show(number)
            child = Child(lambda send: _train(root / "killed", steps, send), size.seconds)
            until = far + chance.randrange(2, 20)
            for step in child.receive():
                if not isinstance(step, int):
                    break
                far = max(far, step)
                if step >= min(until, steps - 2):
                    break
            time.sleep(chance.random() * 0.005)
            child.kill()
            status = child.wait()
            survived.passed += status == -9
            if status != -9:
                survived.fail(f"the run ended by itself with status {status}: {str(child.sent[-1:])[:200]}")
        child = Child(lambda send: _train(root / "killed", steps, send), size.seconds)
        status = child.wait()
        result.tried = 1
        result.passed = int(status == 0 and child.sent[-1] == wanted)
        if not result.passed:
            result.fail(f"status {status}, {str(child.sent[-1:])[:200]}")
    result.note = f"{steps} steps, two tables and a dense model with Adam, commits every {COMMIT_EVERY} steps"
    return [result, survived]
