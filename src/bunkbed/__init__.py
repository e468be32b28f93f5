"""Embedding tables stacked across GPU memory, RAM and SSD, trained exactly as if they all fitted in RAM."""

from types import ModuleType as _ModuleType

from bunkbed.core.budget import Budget as Budget
from bunkbed.core.init import Normal as Normal
from bunkbed.core.init import Uniform as Uniform
from bunkbed.core.init import Zeros as Zeros
from bunkbed.core.optim import SGD as SGD
from bunkbed.core.optim import Adagrad as Adagrad
from bunkbed.core.optim import Adam as Adam
from bunkbed.core.optim import RowwiseAdagrad as RowwiseAdagrad
from bunkbed.core.retention import Retention as Retention
from bunkbed.core.threads import get_num_threads as get_num_threads
from bunkbed.core.threads import set_num_threads as set_num_threads
from bunkbed.errors import BunkbedError as BunkbedError
from bunkbed.errors import CorruptionError as CorruptionError
from bunkbed.errors import FormatError as FormatError
from bunkbed.errors import ReadOnlyError as ReadOnlyError
from bunkbed.errors import TableClosedError as TableClosedError
from bunkbed.errors import TableLockedError as TableLockedError
from bunkbed.errors import UncommittedWarning as UncommittedWarning
from bunkbed.feed.changes import Change as Change
from bunkbed.feed.changes import Changes as Changes
from bunkbed.feed.changes import changes as changes
from bunkbed.feed.changes import cursors as cursors
from bunkbed.feed.changes import drop_cursor as drop_cursor
from bunkbed.io import export_rows as export_rows
from bunkbed.io import import_rows as import_rows
from bunkbed.maintenance.check import check as check
from bunkbed.maintenance.copying import Copied as Copied
from bunkbed.maintenance.copying import copy as copy
from bunkbed.maintenance.problems import Problem as Problem
from bunkbed.maintenance.problems import Report as Report
from bunkbed.maintenance.resharding import Resharded as Resharded
from bunkbed.maintenance.resharding import reshard as reshard
from bunkbed.maintenance.snapshots import Snapshot as Snapshot
from bunkbed.maintenance.snapshots import describe_snapshots as describe_snapshots
from bunkbed.maintenance.snapshots import drop_snapshot as drop_snapshot
from bunkbed.maintenance.snapshots import snapshots as snapshots
from bunkbed.order.block_order import BlockBatch as BlockBatch
from bunkbed.order.block_order import BlockOrder as BlockOrder
from bunkbed.order.suggest import suggest_blocks as suggest_blocks
from bunkbed.run.run import Run as Run
from bunkbed.sharded.opening import open as open
from bunkbed.sharded.table import ShardedTable as ShardedTable
from bunkbed.table.neighbors import neighbors as neighbors
from bunkbed.table.opening import create as create
from bunkbed.table.room import minimum_ram as minimum_ram
from bunkbed.table.sweeps import Bin as Bin
from bunkbed.table.sweeps import Swept as Swept
from bunkbed.table.table import Table as Table

__version__ = "0.1.0"

_MODULES = {"keras", "machine", "planning", "testing", "torch", "train", "window"}


def __dir__() -> list[str]:
    """Return the public names, and the public modules that are imported; all other modules are internal."""
    return [
        name
        for name, value in globals().items()
        if name in _MODULES or name.startswith("__") or not (name.startswith("_") or isinstance(value, _ModuleType))
    ]
