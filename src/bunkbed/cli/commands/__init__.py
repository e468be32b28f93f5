"""The sub-commands. Each is a thin layer over public functions."""
