"""Measurements: ``python -m benchmarks`` runs them all, by cases; RESULTS.md holds figures and commands."""
