"""Options of a training run, and the `config.json` that stores them in the run's folder."""
