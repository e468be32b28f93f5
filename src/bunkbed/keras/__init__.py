"""Keras and TensorFlow layers over tables.

>>> from bunkbed.keras import Embedding

Keras's torch backend has `Embedding`, `TensorBoard` and `moved`; functions with TensorFlow tensors exist on the
TensorFlow backend only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from bunkbed.keras.base.backend import IS_TORCH  # first: reports missing packages
from bunkbed.keras.base.places import moved
from bunkbed.keras.embedding import Embedding
from bunkbed.keras.tensorboard import TensorBoard

_TENSORFLOW_ONLY = {
    "block_dataset": "use bunkbed.torch.BlockSampler",
    "embedding_lookup": "use bunkbed.torch.Embedding(..., table=table)",
    "export": "write the rows with bunkbed.export_rows, or serve them from a reader, bunkbed.open(path, mode='r')",
    "lookahead": "use bunkbed.torch.Embedding and bunkbed.torch.lookahead, or layer.table.stage(ids)",
    "token_of": "use layer.token",
}


def __dir__() -> list[str]:
    """Return the public names, without the modules that define them."""
    return __all__


if not IS_TORCH or TYPE_CHECKING:
    from bunkbed.keras.export import export
    from bunkbed.keras.functions import embedding_lookup, token_of
    from bunkbed.keras.lookahead import lookahead
    from bunkbed.keras.tensorflow.block_dataset import block_dataset
    from bunkbed.keras.workers import table as workers_table  # noqa: F401  # errors and pages name it

    __all__ = [
        "Embedding",
        "TensorBoard",
        "block_dataset",
        "embedding_lookup",
        "export",
        "lookahead",
        "moved",
        "token_of",
    ]
else:
    __all__ = ["Embedding", "TensorBoard", "moved"]

    def __getattr__(name: str) -> NoReturn:
        if name in _TENSORFLOW_ONLY:
            # "from bunkbed.keras import" would hide the text of an AttributeError.
            raise ImportError(
                f"bunkbed.keras.{name} is there on Keras's TensorFlow backend, and this process uses torch; "
                f"{_TENSORFLOW_ONLY[name]}"
            )
        raise AttributeError(f"module 'bunkbed.keras' has no attribute {name!r}")
