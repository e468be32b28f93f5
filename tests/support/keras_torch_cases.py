"""What `test_keras_torch` runs: `bunkbed.keras` on Keras's torch backend, which a process cannot change.

Each function is a case: called with an empty folder, in a process of its own that has never seen TensorFlow. The
processes are forks of one that has only imported, which takes longer than most cases do.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.keras import Embedding
from bunkbed.testing import ReferenceTable
from bunkbed.torch import Embedding as TorchEmbedding
from bunkbed.torch import Optimizer as TorchOptimizer

ROWS, DIM, BATCH, SEED = 50, 4, 16, 3
INIT = bb.Uniform(-0.05, 0.05)
ADAM = bb.Adam(0.01, eps=1e-7)
EVERY = np.arange(ROWS)


def batches(steps: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, steps * BATCH)
    return ids, rng.standard_normal((steps * BATCH, DIM)).astype(np.float32)


def row_model(layer):
    ids = keras.Input((), dtype="int64")
    return keras.Model(ids, layer(ids))


def fit(model, ids, targets, **arguments):
    return model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0, **arguments)


def reference(optimizer, ids, targets, *, batch: int = BATCH, lrs=None, weight: float = 1.0):
    table = ReferenceTable(dim=DIM, num_rows=ROWS, optimizer=optimizer, init=INIT, seed=SEED)
    for step, start in enumerate(range(0, len(ids), batch)):
        part = slice(start, start + batch)
        rows = table.lookup(ids[part])
        grads = 2.0 * (rows - targets[part]) / np.float32(rows.size) * np.float32(weight)
        table.update(ids[part], grads, lr=None if lrs is None else lrs[step])
    return table.get(EVERY)


def check(layer, expected) -> None:
    np.testing.assert_allclose(layer.table.get(EVERY), expected, rtol=0, atol=1e-6)


def fit_gives_the_rows_of_torchs_own_loop(folder: Path) -> None:
    ids, targets = batches(200)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    fit(model, ids, targets)
    assert layer.table.step == 200 == layer._shared.pending.steps_settled

    other = TorchEmbedding(ROWS, DIM, seed=SEED, init=INIT, optimizer=ADAM)
    optimizer = TorchOptimizer(torch.nn.ModuleList([other]))
    for start in range(0, len(ids), BATCH):
        part = slice(start, start + BATCH)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(other(torch.from_numpy(ids[part])), torch.from_numpy(targets[part])).backward()
        optimizer.step()
    check(layer, other.table.get(EVERY))
    check(layer, reference(ADAM, ids, targets))

    before = layer.table.get(EVERY)
    loss = model.evaluate(ids, targets, batch_size=BATCH, verbose=0)
    predicted = model.predict(ids, batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(predicted, before[ids])
    assert loss == pytest.approx(float(np.mean((before[ids] - targets) ** 2)), rel=1e-5)
    np.testing.assert_array_equal(layer.table.get(EVERY), before)
    assert layer.table.step == 200


def the_table_follows_compiles_optimizer_and_schedule(folder: Path) -> None:
    ids, targets = batches(12)
    for theirs, ours in (
        (keras.optimizers.SGD(0.5), bb.SGD(0.5)),
        (keras.optimizers.SGD(0.5, weight_decay=0.1), bb.SGD(0.5, weight_decay=0.1, decoupled=True)),
        (keras.optimizers.Adagrad(0.1), bb.Adagrad(0.1, eps=1e-7, initial_accumulator=0.1)),
        (keras.optimizers.AdamW(0.01), bb.Adam(0.01, eps=1e-7, weight_decay=0.004, decoupled=True)),
    ):
        layer = Embedding(ROWS, DIM, seed=SEED)
        model = row_model(layer)
        model.compile(theirs, "mse")
        fit(model, ids, targets)
        assert type(layer.table.optimizer) is type(ours)
        check(layer, reference(ours, ids, targets))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.9)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(schedule), "mse")
    fit(model, ids, targets)
    check(layer, reference(bb.SGD(0.5), ids, targets, lrs=[0.5 * 0.9**step for step in range(12)]))
    with pytest.raises(ValueError, match=r"no update rule of a table is keras\.optimizers\.Lion"):
        model = row_model(Embedding(ROWS, DIM))
        model.compile(keras.optimizers.Lion(0.1), "mse")
        fit(model, ids, targets)


def accumulation_clipping_and_loss_scaling_are_kerass(folder: Path) -> None:
    ids, targets = batches(8)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.5, gradient_accumulation_steps=4), "mse")
    fit(model, ids, targets)
    assert layer.table.step == 2
    check(layer, reference(bb.SGD(0.5), ids, targets, batch=4 * BATCH))

    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.5, clipvalue=1e-3), "mse")
    fit(model, ids[:BATCH], targets[:BATCH])
    start = ReferenceTable(dim=DIM, num_rows=ROWS, optimizer=ADAM, init=INIT, seed=SEED).get(EVERY)
    moved = np.abs(layer.table.get(EVERY) - start)
    assert moved.max() == pytest.approx(0.5e-3, rel=1e-3)

    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=2.0**10)
    model.compile(scaling, "mse")
    fit(model, ids, targets)
    check(layer, reference(bb.SGD(0.5), ids, targets))
    bad = targets.copy()
    bad[3] = np.inf
    before = layer.table.get(EVERY)
    fit(model, ids[:BATCH], bad[:BATCH])
    np.testing.assert_array_equal(layer.table.get(EVERY), before)
    assert layer.table.step == 8 and float(keras.ops.convert_to_numpy(scaling.dynamic_scale)) == 2.0**9
    plain = keras.optimizers.SGD(0.5)
    model.compile(plain, "mse")
    with pytest.raises(ValueError, match=rf"the gradient of id {ids[3]} is -?inf at column 0; nothing was changed"):
        fit(model, ids[:BATCH], bad[:BATCH])
    np.testing.assert_array_equal(layer.table.get(EVERY), before)


def loops_of_ones_own_step_once_and_nothing_is_silent(folder: Path) -> None:
    ids, targets = batches(6)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    rows = model(ids[:BATCH])
    with pytest.raises(RuntimeError, match="looked up before it was known which optimizer steps them"):
        rows.sum().backward()
    optimizer = keras.optimizers.SGD(0.5)
    layer.follow(optimizer)
    for start in range(0, len(ids), BATCH):
        model.zero_grad()
        part = slice(start, start + BATCH)
        torch.nn.functional.mse_loss(model(ids[part]), torch.from_numpy(targets[part])).backward()
        model.zero_grad()  # drops them
        torch.nn.functional.mse_loss(model(ids[part]), torch.from_numpy(targets[part])).backward()
        weights = model.trainable_weights
        optimizer.apply([weight.value.grad for weight in weights], weights)
    assert layer.table.step == 6
    check(layer, reference(bb.SGD(0.5), ids, targets))
    # Two backwards before a step are one update of their sum.
    model.zero_grad()
    before = layer.table.get(EVERY)
    model(np.array([1, 2])).sum().backward()
    (3 * model(np.array([2]))).sum().backward()
    optimizer.apply([layer.token.value.grad], [layer.token])
    expected = before.copy()
    expected[1] -= 0.5
    expected[2] -= 2.0
    np.testing.assert_allclose(layer.table.get(EVERY), expected, atol=1e-6)
    # A gradient that was applied already cannot be applied again.
    with pytest.raises(RuntimeError, match="names no gradients of rows that wait"):
        optimizer.apply([layer.token.value.grad], [layer.token])
    np.testing.assert_allclose(layer.table.get(EVERY), expected, atol=1e-6)
    # An optimizer of torch's own moves the token, which the next lookup tells.
    model.zero_grad()
    model(np.array([1])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"its token's value was changed .* an optimizer of torch\.optim stepped it"):
        model(np.array([1]))


def backwards_that_no_step_follows_are_an_error(folder: Path) -> None:
    layer = Embedding(ROWS, DIM, optimizer=bb.SGD(0.1))
    with pytest.raises(RuntimeError, match="1000 backwards and no optimizer took their gradients"):
        for _ in range(1100):
            layer(torch.tensor([1])).sum().backward()
    assert layer.table.step == 0
    layer = Embedding(ROWS, DIM, optimizer=bb.SGD(0.1))
    with torch.no_grad():
        layer(torch.tensor([1]))
    rows = layer(torch.tensor([1]), training=False)
    assert not rows.requires_grad
    layer.trainable = False
    assert not layer(torch.tensor([1])).requires_grad
    layer.trainable = True
    ids = torch.tensor([1, 2])
    rows = layer(ids)
    ids[0] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()
    rows = layer(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="create_graph=True reached its rows"):
        rows.sum().backward(create_graph=True)


def ids_of_every_kind_and_combiners(folder: Path) -> None:
    layer = Embedding(ROWS, DIM, optimizer=bb.SGD(1.0), seed=SEED, mask_zero=True)
    every = layer.table.get(EVERY)
    square = [[1, 2], [3, 0]]
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        np.testing.assert_array_equal(layer(torch.tensor(square, dtype=dtype)).detach(), every[square])
    np.testing.assert_array_equal(layer(np.array([4])).detach(), every[[4]])
    assert layer.compute_mask(torch.tensor([0, 1])).tolist() == [False, True]
    with pytest.raises(TypeError, match="ids must be integers, got float32"):
        layer(torch.tensor([1.0]))
    with pytest.raises(IndexError, match=rf"id {ROWS} at position 1 is outside"):
        layer(torch.tensor([1, ROWS]))
    model = keras.Sequential([layer])
    np.testing.assert_array_equal(model(torch.tensor([1.0, 2.0])).detach(), every[[1, 2]])
    with pytest.raises(ValueError, match=r"ids must be whole numbers, got 1\.5 at position \(1,\)"):
        model(torch.tensor([1.0, 1.5]))
    with pytest.raises(TypeError, match=r"beyond 2,147,483,647"):
        Embedding(None, DIM, optimizer=bb.SGD(1.0))(torch.tensor([1], dtype=torch.int32))
    ids, weights = np.array([[3, 1, 3], [0, 2, 0]]), np.array([[1.0, 0.5, 2.0], [0.25, 1.0, 4.0]], np.float32)
    for combiner in ("sum", "mean", "sqrtn"):
        for factors in (None, weights):
            pooled = Embedding(ROWS, DIM, optimizer=bb.SGD(1.0), seed=SEED, combiner=combiner, mask_zero=True)
            out = pooled(ids) if factors is None else pooled(ids, factors)
            given = (np.ones_like(weights) if factors is None else factors) * (ids != 0)
            norm = {"sum": 1.0, "mean": given.sum(1), "sqrtn": np.sqrt((given**2).sum(1))}[combiner]
            share = given / np.reshape(norm, (-1, 1))
            np.testing.assert_allclose(out.detach(), (every[ids] * share[..., None]).sum(1), atol=1e-6)
            out.sum().backward()
            keras.optimizers.SGD(9.0).apply([pooled.token.value.grad], [pooled.token])
            expected = every.copy()
            np.subtract.at(expected, ids, share[..., None])
            np.testing.assert_allclose(pooled.table.get(EVERY), expected, atol=1e-6)
    learned = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"weights of ids get no gradient; pass weights\.detach\(\)"):
        pooled(ids, learned)
    with pytest.raises(AttributeError, match=r"the rows live in table 'table'"):
        getattr(layer, "embeddings")  # noqa: B009


def two_layers_on_one_table_and_mixed_precision(folder: Path) -> None:
    table = bb.create(None, dim=DIM, num_rows=ROWS, optimizer=bb.SGD(0.5), init=INIT, seed=SEED)
    one, two = Embedding(ROWS, DIM, table=table), Embedding(ROWS, DIM, table=table, dtype="mixed_float16")
    assert one.token is two.token
    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, one(ids) + keras.ops.cast(two(ids), "float32"))
    assert two(torch.tensor([1])).dtype is torch.float16
    model.compile(keras.optimizers.SGD(0.5), "mse")
    before = table.get(EVERY)
    fit(model, np.arange(BATCH), np.zeros((BATCH, DIM), np.float32))
    assert table.step == 1
    moved = before[:BATCH] - table.get(np.arange(BATCH))
    np.testing.assert_allclose(moved, 0.5 * 2 * 2 * 2 * before[:BATCH] / (BATCH * DIM), rtol=1e-2, atol=1e-6)


def a_sharded_table_has_the_same_bits(folder: Path) -> None:
    ids, targets = batches(10)
    found = []
    for name, arguments in (
        ("one", {}),
        ("two", {"placement": "sharded", "directories": [folder / "ssd0", folder / "ssd1"]}),
    ):
        layer = Embedding(ROWS, DIM, seed=SEED, path=folder / name, **arguments)
        model = row_model(layer)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        fit(model, ids, targets)
        found.append(layer.table.get(EVERY))
        assert isinstance(layer.table, bb.ShardedTable) == bool(arguments)
        layer.table.close()
    np.testing.assert_array_equal(*found)


def weights_of_a_table_that_is_not_there_yet_are_set(folder: Path) -> None:
    model = row_model(Embedding(ROWS, DIM, seed=SEED))
    model.set_weights(model.get_weights())
    model.compile(keras.optimizers.Adam(0.01), "mse")
    fit(model, *batches(1))


def saved_weights_refer_to_kept_epochs(folder: Path) -> None:
    ids, targets = batches(4)
    layer = Embedding(ROWS, DIM, seed=SEED, path=folder / "user", name="rows")
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    fit(model, ids, targets)
    rows, state = layer.table.get(EVERY), layer.table.get(EVERY, "exp_avg")
    model.save_weights(folder / "m.weights.h5")
    weights, held = model.get_weights(), model.state_dict()
    torch.save(held, folder / "m.pt")

    def goes_back(load) -> None:
        fit(model, ids, targets)
        assert not np.array_equal(layer.table.get(EVERY), rows)
        load()
        np.testing.assert_array_equal(layer.table.get(EVERY), rows)
        np.testing.assert_array_equal(layer.table.get(EVERY, "exp_avg"), state)
        assert layer.table.step == 4

    goes_back(lambda: model.load_weights(folder / "m.weights.h5"))
    goes_back(lambda: model.set_weights(weights))
    goes_back(lambda: model.load_state_dict(torch.load(folder / "m.pt", weights_only=True)))
    stop = keras.callbacks.EarlyStopping("loss", patience=0, mode="max", restore_best_weights=True)
    fit(model, ids, targets, epochs=5, callbacks=[stop])
    assert layer.table.step == 8  # the second epoch was worse
    model.load_weights(folder / "m.weights.h5")
    model.save(folder / "m.keras")
    layer.table.close()
    keras.backend.clear_session()
    loaded = keras.saving.load_model(folder / "m.keras")
    np.testing.assert_array_equal(loaded.get_layer("rows").table.get(EVERY), rows)
    fit(loaded, ids, targets)
    loaded.get_layer("rows").table.close(commit=False)
    with pytest.raises(ValueError, match=r"refers to table 'user' .* but the layer has opened another one"):
        other = Embedding(ROWS, DIM, seed=SEED, path=folder / "other", optimizer=ADAM, name="rows")
        row_model(other).load_weights(folder / "m.weights.h5")


def a_model_saved_on_tensorflow_goes_on(folder: Path) -> None:
    """`folder` holds what the TensorFlow backend saved: m.keras, user, and rows.npy."""
    loaded = keras.saving.load_model(folder / "m.keras")
    np.testing.assert_array_equal(loaded.get_layer("rows").table.get(EVERY), np.load(folder / "rows.npy"))
    fit(loaded, *batches(2))
    assert loaded.get_layer("rows").table.step == 6
    loaded.get_layer("rows").table.close()


def lookups_updates_and_stalls_show_in_torchs_profiler(folder: Path) -> None:
    ids, targets = batches(4)
    layer = Embedding(ROWS, DIM, path=folder / "user", optimizer=bb.SGD(0.1))
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fit(model, ids, targets)
    found = {event.key: event.count for event in profile.key_averages() if event.key.startswith("bunkbed")}
    assert found == {"bunkbed lookup user": 4, "bunkbed update user": 4}, found
    layer.table.close(commit=False)


def what_is_tensorflows_is_an_error_that_says_so(folder: Path) -> None:
    with pytest.raises(ImportError, match=r"bunkbed\.keras\.lookahead is there on Keras's TensorFlow backend"):
        from bunkbed.keras import lookahead  # noqa: F401
    with pytest.raises(ImportError, match=r"write the rows with bunkbed\.export_rows"):
        import bunkbed.keras

        bunkbed.keras.export(None, None)
    layer = Embedding(ROWS, DIM, optimizer=bb.SGD(0.1))
    model = row_model(layer)
    with pytest.warns(UserWarning, match="jit_compile"):
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    fit(model, *batches(2))
    assert layer.table.step == 2
    with pytest.raises(Exception, match="cannot be compiled or exported"):
        torch.export.export(model, (torch.tensor([1, 2]),))
    assert layer.table.step == 2


def nothing_of_a_model_is_left_when_it_goes(folder: Path) -> None:
    import weakref

    ids, targets = batches(2)
    layer = Embedding(ROWS, DIM, path=folder / "user")
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    fit(model, ids, targets)
    layer.table.commit()
    table = weakref.ref(layer.table)
    del layer, model
    keras.backend.clear_session()
    gc.collect()
    assert table() is None


def run(case: str, folder: Path) -> None:
    globals()[case](folder)
    if "saved" not in case.split("_"):  # Keras itself looks for TensorFlow when it saves a model
        assert "tensorflow" not in sys.modules


def run_in_a_fork(case: str, folder: Path) -> int:
    """The case's exit status; what it printed is in ``log``."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        run(case, folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(name, run_in_a_fork(name, Path(sys.argv[1]) / name), flush=True)
