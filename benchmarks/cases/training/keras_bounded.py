"""A 6 GiB table (float32 rows with Adam's state), fully written, in Keras inside a memory cgroup of 1.5 GiB.

The child trains it in ``fit``, saves the model, loads it again, exports the stored rows to Parquet and the used rows
of a second table to a SavedModel, all inside the limit; the kernel's own peak is reported.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings, missing
from bunkbed.core.budget import parse_bytes

DIM = 64
LIMIT = "1.5GiB"


def bounded(settings: Settings) -> list[Figure]:
    """Whether everything took place inside the limit, and how long each part took."""
    size = parse_bytes(settings.pick("24MiB", "1GiB", "6GiB"))
    rows, ram = size // (DIM * 12), settings.pick("8MiB", "128MiB", "256MiB")
    steps = settings.pick(4, 50, 200)
    why_not = common.MemoryLimit.why_not()
    if why_not and not settings.tiny:
        return [missing("peak memory in Keras", f"no memory limit: {why_not}")]
    with common.workspace(settings.dir, int(size * 2.5)) as folder:
        with bb.create(folder / "table", dim=DIM, num_rows=rows, optimizer=bb.Adam(), ram="1GiB") as table:
            common.fill(table)
        common.forget_pages(folder)
        command = [
            "-m",
            "benchmarks.cases.training.keras_bounded",
            str(folder),
            "--ram",
            ram,
            "--steps",
            str(steps),
            "--rows",
            str(rows),
        ]
        if why_not:
            return _figures(common.Child(command), None, size)
        with common.MemoryLimit(parse_bytes(LIMIT)) as limit:
            return _figures(common.Child(command, limit), limit, size)


def _figures(child: common.Child, limit: common.MemoryLimit | None, size: int) -> list[Figure]:
    parts = {name: child.ask(part=name) for name in ("train", "save", "load", "parquet", "savedmodel")}
    child.close()
    assert parts["load"]["agrees"] and parts["parquet"]["rows"] == size // (DIM * 12), parts
    note = f"a table of {common.bb_bytes(size)}; {parts['savedmodel']['rows']:,} used rows in the SavedModel"
    figures = [Figure(f"{name}, in Keras", part["seconds"], "s") for name, part in parts.items()]
    if limit is not None:
        peak = limit.peak_bytes() / common.MIB
        figures.insert(
            0, Figure("peak of the memory cgroup", peak, "MiB", at_most=parse_bytes(LIMIT) / common.MIB, note=note)
        )
        figures.insert(1, Figure("times the limit was reached", limit.refusals(), "", note="page cache counts"))
    return figures


def _serve(options: argparse.Namespace) -> None:
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    from bunkbed.keras import Embedding, export

    folder: Path = options.folder
    rng = np.random.default_rng(0)

    def model_on(path: Path, rows: int | None) -> Any:
        ids = keras.Input((), dtype="int64")
        layer = Embedding(rows, DIM, path=path, ram=options.ram, name="rows")
        model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
        model.compile(keras.optimizers.Adam(1e-3), "mse")
        return model

    rows = options.rows
    sample = common.zipf(rows)
    made: dict[str, Any] = {}

    def train() -> dict[str, Any]:
        made["model"] = model = model_on(folder / "table", rows)
        ids = sample(rng, options.steps * 4_096)
        model.fit(ids, np.ones(len(ids), np.float32), batch_size=4_096, verbose=0)
        return {"steps": model.get_layer("rows").table.step}

    def save() -> dict[str, Any]:
        made["model"].save(folder / "model.keras")
        made["ids"] = sample(rng, 1_000)
        made["expected"] = made["model"].predict(made["ids"], verbose=0)
        made.pop("model").get_layer("rows").table.close()
        return {}

    def load() -> dict[str, Any]:
        made["model"] = keras.models.load_model(folder / "model.keras")
        return {"agrees": bool(np.array_equal(made["model"].predict(made["ids"], verbose=0), made["expected"]))}

    def parquet() -> dict[str, Any]:
        import pyarrow.parquet

        bb.export_rows(made["model"].get_layer("rows").table, folder / "rows.parquet")
        made["model"].get_layer("rows").table.close()
        return {"rows": pyarrow.parquet.read_metadata(folder / "rows.parquet").num_rows}

    def savedmodel() -> dict[str, Any]:
        model = model_on(folder / "lazy", None)  # any int64 id: only what was used is there to be exported
        ids = rng.integers(0, 2**62, options.steps * 512)
        model.fit(ids, np.ones(len(ids), np.float32), batch_size=4_096, verbose=0)
        export(model, folder / "saved", max_bytes="256MiB", verbose=False)
        table = model.get_layer("rows").table
        stored = len(table)
        table.close()
        return {"rows": stored}

    parts = {"train": train, "save": save, "load": load, "parquet": parquet, "savedmodel": savedmodel}

    def handle(part: str) -> dict[str, Any]:
        began = time.perf_counter()
        answer = parts[part]()
        return {**answer, "seconds": time.perf_counter() - began}

    common.serve(handle)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ram", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    _serve(parser.parse_args())
