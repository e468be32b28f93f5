"""One table: make, open, look up, update and commit."""
