"""What Python writes in the folders of runs: durable files, manifests; and which shard has a row."""
