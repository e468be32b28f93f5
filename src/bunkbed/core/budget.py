"""Byte counts as text, and a RAM budget that several tables share."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import weakref
from typing import Protocol

from bunkbed.core.typed import shortened
from bunkbed.errors import BunkbedError, TableClosedError

#: The most bytes of `ram` that a writer takes for an id that has a count (`Retention.admit`): a directory entry.
COUNTED_BYTES = 20

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(value: float | str) -> int:
    """Return the number of bytes of a whole number or a string such as ``"256MiB"``.

    Raises:
        TypeError: neither a number nor a string.
        ValueError: the string is not a size, or the size is not in [1, 2**63).

    >>> parse_bytes("1.5GiB"), parse_bytes(2e9), parse_bytes("2e9")
    (1610612736, 2000000000, 2000000000)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f'a size is a number of bytes or a string like "2GiB", got {shortened(value)}')
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            raise ValueError(
                f'cannot read the size {shortened(value)}; write bytes or a string like "256MiB" or "2GiB"'
            )
        size = float(match.group(1)) * unit
        number = int(match.group(1)) * unit if size < 2**63 and match.group(1).isdigit() else size
    else:
        number = value
        if number % 1 and math.isfinite(number):
            raise ValueError(f"a size must be a whole number of bytes, got {value}")
    if not 0 < number < 2**63:
        bound = "below 2**63 bytes" if number > 0 else "above 0 bytes"
        raise ValueError(f"a size must be {bound}, got {shortened(value)}")
    return int(number)


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text.

    >>> format_bytes(256 * 2**20)
    '256.0 MiB'
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_least(num_bytes: float) -> str:
    """Return a smallest size as text, rounded up, so that what is read from the text is enough.

    >>> format_least(5_181_571_780), format_least(256 * 2**20)
    ('4.9 GiB', '256.0 MiB')
    """
    unit = 1024 ** max(0, min(4, (int(num_bytes).bit_length() - 1) // 10))
    return format_bytes(math.ceil(num_bytes / unit * 10) / 10 * unit if unit > 1 else math.ceil(num_bytes))


class Member(Protocol):
    """The methods of a table that a budget calls."""

    def wanted_bytes(self) -> int | None:
        """Return the bytes beyond which more RAM has no use; None when unknown."""

    def minimum_bytes(self) -> int:
        """Return the bytes below which the table cannot work."""

    def apply_share(self, num_bytes: int) -> None:
        """Set the table's RAM budget to `num_bytes`."""


class Budget:
    """A hard RAM budget that any number of tables share.

    The bytes are divided again whenever a table joins or leaves. A table that needs less than an equal share gets what
    it needs; the others divide the rest evenly (water-filling). Values of rows never depend on the division.

    A budget owns no memory; it may be dropped once its tables are closed. All methods are thread-safe.

    Args:
        total: bytes, or a string like ``"8GiB"``.

    >>> Budget("8GiB").total_bytes
    8589934592
    """

    def __init__(self, total: float | str) -> None:
        self.total_bytes = parse_bytes(total)
        self._pid = os.getpid()
        self._lock = threading.Condition(threading.RLock())  # guards the fields below; notified by `_settle`
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        #: The members that open or close now. They have no usable core, so their shares do not change.
        self._unsettled: weakref.WeakSet[Member] = weakref.WeakSet()
        self._shares: weakref.WeakKeyDictionary[Member, int] = weakref.WeakKeyDictionary()

    @property
    def used_bytes(self) -> int:
        """Sum of the shares of the tables, in bytes."""
        self._require_own_process()
        with self._lock:
            return sum(self._shares.values())

    def free_bytes(self) -> int:
        """Return the bytes of a newcomer if the present members shrank to their minimum."""
        self._require_own_process()
        with self._lock:
            settled = [member for member in self._members if member not in self._unsettled]
            return max(1, self.total_bytes - sum(member.minimum_bytes() for member in settled))

    # Internal: the present members.
    def members(self) -> list[Member]:
        return list(self._members)

    # Internal: the least total of which `member` gets `num_bytes`, with the present members.
    def least_total(self, member: Member, num_bytes: int) -> int:
        part = num_bytes - member.minimum_bytes()  # what each member gets above its minimum, unless it wants less
        total = num_bytes
        for other in self.members():
            if other is not member:
                least, most = other.minimum_bytes(), other.wanted_bytes()
                total += least + (part if most is None else max(0, min(part, most - least)))
        return total

    def reserve(self, newcomer: Member) -> int:
        """Return a share for a member that is about to open; present members shrink first. Call `join` or `leave` next.

        Waits for members that open or close now if the bytes are not sufficient with their present shares.

        Raises:
            MemoryError: the total cannot hold every member's minimum; the message says how much is needed.
        """
        self._require_own_process()
        with self._lock:
            while True:
                others = list(self._members)
                try:
                    shares = self._divide([*others, newcomer])
                    break
                except MemoryError:
                    if not self._unsettled:
                        raise
                self._lock.wait(1.0)  # with a timeout, because a member that is garbage-collected does not notify
            self._apply(others, shares[:-1])
            self._members.add(newcomer)
            self._unsettled.add(newcomer)
            self._shares[newcomer] = shares[-1]
            return shares[-1]

    def join(self, newcomer: Member) -> None:
        """Add a member, with or without `reserve` before, and divide the bytes again; present members shrink first."""
        self._require_own_process()
        with self._lock:
            self._settle(newcomer)
            members = [*self._members - {newcomer}, newcomer]
            self._apply(members, self._divide(members))
            self._members.add(newcomer)

    def start_leaving(self, member: Member) -> None:
        """Mark `member` as closing: it keeps its share until `leave`, and the budget does not call it."""
        self._require_own_process()
        with self._lock:
            if member in self._members:
                self._unsettled.add(member)

    def leave(self, member: Member) -> None:
        """Remove a member and divide its share among the others."""
        self._require_own_process()
        with self._lock:
            self._settle(member)
            self._members.discard(member)
            self._shares.pop(member, None)
            members = list(self._members)
            # The others keep their shares when one member refuses use until it is reopened, when one cannot write
            # its dirty rows to grow its cache (a full disk), and when the minimum of one has grown.
            with contextlib.suppress(BunkbedError, MemoryError, OSError):
                self._apply(members, self._divide(members))

    def _settle(self, member: Member) -> None:
        self._unsettled.discard(member)
        self._lock.notify_all()

    def _require_own_process(self) -> None:
        # Checked before `_lock` is taken: another thread of the parent may have held it at the fork.
        if self._pid != os.getpid():
            raise TableClosedError(
                "a Budget was made before this process was forked, and its tables are the parent's; make a new one here"
            )

    def _apply(self, members: list[Member], shares: list[int]) -> None:
        # Shrink before growing, so that the sum never exceeds the total.
        order = sorted(range(len(members)), key=lambda i: shares[i] - self._shares.get(members[i], 0))
        for i in order:
            if self._shares.get(members[i]) != shares[i]:
                members[i].apply_share(shares[i])
                self._shares[members[i]] = shares[i]

    def _divide(self, members: list[Member]) -> list[int]:
        fixed = {i: self._shares[m] for i, m in enumerate(members) if m in self._unsettled}
        minimum = [fixed[i] if i in fixed else m.minimum_bytes() for i, m in enumerate(members)]
        if sum(minimum) > self.total_bytes:
            raise MemoryError(
                f"a budget of {format_bytes(self.total_bytes)} is too small for {len(members)} tables; "
                f"they need at least {sum(minimum)} bytes ({format_bytes(sum(minimum))})"
            )
        wanted = [fixed[i] if i in fixed else m.wanted_bytes() for i, m in enumerate(members)]
        shares = list(minimum)
        rest = self.total_bytes - sum(shares)
        hungry = [i for i, w in enumerate(wanted) if w is None or w > shares[i]]
        while hungry and rest > 0:
            part = rest // len(hungry)
            if part == 0:
                break
            satisfied = []
            for i in hungry:
                limit = wanted[i]
                grant = part if limit is None else min(part, limit - shares[i])
                shares[i] += grant
                rest -= grant
                if limit is not None and shares[i] >= limit:
                    satisfied.append(i)
            if not satisfied:
                break
            hungry = [i for i in hungry if i not in satisfied]
        return shares

    def __repr__(self) -> str:
        return f"Budget({self.total_bytes})"
