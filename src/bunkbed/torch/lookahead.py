"""`lookahead`: a loader's batches, while the tables prefetch the rows of the coming ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from bunkbed.adapters.bag_gradients import IntArray
from bunkbed.table.table import Table
from bunkbed.torch.base.ranges import ranged
from bunkbed.torch.device.window import DeviceWindow
from bunkbed.torch.layer import TableLayer, id_array
from bunkbed.torch.pending import pending_of
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

    An error of the loader, or of an id, is raised in the place of its batch. A table whose rows are all in RAM needs
    no plan: then one batch is pulled ahead. If a window does not fit its table's budget, the batches wait; nothing
    fails. While the model is in evaluation mode, nothing is planned. Leaving the loop early forgets the batches that
    were pulled ahead. ``table.stats()["stall_s"]`` is the time that lookups and updates waited for reads.

    Args:
        loader: any iterable of batches; ``len()`` works if the loader has a length.
        model: the module whose layers look the ids up.
        ids: function from a batch to ``{layer: ids}``, the ids that the layer will look up: an int64 or int32 tensor,
            or a list with one for each lookup.
        depth: batches whose rows are prefetched, at least 0; 0 plans nothing. None: 2 to 4, by how long the reads of
            a batch take compared with a step (2 with a device cache).
        window: most batches pulled ahead, 1 to 32. None: up to 32, fewer if a cache holds only a few batches.

    Raises:
        ValueError, TypeError: `depth` or `window` out of range, or `ids` names something that is not a layer of
            `model`.

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
        plan = _Plan(self)
        batches = iter(self.loader)
        ended: BaseException | None = None  # the loader's last exception, raised after the queued batches
        try:
            while True:
                for _ in range(PULLS_PER_STEP):
                    if ended is not None or not plan.wants_more():
                        break
                    try:
                        plan.add(next(batches))
                    except Exception as error:  # also StopIteration; raised below, after the queued batches
                        ended = error
                if plan.queue:
                    yield plan.begin()
                elif isinstance(ended, StopIteration):
                    return
                elif ended is not None:
                    raise ended
        finally:
            ended = None  # its traceback refers to this frame; the cycle would keep tables open
            plan.close()
            close = getattr(batches, "close", None)
            if close is not None:
                close()


class _Plan:
    """Queue of pulled batches, and a window for each table that they want, with one entry for each batch."""

    def __init__(self, owner: lookahead) -> None:
        self.queue: deque[Any] = deque()
        self._owner = owner
        self._layers = {id(layer) for layer in owner.model.modules() if isinstance(layer, TableLayer)}
        self._windows: dict[int, Window | DeviceWindow] = {}

    def wants_more(self) -> bool:
        """Return whether another batch should be pulled now."""
        windows = self._windows.values()
        if len(self.queue) > (self._owner.window or MAX_BATCHES) or any(window.is_full for window in windows):
            return False
        # One batch is pulled ahead even if no window plans: only a push shows that rows have left RAM.
        return len(self.queue) < 2 or any(window.plans for window in windows)

    def add(self, batch: Any) -> None:
        """Enter the next batch of the loader. After an error the batch is not queued, and no other may follow."""
        wanted = self._wanted(batch) if self._owner.model.training else {}
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
        self.queue.append(batch)

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
        for layer, tensors in wanted.items():
            if id(layer) not in self._layers:
                raise ValueError(
                    f"lookahead: ids names {type(layer).__name__}, which is not a bunkbed.torch layer of the model"
                )
            parts = tables.setdefault(id(layer.table), (layer.table, []))[1]
            for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
                parts.append(id_array(tensor, "ids").reshape(-1))
        return tables
