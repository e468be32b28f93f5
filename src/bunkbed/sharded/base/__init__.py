"""The rows of shards, for tables and runs that commit them."""
