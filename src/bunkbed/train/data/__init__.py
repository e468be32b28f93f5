"""Interactions: reading files of any form, splitting, sampling, and storing interactions in the folder of a run."""
