"""Embedding tables stacked across GPU memory, RAM and SSD, trained exactly as if they all fitted in RAM."""

from bunkbed.budget import Budget
from bunkbed.errors import (
    BunkbedError,
    CorruptionError,
    FormatError,
    ReadOnlyError,
    TableClosedError,
    TableLockedError,
)
from bunkbed.init import Normal, Uniform, Zeros
from bunkbed.optim import SGD, Adagrad, Adam, RowwiseAdagrad

__version__ = "0.1.0"
