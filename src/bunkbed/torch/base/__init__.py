"""What layers and device caches share: gradients until a step, ranges in profiles, references in checkpoints."""
