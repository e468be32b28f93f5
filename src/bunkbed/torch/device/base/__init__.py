"""What caches and kernels both use: what a device can do, moving bytes to it, batches on it, rounding, update rules."""
