"""Models that train: through `bunkbed train`, on real data, and in Keras."""
