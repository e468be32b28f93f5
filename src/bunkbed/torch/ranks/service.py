"""`Service`: a thread of every rank that does what one rank asks of all, while the ranks' programs do something else.

A collective would hang where only rank 0 saves a checkpoint. So requests go through the store of torch.distributed.
Each rank's thread takes them in one order, and each rank that asks gets an outcome: the same on all ranks.

A request is known by its contents, by the changes of the table that its rank has made, and by how often that rank has
asked the same before at this state. Where all ranks ask the same, it is therefore done once.

The thread uses the store and the rows that its rank owns, never a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch.distributed as dist

from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.torch.ranks.group import Ranks, RanksError

#: Most seconds that a rank waits for another one that has not made as many changes as the rank that asks.
STEP_PATIENCE = 30.0
#: How often a waiting rank looks whether another rank has ended, and how often a working rank says that it lives.
_SLICE = datetime.timedelta(seconds=1)
_IDLE = datetime.timedelta(hours=1)
#: Seconds after the timeout of the process group in which the thread itself finds that a rank does not answer.
_GRACE = 5.0
_STOP = "stop"
#: The request that may come while the ranks have made different changes.
GO_BACK = "go back"


class Work(Protocol):
    """What a request does on each rank. All methods run in threads of the service."""

    def begin(self, request: Json) -> Callable[[], Json]:
        """Do what must be done before the table changes again; return a function that does this rank's rest.

        An error here, or in that function, becomes the outcome on all ranks.
        """

    def conclude(self, request: Json, said: list[Json]) -> Json:
        """On rank 0: make the outcome from what the ranks' functions returned. It has the present commit: "state"."""

    def accept(self, request: Json, outcome: Json) -> None:
        """On every rank: note the outcome."""

    def failed(self, request: Json, result: Json, *, is_begun: bool) -> None:
        """Note that a request failed whose `begin` succeeded here; on all ranks, if `is_begun`."""


class UnsureError(BunkbedError):
    """Raised by `Work.conclude`: whether the request was done is unknown, and no further one may be done."""


class Outcome:
    """A request on its way, and then its outcome. Thread-safe."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.has_started = False
        self.result: Json | None = None

    def is_over(self) -> bool:
        """Return whether the request has an outcome, or can no longer get one."""
        return self._service.find(self) is not None

    def wait_started(self) -> None:
        """Wait until every rank has started; the table may change afterwards. Does not raise the request's error."""
        self._service.wait_until(lambda: self.has_started or self.result is not None)

    def wait(self) -> Json:
        """Wait for the outcome.

        Raises:
            RanksError: the request failed; names the rank. ValueError: it asked for something that is not there.
        """
        self._service.wait_until(lambda: self.result is not None)
        found = self._service.find(self)
        assert found is not None
        if "error" in found:
            raise ValueError(found["error"]) if found.get("kind") == "ValueError" else RanksError(found["error"])
        return found


