"""The processes that train one run."""
