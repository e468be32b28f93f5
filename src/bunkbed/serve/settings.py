"""What is served, and the limits of a request."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ServeSettings:
    """The options of ``bunkbed serve``.

    Attributes:
        path: folder of a table or of a run.
        ram: RAM budget of the rows in all workers together, in bytes.
        workers: processes.
        snapshot: the name to follow; None: a training run's "best" where it has one, otherwise the newest commit.
        max_age_s: the greatest age of the rows in seconds; see `bunkbed.Table.watch`.
        max_rows: most ids of a request.
        max_k: most results for each id or user.
        max_body: most bytes of a request.
        max_scan: most bytes of rows that a request may read to compare them all; see `Source.require_scan`.
        max_waiting: most requests at once; others get status 503.
        parent: the process that started this worker, with which it ends; 0: none.
    """

    path: str
    ram: int = 1 << 30
    workers: int = 1
    snapshot: str | None = None
    max_age_s: float = 2.0
    max_rows: int = 1000
    max_k: int = 1000
    max_body: int = 1 << 20
    max_scan: int = 1 << 30
    max_waiting: int = 256
    parent: int = 0

    def to_json(self) -> str:
        """Return the settings as text for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> ServeSettings:
        """Return the settings that `to_json` wrote."""
        return cls(**json.loads(text))

    @property
    def ram_of_each(self) -> int:
        """The RAM budget of one worker in bytes."""
        return self.ram // self.workers
