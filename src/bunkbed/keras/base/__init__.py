"""Used by layers on every backend: the backend itself, ids, initialisers, optimizers, pending gradients."""
