"""Shared by all formats: rows of a file and of a table, words as names of rows, prefetching."""
