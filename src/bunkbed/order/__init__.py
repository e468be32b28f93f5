"""The order in which a pass over the data visits its samples, so that a table larger than its RAM reads little."""
