"""The change feed: which rows of a table changed since a commit."""
