"""Interactions: reading files of any form, splitting, sampling, and keeping them in the folder of a run."""
