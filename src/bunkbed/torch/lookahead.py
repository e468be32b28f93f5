"""`lookahead`: a loader's batches, while the tables prefetch the rows of the coming ones."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from bunkbed.adapters.bag_gradients import IntArray
from bunkbed.table.table import Table
from bunkbed.torch.base.ranges import ranged
from bunkbed.torch.collection import EmbeddingCollection
from bunkbed.torch.device.window import DeviceWindow
from bunkbed.torch.layer import TableLayer, id_array
from bunkbed.torch.pendings import pending_of
from bunkbed.torch.ranks.exchange import ENDED, FULL, PLANS, Exchange, StartedPlan
from bunkbed.torch.ranks.group import RanksError
from bunkbed.torch.ranks.plan import Plan
from bunkbed.window import MAX_BATCHES, Window

#: Batches pulled from the loader for each one yielded, until the window is full. A slow loader then delays each of the
#: first batches a little, instead of the first batch for the whole window.
PULLS_PER_STEP = 2


class lookahead:  # in lower case, as it is used like a function
    """Iterable of the loader's batches, unchanged and in order, that prefetches the rows of the coming batches.

    The ids of up to `window` coming batches rank the eviction of a table's cache: first rows that no coming batch
    wants, then the row whose next use is furthest. The rows of the next `depth` batches are read from disk while the
    model works. This moves records and never changes values, so training is bit-identical with any window and without.
    The caller's thread pulls the batches; a device cache adds one thread, which ends with the loop. If the loader or
    `ids` uses a random generator that the model also uses, they draw from it earlier than without `lookahead`.

    An error of the loader, or of an id, is raised in the place of its batch. A table whose rows all have room in
    RAM needs no plan: then one batch is pulled ahead. If a window does not fit its table's budget, the batches wait;
    nothing fails. While the model is in evaluation mode, nothing is planned. Leaving the loop early forgets the batches
    that were pulled ahead. ``table.stats()["stall_s"]`` is the time that lookups and updates waited for reads.

    Args:
        loader: any iterable of batches; ``len()`` works if the loader has a length.
        model: the module whose layers look the ids up.
        ids: function from a batch to ``{layer: ids}``, the ids that the layer will look up: an int64 or int32 tensor,
            or a list with one for each lookup. Of an `EmbeddingCollection`, what its ``forward`` takes.
        depth: batches whose rows are prefetched, at least 0; 0 plans nothing. None: 2 to 4, by how long the reads of
            a batch take compared with a step (2 with a device cache).
        window: most batches pulled ahead, 1 to 32. None: up to 32, fewer if a cache holds only a few batches.
        uneven: where several processes share a table, and the loader of one has fewer batches than those of others:
            ``"error"`` raises on all after the last batch that all have, ``"stop"`` ends the loop on all there.

    Where several processes share a table, their ids are exchanged a batch ahead, and all pull equally many batches.

    Raises:
        ValueError, TypeError: `depth`, `window` or `uneven` out of range, or `ids` names something that is not a layer
            of `model`.

    Example::

        for batch in lookahead(loader, model, ids=lambda b: {model.user: b["user"]}):
            loss = model(batch)
    """

    def __init__(
        self,
        loader: Iterable[Any],
        model: torch.nn.Module,
        ids: Callable[[Any], Mapping[Any, Any]],
        depth: int | None = None,
        window: int | None = None,
        *,
        uneven: Literal["error", "stop"] = "error",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"lookahead: model must be a torch.nn.Module, got {type(model).__name__}")
        if not callable(ids):
            raise TypeError(
                f"lookahead: ids must be a function from a batch to {{layer: ids}}, got {type(ids).__name__}"
            )
        if depth is not None and depth < 0:
            raise ValueError(f"lookahead: depth must be at least 0, got {depth}")
        if window is not None and not 1 <= window <= MAX_BATCHES:
            raise ValueError(f"lookahead: window must be 1 to {MAX_BATCHES}, got {window}")
        if uneven not in ("error", "stop"):
            raise ValueError(f'lookahead: uneven must be "error" or "stop", got {uneven!r}')
        self.uneven = uneven
        self.loader = loader
        self.model = model
        self.ids = ids
        self.depth = depth
        self.window = window

    @property
    def batch_sampler(self) -> Any:
        """The loader's batch sampler, of which Lightning sets the epoch; None without one."""
        return getattr(self.loader, "batch_sampler", None)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError where the loader has no length

    def __iter__(self) -> Iterator[Any]:
        if self.depth == 0:
            yield from self.loader
            return
        plan = _plan_of(self)
        batches = iter(self.loader)
        ended: BaseException | None = None  # the loader's last exception, raised after the queued batches
        try:
            while True:
                plan.settle()
                for _ in range(PULLS_PER_STEP):
                    if not plan.wants_more(ended):
                        break
                    try:
                        if ended is None:
                            plan.add(next(batches))
                            continue
                    except Exception as error:  # also StopIteration; raised below, after the queued batches
                        ended = error
                    plan.end(ended)
                plan.prepare()
                if plan.queue:
                    yield plan.begin()
                    continue
                last = plan.last_error(ended)
                if isinstance(last, StopIteration):
                    return
                if last is not None:
                    raise last
        finally:
            ended = last = None  # its traceback refers to this frame; the cycle would keep tables open
            plan.close()
            close = getattr(batches, "close", None)
            if close is not None:
                close()