class Client:
    """One table at the `Service`. Made by `Service.join`. Thread-safe.

    Attributes:
        label: the table, for messages.
        changed: guards the rows of this rank; notified after each change.
    """

    def __init__(
        self,
        service: Service,
        number: int,
        label: str,
        changed: threading.Condition,
        count: Callable[[], int],
        work: Work,
    ) -> None:
        self.label = label
        self.changed = changed
        self._service = service
        self._number = number
        self._count = count
        self._work = weakref.ref(work)
        self._asking = threading.Lock()  # guards the fields below
        self._asked: Counter[str] = Counter()  # how often this rank asked the same, at the state `_asked_at`
        self._asked_at = -1
        self._own: set[str] = set()  # the keys of this rank's requests on their way
        self._is_closed = False

    def ask(self, what: str, *, once: bool = False, **arguments: Any) -> Outcome:
        """Ask all ranks to do `what`, with arguments for JSON. Returns at once.

        Args:
            what: the request.
            once: every rank asks this, and no rank asks it again: it is done once even if it fails.
        """
        with self._asking:
            changes = self._count()
            if changes != self._asked_at:
                self._asked_at = changes
                self._asked.clear()
            content = json.dumps([self._number, changes, what, arguments], sort_keys=True)
            key = f"{content} {self._asked[content]}"
            self._asked[content] += 1
            self._own.add(key)
        request = {"key": key, "table": self._number, "what": what, "at": changes, "arguments": arguments}
        # Going back is collective, and also the way out where the ranks have made different changes.
        return self._service.send({**request, "changes": None if what == GO_BACK else changes, "once": once})

    def ended(self, key: str, *, is_good: bool) -> None:
        """Note the end of a request. One that failed does not count: asked again, it is the same as other ranks'."""
        with self._asking:
            if key in self._own and not is_good:
                self._asked[key[: key.rindex(" ")]] -= 1
            self._own.discard(key)

    @property
    def number(self) -> int:
        """The number of the next request of any table that this rank takes."""
        return self._service.number

    def wait_for(self, number: int) -> None:
        """Wait until this rank has done all requests before `number`."""
        self._service.wait_for(number)

    def close(self) -> None:
        """Answer further requests with an error. Waits for the one that is on its way."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._service.leave(self._number)

    def work(self) -> Work | None:
        """Return what does the requests; None if the table is closed."""
        return None if self._is_closed else self._work()

    def wait_for_changes(self, request: Json) -> str:
        """Wait until this rank has made as many changes as the rank that asks; return an error, or an empty string.

        Requires: `changed` held.
        """
        wanted = request["changes"]
        if wanted is None:
            return ""
        self.changed.wait_for(lambda: self._count() >= wanted or self._is_closed, timeout=self._service.patience)
        if self._is_closed or self._count() == wanted:
            return ""
        return (
            f"{self.label}: rank {request['by']} asked to {request['what']} after {wanted} changes (steps, calls of "
            f"set), but rank {self._service.rank} has made {self._count()}; step on every rank first, and save after it"
        )


class Service:
    """The thread of one rank, for all tables that the same ranks share. Made by `service_of`. Thread-safe.

    Owns two connections to the store, and the thread, until `stop`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank = ranks.rank
        self._ranks = ranks
        self._timeout_s = ranks.timeout.total_seconds()
        self._mine, self._others = ranks.store("service"), ranks.store("service")
        self._sending = threading.Lock()  # guards `_others`
        self._known = threading.Condition()  # guards the fields below
        self._clients: dict[int, Client] = {}  # by number
        self._joined = 0  # clients so far
        self._working = -1  # the table of the request that is on its way, or -1
        self._outcomes: weakref.WeakValueDictionary[str, Outcome] = weakref.WeakValueDictionary()  # by key
        self._ended: dict[str, Json] = {}  # outcomes of requests that succeeded, or are done once, by key
        self._present: dict[int, int] = {}  # the epoch of each table's last outcome
        self._number = 1  # of the next request
        self._cleared = 1  # the first number whose keys may be in the store, on rank 0
        self._moved_at = 0.0  # when a request was last sent, or the thread last heard of the others
        self._broken = ""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="bunkbed-ranks", daemon=True)
        self._thread.start()
        _running.add(self)
        ranks.at_end(self.stop)

    @property
    def patience(self) -> float:
        """Seconds to wait for a rank's changes: it must end before the wait of the rank that asks."""
        return min(STEP_PATIENCE, self._timeout_s / 2)

    def join(self, label: str, changed: threading.Condition, count: Callable[[], int], work: Work) -> Client:
        """Add a table, or a run of tables. All ranks add theirs in the same order.

        Args:
            label: the table or run, for messages.
            changed: guards the rows of this rank; notified after each change.
            count: returns how many changes this rank has made.
            work: what requests do; not kept alive.
        """
        with self._known:
            number = self._joined
            client = self._clients[number] = Client(self, number, label, changed, count, work)
            self._joined += 1
            self._known.notify_all()
        return client

    def leave(self, number: int) -> None:
        """Remove a table, after the request of it that is on its way."""
        with self._known:
            self._clients.pop(number, None)
            if threading.current_thread() is not self._thread:
                self._known.wait_for(lambda: self._working != number or self._broken, timeout=STEP_PATIENCE)

    # ---- Asking

    def send(self, request: Json) -> Outcome:
        """Ask all ranks, unless another rank has asked the same."""
        key = request["key"]
        with self._known:
            outcome = self._outcomes.get(key)
            if outcome is not None and outcome.result is None:
                return outcome  # the thread works on it
            outcome = self._outcomes[key] = Outcome(self)
            outcome.result = self._still_good(request)
            if outcome.result is not None or self._broken:
                return outcome
            self._moved_at = time.monotonic()
        text = json.dumps({**request, "by": self.rank})
        try:
            with self._sending:
                number = self._others.add("requests", 1)
                for rank in range(self._ranks.world):
                    self._others.set(f"{number}/ask/{rank}", text)
        except RuntimeError as error:
            self._break(error)
        return outcome

    def _still_good(self, request: Json) -> Json | None:
        """Return the outcome of an equal request, if nothing was committed since. Requires: `_known` held."""
        found = self._ended.get(request["key"])
        if found is None or request["once"]:
            return found
        if found["state"]["epoch"] != self._present[request["table"]]:
            return None
        return found

    def find(self, outcome: Outcome) -> Json | None:
        """Return the result of a request; None before there is one."""
        with self._known:
            if outcome.result is None and self._broken:
                return {"error": self._broken}
            return outcome.result

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Wait until the thread has reached something, or cannot.

        A call of the store may never return where the network is cut, so the thread alone cannot end the wait.
        """
        limit = self._timeout_s + _GRACE
        with self._known:
            while not is_over() and not self._broken:
                self._known.wait(1.0)
                silent_s = time.monotonic() - self._moved_at
                if silent_s > limit:
                    self._break(RanksError(f"nothing came from them in {limit:.0f} s"))
                elif silent_s > 2.0 and not is_over():
                    self._require_alive(range(self._ranks.world))

    def _require_alive(self, ranks: Iterable[int]) -> None:
        gone = [rank for rank in ranks if rank != self.rank and self._ranks.has_ended(rank)]
        if gone:
            self._break(RanksError(f"rank {', '.join(map(str, gone))} has ended"))

    @property
    def number(self) -> int:
        """The number of the next request that this rank takes."""
        with self._known:
            return self._number

    def wait_for(self, number: int) -> None:
        """Wait until this rank has done all requests before `number`."""
        with self._known:
            self._moved_at = time.monotonic()
        self.wait_until(lambda: self._number >= number)

    # ---- The thread

    def stop(self) -> None:
        """End the thread, after the request that it works on."""
        _running.discard(self)
        self._is_stopping = True
        deadline = time.monotonic() + 5.0
        while self._thread.is_alive() and time.monotonic() < deadline:
            # Another rank may ask at the same time, and use up this number.
            with contextlib.suppress(RuntimeError), self._sending:
                self._others.set(f"{self.number}/ask/{self.rank}", _STOP)
            self._thread.join(0.05)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                number = self._number
                text = self._get(f"{number}/ask/{self.rank}")
                if text == _STOP:
                    break
                request = json.loads(text)
                with self._known:
                    known = self._still_good(request)
                if known is None:
                    self._do(number, request)
                else:
                    self._release(request, known)
                with self._known:
                    self._working = -1
                    self._number = number + 1
                    self._known.notify_all()
        except Exception as error:  # the store is gone, or a rank; in any case no rank may wait for this thread
            self._break(error)
        else:
            self._break(RanksError("this process ends"))
        with contextlib.suppress(RuntimeError):
            self._mine.set(f"left/{self.rank}", "1")

    def _break(self, error: Exception) -> None:
        with self._known:
            self._broken = self._broken or (
                f"{self._ranks.names()}: rank {self.rank} can no longer reach the others "
                f"({_first_line(error)}); start all ranks again; the table opens at its last commit"
            )
            self._working = -1
            self._known.notify_all()

    def _move(self) -> None:
        """Note that the others answer, or that this rank works."""
        with self._known:
            self._moved_at = time.monotonic()
            if self._broken:  # a program on this rank was given an error, so nothing may be committed any more
                raise RanksError("a wait for them has ended")

    def _get(self, key: str) -> str:
        while True:
            with contextlib.suppress(dist.DistStoreError):  # the time is over
                self._mine.wait([key], _IDLE)
                return bytes(self._mine.get(key)).decode()

    def _do(self, number: int, request: Json) -> None:
        """Do a request on this rank. Its outcome is the same on all ranks."""
        client, key = self._client(request), request["key"]
        work = None if client is None else client.work()
        finish, said = self._begin(client, work, request)
        started = self._together(number, "started", said)
        with self._known:
            outcome = self._outcomes.get(key)
            if outcome is not None:
                outcome.has_started = True
            self._known.notify_all()
        if "error" in started:
            if finish is not None and work is not None:
                work.failed(request, started, is_begun=False)
            self._release(request, started)
            return
        assert work is not None and finish is not None
        ended = self._together(number, "said", self._finished(number, finish))
        if "error" not in ended and self._ranks.is_first:
            ended = self._concluded(work, request, ended["said"])
        result = self._spread(number, ended)
        if "error" in result:
            work.failed(request, result, is_begun=True)
        else:
            work.accept(request, result)
        try:
            # A rank that goes on may signal another one, which must then see this outcome too.
            self._together(number, "noted", {})
        finally:
            self._release(request, result)

    def _client(self, request: Json) -> Client | None:
        """Return the client of a request's table; waits for one that this rank is about to make."""
        with self._known:
            self._working = request["table"]
            self._known.wait_for(lambda: self._joined > request["table"] or self._is_stopping, timeout=self.patience)
            return self._clients.get(request["table"])

    def _release(self, request: Json, result: Json) -> None:
        """Give a request its result, and remember it for the ranks that ask the same later."""
        key, is_good = request["key"], "error" not in result
        with self._known:
            if is_good or request["once"]:
                for old in list(self._ended):  # outcomes that no rank can ask for again
                    table, changes, *_ = json.loads(old[: old.rindex(" ")])
                    if table == request["table"] and changes < request["at"] - 1:
                        del self._ended[old]
                self._ended[key] = result
            if is_good:
                self._present[request["table"]] = result["state"]["epoch"]
            outcome = self._outcomes.get(key)
            if outcome is not None:
                outcome.result = result
            client = self._clients.get(request["table"])
            self._known.notify_all()
        if client is not None:
            client.ended(key, is_good=is_good)

    def _begin(self, client: Client | None, work: Work | None, request: Json) -> tuple[Callable[[], Json] | None, Json]:
        closed = {
            "error": f"rank {self.rank} has closed the table that rank {request['by']} asked to {request['what']}"
        }
        if client is None or work is None:
            return None, closed
        with client.changed:
            error = client.wait_for_changes(request)
            if error:
                return None, {"error": error}
            if client.work() is None:
                return None, closed
            try:
                return work.begin(request), {}
            except Exception as raised:
                return None, self._error(raised)

    def _finished(self, number: int, finish: Callable[[], Json]) -> Json:
        """Return what this rank's rest of a request returns; meanwhile tell the others that it is at work."""
        found: list[Json] = []
        worker = threading.Thread(target=lambda: found.append(self._attempt(finish)), daemon=True)
        worker.start()
        while True:
            worker.join(_SLICE.total_seconds())
            if not worker.is_alive():
                return found[0] if found else {"error": f"rank {self.rank}: its thread ended"}
            self._move()
            self._mine.add(f"{number}/beat/{self.rank}", 1)

    def _concluded(self, work: Work, request: Json, said: list[Json]) -> Json:
        try:
            return work.conclude(request, said)
        except ValueError as error:  # the request asked for something that is not there
            return {"error": str(error), "kind": "ValueError"}
        except UnsureError as error:
            return {**self._error(error), "kind": "UnsureError"}
        except Exception as error:
            return self._error(error)

    def _attempt(self, call: Callable[[], Json]) -> Json:
        try:
            return call()
        except Exception as error:
            return self._error(error)

    def _error(self, error: Exception) -> Json:
        return {"error": f"rank {self.rank}: {type(error).__name__}: {error}"}

    # ---- Messages among the threads

    def _together(self, number: int, what: str, mine: Json) -> Json:
        """Send what this rank says, and wait for the others; return {"said": [...]}, or the first error of a rank."""
        world = self._ranks.world
        self._move()
        self._mine.set(f"{number}/{what}/{self.rank}", json.dumps(mine))
        self._await(number, {rank: f"{number}/{what}/{rank}" for rank in range(world)})
        if what == "started" and self._ranks.is_first:
            self._clear(number)
        said = [json.loads(bytes(self._mine.get(f"{number}/{what}/{rank}"))) for rank in range(world)]
        return next((one for one in said if "error" in one), {"said": said})

    def _spread(self, number: int, outcome: Json) -> Json:
        """Return the outcome that rank 0 gives."""
        if self._ranks.is_first:
            self._mine.set(f"{number}/over", json.dumps(outcome))
            return outcome
        self._await(number, {0: f"{number}/over"})
        found: Json = json.loads(bytes(self._mine.get(f"{number}/over")))
        return found

    def _await(self, number: int, keys: dict[int, str]) -> None:
        """Wait for the keys of ranks; raise RanksError if one of the ranks has ended, or says nothing for too long."""
        deadline = time.monotonic() + self._timeout_s
        beats: dict[int, int] = {}
        while True:
            with contextlib.suppress(dist.DistStoreError):
                self._mine.wait(list(keys.values()), _SLICE)
                return
            missing = [rank for rank, key in keys.items() if not self._mine.check([key])]
            self._move()
            gone = [rank for rank in missing if self._ranks.has_ended(rank) or self._mine.check([f"left/{rank}"])]
            gone = [rank for rank in gone if not self._mine.check([keys[rank]])]
            if gone:
                raise RanksError(f"rank {', '.join(map(str, gone))} has ended")
            now = {rank: self._mine.add(f"{number}/beat/{rank}", 0) for rank in missing}
            if any(now[rank] != beats.get(rank, 0) for rank in missing):
                deadline = time.monotonic() + self._timeout_s
            beats = now
            if missing and time.monotonic() > deadline:
                raise RanksError(f"rank {', '.join(map(str, missing))} has not answered")

    def _clear(self, number: int) -> None:
        """Remove the keys of earlier requests: every rank has started this one, so none reads them any more."""
        for old in range(self._cleared, number):
            for rank in range(self._ranks.world):
                for what in ("ask", "started", "said", "noted", "beat"):
                    self._mine.delete_key(f"{old}/{what}/{rank}")
            self._mine.delete_key(f"{old}/over")
        self._cleared = number


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


_running: weakref.WeakSet[Service] = weakref.WeakSet()


def service_of(ranks: Ranks) -> Service:
    """Return the one `Service` of `ranks`; all tables have it, as a connection to the store may take seconds."""
    found: Service | None = ranks.parts.get("service")
    if found is None:
        found = ranks.parts["service"] = Service(ranks)
    return found


@atexit.register
def _stop_all() -> None:
    """End the threads before the interpreter does: they return from the store into Python."""
    for service in list(_running):
        service.stop()
