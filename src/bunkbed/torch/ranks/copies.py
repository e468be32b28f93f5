"""Copies of rank 0's manifests and dense files, on hosts that do not share its disk.

See docs/design/ranks.md, "Hosts without a shared disk".
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping

from bunkbed import _native
from bunkbed.errors import BunkbedError
from bunkbed.files.durable import sync_directory
from bunkbed.files.run_files import RunFiles
from bunkbed.run.leftovers import forget_marks
from bunkbed.torch.ranks.group import Ranks

_COPYING = "copying dense files to other hosts"
#: For bytes in text: a manifest may be damaged.
_BYTES = "surrogateescape"


class Copies:
    """The copies of one directory, seen from one rank.

    Attributes:
        keepers: on each disk that is not rank 0's, the rank that keeps the copies; equal on all ranks.
        next_file: the number that rank 0 gives to the first file of the next commit.
    """

    def __init__(self, folder: RunFiles, ranks: Ranks) -> None:
        self.keepers: list[int] = []
        self.next_file = 1
        self._folder = folder
        self._ranks = ranks

    @property
    def is_keeper(self) -> bool:
        """Whether this rank keeps the copies on its disk."""
        return self._ranks.rank in self.keepers

    def commits(self) -> dict[str, str]:
        """Return the text of each manifest in this rank's directory, also of a damaged one, by epoch."""
        paths = {epoch: self._folder.manifest_path(epoch) for epoch in self._folder.epochs()}
        return {str(epoch): path.read_bytes().decode(errors=_BYTES) for epoch, path in paths.items()}

    def update(self, commits: Mapping[str, str], remaining: Iterable[int]) -> None:
        """Where this rank keeps copies: add these manifests, and remove all but the remaining ones."""
        if not self.is_keeper:
            return
        present = set(self._folder.epochs())
        for epoch, text in commits.items():
            if int(epoch) not in present:
                self._folder.publish_bytes(int(epoch), text.encode(errors=_BYTES))
        for old in present - set(remaining):
            _native.remove_file(str(self._folder.manifest_path(old)))

    def remove_unnamed(self, tables: Iterable[str]) -> None:
        """Where this rank keeps copies: remove dense files that no commit names, and marks of committed `tables`."""
        if self.is_keeper:
            self._folder.remove_unnamed_files()
            forget_marks(self._folder, set(tables))

    def share(self, contents: Mapping[str, bytes], next_file: int) -> dict[str, bytes]:
        """Return the dense files that rank 0 gives, on rank 0 and where copies are kept; else none. Collective.

        Args:
            contents: on rank 0, the files by name.
            next_file: on rank 0, the first number that no file has had.
        """
        # Another rank may not know of the last commit, if rank 0 failed after it had published it.
        self.next_file, names = self._ranks.gather(_COPYING, lambda: [next_file, list(contents)])[0]
        sent = {name: self._ranks.send(_COPYING, contents.get(name, b""), self.keepers) for name in names}
        return dict(contents) if self._ranks.is_first else sent if self.is_keeper else {}

    def fetch_files(self) -> None:
        """Copy from rank 0 what the kept copies lack of the dense files that its commits name. Collective.

        A file that is missing or damaged on rank 0's disk stays so in the copies: `bunkbed.Run.read` reports it.
        """
        lacking = self._ranks.gather(_COPYING, lambda: self._lacking() if self.is_keeper else [])
        for number, digest in sorted({(number, digest) for one in lacking for number, digest in one}):
            self._fetch(number, digest, [rank for rank, one in enumerate(lacking) if [number, digest] in one])
        self._ranks.gather(_COPYING, lambda: sync_directory(self._folder.files) if self.is_keeper else None)

    def _fetch(self, number: int, digest: str, receivers: list[int]) -> None:
        read: list[bytes] = []

        def is_sound() -> bool:
            found = self._sound(number, digest) if self._ranks.is_first else None
            read.extend([] if found is None else [found])
            return bool(read)

        if not self._ranks.gather(_COPYING, is_sound)[0]:
            return
        data = self._ranks.send(_COPYING, read[0] if read else b"", receivers)
        is_mine = self._ranks.rank in receivers
        self._ranks.gather(_COPYING, lambda: self._folder.write_file(number, data) if is_mine else None)

    def _lacking(self) -> list[tuple[int, str]]:
        """Return number and SHA-256 of the dense files that a commit names and that are not here."""
        digests: dict[int, str] = {}
        for epoch in self._folder.epochs():
            with contextlib.suppress(BunkbedError):  # damaged, which check() reports
                digests |= {number: digest for number, _, digest in self._folder.load(epoch).files.values()}
        return [(number, digest) for number, digest in digests.items() if self._sound(number, digest) is None]

    def _sound(self, number: int, digest: str) -> bytes | None:
        """Return the bytes of a dense file; None where it is missing or damaged."""
        try:
            data = _native.read_file(str(self._folder.file_path(number)))
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None
