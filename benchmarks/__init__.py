"""Measurements, each runnable as ``python -m benchmarks.<name>``; RESULTS.md holds figures and commands."""
