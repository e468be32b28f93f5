"""`Sharing`: how a layer's table is placed where torch.distributed runs several processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from bunkbed.torch.base.groups import ProcessGroup
from bunkbed.torch.ranks.group import Ranks, ranks_of


@dataclass(frozen=True)
class Sharing:
    """The arguments of a layer about several processes; see `bunkbed.torch.Embedding`."""

    placement: Literal["sharded", "local"] = "sharded"
    shards: int | None = None
    process_group: ProcessGroup = None
    gradients: Literal["mean", "sum"] = "mean"

    def require_valid(self, kind: str) -> None:
        """Raise ValueError for an argument out of range."""
        if self.placement not in ("sharded", "local"):
            raise ValueError(f'{kind}: placement must be "sharded" or "local", got {self.placement!r}')
        if self.gradients not in ("mean", "sum"):
            raise ValueError(f'{kind}: gradients must be "mean" or "sum", got {self.gradients!r}')
        if self.shards is not None and (isinstance(self.shards, bool) or not isinstance(self.shards, int)):
            raise TypeError(f"{kind}: shards must be an int, got {self.shards!r}")
        if self.shards is not None and self.shards < 1:
            raise ValueError(f"{kind}: shards must be at least 1, got {self.shards}")

    def ranks(self, kind: str) -> Ranks | None:
        """Return the processes that share the layer's table; None if the table is this process's own.

        The first call in a process group is collective.

        Raises:
            RuntimeError: this is one of several processes, and torch.distributed is not initialised.
        """
        if self.placement == "local":
            return None
        if not dist.is_available() or not dist.is_initialized():
            world = os.environ.get("WORLD_SIZE", "1")
            if world.isdigit() and int(world) > 1 and "RANK" in os.environ:
                raise RuntimeError(
                    f"{kind}: this is one of {world} processes (WORLD_SIZE), but torch.distributed is not initialised, "
                    "so each process would train a table of its own; make the layer after "
                    "torch.distributed.init_process_group(...) (in Lightning: in configure_model(), not in __init__), "
                    'or give placement="local"'
                )
            return None
        world = dist.get_world_size(self.process_group)
        if world < 0:
            raise ValueError(
                f"{kind}: this process (rank {dist.get_rank()}) is not in process_group; make the layer on its members "
                'only, or give placement="local"'
            )
        return ranks_of(self.process_group) if world > 1 else None

    def require_none(self, kind: str) -> None:
        """Raise ValueError for an argument that comes with the table that a layer is given."""
        for name, value, default in (
            ("shards", self.shards, None),
            ("process_group", self.process_group, None),
            ("gradients", self.gradients, "mean"),
        ):
            if value != default:
                raise ValueError(f"{kind}: {name}= comes with table=; leave it out")
