"""Reports of training: events, their display in a terminal, the metrics file of a run, and its plots."""
