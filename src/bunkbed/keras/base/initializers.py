"""Keras's initialisers as a table's: functions of (seed, id), so that untouched rows need no memory."""

from __future__ import annotations

import math
from typing import Any

import keras

import bunkbed as bb
from bunkbed.core.init import Initializer

_OURS = "bunkbed.Zeros(), bunkbed.Normal(std) or bunkbed.Uniform(low, high)"


def initializer_of(given: Any, input_dim: int | None, output_dim: int) -> tuple[Initializer, int]:
    """Return the table's initialiser and its seed.

    Args:
        given: one of bunkbed, or what Keras takes: a name, a config, an object.
        input_dim, output_dim: shape of the table, for initialisers that scale by it.

    Raises:
        ValueError: it is not a function of (seed, id); the message lists those of bunkbed.
    """
    if isinstance(given, Initializer):
        return given, _seed_of(None)
    found = keras.initializers.get(given)
    seed = _seed_of(getattr(found, "seed", None))
    if isinstance(found, keras.initializers.Zeros):
        return bb.Zeros(), seed
    if isinstance(found, keras.initializers.Ones):
        return bb.Uniform(1.0, 1.0), seed
    if isinstance(found, keras.initializers.Constant) and isinstance(found.value, (int, float)):
        return bb.Uniform(float(found.value), float(found.value)) if found.value else bb.Zeros(), seed
    if isinstance(found, keras.initializers.RandomUniform):
        return bb.Uniform(float(found.minval), float(found.maxval)), seed
    if isinstance(found, keras.initializers.RandomNormal) and found.mean == 0.0:
        return bb.Normal(float(found.stddev)), seed
    if isinstance(found, keras.initializers.VarianceScaling) and input_dim is not None:
        fans = {"fan_in": input_dim, "fan_out": output_dim, "fan_avg": (input_dim + output_dim) / 2}
        scale = found.scale / max(1.0, fans[found.mode])
        if found.distribution == "uniform":
            limit = math.sqrt(3.0 * scale)
            return bb.Uniform(-limit, limit), seed
        if found.distribution == "untruncated_normal":
            return bb.Normal(math.sqrt(scale)), seed
    name = type(found).__name__ if found is not None else repr(given)
    raise ValueError(
        f"Embedding: embeddings_initializer={name} is not among those a table has (uniform, random_normal around 0, "
        f"zeros, ones, constant, glorot_uniform, he_uniform, lecun_uniform); give {_OURS}, or the rows themselves with "
        "weights="
    )


def _seed_of(seed: Any) -> int:
    # Without a seed, Keras draws one from Python's generator, which set_random_seed() seeds.
    return int(seed) if isinstance(seed, int) else int(keras.initializers.RandomUniform().seed)
