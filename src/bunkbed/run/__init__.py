"""Several tables and dense files that are committed together; removal of a table that was never committed."""
