"""The files that Python writes in the folders of runs: durable files, manifests; and the shard of a row."""
