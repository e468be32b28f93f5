"""What the sub-commands share: the console, errors, options of a training run, opening what a path leads to."""
