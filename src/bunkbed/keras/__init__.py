"""Keras and TensorFlow layers over tables.

>>> from bunkbed.keras import Embedding
"""

from __future__ import annotations

from bunkbed.keras import _backend  # noqa: F401  # first: says what is missing
from bunkbed.keras.embedding import Embedding
from bunkbed.keras.export import export
from bunkbed.keras.functions import embedding_lookup, token_of
from bunkbed.keras.lookahead import lookahead
from bunkbed.keras.places import moved
from bunkbed.keras.tensorboard import TensorBoard

__all__ = ["Embedding", "TensorBoard", "embedding_lookup", "export", "lookahead", "moved", "token_of"]
