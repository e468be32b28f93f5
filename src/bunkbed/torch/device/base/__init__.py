"""Shared by device caches and kernels: capabilities of a device, copies, batches, rounding, update rules."""
