"""Base of layers from ids to rows on every Keras backend: accepted ids, masks, shapes."""

from __future__ import annotations

import keras

from bunkbed.keras.base.types import Layer, Shape, Tensor

COMBINERS = ("sum", "mean", "sqrtn")

#: For tables with more rows, int32 cannot represent every id, and a cast to int32 may have wrapped the ids.
_MOST_INT32 = 2**31
#: For tables with more rows, float32 cannot represent every id.
_MOST_FLOAT32 = 2**24


class RowsLayer(keras.layers.Layer):  # type: ignore[misc]  # keras is untyped here
    """A layer from ids to rows, or to pooled rows with a combiner.

    A subclass sets ``input_dim``, ``output_dim``, ``mask_zero`` and ``combiner``.
    """

    input_dim: int | None
    output_dim: int
    mask_zero: bool
    combiner: str | None

    def _ids_are_float(self, dtype: str, entry: Layer) -> bool:
        """Return whether ids of this dtype are floats, which must be checked for whole numbers.

        Raises:
            TypeError: the dtype cannot represent every id of the table, or the caller gave floats.
        """
        most = self.input_dim
        if dtype in ("int64", "uint32"):
            return False
        if dtype in ("int32", "int16", "int8", "uint16", "uint8"):
            if most is None or most > _MOST_INT32:
                raise TypeError(
                    f"Embedding: ids come as {dtype}, and the table has ids beyond {_MOST_INT32 - 1:,}, which a cast "
                    "to it wraps; give int64, and declare it: keras.Input(shape, dtype='int64')"
                )
            return False
        # Sequential without an Input, and Input without dtype=, convert integers to float32 before this call.
        if dtype in ("float32", "float64") and entry is not self and most is not None and most <= _MOST_FLOAT32:
            return True
        raise TypeError(
            f"Embedding: ids must be integers, got {dtype}; give int64, and declare it: "
            "keras.Input(shape, dtype='int64')"
        )

    def compute_mask(self, inputs: Tensor, previous_mask: Tensor = None) -> Tensor:
        """Return bool[...], whether an id is not 0, if `mask_zero` and without combiner; else None."""
        if not self.mask_zero or self.combiner is not None:
            return None
        return keras.ops.not_equal(inputs, 0)

    def _output(self, shape: Shape) -> tuple[int | None, ...]:
        shape = tuple(shape)
        if self.combiner is not None and len(shape) < 2:
            raise ValueError(f"Embedding: ids of a combiner must be [..., L], got {list(shape)}; give ids[:, None]")
        return (*(shape if self.combiner is None else shape[:-1]), self.output_dim)

    def compute_output_shape(self, input_shape: Shape, weights_shape: Shape = None) -> tuple[int | None, ...]:
        """Return [..., output_dim]; with a combiner without the last axis of the ids."""
        return self._output(input_shape)

    def compute_output_spec(self, inputs: Tensor, weights: Tensor = None, training: bool | None = None) -> Tensor:
        """Return shape and dtype of the output, without a lookup."""
        is_ragged = getattr(inputs, "ragged", False) and self.combiner is None
        return keras.KerasTensor(self._output(inputs.shape), dtype=self.compute_dtype, ragged=is_ragged)