def _plan_of(owner: lookahead) -> _Plan:
    layers = [layer for layer in owner.model.modules() if isinstance(layer, TableLayer)]
    shared = [layer._pending.rank_rows for layer in layers]
    exchanges = {id(rows.exchange): rows.exchange for rows in shared if rows is not None}
    if not exchanges:
        return _Plan(owner, layers)
    if len(exchanges) > 1:
        raise ValueError("lookahead: the tables of the model are shared by different process groups; use one loop each")
    return _RankPlan(owner, layers, next(iter(exchanges.values())))


class _Plan:
    """Queue of pulled batches, and a window for each table that they want, with one entry for each batch."""

    def __init__(self, owner: lookahead, layers: Sequence[TableLayer]) -> None:
        self.queue: deque[Any] = deque()
        self._owner = owner
        self._layers = {id(layer) for layer in layers}
        self._windows: dict[int, Window | DeviceWindow] = {}

    def settle(self) -> None:
        """End what was started for batches that were added before."""

    def prepare(self) -> None:
        """Make sure that the first batch of the queue can begin, or that the queue is empty."""

    def end(self, error: BaseException) -> None:
        """Note that the loader ended, with StopIteration or an error; called only where `wants_more` asks for it."""

    def last_error(self, ended: BaseException | None) -> BaseException | None:
        """Return what ends the loop after the queued batches, or None if it goes on."""
        return ended

    def wants_more(self, ended: BaseException | None) -> bool:
        """Return whether another batch should be pulled now."""
        if ended is not None:
            return False
        windows = self._windows.values()
        if len(self.queue) > (self._owner.window or MAX_BATCHES) or any(window.is_full for window in windows):
            return False
        # One batch is pulled ahead even if no window plans: only a push shows that rows have left RAM.
        return len(self.queue) < 2 or any(window.plans for window in windows)

    def add(self, batch: Any) -> None:
        """Enter the next batch of the loader. After an error the batch is not queued, and no other may follow."""
        self._enter(self._wanted(batch) if self._owner.model.training else {})
        self.queue.append(batch)

    def _enter(self, wanted: dict[int, tuple[Any, list[IntArray]]]) -> None:
        for key, (table, _) in wanted.items():
            if key not in self._windows:
                window = self._windows[key] = self._window(table)
                for _ in self.queue:
                    window.push(None)
        for key, window in self._windows.items():
            ids: Any = wanted[key][1] if key in wanted else None
            if ids is not None and isinstance(window, Window):
                ids = ids[0] if len(ids) == 1 else np.concatenate(ids)
            ranged("stage", window.table.name, window.push, ids)

    def _window(self, table: Table) -> Window | DeviceWindow:
        tier, depth, batches = pending_of(table).tier, self._owner.depth, self._owner.window
        return (
            Window(table, depth=depth, batches=batches)
            if tier is None
            else DeviceWindow(tier, depth=depth, batches=batches)
        )

    def begin(self) -> Any:
        """Advance every window and return the oldest queued batch."""
        for window in self._windows.values():
            ranged("stage", window.table.name, window.advance)
        return self.queue.popleft()

    def close(self) -> None:
        for window in self._windows.values():
            window.close()

    def _wanted(self, batch: Any) -> dict[int, tuple[Any, list[IntArray]]]:
        """Return id(table) -> (table, int64[N] ids of each lookup) of one batch."""
        wanted = self._owner.ids(batch)
        if not isinstance(wanted, Mapping):
            raise TypeError(f"lookahead: ids must return {{layer: ids}}, got {type(wanted).__name__}")
        tables: dict[int, tuple[Any, list[IntArray]]] = {}
        for layer, tensors in _by_layer(wanted):
            if id(layer) not in self._layers:
                raise ValueError(
                    f"lookahead: ids names {type(layer).__name__}, which is not a bunkbed.torch layer of the model"
                )
            parts = tables.setdefault(id(layer.table), (layer.table, []))[1]
            for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
                parts.append(id_array(tensor, "ids").reshape(-1))
        return tables


