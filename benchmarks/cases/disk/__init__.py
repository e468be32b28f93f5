"""Steps on a table larger than its RAM: what they take, which rows the cache misses, what reads cost."""
