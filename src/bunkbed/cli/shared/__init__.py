"""Code that the sub-commands share: console, errors, options of a training run, opening of tables and runs."""
