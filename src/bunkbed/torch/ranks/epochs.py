"""The commits of a table that ranks share: what each rank does for one, and what rank 0 does.

`FileEpochs` keeps them in the files of an ordinary `bunkbed.ShardedTable`, `RamEpochs` as copies in RAM. The protocol
is that of a run (docs/design/engine.md, rule 14): every rank's shards prepare, rank 0 publishes the manifest, and only
then the ranks collect what no commit names. `bunkbed.torch.ranks.service` brings the calls in this order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.files.run_files import RunManifest
from bunkbed.run.leftovers import forget_marks
from bunkbed.table.commits import wait_for_all
from bunkbed.table.table import Table
from bunkbed.torch.ranks.files import RankFiles
from bunkbed.torch.ranks.service import UnsureError


@dataclass(frozen=True)
class State:
    """The last commit, equal on all ranks: its number and meta, and all kept commits, oldest first."""

    epoch: int = 0
    meta: Json = field(default_factory=dict)
    snapshots: dict[str, int] = field(default_factory=dict)


#: By table: epochs that remaining commits name, and epochs that kept commits name.
_Pins: TypeAlias = tuple[dict[str, set[int]], dict[str, set[int]]]


class Epochs(Protocol):
    """The commits as one rank sees them. A change of `state` comes with `accept` only."""

    state: State

    def require_writable(self) -> None:
        """Raise BunkbedError after `refuse`."""

    def refuse(self, reason: str) -> None:
        """On every rank: take no more commits."""

    def begin_commit(self, keep: str) -> Callable[[], Json]:
        """Settle what this rank's part of a commit has; return a function that makes it durable."""

    def commit(self, said: list[Json], meta: Json | None, keep: str) -> Json:
        """On rank 0: make the commit from what the functions of `begin_commit` returned."""

    def drop(self, name: str) -> Json:
        """On rank 0: remove a kept commit."""

    def require(self, to: str | int) -> None:
        """Raise ValueError if there is no commit `to`, a name or an epoch; the same on every rank."""

    def rewind(self, to: str | int) -> Json:
        """Set this rank's rows back to a commit."""

    def finish_rewind(self, said: list[Json], to: str | int) -> Json:
        """On rank 0: make the state that `rewind` set the newest commit."""

    def accept(self, outcome: Json) -> None:
        """On every rank: note the result of `commit`, `drop` or `finish_rewind`."""

    def collect(self, outcome: Json) -> None:
        """On every rank, after `accept`: remove what no commit names."""

    def forget(self) -> None:
        """Note that the commit failed; what `begin_commit` made goes now or with the next commit."""

    def close(self) -> None:
        """Release the rows of this rank."""


class FileEpochs:
    """The commits of a table with files."""

    def __init__(self, files: RankFiles) -> None:
        self._files = files
        self._manifest = files.manifest  # rank 0 keeps it up to date
        self._refusal = ""  # why nothing can be committed any more
        self._pins: dict[str, tuple[set[int], set[int]]] = {}  # epochs of this rank's shards that commits name
        self.state = State(files.manifest.epoch, files.manifest.meta, files.folder.snapshots())

    def require_writable(self) -> None:
        """See `Epochs`."""
        if self._refusal:
            raise BunkbedError(
                f"table '{self._files.place.name}' takes no more commits: the last one may or may not be durable "
                f"({self._refusal}); start all ranks again, which opens the last commit"
            )

    def refuse(self, reason: str) -> None:
        """See `Epochs`."""
        self._refusal = reason

    def begin_commit(self, keep: str) -> Callable[[], Json]:
        """See `Epochs`."""
        shards = self._files.shards
        if keep:
            for table in shards.values():
                table.plain_core.require_disk_to_keep(keep)
        started = {name: table.begin_commit_in_run() for name, table in shards.items()}
        steps = sorted({table.step for table in shards.values()})

        return lambda: {"epochs": wait_for_all(started), "steps": steps}

    def commit(self, said: list[Json], meta: Json | None, keep: str) -> Json:
        """See `Epochs`."""
        epochs = _merged(said)
        steps = {step for one in said for step in one["steps"]}
        if len(steps) > 1:
            raise BunkbedError(f"the ranks' shards are at different steps ({sorted(steps)}); nothing was committed")
        if meta is not None or keep or epochs != self._manifest.tables:
            self._publish(
                replace(
                    self._manifest,
                    epoch=self._manifest.epoch + 1,
                    meta=self._manifest.meta if meta is None else meta,
                    keep=keep,
                    tables=epochs,
                    copied=False,
                )
            )
        return self._outcome(self._collected())

    def drop(self, name: str) -> Json:
        """See `Epochs`."""
        folder = self._files.folder
        folder.find(name)
        if self._manifest.keep == name:
            # The newest commit has the name, so the same state is committed again without the name.
            self._publish(replace(self._manifest, epoch=self._manifest.epoch + 1, keep="", copied=False))
        return self._outcome(folder.forget(name))

    def require(self, to: str | int) -> None:
        """See `Epochs`."""
        self._files.folder.find(to)

    def rewind(self, to: str | int) -> Json:
        """See `Epochs`."""
        target = self._files.folder.find(to)
        shards = self._files.shards
        for name, table in shards.items():
            table.rewind_in_run(target.tables[name])
        return {"epochs": {name: table.epoch for name, table in shards.items()}}

    def finish_rewind(self, said: list[Json], to: str | int) -> Json:
        """See `Epochs`."""
        target = self._files.folder.find(to)
        self._publish(
            replace(
                self._manifest,
                epoch=self._manifest.epoch + 1,
                meta=target.meta,
                keep="",
                copied=False,
                tables=_merged(said),
            )
        )
        return self._outcome(self._collected())

    def _publish(self, manifest: RunManifest) -> None:
        try:
            self._files.folder.publish(manifest)
        except OSError as error:
            if self._files.folder.manifest_path(manifest.epoch).exists():
                # It is linked, but may not be durable, so no epoch that it names may be removed.
                raise UnsureError(str(error)) from error
            raise
        self._manifest = manifest

    def _collected(self) -> _Pins | None:
        """Remove manifests that are not needed; return the epochs that the others name, or None if that failed."""
        folder = self._files.folder
        with contextlib.suppress(OSError, BunkbedError):  # the commit is durable; the next one tries it again
            forget_marks(folder, set(self._manifest.tables))
            return folder.collect()
        return None

    def _outcome(self, pins: _Pins | None) -> Json:
        tables = self._manifest.tables
        state = State(self._manifest.epoch, self._manifest.meta, self._files.folder.snapshots())
        named = None if pins is None else {name: [sorted(one.get(name, ())) for one in pins] for name in tables}
        return {"state": asdict(state), "pins": named, "tables": tables}

    def accept(self, outcome: Json) -> None:
        """See `Epochs`."""
        self.state = State(**outcome["state"])

    def collect(self, outcome: Json) -> None:
        """See `Epochs`."""
        for name, table in self._files.shards.items():
            # The commit is durable, so errors from here on are ignored. The next commit tries the removals again.
            with contextlib.suppress(OSError, BunkbedError):
                if outcome["pins"] is not None:
                    named, kept = outcome["pins"][name]
                    self._pins[name] = set(named), set(kept)
                else:  # which epochs are not needed is unknown
                    named, kept = self._pins.get(name, self._files.pins[name])
                    self._pins[name] = {*named, outcome["tables"][name]}, set(kept)
                table.plain_core.set_pinned_epochs(*self._pins[name])
                table.plain_core.collect()

    def forget(self) -> None:
        """See `Epochs`."""

    def close(self) -> None:
        """See `Epochs`."""
        self._files.close()


