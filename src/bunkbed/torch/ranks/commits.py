"""`RankCommits`: the commits that all ranks make together, of one table or of all tables of a run.

Any rank may ask for a commit alone: the others' threads do their part (`bunkbed.torch.ranks.service`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.sharded.base.rows import ShardedRows
from bunkbed.torch.ranks.epochs import Epochs, State
from bunkbed.torch.ranks.group import Ranks, RanksError
from bunkbed.torch.ranks.rows import Changes, RankRows
from bunkbed.torch.ranks.service import GO_BACK, Outcome, service_of


class PendingRanks:
    """A commit of all ranks that was started. It has the interface of `_native.PendingCommit`."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.is_over = outcome.is_over

    def wait(self) -> int:
        return int(self._outcome.wait()["state"]["epoch"])


class RankCommits:
    """The commits, seen from one rank, and what this rank does for each. Made on all ranks in the same order.

    Args:
        label: the table or run, for messages.
        ranks: the processes that share it.
        epochs: where the commits are.
        changes: those of the tables, which share it.
    """

    def __init__(self, label: str, ranks: Ranks, epochs: Epochs, changes: Changes) -> None:
        self.label = label
        self.epochs = epochs
        self._ranks = ranks
        self.changes = changes
        self._tables: list[RankRows] = []
        self._committed = 0  # the number of changes when the last commit was made
        self._torn = ""  # the reason why the ranks' rows do not agree, or empty
        self._client = service_of(ranks).join(label, changes.condition, lambda: changes.count, self)

    def add(self, table: RankRows) -> None:
        """Add a table that these commits hold."""
        self._tables.append(table)

    # ---- What a request does; see `bunkbed.torch.ranks.service.Work`

    def begin(self, request: Json) -> Callable[[], Json]:
        arguments = request["arguments"]
        self.epochs.require_writable()
        if request["what"] == GO_BACK:
            self.epochs.require(arguments["to"])
            return lambda: self._go_back(arguments["to"])
        self.require_whole()
        return self.epochs.begin_commit(arguments["keep"]) if request["what"] == "commit" else dict

    def _go_back(self, to: str | int) -> Json:
        with self.changes.condition:
            return {**self.epochs.rewind(to), "changes": self.changes.count}

    def conclude(self, request: Json, said: list[Json]) -> Json:
        arguments = request["arguments"]
        if request["what"] == "commit":
            return self.epochs.commit(said, arguments["meta"], arguments["keep"])
        if request["what"] == GO_BACK:
            changes = 1 + max(one["changes"] for one in said)
            return {**self.epochs.finish_rewind(said, arguments["to"]), "changes": changes}
        return self.epochs.drop(arguments["name"])

    def accept(self, request: Json, outcome: Json) -> None:
        with self.changes.condition:  # the state, and whether there are changes since, are seen together
            self.epochs.accept(outcome)
            if request["what"] == "commit":
                self._committed = request["changes"]
            if request["what"] == GO_BACK:
                self.changes.count = self._committed = outcome["changes"]
                self._torn = ""
                for table in self._tables:
                    if isinstance(table.local.core, ShardedRows):
                        table.local.core.mend()
            self.changes.condition.notify_all()
        self.epochs.collect(outcome)

    def failed(self, request: Json, result: Json, *, is_begun: bool) -> None:
        self.epochs.forget()
        if result.get("kind") == "UnsureError":
            self.epochs.refuse(result["error"])
        if request["what"] == GO_BACK and is_begun:
            self._torn = f"going back to commit {request['arguments']['to']!r} failed on a rank"

    # ---- Facts

    @property
    def state(self) -> State:
        """The last commit."""
        with self.changes.condition:
            return self.epochs.state

    def is_changed(self) -> bool:
        """Return whether a table has changed since the last commit."""
        with self.changes.condition:
            return self.changes.count != self._committed

    def require_whole(self) -> None:
        """Raise BunkbedError if the ranks' rows do not agree."""
        if self._torn:
            raise BunkbedError(f"{self.label} refuses use: {self._torn}; go back to a commit, or start all ranks again")

    # ---- Asking

    def begin_commit(self, meta: Json | None, keep: str, number: int = 0) -> PendingRanks:
        """Start a commit of all ranks. Returns once every rank has settled what the commit holds.

        Args:
            meta, keep: see `bunkbed.Table.commit`.
            number: where every rank calls this, the number of the call, from 1.
        """
        self.require_whole()
        outcome = self._client.ask("commit", once=number > 0, meta=meta, keep=keep, number=number)
        outcome.wait_started()
        return PendingRanks(outcome)

    def drop(self, name: str) -> None:
        """Remove a kept commit."""
        self.require_whole()
        self._client.ask("drop", name=name).wait()

    def settle(self, what: str, *facts: Any) -> list[Any]:
        """Return facts of each rank, after all requests that any rank has made. Collective."""
        said = self._ranks.gather(what, lambda: [self._client.number, *facts])
        self._client.wait_for(max(number for number, *_ in said))
        return [rest for _, *rest in said]

    def go_back(self, to: str | int) -> None:
        """Go back to a commit, with all tables. Collective: every rank goes back to the same one."""
        wanted = [one for (one,) in self.settle("going back to a commit", to)]
        if any(one != to for one in wanted):
            raise RanksError(f"{self.label}: the ranks want to go back to different commits: {wanted}")
        self.epochs.require(to)
        # Rank 0 asks, and the others wait for it in the exchange, so that it is done once.
        self._ranks.gather(
            "going back to a commit",
            lambda: self._client.ask(GO_BACK, to=to).wait() if self._ranks.is_first else {},
        )
        for table in self._tables:
            self._ranks.note(table.number, self.changes.count)

    def close(self) -> None:
        """Answer further requests with an error, and release the rows of this rank."""
        self._client.close()
        self.epochs.close()
