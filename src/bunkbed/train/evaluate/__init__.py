"""Evaluating models: metrics, ranks of held-out items, recommendations, comparisons of runs."""
