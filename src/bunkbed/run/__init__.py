"""Several tables and dense files that are committed as one, and what may be removed when one starts."""
