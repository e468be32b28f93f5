"""The commits of a table that ranks share: what each rank does for one, and what rank 0 does.

`FileEpochs` keeps them in the files of an ordinary `bunkbed.ShardedTable` or `bunkbed.Run`, `RamEpochs` as copies in
RAM. The protocol
is that of a run (docs/design/engine.md, rule 14): every rank's shards prepare, rank 0 publishes the manifest, and only
then the ranks collect what no commit names. `bunkbed.torch.ranks.service` brings the calls in this order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.files.run_files import RunManifest, decode, encode
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
    """The commits of a directory of tables. Each is one manifest.

    Attributes:
        contents: dense files that the next commit holds, on rank 0 and on ranks that keep copies of them; removed once
            they are committed.
    """

    def __init__(self, files: RankFiles) -> None:
        self._files = files
        self._refusal = ""  # why nothing can be committed any more
        self.contents: dict[str, bytes] = {}
        self.state = State(files.manifest.epoch, files.manifest.meta, files.folder.snapshots())

    def require_writable(self) -> None:
        """See `Epochs`."""
        if self._refusal:
            raise BunkbedError(
                f"{self._files.folder.label} takes no more commits: the last one may or may not be durable "
                f"({self._refusal}); start all ranks again, which opens the last commit"
            )

    def refuse(self, reason: str) -> None:
        """See `Epochs`."""
        self._refusal = reason

    def begin_commit(self, keep: str) -> Callable[[], Json]:
        """See `Epochs`."""
        files = self._files
        if keep:
            for table in files.shards.values():
                table.plain_core.require_disk_to_keep(keep)
        started = {name: table.begin_commit_in_run() for name, table in files.shards.items()}
        steps = {table: sorted({files.shards[name].step for name in own}) for table, own in files.tables.items()}

        def make_durable() -> Json:
            if files.copies.is_keeper:  # under the numbers that they will have on rank 0's disk
                files.folder.write_files(self.contents, replace(files.manifest, next_file=files.copies.next_file))
                _native.failpoint("run.files")
            return {"epochs": wait_for_all(started), "steps": steps}

        return make_durable

    def commit(self, said: list[Json], meta: Json | None, keep: str) -> Json:
        """See `Epochs`."""
        files, manifest = self._files, self._files.manifest
        epochs = {**manifest.tables, **_merged(said)}
        for table in files.tables:
            steps = {step for one in said for step in one["steps"][table]}
            if len(steps) > 1:
                raise BunkbedError(
                    f"the ranks' shards of table '{table or files.place.name}' are at different steps "
                    f"({sorted(steps)}); nothing was committed"
                )
        if meta is not None or keep or self.contents or epochs != manifest.tables:
            _native.failpoint("run.tables")
            with_files = files.folder.write_files(self.contents, manifest)
            _native.failpoint("run.files")
            self._publish(
                replace(
                    with_files,
                    epoch=manifest.epoch + 1,
                    meta=manifest.meta if meta is None else meta,
                    keep=keep,
                    tables=epochs,
                    copied=False,
                    sharded={**manifest.sharded, **files.shardings},
                )
            )
            self.contents = {}
        return self._outcome(self._collected())

    def drop(self, name: str) -> Json:
        """See `Epochs`."""
        folder, manifest = self._files.folder, self._files.manifest
        folder.find(name)
        if manifest.keep == name:
            # The newest commit has the name, so the same state is committed again without the name.
            self._publish(replace(manifest, epoch=manifest.epoch + 1, keep="", copied=False))
        return self._outcome(folder.forget(name))

    def require(self, to: str | int) -> None:
        """See `Epochs`."""
        target, files = self._files.folder.find(to), self._files
        newer = sorted(set(files.manifest.tables) - set(target.tables))
        if newer:
            raise ValueError(f"{files.folder.label}: {newer[0]!r} was made after {to!r}, so it cannot go back past it")
        opened = {name for own in files.tables.values() for name in own}
        lost = sorted(opened - set(target.tables))
        if lost:
            raise ValueError(
                f"{files.folder.label}: {lost[0]!r} was never committed and would be lost by going back; commit first"
            )
        missing = sorted(set(target.table_names()) - set(files.tables)) if target.sharding is None else []
        if missing:
            raise ValueError(f"{files.folder.label}: open table {missing[0]!r} first, so that all go back together")

    def rewind(self, to: str | int) -> Json:
        """See `Epochs`."""
        target = self._files.folder.find(to)
        shards = self._files.shards
        for name, table in shards.items():
            table.rewind_in_run(target.tables[name])
        return {"epochs": {name: table.epoch for name, table in shards.items()}}

    def finish_rewind(self, said: list[Json], to: str | int) -> Json:
        """See `Epochs`."""
        target, manifest = self._files.folder.find(to), self._files.manifest
        self._publish(
            replace(
                manifest,
                epoch=manifest.epoch + 1,
                meta=target.meta,
                keep="",
                copied=False,
                tables=_merged(said),
                files=target.files,
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
        self._files.manifest = manifest

    def _collected(self) -> _Pins | None:
        """Remove manifests that are not needed; return the epochs that the others name, or None if that failed."""
        folder = self._files.folder
        with contextlib.suppress(OSError, BunkbedError):  # the commit is durable; the next one tries it again
            forget_marks(folder, set(self._files.manifest.tables))
            return folder.collect()
        return None

    def _outcome(self, pins: _Pins | None) -> Json:
        folder, manifest = self._files.folder, self._files.manifest
        state = State(manifest.epoch, manifest.meta, folder.snapshots())
        tables = manifest.tables
        named = None if pins is None else {name: [sorted(one.get(name, ())) for one in pins] for name in tables}
        return {
            "state": asdict(state),
            "pins": named,
            "manifest": encode(manifest).decode(),
            "remaining": folder.epochs(),
        }

    def accept(self, outcome: Json) -> None:
        """See `Epochs`."""
        files = self._files
        self.state = State(**outcome["state"])
        files.manifest = decode(outcome["manifest"].encode(), files.folder.manifest_path(self.state.epoch))
        files.copies.update({str(self.state.epoch): outcome["manifest"]}, outcome["remaining"])
        with contextlib.suppress(OSError):  # the next commit tries the removals again
            files.copies.remove_unnamed(files.manifest.tables)
        if files.copies.is_keeper:
            self.contents = {}
        for name in files.manifest.sharded:
            files.shardings.pop(name, None)

    def collect(self, outcome: Json) -> None:
        """See `Epochs`."""
        files = self._files
        for name, table in files.shards.items():
            if name not in files.manifest.tables:
                continue  # opened after the commit began
            # The commit is durable, so errors from here on are ignored. The next commit tries the removals again.
            with contextlib.suppress(OSError, BunkbedError):
                if outcome["pins"] is not None:
                    named, kept = outcome["pins"][name]
                    files.pins[name] = set(named), set(kept)
                else:  # which epochs are not needed is unknown
                    named, kept = files.pins[name]
                    files.pins[name] = {*named, files.manifest.tables[name]}, set(kept)
                table.plain_core.set_pinned_epochs(*files.pins[name])
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
