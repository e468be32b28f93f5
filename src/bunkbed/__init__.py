"""Embedding tables stacked across GPU memory, RAM and SSD, trained exactly as if they all fitted in RAM."""

from bunkbed.budget import Budget as Budget
from bunkbed.check import check as check
from bunkbed.copying import Copied as Copied
from bunkbed.copying import copy as copy
from bunkbed.errors import BunkbedError as BunkbedError
from bunkbed.errors import CorruptionError as CorruptionError
from bunkbed.errors import FormatError as FormatError
from bunkbed.errors import ReadOnlyError as ReadOnlyError
from bunkbed.errors import TableClosedError as TableClosedError
from bunkbed.errors import TableLockedError as TableLockedError
from bunkbed.errors import UncommittedWarning as UncommittedWarning
from bunkbed.init import Normal as Normal
from bunkbed.init import Uniform as Uniform
from bunkbed.init import Zeros as Zeros
from bunkbed.io import export_rows as export_rows
from bunkbed.io import import_rows as import_rows
from bunkbed.kept import Snapshot as Snapshot
from bunkbed.kept import describe_snapshots as describe_snapshots
from bunkbed.kept import drop_snapshot as drop_snapshot
from bunkbed.neighbors import neighbors as neighbors
from bunkbed.opening import create as create
from bunkbed.opening import open as open
from bunkbed.opening import snapshots as snapshots
from bunkbed.optim import SGD as SGD
from bunkbed.optim import Adagrad as Adagrad
from bunkbed.optim import Adam as Adam
from bunkbed.optim import RowwiseAdagrad as RowwiseAdagrad
from bunkbed.problems import Problem as Problem
from bunkbed.problems import Report as Report
from bunkbed.run import Run as Run
from bunkbed.sharded import ShardedTable as ShardedTable
from bunkbed.table import Table as Table
from bunkbed.threads import get_num_threads as get_num_threads
from bunkbed.threads import set_num_threads as set_num_threads

__version__ = "0.1.0"
