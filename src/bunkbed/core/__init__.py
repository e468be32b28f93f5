"""The parts that all other folders use: argument checks, budgets, initialisers, optimizers, threads."""
