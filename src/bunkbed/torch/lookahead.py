"""`lookahead`: the loader's batches, with the rows of the next few already on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from bunkbed.torch.layer import TableLayer, id_array

#: Batches whose rows are staged ahead of the one in use. A table reads one batch at a time, so more would only make a
#: small cache give up rows before they are used.
DEFAULT_DEPTH = 1


class lookahead:  # in lower case, as it is used like a function
    """Yields the loader's batches unchanged and in order, having staged the rows of the next `depth` ones.

    Staging moves records, never values, so training is bit-identical at any depth. Batches are pulled in the
    caller's thread: the loader's use of random numbers stays deterministic, and there is no thread to clean up.
    The rows are read beside the model's work, one batch at a time. An error of the loader, or of an id, is raised
    where its batch would have come. It owns nothing; iterating again starts the loader again.

    Args:
        loader: any iterable of batches; ``len()`` works where the loader's does.
        model: the module whose layers look the ids up.
        ids: from a batch to ``{layer: ids}``, an int64 or int32 tensor, or several in a list; what the layers
            will get.
        depth: batches ahead, at least 0; None for the default, 1.

    Raises:
        ValueError, TypeError: `depth` below 0, or `ids` names something that is not a layer of `model`.

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
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"lookahead: model must be a torch.nn.Module, got {type(model).__name__}")
        if not callable(ids):
            raise TypeError(
                f"lookahead: ids must be a function from a batch to {{layer: ids}}, got {type(ids).__name__}"
            )
        if depth is not None and depth < 0:
            raise ValueError(f"lookahead: depth must be at least 0, got {depth}")
        self.loader = loader
        self.model = model
        self.ids = ids
        self.depth = DEFAULT_DEPTH if depth is None else depth

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError where the loader has no length

    def __iter__(self) -> Iterator[Any]:
        layers = {id(layer) for layer in self.model.modules() if isinstance(layer, TableLayer)}
        batches = iter(self.loader)
        queue: deque[Any] = deque()
        ended: BaseException | None = None  # what the loader ended with, after the batches in the queue
        try:
            while True:
                while ended is None and len(queue) <= self.depth:
                    try:
                        batch = next(batches)
                        self._stage(batch, layers)
                    except Exception as error:  # StopIteration too; raised in turn below
                        ended = error
                    else:
                        queue.append(batch)
                if queue:
                    yield queue.popleft()
                elif isinstance(ended, StopIteration):
                    return
                elif ended is not None:
                    raise ended
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def _stage(self, batch: Any, layers: set[int]) -> None:
        wanted = self.ids(batch)
        if not isinstance(wanted, Mapping):
            raise TypeError(f"lookahead: ids must return {{layer: ids}}, got {type(wanted).__name__}")
        for layer, tensors in wanted.items():
            if id(layer) not in layers:
                raise ValueError(
                    f"lookahead: ids names {type(layer).__name__}, which is not a bunkbed.torch layer of the model"
                )
            for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
                layer.table.stage(id_array(tensor, "ids").reshape(-1))
