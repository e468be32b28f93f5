"""The anchor's protocol on a device without float64: a norm of float32, and the same rows but for its rounding."""

from typing import Any

import numpy as np
import pytest

from bunkbed.torch.device.base import capabilities
from device_setup import NUM_ROWS, batches, bt, contents, loss_of, make_layer, torch, train

ABLE = (capabilities.CPU, capabilities.Capabilities(has_streams=False, has_float64=False, adds_in_order=True))


@pytest.mark.parametrize("cache", ["8KiB", None, 0])
def test_clipping_scaling_and_accumulation(cache: Any) -> None:
    found = []
    for able in ABLE:
        with capabilities.forced(able):
            layer = make_layer(device_cache=cache)
            opt = bt.Optimizer(layer)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for number, ids in enumerate(batches(12)):
                opt.zero_grad()
                for part in (ids, ids[:9]):
                    loss = loss_of(layer, part)
                    scaler.scale(loss * (float("inf") if number == 5 else 1.0)).backward()
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
                scaler.step(opt)
                scaler.update()
            wanted = torch.float64 if able.has_float64 else torch.float32
            assert layer.anchor.grad.dtype == wanted
            found.append((layer.table.step, layer.table.get(np.arange(NUM_ROWS))))
            layer.table.close()
    assert found[0][0] == found[1][0] == 11
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=0, atol=1e-6)


def test_plain_steps_are_the_same_bits() -> None:
    found = []
    for able in ABLE:
        with capabilities.forced(able):
            layer = make_layer(device_cache="8KiB")
            train(layer, batches(20))
            found.append(contents(layer))
            layer.table.close()
    assert found[0] == found[1], "a norm that is rounded scales nothing"
