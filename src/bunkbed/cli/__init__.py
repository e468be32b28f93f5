"""The ``bunkbed`` command. Each sub-command is a thin layer over public functions."""

from bunkbed.cli.main import main

__all__ = ["main"]
