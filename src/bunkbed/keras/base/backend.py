"""Requirements of `bunkbed.keras`, checked before its other modules are imported."""

from __future__ import annotations

import importlib

_LEAST = {"tensorflow": (2, 16), "keras": (3, 15), "torch": (2, 11)}
_INSTALL = {
    "tensorflow": 'pip install "bunkbed[keras]"',
    "keras": 'pip install "bunkbed[keras]"',
    "torch": 'pip install keras "bunkbed[torch]"',
}


def _wanted(package: str) -> str:
    least = _LEAST[package]
    return f"{package} {least[0]}.{least[1]} or newer"


def _require(package: str) -> None:
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        absent = (error.name or "").partition(".")[0]
        if absent in _LEAST:  # keras imports its backend
            raise ModuleNotFoundError(
                f"bunkbed.keras needs {_wanted(absent)}: {_INSTALL[absent]}", name=absent
            ) from None
        raise
    present = tuple(int(part) for part in module.__version__.split(".")[:2])
    if present < _LEAST[package]:
        raise ImportError(
            f"bunkbed.keras needs {_wanted(package)}, and {module.__version__} is installed: {_INSTALL[package]}"
        )


def _require_backend() -> str:
    import keras

    name = str(keras.backend.backend())
    if name not in ("tensorflow", "torch"):
        raise ImportError(
            f"bunkbed.keras works on Keras's TensorFlow and torch backends, and this process uses {name!r}; set "
            "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before importing keras"
        )
    return name


_require("keras")
#: The backend Keras runs on.
NAME = _require_backend()
_require(NAME)
IS_TORCH = NAME == "torch"
