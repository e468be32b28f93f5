"""The errors that are ours.

The caller's mistakes are ``ValueError``, ``TypeError`` and ``IndexError``, the system's ``OSError``.
"""


class BunkbedError(Exception):
    """Base of every error that is Bunkbed's own."""


class FormatError(BunkbedError):
    """The files are not a table, or of a version this release cannot read."""


class CorruptionError(BunkbedError):
    """Stored bytes fail their checksum, or a file a commit names is missing or too short."""


class TableLockedError(BunkbedError):
    """Another process writes this table."""


class TableClosedError(BunkbedError):
    """The table was closed, or was opened before a fork."""


class UncommittedWarning(UserWarning):
    """Rows that were updated or set are lost: a table was let go of, or the program ended, without a commit."""


class ReadOnlyError(BunkbedError):
    """A write on a reader, or on a table that became read-only after a failed sync."""
