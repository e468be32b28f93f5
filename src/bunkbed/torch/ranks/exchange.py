"""`Exchange`: lookups and backward of all tables of the same ranks (docs/design/ranks.md).

One step, on the critical path with ids ahead: rows, gradients, norms; one all-to-all each, for all tables together.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.types import Json
from bunkbed.torch.base.gradients import Part
from bunkbed.torch.base.groups import after_reduction
from bunkbed.torch.ranks.group import Bytes, Kind, OtherWay, Ranks, RanksError, Sending
from bunkbed.torch.ranks.plan import Plan, ScaledRows, Wish, empty_rows, split_by_owner

if TYPE_CHECKING:
    from bunkbed.torch.ranks.rows import RankRows

_IDS = Kind(10, "a lookup", frozenset({10, 11}))
_PLANNED = Kind(11, "a lookup of planned ids", frozenset({10, 11}), bulk=True)
_ROWS = Kind(15, "the rows of a lookup", bulk=True)
_GRADS = Kind(12, "a backward", bulk=True)
_NORMS = Kind(13, "the norms of a backward")
_AHEAD = Kind(14, "the ids of a coming batch")

#: Bits of the flags that a plan carries.
FULL, PLANS, ENDED = 1, 2, 4


@dataclass
class Received:
    """Occurrence gradients that one rank sends this one for one lookup of a table: int64[N], float32[N, dim]."""

    rank: int
    order: int
    starts_round: bool
    ids: Ids
    grads: Floats


class Gradients(Protocol):
    """What `Exchange` needs of the gradients of one table: `bunkbed.torch.rank_pending.RankPending`."""

    factor: float  # by which a rank's gradients are multiplied: 1 / W, or 1

    def prepare(self) -> None:
        """Apply the changes of ``anchor.grad`` before this rank's backward."""

    def pending(self) -> tuple[float, ...]:
        """Return facts about the pending gradients, equal on all ranks; none if there are none."""

    def starts_round(self, parts: Sequence[Part]) -> bool:
        """Return whether new parts are of lookups that were made after the backward call before."""

    def mark(self) -> None:
        """Note a backward call of any table: lookups made from here on begin a new round."""

    def add(self, received: Sequence[Received]) -> Ids:
        """Add gradients, in order; return the exact sum of squares of the sums, int64[`_native.SQUARES`]."""

    def first_bad(self) -> str:
        """Return the message for the first sum that is not finite, or an empty string."""

    def finish(self, norm: float, bad: str) -> None:
        """Write the norm over all ranks into ``anchor.grad``; `bad` is the first message of `first_bad`."""

    def restore(self) -> None:
        """Write the last norm into ``anchor.grad`` again if rows are pending."""


@dataclass
class _Round:
    """What one backward call of this rank has reached so far."""

    parts: dict[int, list[Part]] = field(default_factory=dict)  # by the number of the table
    error: Exception | None = None


