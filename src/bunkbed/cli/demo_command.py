"""``bunkbed demo``."""


def demo() -> None:
    """Train on a table larger than its memory budget, and in memory, and compare."""
