"""The next one while this one is used."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")

_NONE = object()


def ahead(items: Iterable[Item]) -> Generator[Item, None, None]:
    """`items`, each asked for by a thread while the caller has the one before it, in their order.

    What asking raises is raised here, after the items before it. Once this is closed nothing is under way.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(1, "bunkbed-ahead") as thread:
        asked = thread.submit(next, iterator, _NONE)
        while (item := asked.result()) is not _NONE:
            asked = thread.submit(next, iterator, _NONE)
            yield item  # type: ignore[misc]
