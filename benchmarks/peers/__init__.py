"""The libraries ours is measured against, one to a file, each used as well as its documentation allows.

A peer imports its library inside its functions, so that naming one costs nothing, and raises `Missing` with the
command that installs it where it is absent: the case then leaves that side out and says so.
"""

from __future__ import annotations

import importlib
from typing import Any


class Missing(Exception):
    """A peer's library is not installed; the message says how to get it."""


def load(module: str, install: str) -> Any:
    """The module, or `Missing`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{module} is not installed ({error}); pip install {install}") from error
