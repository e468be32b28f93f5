"""The folders that a table's rows are in, and the commits of each that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bunkbed import _native
from bunkbed.files.kinds import kind_of
from bunkbed.files.run_files import RunFiles, RunManifest


@dataclass(frozen=True)
class Part:
    """A table, or a shard of one.

    Attributes:
        name: the name in its run; empty for a table without one.
        folder: where it is.
        commit: the number of its own commit; None: the newest.
    """

    name: str
    folder: Path
    commit: int | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of a table at one commit.

    Attributes:
        home: the folder of the table, of the sharded table or of the run.
        parts: at least one.
        table: the table's name in its run; empty for a table, and for a sharded table, on its own.
        commit: the number of the commit of the run or sharded table; None for a table on its own.
    """

    home: Path
    parts: list[Part]
    table: str = ""
    commit: int | None = None

    @property
    def label(self) -> str:
        """Return the table's name, for errors."""
        return self.table or self.home.name


def parts_of(path: Path, table: str | None) -> Parts:
    """Return the parts of a table on its own, a sharded table, or a table of a run, at the newest commit.

    Raises:
        FileNotFoundError, FormatError: there is no such table. ValueError: `table` names none of the run's.
    """
    kind = kind_of(path)
    if kind == "table":
        if table is not None:
            raise ValueError(f"{path} is a table, not a run; leave table= out")
        spec, _, _ = _native.read_spec(str(path), "", None)
        if spec.belongs_to_run:
            raise ValueError(
                f"{path} is a table of the run at {path.parent.parent}; give that path, and table={path.name!r}"
            )
        return Parts(path, [Part("", path)])
    files = RunFiles(path, kind)
    manifest = files.load_newest()
    if kind == "sharded table" and table is not None:
        raise ValueError(f"{path} is a sharded table, not a run; leave table= out")
    if kind == "run":
        names = manifest.table_names()
        if not names:
            raise FileNotFoundError(2, "no table was committed yet", str(path))
        if table is None and len(names) == 1:
            table = names[0]
        if table not in names:
            asked = "say which one with table=" if table is None else f"it has no table {table!r}"
            raise ValueError(f"{files.label} has the tables {', '.join(names) or 'none'}; {asked}")
    members = _members(manifest, table)
    parts = [Part(name, files.own_table(name), manifest.tables[name]) for name in members]
    return Parts(path, parts, table or "", manifest.epoch)


def commits_at(parts: Parts, commit: int) -> list[int]:
    """Return the commit of each part at a commit of the whole; 0 for a part that did not exist.

    Raises:
        ValueError: no such commit; the message lists those that remain.
    """
    if parts.commit is None or commit == 0:
        return [commit] * len(parts.parts)
    manifest = RunFiles(parts.home).find(commit)
    return [manifest.tables.get(part.name, 0) for part in parts.parts]


def _members(manifest: RunManifest, table: str | None) -> list[str]:
    if table is None:
        assert manifest.sharding is not None
        return manifest.sharding.names()
    sharding = manifest.sharded.get(table)
    return [table] if sharding is None else sharding.names(table)
