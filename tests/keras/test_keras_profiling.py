"""What tables do shows in TensorFlow's profiler and in TensorBoard."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
import bunkbed.keras
from bunkbed.keras import Embedding, lookahead
from keras_setup import BATCH, DIM, ROWS, SEED, batches, keras, row_model, stored_dataset, stored_layers, tf


@pytest.fixture
def on_disk(tmp_path):
    return stored_layers(tmp_path / "user")


def ranges_of(logs: Path) -> Counter[str]:
    """How often each range of ours is in what the profiler wrote."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (file,) = logs.glob("plugins/profile/*/*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    names = [
        plane.event_metadata[event.metadata_id].name
        for plane in space.planes
        for line in plane.lines
        for event in line.events
    ]
    return Counter(name for name in names if name.startswith("bunkbed"))


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_lookups_updates_staging_and_stalls_show_in_the_profiler(on_disk, tmp_path, eager: bool) -> None:
    layer = on_disk()
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
    model.fit(stored_dataset(6, seed=1), verbose=0)  # traces the graph

    tf.profiler.experimental.start(str(tmp_path / "plain"))
    model.fit(stored_dataset(6, seed=2), verbose=0)
    tf.profiler.experimental.stop()
    found = ranges_of(tmp_path / "plain")
    assert found["bunkbed lookup user"] == found["bunkbed gradients user"] == found["bunkbed update user"] == 6
    # Other ids: every lookup waits for reads, and an update never, whose rows are there by then.
    assert found["bunkbed stall user"] == 6
    assert "bunkbed stage user" not in found

    tf.profiler.experimental.start(str(tmp_path / "ahead"))
    model.fit(lookahead(stored_dataset(6, seed=3), model), verbose=0)
    tf.profiler.experimental.stop()
    found = ranges_of(tmp_path / "ahead")
    assert found["bunkbed stage user"] == 12  # each batch is planned once, and begins once
    assert found["bunkbed update user"] == 6
    layer.table.close(commit=False)


def test_bags_show_in_the_profiler_by_the_tables_name(tmp_path) -> None:
    table = bb.create(tmp_path / "words", dim=DIM, num_rows=ROWS, optimizer=bb.SGD(0.1))
    layer = Embedding(ROWS, DIM, table=table, combiner="mean")
    tf.profiler.experimental.start(str(tmp_path / "logs"))
    layer(np.array([[1, 2, 2]]))
    tf.profiler.experimental.stop()
    assert ranges_of(tmp_path / "logs") == {"bunkbed bags words": 1}
    table.close()


def scalars_of(logs: Path) -> dict[str, list[tuple[int, float]]]:
    """tag -> (step, value) of what TensorBoard would read."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted((logs / "tables").glob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
    return found


def test_tensorboard_has_each_tables_scalars_by_epoch(on_disk, tmp_path) -> None:
    layer = on_disk()
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    before = layer.table.stats()
    model.fit(stored_dataset(30), epochs=2, verbose=0, callbacks=[bunkbed.keras.TensorBoard(tmp_path / "logs")])
    after = layer.table.stats()
    found = scalars_of(tmp_path / "logs")
    assert set(found) == {
        f"user/{name}"
        for name in (
            "hit_rate", "misses", "evictions", "staged_rows", "stall_s", "read_bytes", "written_bytes", "steps_per_s",
            "stored_rows", "dirty_rows", "ram_bytes", "disk_bytes", "snapshot_bytes",
        )
    }  # fmt: skip
    first = layer.table.step - 60
    assert all([step for step, _ in values] == [first + 30, first + 60] for values in found.values())
    for name in ("misses", "evictions", "read_bytes", "stall_s"):
        assert sum(value for _, value in found[f"user/{name}"]) == pytest.approx(after[name] - before[name], rel=1e-5)
    assert found["user/misses"][0][1] > 5000 and sum(value for _, value in found["user/evictions"]) > 500
    wanted = after["hits"] + after["misses"] - before["hits"] - before["misses"]
    assert 0.0 < found["user/hit_rate"][0][1] < found["user/hit_rate"][1][1] < 1.0
    assert found["user/hit_rate"][0][1] < (after["hits"] - before["hits"]) / wanted < found["user/hit_rate"][1][1]
    assert found["user/ram_bytes"][1][1] == pytest.approx(after["ram_bytes"], rel=1e-6)
    assert found["user/stored_rows"][1][1] == 20_000
    assert all(rate > 0 for _, rate in found["user/steps_per_s"])
    layer.table.close(commit=False)


def test_tensorboard_writes_every_few_batches_and_tables_that_fit_makes(tmp_path) -> None:
    ids, targets = batches(10)
    layer = Embedding(ROWS, DIM, seed=SEED)
    again = Embedding(ROWS, DIM, optimizer=bb.SGD(0.1))
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, layer(inputs) + again(inputs))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    again.table._name = "again"
    callback = bunkbed.keras.TensorBoard(tmp_path / "logs", update_freq=4)
    model.fit(ids, targets, batch_size=BATCH, verbose=0, callbacks=[callback])
    found = scalars_of(tmp_path / "logs")
    assert [step for step, _ in found["table/stored_rows"]] == [4, 8, 10]
    assert [step for step, _ in found["again/stored_rows"]] == [4, 8, 10]
    assert found["table/stored_rows"][-1][1] == len(layer.table)
    model.fit(ids[: 8 * BATCH], targets[: 8 * BATCH], batch_size=BATCH, verbose=0, callbacks=[callback])
    assert [step for step, _ in scalars_of(tmp_path / "logs")["table/stored_rows"]] == [4, 8, 10, 14, 18]


def test_tensorboard_refuses_what_is_no_frequency() -> None:
    with pytest.raises(TypeError, match=r'update_freq must be "epoch" or an int, got \'batch\''):
        bunkbed.keras.TensorBoard("logs", update_freq="batch")
    with pytest.raises(ValueError, match="update_freq must be at least 1, got 0"):
        bunkbed.keras.TensorBoard("logs", update_freq=0)
