"""The local variables of the function of Keras that called: the only place that inspects frames.

Keras 3.15 gives a variable neither the optimizer that assigns to it nor, under gradient accumulation, its gradient: the
assigned value is then the old value, or a maximum. `keras.src.backend.name_scope` knows the optimizer, but is internal
too, and does not know the gradient. `bunkbed.keras.base.stepping.require_known_keras` checks what is found here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def caller_locals() -> Mapping[str, Any]:
    """Return the local variables of the function that called the method which calls this."""
    return sys._getframe(2).f_locals
