"""Shared by all layers on one table: the table, its token and kept epoch, and its lookups as TensorFlow ops."""
