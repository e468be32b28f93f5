"""`Ranks`: the processes that train tables together, and the exchange of messages among them.

Every exchange is one all-to-all on a gloo group of its own, so it may interleave with other groups' collectives in any
order. A message is a header and a payload. Ranks do not know the sizes of each other's messages before: a rank receives
into room for `_room` bytes, which is more than most messages have (gloo accepts a message that is smaller than the
room, and ends the process at one that is larger). The rest of a larger message follows in a second all-to-all, and the
room grows. So any two exchanges fit together, also two of ranks that do different things, and the headers show it:
every rank raises an error that says what each rank does.

Where the ranks' own process group has NCCL, the rest of rows and gradients goes through it, by way of the GPU's memory,
and the room does not grow. NCCL hangs where sizes differ, or where ranks use the group in different orders. So it is
used only where all headers allow it: see `Kind.bulk` and `Ranks.allows_bulk`.

A rank whose own part fails sends the text of its error instead of a payload, and all ranks raise.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.machine import processes
from bunkbed.torch.base import groups
from bunkbed.torch.base.groups import ProcessGroup

Bytes = npt.NDArray[np.uint8]


class Writer(Protocol):
    """A part of a message that is made in it, without a copy."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def write(self, out: Bytes) -> None:
        """Write it to uint8[nbytes]."""


#: What a rank sends to another: arrays and writers, one after another.
Payload: TypeAlias = Sequence[npt.NDArray[Any] | Writer]
#: Time that a rank waits for the others before it logs a warning.
PATIENCE = datetime.timedelta(seconds=60)
#: Time after `PATIENCE` in which the ranks that also wait report it.
_GRACE = datetime.timedelta(seconds=2)
_ROOM = 1 << 16
#: Bytes of a piece of `Ranks.send`.
_PIECE = 1 << 20
#: Seconds between looks at whether rank 0 is ready.
_POLL_S = 0.02
#: int64 words of a header: kind, number, facts, 1 with an error, bytes of the payload, bytes of the largest message, 1
#: if the rest may go through NCCL.
_WORDS = 7
_HEADER = _WORDS * 8

log = logging.getLogger("bunkbed.torch")


@dataclass(frozen=True)
class Kind:
    """A kind of exchange. `number` is in the header; `what` completes "rank 1 is at ...".

    `ways` are the numbers of kinds that begin the same call; see `OtherWay`. `bulk`: the rest of a large message may go
    through NCCL; see `Ranks.allows_bulk`. Not for what `Ranks.start` begins: a rank may do other things before it ends.
    """

    number: int
    what: str
    ways: frozenset[int] = frozenset()
    bulk: bool = False

    def of(self, what: str) -> Kind:
        """Return the kind of exchanges of one `what`, which must be equal on all ranks."""
        return Kind(self.number | zlib.crc32(what.encode()) << 8, what)


MEET = Kind(1, "a set-up call")
_DIFFER = Kind(2, "an exchange that failed")


class RanksError(BunkbedError):
    """Another rank failed, left, or does something else than this one."""


class OtherWay(Exception):
    """Another rank does the same in another way: it has a plan for a lookup where this one has none, or the reverse."""


