"""The problems that a check reports: the damage, its meaning, the remedy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from bunkbed.core.types import Json


class Problem(str):
    """One problem: a line of text with the damage, its meaning and the remedy.

    Attributes:
        kind: ``"manifest"`` (a commit cannot be read), ``"foreign"`` (a commit of another table), ``"fields"`` (of
            another release), ``"segment"``, ``"chunk"``, ``"record"``, ``"rows"`` (a commit's files do not belong
            together), ``"directory"`` (an index snapshot, which a repair replaces), ``"file"`` (a dense file of a
            run), ``"table"`` (a run's commit names a commit of a table that is missing or damaged), ``"padding"`` (a
            byte without meaning changed), ``"stranger"`` (a file that Bunkbed did not write).
        file: the file; the table's or run's folder where the problem is not in a single file.
        offset: byte in the file where the damage begins, or None: the whole file.
        found: the damage.
        meaning: the effect on rows and commits.
        remedy: what the user can do.
        epochs: commits that cannot be read in full because of this problem.
    """

    kind: str
    file: Path
    offset: int | None
    found: str
    meaning: str
    remedy: str
    epochs: tuple[int, ...]

    def __new__(
        cls,
        kind: str,
        file: Path,
        found: str,
        meaning: str,
        remedy: str,
        *,
        offset: int | None = None,
        epochs: Sequence[int] = (),
    ) -> Problem:
        where = "" if offset is None or f"byte {offset}" in found else f" (byte {offset} of {file.name})"
        problem = super().__new__(cls, f"{found}{where}; {meaning}; {remedy}")
        problem.kind, problem.file, problem.offset = kind, file, offset
        problem.found, problem.meaning, problem.remedy, problem.epochs = found, meaning, remedy, tuple(epochs)
        return problem

    def as_dict(self) -> Json:
        """Return the attributes, for JSON."""
        return {
            "kind": self.kind,
            "file": str(self.file),
            "offset": self.offset,
            "found": self.found,
            "meaning": self.meaning,
            "remedy": self.remedy,
            "epochs": list(self.epochs),
        }


class Report(list[Problem]):
    """The list of problems that a check found; empty, and equal to ``[]``, when the table or run is sound.

    Attributes:
        repaired: the repairs made, one line each.
        leftovers: files, or ends of files, that no commit names: (file, bytes). They are no problem. A writer at work
            or a process that died left them; the next writer removes them, and so does a repair.
        epochs: the existing commits, ascending.
        sound_epochs: the commits whose bytes were all read and are correct.
        bytes_read: bytes of segments that were verified.
    """

    def __init__(self, problems: Sequence[Problem] = ()) -> None:
        super().__init__(problems)
        self.repaired: list[str] = []
        self.leftovers: list[tuple[Path, int]] = []
        self.epochs: list[int] = []
        self.sound_epochs: list[int] = []
        self.bytes_read = 0


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Return ``commit 3``, ``commits 3, 4``."""
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def how_to_go_back(place: Path, epochs: Sequence[int], sound: Sequence[int]) -> str:
    """Return the remedy for a newest commit that cannot be read."""
    older = [number for number in sound if number < epochs[-1]]
    if not older:
        return "no older commit is sound: put the files back from a copy"
    return (
        f"put the file back from a copy, or go back to commit {older[-1]}, which loses what came after it: "
        f"bunkbed check {shlex.quote(str(place))} --repair --fall-back-to {older[-1]}"
    )


def problems_of_table(place: Path, checked: Json, owner: Path | None = None) -> Report:
    """Return the report of the core's findings in the table at `place`; `owner` is the run of the table."""
    report = Report([_explain(place, checked, found, owner) for found in checked["problems"]])
    report.leftovers = [(place / name, size) for _, name, size in checked["leftovers"]]
    report.epochs, report.sound_epochs = list(checked["epochs"]), list(checked["sound"])
    report.bytes_read = int(checked["bytes"])
    return report


def _explain(place: Path, checked: Json, found: Json, owner: Path | None) -> Problem:
    kind, epochs = found["kind"], list(found["epochs"])
    newest = checked["epochs"][-1]
    commits = numbered("commit", epochs)
    command = f"bunkbed check {shlex.quote(str(owner or place))} --repair"
    if kind == "stranger":
        meaning, remedy = "it is not read", "move it elsewhere"
    elif kind == "padding":
        meaning = "no value is touched, but the disk changed what was written"
        remedy = "look after the disk, and keep a copy on another one"
    elif kind == "misplaced":
        meaning = f"no lookup finds it there, and rows may be missing from their own shard, in {commits}"
        remedy = "the shard was written by itself, or its folder was put here from elsewhere: put it back from a copy"
    elif kind == "directory":
        meaning = f"{commits} cannot be opened until it is repaired; no row is lost: the segments hold them all"
        remedy = f"{command} builds the directory from the segments"
    else:
        meaning = {
            "manifest": f"{commits} cannot be opened",
            "foreign": f"{commits} cannot be opened: the file was put here from elsewhere",
            "fields": f"{commits} cannot be opened by this release",
            "segment": f"rows in it are lost to {commits}",
            "chunk": f"rows in it are lost to {commits}",
            "record": f"where no newer record of that id exists, its lookup is an error in {commits}",
            "rows": f"{commits} cannot be opened: its files do not belong together",
        }[kind]
        if kind == "fields":
            remedy = "open it with the release that wrote it, or a newer one"
        elif owner is not None:
            remedy = f"see the run's own problems, or {command}"
        elif newest in epochs:
            remedy = how_to_go_back(place, checked["epochs"], checked["sound"])
        else:
            meaning += f"; the newest, {newest}, is not touched by it"
            remedy = f"if it is a snapshot, drop it with bunkbed snapshots --drop; otherwise it goes with: {command}"
    where = place / found["file"] if found["file"] else place
    return Problem(kind, where, found["what"], meaning, remedy, offset=found["offset"], epochs=epochs)