class RamEpochs:
    """The commits of a table in RAM: each rank keeps those of its rows, in copies that it numbers."""

    def __init__(self, local: Table) -> None:
        self._local = local
        self._copies: dict[str, tuple[str, Json]] = {}  # by the commit's name: the copy's name, and the meta
        self._made = 0
        self._new = ""  # the copy of a commit that is on its way
        self.state = State()

    def require_writable(self) -> None:
        """See `Epochs`."""

    def refuse(self, reason: str) -> None:
        """See `Epochs`."""

    def begin_commit(self, keep: str) -> Callable[[], Json]:
        """See `Epochs`."""
        is_new = self._local.is_dirty
        if keep:
            self._made += 1
            self._new = f"copy-{self._made}"
        self._local.commit(keep=self._new or None)
        return lambda: {"is_new": is_new}

    def commit(self, said: list[Json], meta: Json | None, keep: str) -> Json:
        """See `Epochs`."""
        if meta is None and not keep and not any(one["is_new"] for one in said):
            return {"state": asdict(self.state)}
        epoch = self.state.epoch + 1
        snapshots = {name: at for name, at in self.state.snapshots.items() if name != keep}
        if keep:
            snapshots[keep] = epoch
        state = State(epoch, self.state.meta if meta is None else meta, snapshots)
        return {"state": asdict(state), "kept": keep}

    def drop(self, name: str) -> Json:
        """See `Epochs`."""
        named = self._named(name)
        snapshots = {one: at for one, at in self.state.snapshots.items() if one != named}
        return {"state": asdict(replace(self.state, snapshots=snapshots))}

    def require(self, to: str | int) -> None:
        """See `Epochs`."""
        self._named(to)

    def rewind(self, to: str | int) -> Json:
        """See `Epochs`."""
        self._local.rewind(self._copies[self._named(to)][0])
        return {}

    def finish_rewind(self, said: list[Json], to: str | int) -> Json:
        """See `Epochs`."""
        _, meta = self._copies[self._named(to)]
        return {"state": asdict(replace(self.state, epoch=self.state.epoch + 1, meta=meta))}

    def _named(self, to: str | int) -> str:
        for name, epoch in self.state.snapshots.items():
            if to in (name, epoch):
                return name
        known = ", ".join(f"{name!r} (epoch {epoch})" for name, epoch in self.state.snapshots.items()) or "none"
        raise ValueError(f"table '{self._local.name}' keeps no commit {to!r}; it keeps: {known}")

    def accept(self, outcome: Json) -> None:
        """See `Epochs`."""
        self.state = State(**outcome["state"])
        if outcome.get("kept"):
            self._copies[outcome["kept"]] = self._new, self.state.meta
            self._new = ""

    def collect(self, outcome: Json) -> None:
        """See `Epochs`."""
        self._copies = {name: copy for name, copy in self._copies.items() if name in self.state.snapshots}
        for copy in set(self._local.snapshots()) - {one for one, _ in self._copies.values()} - {self._new}:
            self._local.drop(copy)

    def forget(self) -> None:
        """See `Epochs`."""
        if self._new in self._local.snapshots():
            self._local.drop(self._new)
        self._new = ""

    def close(self) -> None:
        """See `Epochs`."""
        self._local.release()


def _merged(said: list[Json]) -> dict[str, Any]:
    """Return the epochs of all shards."""
    return {name: epoch for one in said for name, epoch in one["epochs"].items()}
