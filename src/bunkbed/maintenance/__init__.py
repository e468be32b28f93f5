"""What is done to the files of tables and runs: checking, repairing, copying, listing and dropping snapshots."""
