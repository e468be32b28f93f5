"""``python -m bunkbed``: the same command as ``bunkbed``."""

from bunkbed.cli import main

if __name__ == "__main__":
    main()
