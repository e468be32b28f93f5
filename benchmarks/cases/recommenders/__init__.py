"""Cases of `bunkbed train`: other models, and more interactions."""
