"""Prefetching of the next item of an iterable."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")

_NONE = object()


def ahead(items: Iterable[Item]) -> Generator[Item, None, None]:
    """Yield `items` in order; a thread fetches the next item while the caller uses one.

    An error of `items` is raised here, after the items before it. After this generator is closed, the thread is idle.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(1, "bunkbed-ahead") as thread:
        asked = thread.submit(next, iterator, _NONE)
        while (item := asked.result()) is not _NONE:
            asked = thread.submit(next, iterator, _NONE)
            yield item  # type: ignore[misc]
