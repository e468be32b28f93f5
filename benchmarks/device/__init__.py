"""The device cache: an experiment on the device that is here, its check, and the host's part of it."""
