"""Options of a training run, and the `config.json` that keeps them in the folder of the run."""
