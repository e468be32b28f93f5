"""A program that ends while tf.data's threads are at work ends: with its own exit status, and at once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")

SCRIPT = """
import sys, time
import numpy as np, tensorflow as tf, keras
import bunkbed as bb
from bunkbed.keras import Embedding, lookahead

module = sys.modules["bunkbed.keras.lookahead"]
layer = Embedding(20_000, 32, optimizer=bb.SGD(0.1))
ids = keras.Input((), dtype="int64")
model = keras.Model(ids, layer(ids))
model.compile(keras.optimizers.SGD(0.1), "mse")

plan, push = module._Plan, module._Plan._push

def slow(self, *arguments):  # a thread that is here when the interpreter goes wants the GIL back
    time.sleep(0.03)
    push(self, *arguments)

plan._push = slow
rows = np.arange(20_000), np.zeros((20_000, 32), np.float32)
data = lookahead(tf.data.Dataset.from_tensor_slices(rows).batch(256).repeat(), model)
if sys.argv[1] == "iterator":
    iterator = iter(data)
    for _ in range(3):
        next(iterator)
else:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise RuntimeError("the user's error")

    model.fit(data, steps_per_epoch=1000, verbose=0, callbacks=[Stop()])
raise RuntimeError("the user's error")
"""


@pytest.mark.parametrize("way", ["iterator", "fit"])
def test_an_error_beside_a_live_lookahead_ends_the_program(way: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, script, way], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1, done.stderr[-2000:]  # neither killed nor aborted
    assert "RuntimeError: the user's error" in done.stderr
    assert "terminate called" not in done.stderr
