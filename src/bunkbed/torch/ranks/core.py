"""`RankCore`: the core of a table that ranks share. Rows are in `RankRows`, commits here."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.sharded.rows import ShardedRows
from bunkbed.table.table import Table
from bunkbed.torch.ranks.epochs import Epochs
from bunkbed.torch.ranks.group import Ranks, RanksError
from bunkbed.torch.ranks.rows import RankRows
from bunkbed.torch.ranks.service import GO_BACK, Outcome, service_of


class PendingRanks:
    """A commit of all ranks that was started. It has the interface of `_native.PendingCommit`."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.is_over = outcome.is_over

    def wait(self) -> int:
        return int(self._outcome.wait()["state"]["epoch"])


class NothingPending:
    """The commit of a table that has not changed."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def is_over(self) -> bool:
        return True

    def wait(self) -> int:
        return self._epoch


class RankCore(RankRows):
    """All rows, seen from one rank, and the commits of all ranks. Owns this rank's rows.

    Args:
        name, spec, local, ranks, num_shards: see `RankRows`.
        epochs: the commits.
        uuid: identity of the table, equal on all ranks.
    """

    def __init__(
        self,
        name: str,
        spec: _native.TableSpec,
        local: Table,
        ranks: Ranks,
        num_shards: int,
        epochs: Epochs,
        uuid: bytes,
    ) -> None:
        super().__init__(name, spec, local, ranks, num_shards)
        self._epochs = epochs
        self._uuid = uuid
        self._committed = 0  # `changes` when the last commit was made
        self._torn = ""  # the reason why the ranks' rows do not agree, or empty
        self._service = service_of(ranks).join(self.number, f"table '{name}'", self.changed, lambda: self.changes, self)

    # ---- What a request does; see `bunkbed.torch.ranks.service.Work`

    def begin(self, request: Json) -> Callable[[], Json]:
        arguments = request["arguments"]
        self._epochs.require_writable()
        if request["what"] == GO_BACK:
            self._epochs.require(arguments["to"])
            return lambda: self._go_back(arguments["to"])
        self.require_open()
        return self._epochs.begin_commit(arguments["keep"]) if request["what"] == "commit" else dict

    def _go_back(self, to: str | int) -> Json:
        with self.changed:
            return {**self._epochs.rewind(to), "changes": self.changes}

    def conclude(self, request: Json, said: list[Json]) -> Json:
        arguments = request["arguments"]
        if request["what"] == "commit":
            return self._epochs.commit(said, arguments["meta"], arguments["keep"])
        if request["what"] == GO_BACK:
            changes = 1 + max(one["changes"] for one in said)
            return {**self._epochs.finish_rewind(said, arguments["to"]), "changes": changes}
        return self._epochs.drop(arguments["name"])

    def accept(self, request: Json, outcome: Json) -> None:
        with self.changed:  # the state, and whether there are changes since, are seen together
            self._epochs.accept(outcome)
            if request["what"] == "commit":
                self._committed = request["changes"]
            if request["what"] == GO_BACK:
                self.changes = self._committed = outcome["changes"]
                self._torn = ""
                if isinstance(self.local.core, ShardedRows):
                    self.local.core.mend()
            self.changed.notify_all()
        self._epochs.collect(outcome)

    def failed(self, request: Json, result: Json, *, is_begun: bool) -> None:
        self._epochs.forget()
        if result.get("kind") == "UnsureError":
            self._epochs.refuse(result["error"])
        if request["what"] == GO_BACK and is_begun:
            self._torn = f"going back to commit {request['arguments']['to']!r} failed on a rank"

    def require_open(self) -> None:
        """Raise also if the ranks' rows do not agree."""
        super().require_open()
        if self._torn:
            raise BunkbedError(
                f"table '{self.name}' refuses use: {self._torn}; go back to a commit, or start all ranks again"
            )

    # ---- Facts

    # A commit's state and "nothing has changed since" are set together, under `changed`.

    def epoch(self) -> int:
        with self.changed:
            return self._epochs.state.epoch

    def meta(self) -> str:
        with self.changed:
            return json.dumps(self._epochs.state.meta)

    def uuid(self) -> bytes:
        return self._uuid

    def is_changed(self) -> bool:
        with self.changed:
            return self.changes != self._committed

    def uncommitted(self) -> tuple[int, bool, int]:
        """Return the changes of this rank's rows since the last commit; see `bunkbed.sharded.rows.ShardedRows`."""
        return self.local.core.uncommitted() if self.is_changed() else (0, True, 0)

    def snapshots(self) -> list[tuple[str, int]]:
        with self.changed:
            return list(self._epochs.state.snapshots.items())

    # ---- Commits. Any rank may ask for one alone: the others' threads do their part.

    def begin_commit(self, meta: str | None, keep: str) -> PendingRanks | NothingPending:
        """See `bunkbed.Table.begin_commit`. Returns once every rank has settled what the commit holds."""
        self.require_open()
        if meta is None and not keep and not self.is_changed():
            return NothingPending(self.epoch())
        outcome = self._service.ask("commit", meta=None if meta is None else json.loads(meta), keep=keep)
        outcome.wait_started()
        return PendingRanks(outcome)

    def commit(self, meta: str | None, keep: str) -> int:
        """See `bunkbed.Table.commit`."""
        return self.begin_commit(meta, keep).wait()

    def drop(self, name: str) -> None:
        """See `bunkbed.Table.drop`."""
        self.require_open()
        self._service.ask("drop", name=name).wait()

    def settle(self, what: str, *facts: Any) -> list[Any]:
        """Return facts of each rank, after all requests that any rank has made. Collective."""
        said = self.ranks.gather(what, lambda: [self._service.number, *facts])
        self._service.wait_for(max(number for number, *_ in said))
        return [rest for _, *rest in said]

    def rewind(self, name: str, epoch: int | None) -> None:
        """See `bunkbed.Table.rewind`. Collective: every rank goes back to the same commit."""
        super().require_open()
        to = name if epoch is None else epoch
        wanted = [one for (one,) in self.settle("going back to a commit", to)]
        if any(one != to for one in wanted):
            raise RanksError(f"table '{self.name}': the ranks want to go back to different commits: {wanted}")
        self._epochs.require(to)
        # Rank 0 asks, and the others wait for it in the exchange, so that it is done once.
        self.ranks.gather(
            "going back to a commit",
            lambda: self._service.ask(GO_BACK, to=to).wait() if self.ranks.is_first else {},
        )
        self.ranks.note(self.number, self.changes)

    def refresh(self) -> int:
        raise ValueError(f"table '{self.name}' is open for writing and always up to date; refresh() is for readers")

    def write_dirty(self) -> None:
        """Start to write this rank's dirty rows."""
        self.local.core.write_dirty()

    def compact(self) -> int:
        """Compact this rank's log; return how many records were moved."""
        return self.local.core.compact()

    def set_holder(self, map: object | None, write_back: object | None) -> None:
        """Accept only None, which `Table.close` passes."""
        if map is not None:
            raise BunkbedError(f"table '{self.name}' has several processes, and a device cache wants one")

    def close(self) -> None:
        """Release this rank's rows without a commit."""
        if self.closed or not self.is_own:  # the locks and the connections are those of the parent
            return
        self.closed = True
        self._service.close()
        self._epochs.close()
        if self.local.path is None:
            self.local.release()
