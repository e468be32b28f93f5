"""`bunkbed.keras.Embedding` under MultiWorkerMirroredStrategy: processes on loopback (see keras_worker.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.adapters.references import Reference
from bunkbed.keras import Embedding, moved
from bunkbed.keras.shared.table import reference_of
from bunkbed.keras.workers.messages import error_message, message, split_messages
from bunkbed.testing import ReferenceTable
from keras_setup import INIT, keras, tf
from keras_worker import (
    BATCH,
    DIM,
    KILLED_AT,
    ROWS,
    SAVED_AT,
    SEED,
    STEPS,
    WORKERS,
    batches,
    columns,
    cut_of,
    model_of,
    owners,
    several,
    zipf,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("default")

PROGRAM = Path(__file__).parents[1] / "support" / "keras_worker.py"
#: A worker that waits for one that is gone would wait longer.
PATIENCE_S = 150
KINDS = ("replicated", "sharded")
ALL = np.arange(ROWS)


def workers(scenario: str, folder: Path, count: int = WORKERS) -> list[tuple[int, str]]:
    """Exit status and output of `count` workers that ran a scenario; a hang is an error."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    running = []
    for index in range(count):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        env = {**os.environ, "TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        command = [sys.executable, str(PROGRAM), scenario, str(folder)]
        output = (folder / f"output-{index}").open("w+")  # not a pipe, which a worker that is not read from would fill
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
        running.append((process, output))
    try:
        ended = []
        for process, output in running:
            status = process.wait(timeout=PATIENCE_S)
            output.seek(0)
            ended.append((status, output.read()))
        return ended
    finally:
        for process, output in running:
            process.kill()
            process.wait()
            output.close()


def found_in(folder: Path, count: int = WORKERS) -> tuple[list[dict[str, np.ndarray]], list[dict[str, str]]]:
    """What the workers wrote."""
    found = [dict(np.load(folder / f"found-{index}.npz")) for index in range(count)]
    return found, [json.loads((folder / f"said-{index}.json").read_text()) for index in range(count)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    for status, output in workers("train", folder):
        assert status == 0, output[-3000:]
    return folder, *found_in(folder)


def whole(found: list[dict[str, np.ndarray]], name: str) -> dict[str, np.ndarray]:
    """The rows that training touched, {kind: float32[ROWS, DIM]} with NaN for others, after what must hold of parts."""
    rows = {kind: np.full((ROWS, DIM), np.nan, np.float32) for kind in KINDS}
    for index, each in enumerate(found):
        ids = each[f"{name}_sharded_ids"]
        np.testing.assert_array_equal(owners(ids, len(found)), index)  # a shard never holds another's rows
        rows["sharded"][ids] = each[f"{name}_sharded_rows"]
        for what in ("ids", "rows", "step"):  # replicas are the same bits
            np.testing.assert_array_equal(each[f"{name}_replicated_{what}"], found[0][f"{name}_replicated_{what}"])
        assert each[f"{name}_sharded_step"] == each[f"{name}_replicated_step"]
    assert all(len(each[f"{name}_sharded_ids"]) for each in found)
    rows["replicated"][found[0][f"{name}_replicated_ids"]] = found[0][f"{name}_replicated_rows"]
    return rows


def one_process(optimizer, steps: int):
    """The same model trained by fit in this process: its layers."""
    layers = [Embedding(ROWS, DIM, seed=SEED) for _ in KINDS]
    model = model_of(keras, layers, optimizer)
    ids, targets = batches(STEPS)
    model.fit(ids[: steps * BATCH], targets[: steps * BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    return layers


def assert_rows_equal(rows: dict[str, np.ndarray], layers) -> None:
    """Bit by bit, and no other row was touched."""
    for kind, layer in zip(KINDS, layers, strict=True):
        touched = ~np.isnan(rows[kind][:, 0])
        np.testing.assert_array_equal(touched, layer.table.contains(ALL), err_msg=kind)
        np.testing.assert_array_equal(rows[kind][touched], layer.table.get(ALL)[touched], err_msg=kind)


def test_two_workers_train_the_bits_that_one_process_trains(trained) -> None:
    _, found, _ = trained
    rows = whole(found, "again")  # of which the first steps were saved, and loaded
    assert found[0]["again_sharded_step"] == STEPS
    assert_rows_equal(rows, one_process(keras.optimizers.Adam(0.01), STEPS))


@pytest.mark.parametrize("count", [2, 4])
def test_gradients_are_added_in_the_order_of_workers_then_of_lookups(count: int, tmp_path: Path) -> None:
    for status, output in workers("ordinary", tmp_path, count):
        assert status == 0, output[-3000:]
    found, _ = found_in(tmp_path, count)
    assert found[0]["once_sharded_step"] == STEPS
    assert_rows_equal(whole(found, "once"), one_process(keras.optimizers.Adam(0.01), STEPS))

    # One process looks up what each worker looks up, one worker after another, in each of two accumulated batches.
    layers = [Embedding(ROWS, DIM, seed=SEED) for _ in KINDS]
    for layer in layers:
        layer.follow(keras.optimizers.SGD(0.5))
    bags = [Embedding(ROWS, DIM, table=layer.table, combiner="mean") for layer in layers]
    train = several(tf, keras, layers, bags, count, lambda step, args: step(*args))
    for ids in columns(STEPS):
        train(tf.constant(ids))
    assert found[0]["several_sharded_step"] == layers[0].table.step == STEPS // 2
    assert_rows_equal(whole(found, "several"), layers)


def test_batches_that_are_divided_unevenly_and_empty_ones(trained) -> None:
    _, found, _ = trained
    ids, targets = batches(STEPS)
    rows = whole(found, "trained")
    for half, kind in enumerate(KINDS):
        table = ReferenceTable(dim=DIM, num_rows=ROWS, optimizer=bb.Adam(0.01, eps=1e-7), init=INIT, seed=SEED)
        wanted = targets[:, half * DIM : (half + 1) * DIM]
        for step in range(STEPS):
            part, cut = slice(step * BATCH, (step + 1) * BATCH), cut_of(step)
            sizes = np.repeat([cut, BATCH - cut], [cut, BATCH - cut])[:, None]  # a mean in each worker, and of both
            grads = 2 * (table.lookup(ids[part]) - wanted[part]) / (sizes * 2 * DIM) / WORKERS
            table.update(ids[part], grads.astype(np.float32))
        touched = np.unique(ids)
        np.testing.assert_allclose(rows[kind][touched], table.get(touched), atol=1e-6)
        assert np.isnan(rows[kind]).any(1).sum() == ROWS - len(touched)


def test_every_worker_looks_up_the_rows_of_all(trained) -> None:
    _, found, _ = trained
    rows = whole(found, "trained")
    untouched = ReferenceTable(dim=DIM, num_rows=ROWS, optimizer=bb.SGD(0.1), init=INIT, seed=SEED).get(ALL)
    expected = np.concatenate([np.where(np.isnan(rows[kind]), untouched, rows[kind]) for kind in KINDS], 1)
    for index, each in enumerate(found):
        np.testing.assert_array_equal(each["looked_up"], expected)
        np.testing.assert_array_equal(each["predicted"], expected)
        own = np.array([[3, 3, 7], [49, 0, 11]][index])
        np.testing.assert_array_equal(each["own"], expected[own])
        np.testing.assert_array_equal(each["none"], expected[own] if index else expected[:0])


def test_seeds_that_were_not_given_are_those_of_worker_0(trained) -> None:
    _, found, _ = trained
    np.testing.assert_array_equal(found[0]["seeds"], found[1]["seeds"])


@pytest.mark.parametrize(
    "name, own, other",
    [
        (
            "out of range",
            r"id 50 at position 15 is outside \[0, 50\)",
            "worker 1 failed, and nothing was changed: Inde",
        ),
        ("not finite", "the gradient of id .* is nan at column 3", "worker 1 failed, and nothing was changed: Value"),
        ("learning rate", "worker 1 does not do what worker 0 does", "worker 1 does not do what worker 0 does"),
        ("skew", "worker 0 at step 10, worker 1 at step 11; nothing", "load the last model that was saved"),
        ("half accumulated", "worker 1 does not do what worker 0 does", "worker 1 does not do what worker 0 does"),
        ("scaling", "LossScaleOptimizer skips a step on each of 2 workers", "a constant loss_scale_factor="),
        ("foreign", "is a row of worker 0, and this is worker 1", "id 0 at position 0 is a row of worker 1"),
        ("outside", r"takes all 2 workers; do it inside strategy\.run", "on every worker as often"),
        ("bare table", "must be another layer's .table", "give path="),
    ],
)
def test_an_error_of_one_worker_is_one_of_both(trained, name: str, own: str, other: str) -> None:
    _, _, said = trained
    assert re.search(own, said[1][name]), said[1][name]
    assert re.search(other, said[0][name]), said[0][name]


@pytest.mark.parametrize("name", ["loaded0", "loaded1"])
def test_the_file_of_either_worker_puts_every_worker_back(trained, name: str) -> None:
    _, found, _ = trained
    assert found[0][f"{name}_sharded_step"] == SAVED_AT
    assert_rows_equal(whole(found, name), one_process(keras.optimizers.Adam(0.01), SAVED_AT))


def test_gradients_accumulate_and_are_clipped_over_all_workers(trained) -> None:
    _, found, _ = trained
    rows = whole(found, "accumulated")
    assert found[0]["accumulated_sharded_step"] == STEPS // 2
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2, clipnorm=0.05, loss_scale_factor=4.0)
    for kind, layer in zip(KINDS, one_process(optimizer, STEPS), strict=True):
        touched = layer.table.contains(ALL)
        np.testing.assert_array_equal(touched, ~np.isnan(rows[kind][:, 0]))
        np.testing.assert_array_equal(rows[kind][touched], layer.table.get(ALL)[touched])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_of_workers_are_those_of_one_process(trained, combiner: str) -> None:
    _, found, _ = trained
    ids = zipf(np.random.default_rng(1), (8, 5))
    weights = np.random.default_rng(2).random((8, 5)).astype(np.float32)
    layer = Embedding(ROWS, DIM, seed=SEED, combiner=combiner, mask_zero=True)
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))
    layer.follow(optimizer)
    for _ in range(3):
        with tf.GradientTape() as tape:
            output = layer(ids, weights, training=True)
            loss = tf.reduce_sum(tf.square(output))
        optimizer.apply([tape.gradient(loss, layer.token.value)], [layer.token])
    rows = whole(found, f"bags_{combiner}")
    touched = layer.table.contains(ALL)
    assert not touched[0] and touched.sum() > 10  # id 0 is padding
    for kind in KINDS:
        np.testing.assert_array_equal(~np.isnan(rows[kind][:, 0]), touched)
        np.testing.assert_array_equal(rows[kind][touched], layer.table.get(ALL)[touched])
    np.testing.assert_array_equal(rows["sharded"], rows["replicated"])
    outputs = np.concatenate([each[f"bags_{combiner}"] for each in found], 1)
    np.testing.assert_array_equal(outputs[0], outputs[1])  # pooled from rows that came, and by the table
    np.testing.assert_array_equal(outputs[0], output)


def test_layers_that_share_a_divided_table_and_rows_that_were_given(trained) -> None:
    _, found, _ = trained
    given = np.random.default_rng(3).random((ROWS, DIM)).astype(np.float32)
    for index, each in enumerate(found):
        ids = each["given_sharded_ids"]
        np.testing.assert_array_equal(ids, ALL[owners(ALL) == index])
        counts = np.zeros((ROWS, 1), np.float32)
        counts[[0, 1]], counts[[2, 4]] = 3, 6  # three layers, and two workers
        np.testing.assert_array_equal(each["given_sharded_rows"], (given - np.float32(0.5) * counts)[ids])
        assert each["given_sharded_step"] == 1


def test_a_checkpoint_of_tensorflow_puts_every_worker_back(trained) -> None:
    _, found, _ = trained
    for each in found:
        np.testing.assert_array_equal(each["restored_sharded_rows"], each["given_sharded_rows"])


def test_what_was_saved_stays_until_every_worker_has_its_successor(trained) -> None:
    _, found, said = trained
    assert said[1]["half saved"] == "OSError: no space left"
    assert "worker 1 failed, and nothing was changed: OSError: no space left" in said[0]["half saved"]
    for each in found:
        np.testing.assert_array_equal(each["half_saved"], [[2, 1], [2, 1]])


def test_a_worker_that_waits_for_others_to_save_says_so(trained) -> None:
    _, _, said = trained
    assert "saving table 'table' takes all 2 workers, and this one waits" in said[0]["alone"], said[0]["alone"]


def test_one_process_opens_what_workers_left_and_refuses_to_begin_anew_beside_it(trained) -> None:
    folder, found, _ = trained
    for kind in KINDS:
        for placement in ("central", "replicated"):
            with pytest.raises(ValueError, match=r"-0000-of-0002, of a table that several workers trained"):
                Embedding(ROWS, DIM, path=folder / "half" / kind, placement=placement)
    rows = whole(found, "half")
    touched = ~np.isnan(rows["replicated"][:, 0])
    layer = Embedding(ROWS, DIM, path=folder / "half" / "replicated" / "replica-0001-of-0002")
    np.testing.assert_array_equal(layer.table.get(ALL[touched]), rows["replicated"][touched])
    layer.table.close()
    copy = bb.create(None, dim=DIM, num_rows=ROWS, optimizer=bb.Adam(), init=INIT, seed=SEED)
    for path in sorted((folder / "half" / "sharded").glob("shard-*-of-*")):
        with bb.open(path, mode="r") as shard:
            for ids, values in shard.scan():
                copy.set(ids, values)
    np.testing.assert_array_equal(copy.get(ALL[touched]), rows["sharded"][touched])


def test_a_reference_of_several_workers_is_read_as_that_of_the_table_at_hand() -> None:
    def has(uuid: str, *epochs: int):
        return SimpleNamespace(uuid=uuid, epoch=epochs[0], snapshots=lambda: dict(zip("xyz", epochs[1:], strict=False)))

    fields = {"uuid": "a", "table": "t", "epoch": 3, "step": 9, "workers": [["a", 3], ["b", 5]]}
    assert reference_of(fields, has("a", 3)).epoch == 3
    assert reference_of(fields, has("b", 5), (1, 2)) == Reference("b", "t", 5, 9)
    assert reference_of(fields, has("c", 5)).uuid == "a"  # another table's, which loading says
    # Four workers after two: the first and the third have the uuid of the same old one.
    fields["workers"] = [["a", 3], ["b", 5], ["a", 4], ["b", 6]]
    for index, epoch in enumerate((3, 5, 4, 6)):  # the four that saved, whatever else they have
        uuid = "ab"[index % 2]
        assert reference_of(fields, has(uuid, 9, 3, 4), (index, 4)).epoch == epoch
    for epoch in (3, 4):  # others after them
        assert reference_of(fields, has("a", epoch), (4, 8)).epoch == epoch
        assert reference_of(fields, has("a", 9, epoch), (0, 3)).epoch == epoch
    assert reference_of(fields, has("a", 9), (0, 3)).epoch == 3  # which loading says is not kept


def test_a_worker_that_is_killed_ends_the_other_and_both_resume(tmp_path: Path) -> None:
    (status, output), (killed, _) = workers("crash", tmp_path)
    assert killed == -signal.SIGKILL
    assert status > 0 and "UnavailableError" in output, output[-3000:]
    for status, output in workers("resume", tmp_path):
        assert status == 0, output[-3000:]
    found, said = found_in(tmp_path)
    for each in said:
        assert f"worker 0 at step {SAVED_AT}, worker 1 at step {KILLED_AT}; nothing was changed" in each["apart"]
        assert "with 2 processes each would train a table of its own" in each["function"], each["function"]
        assert "under CollectiveAllReduceStrategy with 2 processes" in each["central"], each["central"]
    assert_rows_equal(whole(found, "resumed"), one_process(keras.optimizers.Adam(0.01), SAVED_AT))
    assert found[0]["trained_sharded_step"] == STEPS
    assert_rows_equal(whole(found, "trained"), one_process(keras.optimizers.Adam(0.01), STEPS))


def test_four_workers_go_on_where_two_saved_and_one_process_after_them(tmp_path: Path) -> None:
    for status, output in workers("begin", tmp_path):
        assert status == 0, output[-3000:]
    tables = tmp_path / "tables"
    assert bb.reshard(tables / "sharded", shards=4, ram="128MiB").workers
    for index in range(4):
        bb.copy(tables / "replicated" / f"replica-000{index % 2}-of-0002", tables / f"replica-000{index}-of-0004")
    shutil.rmtree(tables / "replicated")
    (tables / "replicated").mkdir()
    for folder in tables.glob("replica-*"):
        folder.rename(tables / "replicated" / folder.name)
    for status, output in workers("go_on", tmp_path, 4):
        assert status == 0, output[-3000:]
    found, _ = found_in(tmp_path, 4)
    assert found[0]["trained_sharded_step"] == STEPS
    assert_rows_equal(whole(found, "loaded"), one_process(keras.optimizers.Adam(0.01), SAVED_AT))
    ended = one_process(keras.optimizers.Adam(0.01), STEPS)
    for name in ("trained", "again"):
        assert_rows_equal(whole(found, name), ended)

    bb.reshard(tables / "sharded", shards=1, ram="128MiB", drop_snapshots=True)
    with moved({tables / "replicated": tables / "replicated" / "replica-0000-of-0004"}):
        layers = keras.models.load_model(tmp_path / "end-3.keras").layers[1:3]
    assert [layer.table.step for layer in layers] == [STEPS + 1] * 2
    assert isinstance(layers[1].table, bb.ShardedTable)
    for kind, rows in whole(found, "end").items():
        touched = ~np.isnan(rows[:, 0])
        np.testing.assert_array_equal(layers[KINDS.index(kind)].table.get(ALL[touched]), rows[touched])


def test_workers_that_do_not_agree_end_with_errors(tmp_path: Path) -> None:
    ended = workers("refused", tmp_path)
    _, said = found_in(tmp_path)
    for name, text in {
        "other arguments": "worker 1 makes a layer with other arguments than worker 0",
        "of three": "shard-0000-of-0003, and 2 workers with placement='sharded' would create another table",
        "another": "replica-0000-of-0002, and 2 workers with placement='sharded' would create another table",
        "lost": r"worker 1 has no .*shard-0001-of-0002, and others have their parts of the table; put it back",
        "whole": "worker 0 has a whole table at .*whole, which is no part of one",
    }.items():
        for index, each in enumerate(said):
            assert re.search(text, each[name]), (index, each[name])
    assert "shard-0000-of-0002" in said[0]["not opened"] and "Embedding" not in said[0]["not opened"]
    assert "Embedding: opening its table: worker 0 failed" in said[1]["not opened"], said[1]["not opened"]
    # A lookup of a replica is one worker's own; its error ends both.
    assert ended[1][0] > 0 and "id 50 at position 7 is outside [0, 50)" in ended[1][1], ended[1][1][-3000:]
    assert ended[0][0] > 0 and "UnavailableError" in ended[0][1], ended[0][1][-3000:]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_replicated_in_one_process_is_one_table(replicas: int, tmp_path: Path) -> None:
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{device}" for device in range(replicas)])
    with strategy.scope():
        layer = Embedding(ROWS, 2 * DIM, seed=SEED, placement="replicated", path=tmp_path / "user")
        ids = keras.Input((), dtype="int64")
        model = keras.Model(ids, layer(ids))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    data = batches(STEPS)
    model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)
    table = ReferenceTable(dim=2 * DIM, num_rows=ROWS, optimizer=bb.Adam(0.01, eps=1e-7), init=INIT, seed=SEED)
    for start in range(0, STEPS * BATCH, BATCH):
        part = slice(start, start + BATCH)
        grads = 2 * (table.lookup(data[0][part]) - data[1][part]) / np.float32(BATCH * 2 * DIM)
        table.update(data[0][part], grads)
    assert layer.table.step == STEPS and layer.table.path == tmp_path / "user"
    np.testing.assert_allclose(layer.table.get(ALL), table.get(ALL), atol=1e-6)
    assert Embedding.from_config(layer.get_config()).table is layer.table
    layer.table.close()