class _RankPlan(_Plan):
    """The plan where ranks share tables: each batch's ids go to the rows' owners, whose windows then know all ranks'.

    Every rank adds, ends and begins batches at the same places of its loop, and decides from what all ranks said.
    """

    def __init__(self, owner: lookahead, layers: Sequence[TableLayer], exchange: Exchange) -> None:
        super().__init__(owner, layers)
        self._exchange = exchange
        self._ranks = exchange.ranks
        self._started: deque[StartedPlan] = deque()  # of the last batches of the queue, and of ends after them
        self._plans: deque[Plan] = deque()  # of the batches of the queue before those
        self._rank_windows: dict[int, Window] = {}  # by the table's number
        self._flags = 0  # what the ranks said last
        self._limit = owner.window or MAX_BATCHES
        self._stop: BaseException | None = None
        self._begun: Plan | None = None  # of the batch that was yielded last

    def wants_more(self, ended: BaseException | None) -> bool:
        """See `_Plan`; a rank whose loader has ended says so as often as others add batches."""
        pulled = len(self._plans) + len(self._started)
        if self._stop is not None or pulled > self._limit:
            return False
        return pulled < 2 or bool(self._flags & PLANS)

    def add(self, batch: Any) -> None:
        """See `_Plan`."""
        wanted = self._wanted(batch) if self._owner.model.training else {}
        lookups = [
            (rows, ids)
            for table, parts in wanted.values()
            for ids in parts
            if (rows := pending_of(table).rank_rows) is not None
        ]
        self._enter({key: one for key, one in wanted.items() if pending_of(one[0]).rank_rows is None})
        self._started.append(self._exchange.start_plan(lookups, self._own_flags()))
        self.queue.append(batch)

    def end(self, error: BaseException) -> None:
        """See `_Plan`; every rank hears of an error of this rank's loader or ids."""
        failure = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else None
        self._started.append(self._exchange.start_plan([], ENDED, error=failure))

    def _own_flags(self) -> int:
        windows = [*self._windows.values(), *self._rank_windows.values()]
        full, plans = any(window.is_full for window in windows), any(window.plans for window in windows)
        return FULL * full | PLANS * plans

    def settle(self) -> None:
        """See `_Plan`."""
        while self._started:
            started = self._started.popleft()
            try:
                plan = started.plan()
                self._stop = self._stop or self._uneven(started.flags)
            except Exception as error:
                self._stop = self._stop or error
            if self._stop is not None:  # this batch is not one that every rank has
                while len(self.queue) > len(self._plans):
                    self.queue.pop()
                continue
            self._push(plan)
            self._plans.append(plan)
            self._flags = functools.reduce(operator.or_, started.flags)
            if self._flags & FULL:
                self._limit = max(1, min(self._limit, len(self._plans)))

    def _uneven(self, flags: list[int]) -> BaseException | None:
        over = [rank for rank, one in enumerate(flags) if one & ENDED]
        if not over:
            return None
        if len(over) == len(flags) or self._owner.uneven == "stop":
            return StopIteration()
        return RanksError(
            f"lookahead: the loader of rank {', '.join(map(str, over))} ended before those of the other ranks; give "
            'all ranks equally many batches (a DistributedSampler does), or uneven="stop" to leave the rest out'
        )

    def _push(self, plan: Plan) -> None:
        asked = {wish.table.number: wish for wish in plan.wishes}
        for number, wish in asked.items():
            if number not in self._rank_windows:
                window = self._rank_windows[number] = Window(
                    wish.table.local, depth=self._owner.depth, batches=self._owner.window
                )
                for _ in self._plans:
                    window.push(None)
        for number, window in self._rank_windows.items():
            ids = asked[number].asked if number in asked else None
            ranged("stage", window.table.name, window.push, ids)

    def prepare(self) -> None:
        """See `_Plan`."""
        if not self._plans:
            self.settle()

    def begin(self) -> Any:
        """See `_Plan`."""
        self._begun = self._plans.popleft()
        self._exchange.begin(self._begun)
        for window in self._rank_windows.values():
            ranged("stage", window.table.name, window.advance)
        return super().begin()

    def last_error(self, ended: BaseException | None) -> BaseException | None:
        """See `_Plan`."""
        return self._stop

    def close(self) -> None:
        super().close()
        for window in self._rank_windows.values():
            window.close()
        for started in self._started:  # the other ranks have started it, too, and a new exchange must not meet it
            with contextlib.suppress(Exception):
                started.plan()
        if self._begun is not None:
            self._exchange.end(self._begun)


def _by_layer(wanted: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (layer, ids) of ``{layer: ids}``, with the layers of a collection in its place."""
    for layer, tensors in wanted.items():
        if not isinstance(layer, EmbeddingCollection):
            yield layer, tensors
            continue
        layer.require_names(tensors)
        for name, value in tensors.items():
            yield layer[name], value[0] if isinstance(value, tuple) else value
