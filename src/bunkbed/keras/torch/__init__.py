"""Keras on torch: lookups, gradients and the token."""
