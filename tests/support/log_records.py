"""What our own loggers wrote: frameworks in the same process log, too."""

from __future__ import annotations

import logging
from typing import Any


def our_records(caplog: Any) -> list[logging.LogRecord]:
    """Return the captured records of our loggers."""
    return [record for record in caplog.records if record.name.partition(".")[0] == "bunkbed"]
