"""The ``bunkbed`` command: sub-commands, each a thin layer over public functions."""

from bunkbed.cli.main import main

__all__ = ["main"]