class Ranks:
    """The ranks of a process group, seen from one rank. Made by `ranks_of`. Not thread-safe.

    Attributes:
        rank, world: the number of this process in the group, and the number of processes.
        local_world: processes on this host.
        parent: their process group.
        timeout: the longest wait for other ranks, that of the process group.
        exchanges: all-to-alls made so far.
        facts: a checksum of what every rank must have done equally so far; see `note`.
        describe: returns JSON facts for the message when ranks differ.
    """

    def __init__(self, parent: ProcessGroup, timeout: datetime.timedelta) -> None:
        self.rank: int = dist.get_rank(parent)
        self.world: int = dist.get_world_size(parent)
        self.timeout = timeout
        self.parent = parent
        # Made directly: `new_group` names a group by how many this process has, which may differ among the ranks.
        store = dist.PrefixStore("bunkbed", dist.distributed_c10d._world.pg_map[parent][1])
        self._group = dist.ProcessGroupGloo(store, self.rank, self.world, timeout)
        #: What exists once for these ranks, as the exchange of all their tables.
        self.parts: dict[str, Any] = {}
        self._ends: list[Callable[[], None]] = []
        self.exchanges = 0
        self.facts = 0
        self.describe: Callable[[], Json] = dict
        self._made = 0  # exchanges of messages; an all-to-all for the rest of large messages does not count
        self._room = _ROOM
        self._bulk: torch.device | None = None  # through which the rest of large messages goes; None: gloo
        self._inbox: Bytes = np.empty(0, np.uint8)
        self._broken = ""
        self.local_world = self.world  # until the hosts are known
        host = processes.host()
        own, (bulk, gpu) = os.getpid(), groups.gpu_of(parent)
        mine = [host, uuid.uuid4().hex, own, processes.started(own), gpu and f"{host} {gpu}"]
        said = self.gather("making a layer", lambda: mine)
        gpus = {one[4] for one in said} - {""}
        if len(gpus) == self.world:  # NCCL refuses two ranks on one GPU
            self._bulk = bulk
        hosts = [one[0] for one in said]
        self.local_world = hosts.count(host)
        # In the keys of the store, which may still have those of an earlier attempt of the same job.
        self._unique = said[0][1]
        #: By rank: process and time of its start, of ranks that this process can see.
        self._processes: dict[int, tuple[int, str]] = {
            rank: (one[2], one[3])
            for rank, one in enumerate(said)
            if one[3] and one[0] == host and processes.started(one[2]) == one[3]
        }
        #: Kept alive: on rank 0 it may be the server, which the threads of others need to the end.
        self._base = groups.base_store()

    def at_end(self, call: Callable[[], None]) -> None:
        """Make `end` call this."""
        self._ends.append(call)

    def end(self) -> None:
        """End what runs for these ranks: their process group is gone."""
        for call in self._ends:
            call()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def note(self, *values: float) -> None:
        """Add facts that must be equal on all ranks, as a step and its learning rate, to the checksum."""
        self.facts = zlib.crc32(np.array(values, np.float64).tobytes(), self.facts)

    def store(self, prefix: str) -> dist.Store:
        """Return a connection of its own to the store of torch.distributed, with `prefix` before every key."""
        return dist.PrefixStore(f"bunkbed/{self._unique}/{prefix}", self._base.clone())

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's process has ended; False where that cannot be seen, as on another host."""
        if rank not in self._processes:
            return False
        process, started = self._processes[rank]
        return processes.started(process) != started

    # ---- Exchanges

    def gather(self, what: str, say: Callable[[], Any]) -> list[Any]:
        """Exchange a JSON value with all ranks, each of which must call this; return the values by rank.

        Args:
            what: what the ranks do, for messages.
            say: returns this rank's value; if it raises, every rank raises.

        Raises:
            RanksError: another rank failed; names it, with its error.
        """
        kind = MEET.of(what)
        try:
            text = np.frombuffer(json.dumps(say()).encode(), np.uint8)
        except Exception as error:
            self.fail(kind, error)
        return [json.loads(bytes(one)) for one in self.swap(kind, [[text]] * self.world)]

    def first(self, what: str, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0, and return its JSON value on every rank. The others wait without a limit. Collective.

        Raises:
            RanksError: `work` failed on rank 0, or its process has ended.
        """
        opened: list[dist.Store] = []
        # Rank 0 may end in `work`, and the server of the store with it: all ranks connect before.
        self.gather(what, lambda: opened.append(self.store("first")))
        store, key = opened[0], str(self._made)
        error: Exception | None = None
        value: Any = None
        if self.is_first:
            try:
                value = work()
            except Exception as failed:
                error = failed
            store.set(key, b"")
        while not self.is_first and not self._is_said(store, key):
            time.sleep(_POLL_S)

        def say() -> Any:
            if error is not None:
                raise error
            return value

        return self.gather(what, say)[0]

    def _is_said(self, store: dist.Store, key: str) -> bool:
        """Return whether rank 0 has set a key, or has ended; the store may end with it."""
        try:
            return bool(store.check([key])) or self.has_ended(0)
        except RuntimeError:
            return True

    def concatenate(self, what: str, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the one-dimensional arrays of all ranks, of one dtype, as one array, in their order. Collective."""
        parts = self.swap(MEET.of(what), [[np.ascontiguousarray(part)]] * self.world)
        return np.concatenate([one.view(part.dtype) for one in parts])

    def send(self, what: str, data: bytes, receivers: Sequence[int]) -> bytes:
        """Send bytes of rank 0 to some ranks, in pieces; return them there, and nothing on the others. Collective.

        Args:
            what: what the ranks do, for messages.
            data: on rank 0, what is sent.
            receivers: equal on all ranks, and without rank 0.
        """
        kind, size = MEET.of(what), self.gather(what, lambda: len(data) if self.is_first else 0)[0]
        whole, received = np.frombuffer(data if self.is_first else b"", np.uint8), bytearray()
        for at in range(0, size, _PIECE):
            piece = whole[at : at + _PIECE]
            received += self.swap(kind, [[piece] if rank in receivers else [] for rank in range(self.world)])[0].data
        return bytes(received) if self.rank in receivers else b""

    def fail(self, kind: Kind, error: Exception) -> NoReturn:
        """Tell all ranks of an error of this rank in place of an exchange; raises it."""
        self.swap(kind, [], error)
        raise error

    def swap(self, kind: Kind, payloads: Sequence[Payload], error: Exception | None = None) -> list[Bytes]:
        """Send each rank its payload; return what each rank sent to this one, as views that the next call overwrites.

        Args:
            kind: what every rank must be doing.
            payloads: for each rank, arrays of any dtype.
            error: raised here, and as a `RanksError` on all other ranks.

        Raises:
            RanksError: a rank sent an error, left, did not come in time, or does something else.
        """
        if self._broken:
            raise RanksError(self._broken)
        sent = Sending(self, kind, payloads, error)
        return sent.receive()

    def start(self, kind: Kind, payloads: Sequence[Payload], error: Exception | None = None) -> Sending:
        """Start an exchange that `Sending.receive` ends; other exchanges may come in between."""
        if self._broken:
            raise RanksError(self._broken)
        return Sending(self, kind, payloads, error, owns_inbox=True)

    def next_number(self) -> int:
        """Return the number of the next exchange, and count it."""
        self._made += 1
        return self._made

    @property
    def room(self) -> int:
        """Bytes that are received from a rank in one all-to-all."""
        return self._room

    def allows_bulk(self, kind: Kind) -> bool:
        """Return whether the rest of a message may go through NCCL here: in a forward pass, or after a backward pass.

        Not in a backward pass, because the order of a recomputed lookup and of DDP's buckets may differ among ranks.
        """
        return self._bulk is not None and kind.bulk and torch._C._current_autograd_node() is None

    def rest(self, out: Bytes, sizes: list[int], rooms: list[int], *, largest: int, in_bulk: bool, kind: Kind) -> Bytes:
        """Exchange what did not fit into the room, uint8[sum(rooms)]; all ranks know each other's sizes.

        Args:
            out: bytes for each rank, one after another.
            sizes: of them, by rank.
            rooms: what each rank sends to this one.
            largest: bytes of the largest message of any rank; gloo makes room for as many from now on.
            in_bulk: through NCCL; all ranks say so.
            kind: of the exchange.
        """
        if not in_bulk:
            inbox = np.empty(sum(rooms), np.uint8)
            self.wait(self.all_to_all(out, sizes, inbox, rooms), kind)
            self._room = max(self._room, 1 << (largest - 1).bit_length())
            return inbox
        self.exchanges += 1
        try:  # NCCL watches over its own timeout
            received = torch.empty(sum(rooms), dtype=torch.uint8, device=self._bulk)
            sent = torch.from_numpy(out).to(self._bulk)
            dist.all_to_all_single(received, sent, rooms, sizes, group=self.parent)
            found: Bytes = received.cpu().numpy()
        except RuntimeError as error:
            self._break(kind, error)
        return found

    def inbox(self, size: int) -> Bytes:
        """Return uint8[size] to receive into; later calls return the same memory."""
        if self._inbox.size < size:
            self._inbox = empty_bytes(size)
        return self._inbox[:size]

    def all_to_all(self, out: Bytes, sizes: list[int], inbox: Bytes, rooms: list[int]) -> Any:
        """Start an all-to-all of bytes; return its work."""
        self.exchanges += 1
        return self._group.alltoall_base(torch.from_numpy(inbox), torch.from_numpy(out), rooms, sizes)

    def wait(self, work: Any, kind: Kind) -> None:
        """Wait for an all-to-all; log a warning after `PATIENCE`, and name the ranks that have not come."""
        try:
            if self.timeout > PATIENCE and not work.is_completed() and not _completes(work, PATIENCE):
                # In a thread: where the network is cut, a call of the store may never return.
                threading.Thread(target=self._warn, args=(work, kind), daemon=True).start()
            work.wait()
        except RuntimeError as error:
            self._break(kind, error)

    def _break(self, kind: Kind, error: Exception) -> NoReturn:
        reason = str(error).splitlines()[0]
        self._broken = (
            f"{self.names()}: an exchange of all {self.world} ranks ({kind.what}) failed on rank {self.rank}: a rank "
            f"left, or did not come within {self.timeout.total_seconds():.0f} s ({reason}); start all ranks again; the "
            "table opens at its last commit"
        )
        raise RanksError(self._broken) from error

    def _warn(self, work: Any, kind: Kind) -> None:
        store, number = self.store("waits"), self._made
        store.set(f"{number}/{self.rank}", kind.what)
        if _completes(work, _GRACE):
            return
        others = [rank for rank in range(self.world) if not store.check([f"{number}/{rank}"])]
        log.warning(
            "%s: rank %d has waited %.0f s in %s for %s; every rank must make the same calls as often as the others "
            "(a lookup on one rank alone never ends; to evaluate on one rank, open a reader: "
            'bunkbed.open(path, mode="r"))',
            self.names(), self.rank, (PATIENCE + _GRACE).total_seconds(), kind.what,
            ", ".join(f"rank {rank}" for rank in others) or "slow ranks",
        )  # fmt: skip

    def names(self) -> str:
        """Return the tables' names for messages."""
        known = [repr(name) for name in self.describe().get("tables", {})]
        return f"table{'s' * (len(known) > 1)} {', '.join(known)}" if known else "bunkbed.torch"

    def differ(self, kind: Kind) -> None:
        """Raise an error that says what each rank does. Every rank has found that they differ."""
        mine = json.dumps({"at": kind.what, **self.describe()}).encode()
        Sending(self, _DIFFER, [[np.frombuffer(mine, np.uint8)]] * self.world, None).receive()

    def differed(self, said: dict[int, Json]) -> NoReturn:
        """Raise the error for `differ`, from what ranks said there; a rank that went on said nothing."""
        facts = list(said.values())
        lines = [
            f"rank {rank} is at {_differences(said[rank], facts) if rank in said else 'a later call'}"
            for rank in range(self.world)
        ]
        self._broken = (
            f"{self.names()}: the ranks do not do the same: {'; '.join(lines)}; every rank must make the same lookups, "
            "backward calls, steps and changes of the learning rate, as often as the others"
        )
        raise RanksError(self._broken)


class Sending:
    """An exchange that was started; `receive` ends it.

    Owns its own copy of what it sends, and, with `owns_inbox`, of what it receives.
    """

    def __init__(
        self,
        ranks: Ranks,
        kind: Kind,
        payloads: Sequence[Payload],
        error: Exception | None,
        *,
        owns_inbox: bool = False,
    ) -> None:
        self._ranks = ranks
        self._kind = kind
        self._error = error
        if error is not None:
            text = np.frombuffer(f"{type(error).__name__}: {error}".encode(), np.uint8)
            payloads = [[text]] * ranks.world
        own, self._bodies = ranks.rank, [0] * ranks.world
        for rank, payload in enumerate(payloads):
            self._bodies[rank] = sum(one.nbytes for one in payload)
        largest = _HEADER + max((size for rank, size in enumerate(self._bodies) if rank != own), default=0)
        in_bulk = error is None and ranks.allows_bulk(kind)
        header = [kind.number, ranks.next_number(), ranks.facts, int(error is not None), 0, largest, int(in_bulk)]
        self._room = ranks.room
        sizes = [0 if rank == own else _HEADER + size for rank, size in enumerate(self._bodies)]
        self._out: Bytes = empty_bytes(sum(sizes))
        self._own: Bytes = np.empty(0, np.uint8)
        self._header = np.array(header, np.int64)
        self._starts: list[int] = []  # of each rank's message in `_out`
        at = 0
        for rank, payload in enumerate(payloads):
            self._starts.append(at)
            if rank == own:
                self._own = empty_bytes(self._bodies[rank])
                _fill(self._own, payload)
                continue
            self._header[4] = self._bodies[rank]
            self._out[at : at + _HEADER] = _bytes(self._header)
            at += _HEADER
            _fill(self._out[at : at + self._bodies[rank]], payload)
            at += self._bodies[rank]
        self._sizes = sizes
        rooms = [0 if rank == own else self._room for rank in range(ranks.world)]
        self._inbox = empty_bytes(sum(rooms)) if owns_inbox else ranks.inbox(sum(rooms))
        first = [min(size, self._room) for size in sizes]
        out = self._out
        if first != sizes:
            out = np.concatenate([self._out[at : at + size] for at, size in zip(self._starts, first, strict=True)])
        self._sent = out  # gloo reads it until the exchange is over
        self._work = ranks.all_to_all(out, first, self._inbox, rooms)

    def receive(self) -> list[Bytes]:
        """End the exchange; see `Ranks.swap`."""
        ranks, own = self._ranks, self._ranks.rank
        ranks.wait(self._work, self._kind)
        self._header[4] = self._bodies[own]
        parts: list[Bytes] = []
        headers: list[list[int]] = []
        at = 0
        for rank in range(ranks.world):
            if rank == own:
                parts.append(self._own)
                headers.append(self._header.tolist())
                continue
            part = self._inbox[at : at + self._room]
            at += self._room
            headers.append(part[:_HEADER].view(np.int64).tolist())
            parts.append(part[_HEADER:])
        largest = max(header[5] for header in headers)
        if largest > self._room:
            parts = self._with_rest(parts, headers, largest)
        return self._ended(parts, headers)

    def _with_rest(self, parts: list[Bytes], headers: list[list[int]], largest: int) -> list[Bytes]:
        """Exchange what did not fit; return the whole payloads."""
        ranks, own = self._ranks, self._ranks.rank
        whole = [_HEADER + header[4] for header in headers]
        rest = [0 if rank == own else max(0, size - self._room) for rank, size in enumerate(whole)]
        sizes = [max(0, size - self._room) for size in self._sizes]
        out = np.concatenate(
            [
                self._out[at + min(size, self._room) : at + size]
                for at, size in zip(self._starts, self._sizes, strict=True)
            ]
        )
        in_bulk = all(header[6] and header[:3] == headers[own][:3] for header in headers)
        inbox = ranks.rest(out, sizes, rest, largest=largest, in_bulk=in_bulk, kind=self._kind)
        ends = np.cumsum(rest)
        return [
            np.concatenate([part, inbox[end - size : end]]) if size else part
            for part, end, size in zip(parts, ends, rest, strict=True)
        ]

    def _ended(self, parts: list[Bytes], headers: list[list[int]]) -> list[Bytes]:
        ranks, mine = self._ranks, headers[self._ranks.rank]
        bodies = [part[: header[4]] for part, header in zip(parts, headers, strict=True)]
        said = {rank: json.loads(bytes(bodies[rank])) for rank, one in enumerate(headers) if one[0] == _DIFFER.number}
        if said:
            ranks.differed(said)
        if any(header[:3] != mine[:3] for header in headers):
            if {header[0] for header in headers} == self._kind.ways and all(
                header[1:3] == mine[1:3] and not header[3] for header in headers
            ):
                raise OtherWay
            ranks.differ(self._kind)
        if self._error is not None:
            raise self._error
        for rank, header in enumerate(headers):
            if header[3]:
                text = bytes(bodies[rank]).decode()
                raise RanksError(f"{ranks.names()}: rank {rank} failed in {self._kind.what}: {text}")
        return bodies


def empty_bytes(size: int) -> Bytes:
    """Return uint8[size], from memory that the core keeps: new memory costs as much as the messages themselves."""
    block: Bytes = _native.empty_rows(1, -(-size // 4)).reshape(-1).view(np.uint8)
    return block[:size]


def _fill(out: Bytes, payload: Payload) -> None:
    at = 0
    for one in payload:
        place = out[at : at + one.nbytes]
        if isinstance(one, np.ndarray):
            place[:] = _bytes(one)
        else:
            one.write(place)
        at += one.nbytes


def _bytes(array: npt.NDArray[Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _differences(one: Json, every: list[Json]) -> str:
    """Return what one rank said in `Ranks.differ`, without the tables that are equal everywhere."""
    tables = {
        name: fact
        for name, fact in one.get("tables", {}).items()
        if any(other.get("tables", {}).get(name) != fact for other in every)
    }
    text = ", ".join(f"{name!r}: {fact}" for name, fact in tables.items())
    return f"{one['at']} ({text})" if text else str(one["at"])


def _completes(work: Any, time: datetime.timedelta) -> bool:
    """Wait up to `time`; return whether the work is over, with or without an error."""
    try:
        work.wait(time)
    except RuntimeError:
        return bool(work.is_completed())
    return True


_known: dict[str, tuple[Any, Ranks]] = {}


def ranks_of(group: ProcessGroup = None) -> Ranks:
    """Return the `Ranks` of a process group, None for the default group. The first call is collective."""
    group = dist.group.WORLD if group is None else group
    name = group.group_name
    found = _known.get(name)
    if found is None or found[0] is not group:
        for old, (former, ranks) in list(_known.items()):  # of process groups that were destroyed
            if former not in dist.distributed_c10d._world.pg_map:
                ranks.end()
                del _known[old]
        found = _known[name] = group, Ranks(group, groups.timeout_of(group))
    return found[1]
