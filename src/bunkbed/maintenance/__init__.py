"""Work on the files of tables and runs: check, repair, copy, list and drop snapshots."""