def test_messages_hold_ids_and_the_bits_of_rows() -> None:
    rows = np.array([[-0.0, np.nan, 1e-45]], np.float32)
    rows.view(np.uint32)[0, 1] |= 0x1234  # a NaN of its own
    parts = [message(7, 9, 3, np.array([2**62]), rows), message(7, 9, 3), message(7, 9, 3, rows=np.tile(rows, (4, 1)))]
    said = split_messages(np.concatenate(parts), 0, "table 't'", 3)
    assert [each.ids.tolist() for each in said] == [[2**62], [], []]
    assert [each.rows.tobytes() for each in said] == [rows.tobytes(), b"", rows.tobytes() * 4]

    wrong = error_message(IndexError("id ü is outside"))
    with pytest.raises(IndexError, match=r"^id ü is outside$"):
        split_messages(np.concatenate([parts[0], wrong]), 1, "table 't'", 3)
    with pytest.raises(RuntimeError, match="table 't': worker 1 failed, and nothing was changed: IndexError: id ü"):
        split_messages(np.concatenate([parts[0], wrong]), 0, "table 't'", 3)
    with pytest.raises(RuntimeError, match="worker 0 at step 7, worker 1 at step 8"):
        split_messages(np.concatenate([parts[0], message(8, 9, 3)]), 0, "table 't'", 3)
    with pytest.raises(RuntimeError, match="worker 1 does not do what worker 0 does"):
        split_messages(np.concatenate([parts[0], message(7, 8, 3)]), 0, "table 't'", 3)
