"""Shared by layers and device caches: gradients before a step, profiler ranges, references in checkpoints."""
