"""Hosts without a shared disk, for tests: each rank sees another folder at the same path."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bunkbed as bb
from rank_processes import spawn, use_own_disk


class Disks:
    """The disks of some hosts, and the host of each rank."""

    def __init__(self, root: Path, hosts: list[int]) -> None:
        self.root, self.hosts = root, hosts
        self.rows = root / "mounted" / "rows"
        for folder in (*map(self.disk, hosts), self.rows.parent):
            folder.mkdir(parents=True, exist_ok=True)

    def disk(self, host: int) -> Path:
        return self.root / f"disk-{host}"

    def spawn(self, worker: Callable[..., Any], *arguments: Any, dying: int | None = None) -> list[Any]:
        return spawn(len(self.hosts), _with_own_disk, self, worker, *arguments, dying=dying)

    def shards(self, host: int) -> list[str]:
        return sorted(path.name for path in (self.disk(host) / "rows" / "tables").iterdir())

    def manifests(self, host: int) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.disk(host) / "rows").glob("run-*")}

    def dense(self, host: int) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.disk(host) / "rows" / "files").iterdir()}

    def merge(self) -> Path:
        """Put the shards of all hosts into a copy of the directory of rank 0's, as a user would to read the table."""
        whole = self.root / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(self.disk(self.hosts[0]) / "rows", whole)
        for host in set(self.hosts) - {self.hosts[0]}:
            shutil.copytree(self.disk(host) / "rows" / "tables", whole / "tables", dirs_exist_ok=True)
        assert not bb.check(whole)
        return whole


def _with_own_disk(rank: int, disks: Disks, worker: Callable[..., Any], *arguments: Any) -> Any:
    use_own_disk(disks.disk(disks.hosts[rank]), disks.rows.parent)
    return worker(rank, disks, *arguments)
