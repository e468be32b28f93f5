"""The number of compute threads of one operation, for the whole process. Results never depend on it."""

from __future__ import annotations

from bunkbed import _native
from bunkbed.core.typed import shortened

_MOST = 1024


def get_num_threads() -> int:
    """Return the threads that an operation may use; default: ``BUNKBED_NUM_THREADS``, or the processors available."""
    return int(_native.get_num_threads())


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads that an operation may use, in this process.

    Raises:
        TypeError: not an int. ValueError: not in [1, 1024].
    """
    if isinstance(num_threads, bool) or not isinstance(num_threads, int):
        raise TypeError(f"the number of threads must be an int, got {shortened(num_threads)}")
    if not 1 <= num_threads <= _MOST:
        raise ValueError(f"the number of threads must be in [1, {_MOST}], got {shortened(num_threads)}")
    _native.set_num_threads(num_threads)
