"""The exceptions of Bunkbed.

Mistakes of the caller raise ``ValueError``, ``TypeError`` or ``IndexError``; failures of the system raise ``OSError``.
"""


class BunkbedError(Exception):
    """Base class of the exceptions of Bunkbed."""


class FormatError(BunkbedError):
    """The files are not a table, or of a version that this release cannot read."""


class CorruptionError(BunkbedError):
    """Stored bytes fail their checksum, or a file that a commit names is missing or too short."""


class TableLockedError(BunkbedError):
    """Another process writes this table."""


class TableClosedError(BunkbedError):
    """The table was closed, or was opened before a fork."""


class UncommittedWarning(UserWarning):
    """Changed rows are lost, because a table was garbage-collected, or the program ended, without a commit."""


class ReadOnlyError(BunkbedError):
    """A write on a reader, or on a table that became read-only after a failed sync."""
