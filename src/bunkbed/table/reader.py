"""What a table that is open for reading has to follow its writer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from bunkbed.table.core import Core
from bunkbed.table.following import Following, Pins

_MANIFEST = re.compile(r"manifest-(\d{16})")


class TableReader(Following):
    """The part of `bunkbed.Table` that moves a reader to newer commits."""

    core: Core
    _path: Path | None
    _mode: Literal["w", "r"]
    _name: str
    _closed: bool

    _snapshot: str | None = None  # the name that a reader was opened at
    _is_of_reader_run = False  # whether a run moves this reader with others

    @property
    def is_own(self) -> bool:
        """Return whether this process opened the table."""
        raise NotImplementedError

    def share_pins(self, pins: Pins) -> None:
        """Move only when the run moves that has the table."""
        self._pins = pins

    def _move(self) -> int:
        return int(self.core.refresh())

    def _at(self) -> int:
        return int(self.core.epoch())

    def _newest(self) -> int:
        self._reader_label()
        if self._snapshot is not None:
            named = {} if self.core is None else dict(self.core.snapshots())
            if self._snapshot not in named:
                raise ValueError(f"table '{self._name}' has no snapshot {self._snapshot!r} any more")
            return named[self._snapshot]
        assert self._path is not None
        found = (_MANIFEST.fullmatch(entry.name) for entry in self._path.iterdir())
        numbers = [int(match[1]) for match in found if match]
        return max(numbers) if numbers else self._at()

    def _file_of(self, number: int) -> Path:
        assert self._path is not None
        return self._path / f"manifest-{number:016d}"

    def _writes(self) -> bool:
        return self._mode == "w"

    def _reader_label(self) -> str:
        if self._mode == "w" or self._closed or not self.is_own:
            self.core.refresh()  # raises
        if self._is_of_reader_run:
            raise ValueError(
                f"table '{self._name}' is part of a run, whose tables move together; call this method of the run"
            )
        return f"table '{self._name}'"
