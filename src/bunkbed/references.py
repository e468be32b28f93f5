"""What a framework's checkpoint holds of a table: a reference to a kept epoch, never rows.

The reference is the table's uuid and name, the epoch and the step. Saving commits the table and keeps that epoch under
a name of ours; the oldest of those beyond `References.keep` are dropped. Loading rewinds the writer to the epoch,
optimizer state included. How a framework stores the four values is its adapter's business.

- Saving twice without a change in between is one commit, so a stray save costs no kept epoch, and two layers on one
  table commit once.
- A table of a `bunkbed.Run` is committed by its run only: the reference then just names the table, and ``run.rewind``
  puts tables and dense weights back together.
- A table in RAM only keeps its epochs as copies in this process (`RamSnapshots`): going back to the best epoch works
  as with files, loading in another process is an error that says to give a path.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bunkbed.ram_snapshots import RamSnapshots


@dataclass(frozen=True)
class Reference:
    """A kept epoch of a table."""

    uuid: str
    table: str
    epoch: int
    step: int

    def fields(self) -> dict[str, Any]:
        """The four values by name."""
        return asdict(self)


class References:
    """Kept epochs of one table, for every layer on it.

    Args:
        table: the `bunkbed.Table`.
        prefix: of the names under which epochs are kept.
        saved: what holds the references, for errors: ``"state_dict"``.

    Owns copies of the rows of a table in RAM only, and nothing else. Not thread-safe.
    """

    def __init__(self, table: Any, prefix: str, saved: str) -> None:
        self.table = table
        self.keep: int | None = 0
        self._prefix = prefix
        self._saved = saved
        self._ram: RamSnapshots | None = None
        # (table epoch, epoch it equals): after a rewind the newest commit has a new number but old contents.
        self._same_as: tuple[int, int] | None = None

    def keep_at_least(self, keep: int | None) -> None:
        """Of the layers on one table the one that keeps most decides; None is all."""
        if self.keep is not None:
            self.keep = None if keep is None else max(self.keep, keep)

    # ---- the step

    @property
    def step(self) -> int:
        """Optimizer steps that made the rows what they are."""
        return int(self.table.step) if self.next_step is None else self.next_step - 1

    @property
    def next_step(self) -> int | None:
        """The number to impose on the next step; None where the core's count is right."""
        return None if self._ram is None else self._ram.next_step

    def step_was_taken(self) -> None:
        """A step with `next_step` happened."""
        if self._ram is not None:
            self._ram.next_step = None

    # ---- save and load

    def save(self) -> Reference:
        """Commits the table if it changed, and keeps that epoch."""
        table = self.table
        epoch = self._commit() if table.mode != "r" and table.run is None else table.epoch
        return Reference(table.uuid, table.name, epoch, self.step)

    def load(self, reference: Reference) -> str | None:
        """Puts the table back to the epoch of `reference`; returns what prevents it, or None."""
        table, saved = self.table, self._saved
        if reference.uuid != table.uuid:
            if table.path is None:
                return (
                    f"table {table.name!r}: the {saved} refers to table {reference.table!r}, but this layer's table is "
                    "another one, in RAM only; such a table ends with its process, so give path= to the layer that is "
                    "saved and to this one"
                )
            return (
                f"table {table.name!r}: the {saved} refers to table {reference.table!r} (uuid {reference.uuid}), but "
                f"the layer has opened another one, {table.path} (uuid {table.uuid}); give the layer the path of that "
                "table"
            )
        return None if table.run is not None else self.go_back(reference.epoch)

    def go_back(self, epoch: int) -> str | None:
        """Puts the table back to a kept epoch; returns what prevents it, or None."""
        table, saved = self.table, self._saved
        if epoch == self._current() and (table.mode == "r" or not table.is_dirty):
            return None
        if table.mode == "r":
            return (
                f"table {table.name!r}: the {saved} refers to epoch {epoch}, but this reader is at epoch "
                f"{table.epoch}; open it with snapshot=, one of bunkbed.snapshots(path)"
            )
        snapshots: dict[str, int] = self._kept().snapshots()
        if epoch not in snapshots.values():
            kept = ", ".join(f"{key!r} (epoch {value})" for key, value in sorted(snapshots.items(), key=lambda x: x[1]))
            return (
                f"table {table.name!r}: epoch {epoch} was dropped; it keeps {kept or 'none'}; raise keep_checkpoints= "
                "of the layer, or name what must stay: layer.table.commit(keep='best')"
            )
        self._kept().rewind(epoch)
        self._same_as = (table.epoch, epoch)
        return None

    def _current(self) -> int:
        """The table's epoch; after a rewind the one that it equals."""
        epoch = int(self.table.epoch)
        if self._same_as is not None and self._same_as[0] == epoch:
            return self._same_as[1]
        return epoch

    def _kept(self) -> Any:
        """Who keeps the table's epochs: the table, or for one in RAM only our copies."""
        if self.table.path is not None:
            return self.table
        if self._ram is None:
            self._ram = RamSnapshots(self.table)
        return self._ram

    def _commit(self) -> int:
        table, kept = self.table, self._kept()
        snapshots: dict[str, int] = kept.snapshots()
        if not table.is_dirty and self._current() in snapshots.values():
            return self._current()
        ours = sorted(int(name.removeprefix(self._prefix)) for name in snapshots if self._is_ours(name))
        epoch: int = kept.commit(keep=f"{self._prefix}{ours[-1] + 1 if ours else 1:06d}")
        if self.keep is not None:
            # The new one first: an epoch is let go only once its successor is durable.
            for number in ours[: max(0, len(ours) + 1 - self.keep)]:
                kept.drop(f"{self._prefix}{number:06d}")
        return epoch

    def _is_ours(self, name: str) -> bool:
        return name.startswith(self._prefix) and name.removeprefix(self._prefix).isdigit()
