"""What `bunkbed.keras` needs, checked before anything of it is imported."""

from __future__ import annotations

import importlib

_LEAST = {"tensorflow": (2, 16), "keras": (3, 15)}
_INSTALL = 'pip install "bunkbed[keras]"'


def _wanted(package: str) -> str:
    least = _LEAST[package]
    return f"{package} {least[0]}.{least[1]} or newer"


def _require(package: str) -> None:
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        absent = (error.name or "").partition(".")[0]
        if absent in _LEAST:  # keras imports tensorflow
            raise ModuleNotFoundError(f"bunkbed.keras needs {_wanted(absent)}: {_INSTALL}", name=absent) from None
        raise
    present = tuple(int(part) for part in module.__version__.split(".")[:2])
    if present < _LEAST[package]:
        raise ImportError(f"bunkbed.keras needs {_wanted(package)}, and {module.__version__} is installed: {_INSTALL}")


def _require_backend() -> None:
    import keras

    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"bunkbed.keras works on Keras's TensorFlow backend, and this process uses {keras.backend.backend()!r}; "
            "set KERAS_BACKEND=tensorflow before importing keras, or use bunkbed.torch in torch models"
        )


_require("keras")
_require_backend()
_require("tensorflow")
