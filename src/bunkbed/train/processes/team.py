"""`Team`: the processes that train one run together, or the only one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bunkbed.run.run import Run
    from bunkbed.torch.ranks.group import Ranks

__all__ = ["ALONE", "Team", "join_team"]


class Team:
    """The processes (ranks) of one training, seen from one of them.

    Every method except `share` is collective: each rank calls it, in the same order. An error of one rank is raised on
    all. One thread may call these; any thread may call `share`. Owns nothing.

    Args:
        ranks: the processes; None: this one alone.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self.rank = 0 if ranks is None else ranks.rank
        #: Number of processes.
        self.world = 1 if ranks is None else ranks.world
        #: Number of processes on this host.
        self.local_world = 1 if ranks is None else ranks.local_world
        #: Their process group, for torch; None where there is only one process.
        self.process_group: Any = None if ranks is None else ranks.parent

    @classmethod
    def of(cls, run: Run) -> Team:
        """Return the processes that share a run."""
        return cls(getattr(run, "ranks", None))  # only a run of several processes has `ranks`

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone reads the data, reports, and writes files that are not tables."""
        return self.rank == 0

    def share(self, count: int, unit: int = 1) -> tuple[int, int]:
        """Return the places ``[first, last)`` of `count` that this rank takes: whole units, in the order of ranks.

        Units are divided as evenly as possible, and no rank has more than rank 0.

        >>> Team().share(10)
        (0, 10)
        """
        units = -(-count // unit)
        first, last = (-(-rank * units // self.world) for rank in (self.rank, self.rank + 1))
        return min(first * unit, count), min(last * unit, count)

    def gather(self, what: str, say: Callable[[], Any]) -> list[Any]:
        """Return what `say` returns on each rank, a JSON value; `what` names the call in messages.

        Raises:
            RanksError: another rank failed, or does something else.
        """
        return [say()] if self._ranks is None else self._ranks.gather(what, say)

    def any(self, what: str, say: Callable[[], bool]) -> bool:
        """Return whether `say` is true on a rank."""
        return any(self.gather(what, say))

    def most(self, what: str, count: int) -> int:
        """Return the largest of the ranks' counts."""
        return int(max(self.gather(what, lambda: int(count))))

    def concatenate(self, what: str, part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the one-dimensional arrays of all ranks, of one dtype, as one array, in the order of ranks."""
        return part if self._ranks is None else self._ranks.concatenate(what, part)

    def require_same(self, what: str, **given: object) -> None:
        """Raise ValueError on every rank, with the values, if an argument of `what` differs among the ranks."""
        if self._ranks is not None:
            from bunkbed.torch.ranks.files import same_arguments

            same_arguments(self._ranks, what, **given)

    def first(self, what: str, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0, and return its JSON value on every rank; the others wait as long as it takes."""
        return work() if self._ranks is None else self._ranks.first(what, work)


#: The only process.
ALONE = Team()


def join_team() -> Team:
    """Return the processes that torchrun started with this one, which then have a process group of torch.

    Without torchrun, or with one process: this one alone. The first call is collective.
    """
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return ALONE
    import torch.distributed as dist

    from bunkbed.torch.ranks.group import ranks_of

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Team(ranks_of())