class Exchange:
    """The tables that the same ranks share. Made by `exchange_of`. Not thread-safe, like a model."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._tables: list[weakref.ref[RankRows]] = []
        self._gradients: dict[int, weakref.ref[Any]] = {}
        self._rounds: dict[int, _Round] = {}
        self._current: Plan | None = None  # of the batch that `lookahead` yielded
        self._next: Plan | None = None  # of the lookups that `want` announced
        self._wanted: Sequence[tuple[RankRows, Ids]] = []  # the lookups that `want` announced last
        ranks.describe = self._describe

    # ---- The tables

    def join(self, table: RankRows) -> int:
        """Add a table; every rank adds its tables in the same order. Return its number."""
        self._tables.append(weakref.ref(table))
        return len(self._tables) - 1

    def join_gradients(self, table: RankRows, gradients: Gradients) -> None:
        """Add the gradients of a table."""
        self._gradients[table.number] = weakref.ref(gradients)

    def _describe(self) -> Json:
        tables = [table() for table in self._tables]
        return {"tables": {table.name: table.progress() for table in tables if table is not None and not table.closed}}

    def _table(self, number: int) -> RankRows:
        found = self._tables[number]() if 0 <= number < len(self._tables) else None
        if found is None:
            raise RanksError(f"{self.ranks.names()}: another rank uses table {number}, which this rank has closed")
        return found

    # ---- Lookups

    def want(self, lookups: Sequence[tuple[RankRows, Ids]]) -> None:
        """Announce the next lookups, so that one exchange serves them all; each is int64[N]."""
        first, ids = lookups[0]
        wish = None if self._current is None else self._current.of(first)
        self._wanted = list(lookups)
        if wish is None or not wish.comes_next(ids):
            self._next = self._planned(lookups)

    def begin(self, plan: Plan) -> None:
        """Begin a batch; its lookups use the ids of `plan`, which were exchanged before."""
        self._current, self._next, self._wanted = plan, None, []

    def end(self, plan: Plan) -> None:
        """End a batch whose loop is left."""
        if self._current is plan:
            self._current = None

    def look_up(self, table: RankRows, ids: Ids, out: Floats, *, touch: bool) -> None:
        """Write the rows of int64[N] `ids` to float32[N, dim] `out`."""
        lookups: Sequence[tuple[RankRows, Ids]] = [(table, ids)]
        for plan in (self._next, self._current):
            wish = None if plan is None else plan.of(table)
            if plan is None or wish is None or not wish.comes_next(ids):
                continue
            if not wish.is_fresh:
                wishes = [one for one in plan.wishes if not one.is_fresh and not one.is_over]
                try:
                    self._fetch(wishes, touch, _PLANNED if plan is self._current else _ROWS)
                except OtherWay:  # another rank looks up other ids than its plan has: do as it does
                    if self._wanted and self._wanted[0][0] is table and np.array_equal(self._wanted[0][1], ids):
                        lookups = self._wanted
                    break
            wish.take(out)
            return
        self._next, self._wanted = self._planned(lookups), []
        wish = self._next.of(table)
        if wish is None or not wish.comes_next(ids):
            raise RanksError(f"table '{table.name}': ids changed between a collection's call and its lookups")
        self._fetch(self._next.wishes, touch, _ROWS)
        wish.take(out)

    def _planned(self, lookups: Sequence[tuple[RankRows, Ids]]) -> Plan:
        """Exchange the ids of lookups now."""
        while True:
            try:
                return self.start_plan(lookups, 0, kind=_IDS).plan()
            except OtherWay:  # a rank began with its plan, and now comes this way
                continue

    def start_plan(
        self,
        lookups: Sequence[tuple[RankRows, Ids]],
        flags: int,
        *,
        kind: Kind = _AHEAD,
        error: Exception | None = None,
    ) -> StartedPlan:
        """Start the exchange of a batch's ids: (table, int64[N]) of each lookup, in order."""
        wishes: list[Wish] = []
        if error is None:
            try:
                by_table: dict[int, list[Ids]] = {}
                for table, ids in lookups:
                    by_table.setdefault(table.number, []).append(ids)
                wishes = [Wish(self._table(number), by_table[number]) for number in sorted(by_table)]
            except Exception as raised:
                error = raised
        payloads = []
        for rank in range(self.ranks.world):
            head = [flags, len(wishes)]
            for wish in wishes:
                head += [wish.table.number, wish.split.size(rank)]
            payloads.append([np.array(head, np.int64), *(wish.unique[wish.split.part(rank)] for wish in wishes)])
        return StartedPlan(wishes, self.ranks.start(kind, payloads, error), self.ranks.names)

    def _fetch(self, wishes: Sequence[Wish], touch: bool, kind: Kind) -> None:
        """Fill the rows of wishes."""
        ranks = self.ranks
        try:
            found = [wish.table.read(wish.asked, touch) for wish in wishes]
        except Exception as error:
            ranks.fail(kind, error)
        payloads: list[list[Any]] = [
            []
            if rank == ranks.rank
            else [
                rows[wish.asked_bounds[rank] : wish.asked_bounds[rank + 1]]
                for wish, rows in zip(wishes, found, strict=True)
            ]
            for rank in range(ranks.world)
        ]
        heard = [part.view(np.float32) for part in ranks.swap(kind, payloads)]
        ends = [0] * ranks.world
        for wish, rows in zip(wishes, found, strict=True):
            dim = wish.table.dim
            values = empty_rows(len(wish.unique), dim)
            for rank in range(ranks.world):
                place = wish.split.part(rank)
                if rank == ranks.rank:
                    values[place] = rows[wish.asked_bounds[rank] : wish.asked_bounds[rank + 1]]
                    continue
                size = wish.split.size(rank) * dim
                values[place] = heard[rank][ends[rank] : ends[rank] + size].reshape(-1, dim)
                ends[rank] += size
            wish.fill(values)

    # ---- Backward

    def arrive(self, number: int, task: int, parts: list[Part]) -> None:
        """Take the gradients of one table in a backward call; the exchange follows at the call's end, after DDP's."""
        found = self._rounds.get(task)
        if found is None:
            found = self._rounds[task] = _Round()
            for gradients in self._live().values():
                try:
                    gradients.prepare()
                except Exception as error:
                    found.error = found.error or error
            after_reduction(lambda: self._backward(task))
        found.parts[number] = parts

    def _live(self) -> dict[int, Gradients]:
        """Return the gradients by table's number."""
        found = {number: gradients() for number, gradients in self._gradients.items()}
        return {number: gradients for number, gradients in sorted(found.items()) if gradients is not None}

    def _backward(self, task: int) -> None:
        mine = self._rounds.pop(task)
        live = self._live()
        received = self._swap_gradients(mine, live)
        active = sorted(received)
        squares: list[Ids] = []
        bad: dict[str, str] = {}
        error: Exception | None = None
        try:
            for number in active:
                squares.append(live[number].add(received[number]))
                text = live[number].first_bad()
                if text:
                    bad[str(number)] = text
        except Exception as raised:
            error = raised
        self._swap_norms(live, active, squares, bad, error)
        for number, gradients in live.items():
            if number not in received:
                gradients.restore()

    def _swap_gradients(self, mine: _Round, live: dict[int, Gradients]) -> dict[int, list[Received]]:
        """Send each owner its occurrence gradients; return by table what came, in the order of ranks."""
        ranks, error = self.ranks, mine.error
        payloads: list[list[Any]] = [[] for _ in range(ranks.world)]
        heads: list[list[int]] = [[] for _ in range(ranks.world)]
        try:
            for number, parts in sorted(mine.parts.items()):
                if not parts:
                    continue
                table, gradients = self._table(number), live[number]
                starts_round = gradients.starts_round(parts)
                for part in parts:
                    split = split_by_owner(part.ids, table.num_shards, ranks.world)
                    ids, grads = split.take(part.ids), np.ascontiguousarray(part.scaled())
                    assert split.order is not None
                    for rank in range(ranks.world):
                        place = split.part(rank)
                        heads[rank] += [number, int(part.order), int(starts_round), split.size(rank)]
                        payloads[rank] += [ids[place], ScaledRows(grads, split.order[place], gradients.factor)]
            for number, one in live.items():
                # Ranks whose gradients were scaled or dropped differently must not go on.
                if facts := one.pending():
                    ranks.note(number, *facts)
                one.mark()
        except Exception as raised:
            error = error or raised
        for rank, head in enumerate(heads):
            # Gradients of odd dims would leave the ids after them unaligned, so all ids come first.
            arrays = payloads[rank]
            payloads[rank] = [np.array([len(head) // 4, *head], np.int64), *arrays[0::2], *arrays[1::2]]
        heard = ranks.swap(_GRADS, payloads, error)
        return self._parsed(heard)

    def _parsed(self, heard: list[Bytes]) -> dict[int, list[Received]]:
        received: dict[int, list[Received]] = {}
        for rank, message in enumerate(heard):
            count = int(message[:8].view(np.int64)[0])
            at = 8 + count * 32
            head = message[8:at].view(np.int64).reshape(count, 4).tolist()
            ids = []
            for _, _, _, size in head:
                ids.append(message[at : at + size * 8].view(np.int64))
                at += size * 8
            for (number, order, starts_round, size), own in zip(head, ids, strict=True):
                dim = self._table(number).dim
                grads = message[at : at + size * dim * 4].view(np.float32).reshape(size, dim)
                at += size * dim * 4
                received.setdefault(number, []).append(Received(rank, order, bool(starts_round), own, grads))
        return received

    def _swap_norms(
        self,
        live: dict[int, Gradients],
        active: list[int],
        squares: list[Ids],
        bad: dict[str, str],
        error: Exception | None,
    ) -> None:
        text = np.frombuffer(json.dumps(bad).encode(), np.uint8)
        heard = self.ranks.swap(_NORMS, [[*squares, text]] * self.ranks.world, error)
        size = len(active) * _native.SQUARES
        sums = np.stack([message[: size * 8].view(np.int64) for message in heard])
        texts = [json.loads(bytes(message[size * 8 :])) for message in heard]
        for place, number in enumerate(active):
            own = np.ascontiguousarray(sums[:, place * _native.SQUARES : (place + 1) * _native.SQUARES])
            first = next((one[str(number)] for one in texts if str(number) in one), "")
            live[number].finish(_native.norm_of(own), first)


class StartedPlan:
    """A plan whose ids are on their way."""

    def __init__(self, wishes: list[Wish], sending: Sending, names: Callable[[], str]) -> None:
        self._wishes = wishes
        self._names = names
        self._sending = sending
        #: After `plan`: the flags of each rank.
        self.flags: list[int] = []

    def plan(self) -> Plan:
        """Return the plan, once every rank has said which rows it wants of this one."""
        asked: list[list[Ids]] = [[] for _ in self._wishes]
        tables: list[list[int]] = []
        for message in self._sending.receive():
            words = message.view(np.int64)
            self.flags.append(int(words[0]))
            count = int(words[1])
            head = words[2 : 2 + 2 * count].reshape(count, 2).tolist()
            tables.append([number for number, _ in head])
            at = 2 + 2 * count
            for place, (_, size) in enumerate(head):
                if place < len(asked):
                    asked[place].append(words[at : at + size])
                at += size
        if any(one != tables[0] for one in tables) and not any(flags & ENDED for flags in self.flags):
            self._refuse(tables)
        if all(one == tables[0] for one in tables):
            for wish, parts in zip(self._wishes, asked, strict=True):
                wish.hear(parts)
        return Plan(self._wishes)

    def _refuse(self, tables: list[list[int]]) -> NoReturn:
        lines = "; ".join(f"rank {rank}: {numbers}" for rank, numbers in enumerate(tables))
        raise RanksError(
            f"{self._names()}: the ranks look up different tables in one batch, by their numbers {lines}; every rank "
            "must look up the same tables, with no ids where a table is not needed"
        )


def exchange_of(ranks: Ranks) -> Exchange:
    """Return the one `Exchange` of `ranks`."""
    found: Exchange | None = ranks.parts.get("exchange")
    if found is None:
        found = ranks.parts["exchange"] = Exchange(ranks)
    return found
