"""What everything else is made with: arguments and their types, budgets, initialisers, optimizers, threads."""
