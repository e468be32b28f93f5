"""`lookahead`: the loader's batches, with what the coming ones want planned and on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from bunkbed.torch.base.gradients import IntArray
from bunkbed.torch.base.ranges import ranged
from bunkbed.torch.device.window import DeviceWindow
from bunkbed.torch.layer import TableLayer, id_array
from bunkbed.torch.pending import pending_of
from bunkbed.window import MAX_BATCHES, Window

#: Batches pulled from the loader for each one handed over, until the window is full: a slow loader then delays the
#: first batches a little each, instead of the first one for the whole window.
PULLS_PER_STEP = 2


class lookahead:  # in lower case, as it is used like a function
    """Yields the loader's batches unchanged and in order, having planned and staged the rows of the coming ones.

    The ids of up to `window` coming batches rank what a table's cache gives up: first rows none of them wants, then the
    row that is wanted last. The rows of the next `depth` batches are read from disk beside the model's work. Only
    records move, never values, so training is bit-identical with any window and without. Batches are pulled in the
    caller's thread: there is no thread to clean up. A loader or `ids` that draws from a random generator the model uses
    too draws earlier than without.

    An error of the loader, or of an id, is raised where its batch would have come. A table whose rows are all in RAM
    has nothing to plan: then one batch is pulled ahead. Where a window does not fit its table's budget, the batches
    wait; nothing fails. While the model is in evaluation mode batches pass through. Leaving the loop early forgets the
    batches that did not come. ``table.stats()["stall_s"]`` says how long lookups and updates waited for reads.

    Args:
        loader: any iterable of batches; ``len()`` works where the loader's does.
        model: the module whose layers look the ids up.
        ids: from a batch to ``{layer: ids}``, an int64 or int32 tensor, or several in a list; what the layers
            will get.
        depth: batches whose rows are staged ahead, at least 0; 0 passes batches through and plans nothing. None: 2
            to 4, by how long the reads of a batch take beside a step.
        window: most batches pulled ahead, 1 to 32. None: up to 32, fewer where a cache holds only a few batches.

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
        model: Any,
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

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError where the loader has no length

    def __iter__(self) -> Iterator[Any]:
        if self.depth == 0:
            yield from self.loader
            return
        plan = _Plan(self)
        batches = iter(self.loader)
        ended: BaseException | None = None  # what the loader ended with, after the batches pulled before
        try:
            while True:
                for _ in range(PULLS_PER_STEP):
                    if ended is not None or not plan.wants_more():
                        break
                    try:
                        plan.add(next(batches))
                    except Exception as error:  # StopIteration too; raised in turn below
                        ended = error
                if plan.queue:
                    yield plan.begin()
                elif isinstance(ended, StopIteration):
                    return
                elif ended is not None:
                    raise ended
        finally:
            ended = None  # its traceback refers to this very frame: a cycle, which would keep tables open
            plan.close()
            close = getattr(batches, "close", None)
            if close is not None:
                close()


class _Plan:
    """Batches pulled and not begun, and the windows of the tables they want: one entry a batch in each."""

    def __init__(self, owner: lookahead) -> None:
        self.queue: deque[Any] = deque()
        self._owner = owner
        self._layers = {id(layer) for layer in owner.model.modules() if isinstance(layer, TableLayer)}
        self._windows: dict[int, Window | DeviceWindow] = {}

    def wants_more(self) -> bool:
        """Whether another batch should be pulled now."""
        windows = self._windows.values()
        if len(self.queue) > (self._owner.window or MAX_BATCHES) or any(window.is_full for window in windows):
            return False
        # One ahead even where there is nothing to plan: the day may come when rows leave RAM.
        return len(self.queue) < 2 or any(window.plans for window in windows)

    def add(self, batch: Any) -> None:
        """Takes the next batch of the loader; on an error it is as if it had not come, and none may follow."""
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

    def _window(self, table: Any) -> Window | DeviceWindow:
        tier, depth, batches = pending_of(table).tier, self._owner.depth, self._owner.window
        return (
            Window(table, depth=depth, batches=batches)
            if tier is None
            else DeviceWindow(tier, depth=depth, batches=batches)
        )

    def begin(self) -> Any:
        """The next batch, whose turn it is."""
        for window in self._windows.values():
            ranged("stage", window.table.name, window.advance)
        return self.queue.popleft()

    def close(self) -> None:
        for window in self._windows.values():
            window.close()

    def _wanted(self, batch: Any) -> dict[int, tuple[Any, list[IntArray]]]:
        """id(table) -> (table, int64[N] ids of each lookup) of one batch."""
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
