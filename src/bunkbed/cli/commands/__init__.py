"""The sub-commands, each a thin layer over public functions."""
