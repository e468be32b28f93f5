"""A table whose rows are divided among several directories."""
