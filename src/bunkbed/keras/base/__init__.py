"""What the layers need on every backend: the backend itself, ids, initialisers, optimizers, gradients that wait."""
