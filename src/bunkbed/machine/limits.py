"""The minimum cost of a training step, as formulas. Nothing here measures.

1. The rows that a step wants. Ids follow a Zipf law: the row of rank k (1 is the hottest) is drawn with probability
   ``p_k = k**-s / sum(j**-s)``. A step of N ids wants the row with probability ``q_k = 1 - (1 - p_k)**N``, and
   ``U = sum(q_k)`` unique rows in all. Ranks are grouped in buckets that grow with the rank, so a table of 10^12 rows
   needs some hundreds of numbers.
2. The wanted rows that are not in RAM. A row stays in the cache for some time after it was last wanted. In the steady
   state the expected number of rows that stay equals the number of frames (Che, Tung and Wang 2002). See `cache`.
3. The cost: ``disk = max(reads / IOPS, bytes read / read bandwidth) + bytes written / write bandwidth``,
   ``memory = (N e + U (2 r + g)) / memory bandwidth``. If all work overlaps, a step takes the maximum of these and of
   the model's own work.
4. The exchange of rows and gradients between the processes of a table that is divided over several. See `exchange`.

Misses always count *unique* rows: with hit rates of 84 to 98 % of the accesses, 12 to 55 % of the unique rows miss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

_HEAD = 256  # the first ranks, which have a bucket each
_GROWTH = 1.04  # growth of the later buckets; this width changes a result by about 1e-4
# The core's largest count, the count that a use adds, the first count of a row with a ghost (evicted recently).
GCLOCK_MAX, GCLOCK_HIT, GCLOCK_RETURN = 127, 32, 16


@dataclass(frozen=True)
class Popularity:
    """Rows grouped by how often a step wants them.

    Attributes:
        rows: float64[B], rows of each bucket; hottest first.
        share: float64[B], the probability that an id is one given row of the bucket.
    """

    rows: Numbers
    share: Numbers

    def wanted(self, ids: int) -> Numbers:
        """Return float64[B], the probability that a step of `ids` ids wants one given row of the bucket."""
        return np.asarray(-np.expm1(ids * np.log1p(-np.minimum(self.share, 1 - 1e-16))))

    def unique_rows(self, ids: int) -> float:
        """Return the expected number of unique rows of a step of `ids` ids.

        >>> round(zipf(10_000_000, 1.05).unique_rows(65_536))
        26072
        >>> zipf(2, 0.0).unique_rows(2)  # the second id is the first again in one case of two
        1.5
        """
        return float(self.rows @ self.wanted(ids))


def zipf(num_rows: int, exponent: float) -> Popularity:
    """Return the popularity by Zipf's law; exponent 0 is uniform.

    Raises:
        ValueError: no rows, or an exponent that is negative or not finite.
    """
    if num_rows < 1:
        raise ValueError(f"rows must be at least 1, got {num_rows}")
    if not (exponent >= 0 and math.isfinite(exponent)):
        raise ValueError(f"the Zipf exponent must be at least 0, got {exponent}")
    if exponent == 0:
        return Popularity(np.array([float(num_rows)]), np.array([1.0 / num_rows]))
    head = np.arange(1, min(num_rows, _HEAD) + 1, dtype=np.float64)
    weight = head**-exponent
    rows = np.ones_like(head)
    if num_rows > _HEAD:
        count = math.ceil(math.log(num_rows / _HEAD) / math.log(_GROWTH))
        ends = np.unique(np.floor(np.geomspace(_HEAD, num_rows, count + 1)))
        ends[-1] = num_rows
        tail = np.diff(ends)
        # The sum over a bucket's ranks is about the integral between the half ranks around it, with errors near 1e-6.
        total = _power_integral(ends[1:] + 0.5, exponent) - _power_integral(ends[:-1] + 0.5, exponent)
        rows = np.concatenate([rows, tail])
        weight = np.concatenate([weight, total / tail])
    return Popularity(rows, weight / (rows @ weight))


def _power_integral(x: Numbers, exponent: float) -> Numbers:
    power = 1.0 - exponent
    return np.asarray(np.log(x) if abs(power) < 1e-9 else x**power / power)


# ---- Misses


@dataclass(frozen=True)
class Cache:
    """A cache of rows in the steady state, with all rows stored: its misses and its writes.

    Made by `cache`.

    Attributes:
        popularity: popularity of the rows.
        ids: ids of a step.
        missed: float64[B], the probability that a row is not in the cache when a step wants it; also the fraction of
            time in which it is not in the cache.
    """

    popularity: Popularity
    ids: int
    missed: Numbers

    @property
    def misses(self) -> float:
        """Rows of a step that are not in the cache."""
        return float(self.popularity.rows @ (self.popularity.wanted(self.ids) * self.missed))

    @property
    def hit_rate(self) -> float:
        """Fraction of the unique rows of a step that are in the cache."""
        return 1 - self.misses / self.popularity.unique_rows(self.ids)

    def write_amplification(self, live: float) -> float:
        """Return the records written for each evicted record, where `live` is one record of each row / log size.

        A row's record in the log is live until the row is wanted again. The log is modelled as a ring: after T steps
        its oldest records are removed, and the live records among these are written again. ``T`` times the records
        written in a step is the log's size, which is one record of each row, also of rows in RAM, divided by `live`.
        (For rows that are evicted with equal probability and almost never in RAM this is the known ``1 / (1 - u)``
        with ``live = (1 - u) / -ln(u)``; compacting the segment with the fewest live records first differs little.)

        >>> round(cache(zipf(100_000, 0.0), 1024, 40_000).write_amplification(0.65), 2)
        1.11

        Raises:
            ValueError: `live` is not between 0 and 1.
        """
        if not 0 < live < 1:
            raise ValueError(f"the live part must lie between 0 and 1, got {live}")
        rows, wanted = self.popularity.rows, self.popularity.wanted(self.ids)
        evicted = wanted * self.missed
        if not float(rows @ evicted) > 0:
            return 1.0
        log_rest = np.log1p(-np.minimum(wanted, _ALWAYS))

        def written(steps: float) -> float:  # 1 - P(live after `steps`) is the probability of no further move
            return float(rows @ (evicted / -np.expm1(steps * log_rest)))

        size = float(rows.sum()) / live
        return written(_solve(lambda steps: steps * written(steps), size)) / float(rows @ evicted)


def cache(popularity: Popularity, ids: int, frames: float, *, policy: str = "gclock", window: int = 0) -> Cache:
    """Return a cache of `frames` rows in the steady state.

    Args:
        popularity: popularity of the rows, all stored.
        ids: ids of a step.
        frames: number of rows in the cache.
        policy: the choice of the victim.
            ``"static"``: no row is evicted: the hottest rows stay. The best policy without knowledge of coming ids.
            ``"lru"``: the least recently wanted row (Che's approximation).
            ``"gclock"``: the core's policy. A clock hand lowers each row's count by 1 and evicts the first row at 0.
            Each step that wants the row after the first adds 32, up to 127. A row with a ghost starts with 16. The
            stay of a row is a Markov chain over rounds of the hand.
            ``"window"``: the ids of the next `window` steps are known. Rows that they want stay, the row that is
            wanted last is evicted first, and of the other rows the hottest stay. The best policy with a window.
            ``"planner"``: the core's policy with a window: rows of the window stay, ``"gclock"`` for the others.
        window: number of coming steps whose ids are known, for the last two policies.

    >>> hot = zipf(10_000_000, 1.05)
    >>> [round(cache(hot, 65_536, 700_000, policy=name).misses) for name in ("lru", "gclock", "static")]
    [9840, 7605, 7144]
    >>> [round(cache(hot, 65_536, 700_000, policy=name, window=32).misses) for name in ("planner", "window")]
    [7262, 6849]

    Raises:
        ValueError: no such policy.
    """
    rows, wanted = popularity.rows, popularity.wanted(ids)
    if policy not in _POLICIES:
        raise ValueError(f"policy must be one of {', '.join(_POLICIES)}, got {policy!r}")
    if frames >= float(rows.sum()):
        missed = np.zeros_like(wanted)
    elif frames <= 0:
        missed = np.ones_like(wanted)
    else:
        missed = _POLICIES[policy](rows, np.minimum(wanted, _ALWAYS), float(frames), window)
    return Cache(popularity, ids, missed)


# Each returns `Cache.missed`.


def _static(rows: Numbers, wanted: Numbers, frames: float, window: int) -> Numbers:
    return _without_hottest(rows, frames)


def _lru(rows: Numbers, wanted: Numbers, frames: float, window: int) -> Numbers:
    log_rest = np.log1p(-wanted)
    # A row is missing if it was not wanted within the last `steps` steps.
    steps = _solve(lambda s: float(rows @ -np.expm1(s * log_rest)), frames)
    return np.asarray(np.exp(steps * log_rest))


def _gclock(rows: Numbers, wanted: Numbers, frames: float, window: int) -> Numbers:
    rate = -np.log1p(-wanted)

    def missed(round_steps: float) -> Numbers:
        # The hits of one stay: its steps times `wanted`. After the stay, 1 / wanted steps pass until the next use.
        new, back = (wanted * round_steps * stay for stay in rounds_stayed(rate * round_steps))
        return _missed(rows, wanted, new, back, frames)

    return missed(_solve(lambda s: float(rows @ (1 - missed(s))), frames))


def _missed(rows: Numbers, wanted: Numbers, new: Numbers, back: Numbers, frames: float) -> Numbers:
    """Return the fraction of uses that miss. A stay has `new` hits after its first use, `back` hits with a ghost.

    A ghost stays until another ghost takes its place. There are as many places as frames, and each miss evicts a row.
    """
    missed = np.asarray(1 / (1 + new))
    for _ in range(6):
        evicted = float(rows @ (wanted * missed)) / frames  # evictions a step, for each place
        ghost = wanted / (wanted + evicted)
        missed = np.asarray(1 / (1 + new + ghost * (back - new)))
    return missed


def _window(rows: Numbers, wanted: Numbers, frames: float, window: int) -> Numbers:
    """Keep a row between two uses if the interval is short, and a hot row also through long intervals."""
    log_rest = np.log1p(-wanted)

    def kept(steps: float) -> Numbers:  # frames that intervals of at most `steps` take: wanted * E[gap; gap <= steps]
        return np.asarray(1 - np.exp(steps * log_rest) * (1 + wanted * steps))

    if float(rows @ kept(window)) > frames:
        steps = _solve(lambda s: float(rows @ kept(s)), frames)
        return np.asarray(np.exp(steps * log_rest))
    # The rest of the frames is for rows that the window does not want. Keeping a row through its long intervals too
    # costs 1 - kept(window) frames and saves wanted * (1 - wanted)**window misses; the hottest rows save most a frame.
    short = kept(window)
    short_of_room = _without_hottest(rows * (1 - short), frames - float(rows @ short))
    return np.asarray(short_of_room * np.exp(window * log_rest))


def _planner(rows: Numbers, wanted: Numbers, frames: float, window: int) -> Numbers:
    """Keep the rows of the window; the hand lowers the counts of the others."""
    log_rest = np.log1p(-wanted)
    short = 1 - np.exp(window * log_rest) * (1 + wanted * window)  # frames of intervals within the window, as above
    if float(rows @ short) > frames * 15 / 16:  # almost no other rows are in the cache: evict the row wanted last
        return _window(rows, wanted, frames, window)
    alone = np.exp(window * log_rest)  # P(no use follows within the window), so the hand may lower the row's count

    def missed_and_uses(round_steps: float) -> tuple[Numbers, Numbers]:
        rate = -log_rest * round_steps
        new, back = (rate * stay for stay in rounds_stayed(rate, alone))
        found = _missed(rows, wanted * alone, new, back, frames)
        return alone * found, 1 / found - 1

    def resident(round_steps: float) -> float:
        # The hand lowers a row's count except in the `window` steps before its next use.
        missed, uses = missed_and_uses(round_steps)
        return float(rows @ (short + missed * uses * (1 + wanted * window)))

    return np.asarray(missed_and_uses(_solve(resident, frames))[0])


_POLICIES: dict[str, Callable[[Numbers, Numbers, float, int], Numbers]] = {
    "static": _static,
    "lru": _lru,
    "gclock": _gclock,
    "window": _window,
    "planner": _planner,
}
_ALWAYS = 1 - 1e-12  # the largest probability, so that log(1 - p) is finite


def _without_hottest(sizes: Numbers, room: float) -> Numbers:
    """Return the fraction of each bucket that does not fit in `room` when the hottest rows are placed first."""
    held = np.clip(room - (np.cumsum(sizes) - sizes), 0, sizes)
    return np.asarray(1 - np.divide(held, sizes, out=np.ones_like(sizes), where=sizes > 0))


def _solve(grows: Callable[[float], float], value: float) -> float:
    """Return the positive x with grows(x) = value, for an increasing function."""
    low, high = 0.0, 1.0
    while grows(high) < value and high < 1e15:
        low, high = high, 2 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if grows(middle) > value else (middle, high)
    return (low + high) / 2


def rounds_stayed(uses: Numbers, alone: Numbers | float = 1.0) -> tuple[Numbers, Numbers]:
    """Return the rounds of the hand for which GCLOCK keeps a row, without the time in which a window protects the row.

    Args:
        uses: float64[B], the average number of uses in a round.
        alone: float64[B], the probability that no further use follows a use within the window; 1 without a window.
            Uses come in runs of a geometric length.

    Returns:
        The rounds of rows that start with count 0, and of rows that start with `GCLOCK_RETURN` because they have a
        ghost. The first use of a stay adds nothing to the count; each later use adds `GCLOCK_HIT`.

    Let D(c) be the rounds until a row with count c after a visit of the hand first has c - 1 (for c = 0: is evicted).
    With k uses until the next visit, compound Poisson, the count becomes min(max, c + k hit) - 1. So
    ``D(c) P(0) = 1 + sum over j > c of P(at least (j - c + 1) / hit) D(j)``: from the top down, all terms positive.

    >>> rounds_stayed(np.array([0.0, 0.5 / GCLOCK_HIT, 1.0 / GCLOCK_HIT]))[0].round(1)  # never wanted: one round
    array([1. , 2. , 8.6])
    """
    uses = np.minimum(uses, 5.0)  # with more uses a row practically always stays
    alone = np.clip(np.broadcast_to(np.asarray(alone, np.float64), uses.shape), 1e-12, 1.0)
    most = -(-GCLOCK_MAX // GCLOCK_HIT)
    run = [alone * (1 - alone) ** k for k in range(most + 1)]  # [k]: k + 1 uses in a run
    chance = [np.exp(-uses)]  # [k]: P(k uses in a round), by Panjer's recursion (1981)
    for k in range(1, most + 1):
        chance.append(uses / k * sum((j * run[j - 1] * chance[k - j] for j in range(1, k + 1)), np.zeros_like(uses)))
    at_least = [np.ones_like(uses)]
    for k in range(most):
        at_least.append(np.maximum(0.0, at_least[-1] - chance[k]))
    # above[c]: D(c) + D(c + 1) + ... up to D(GCLOCK_MAX - 1).
    above = [np.zeros_like(uses)] * (GCLOCK_MAX + 1)
    for count in range(GCLOCK_MAX - 1, -1, -1):
        ends = [min(GCLOCK_MAX, count + 1)] + [min(GCLOCK_MAX, count + k * GCLOCK_HIT) for k in range(1, most + 1)]
        further = sum(
            (at_least[k] * (above[ends[k - 1]] - above[ends[k]]) for k in range(1, most + 1)), np.zeros_like(uses)
        )
        above[count] = above[count + 1] + (1 + further) / chance[0]

    def stayed(start: int) -> Numbers:
        # The first count is `start` plus the further uses of the first run. Add D(c) times P(first count >= c).
        rounds = above[0] - above[start + 1]
        for k in range(1, most + 1):
            low, high = (min(GCLOCK_MAX, start + 1 + (k - less) * GCLOCK_HIT) for less in (1, 0))
            rounds = rounds + (above[low] - above[high]) * (1 - alone) ** k
        return np.asarray(rounds)

    return stayed(0), stayed(GCLOCK_RETURN)


# ---- Costs


def memory_bytes(ids: float, unique_rows: float, dim: int, record_bytes: float) -> float:
    """Return the minimum bytes that a step moves through memory: ``N e + U (2 r + g)``.

    e: a float32 row of the lookup's result; r: a record, read and written; g: a float32 row of gradient sums.
    """
    row = 4 * dim
    return ids * row + unique_rows * (2 * record_bytes + row)


@dataclass(frozen=True)
class StepTimes:
    """The seconds of one step for each resource; 0: the resource is not needed."""

    disk_reads: float
    disk_writes: float
    memory: float
    compute: float = 0.0
    link_forward: float = 0.0
    link_backward: float = 0.0

    @property
    def resources(self) -> dict[str, float]:
        """Seconds by resource; reads and writes share the disk, both exchanges the link."""
        found = {"disk": self.disk_reads + self.disk_writes, "memory": self.memory, "model": self.compute}
        link = self.link_forward + self.link_backward
        return {**found, "link": link} if link else found

    @property
    def binds(self) -> str:
        """The resource that needs the most time; model and link work one after the other and count together.

        >>> StepTimes(disk_reads=0.1, disk_writes=0.01, memory=0.004).binds
        'disk'
        >>> StepTimes(0.1, 0.01, memory=0.004, compute=0.08, link_forward=0.01, link_backward=0.03).binds
        'model'
        """
        seconds = self.resources
        longest = max(("disk", "memory"), key=seconds.__getitem__)
        chain = sum(seconds.values()) - seconds["disk"] - seconds["memory"]
        return longest if seconds[longest] >= chain else max(("model", "link"), key=lambda name: seconds.get(name, 0.0))

    @property
    def together(self) -> float:
        """Seconds of a step in which all resources work in parallel: a lower bound.

        The model waits for the rows of the link, and the link for the model's gradients: these two work in turn.
        """
        return max(
            self.disk_reads + self.disk_writes, self.memory, self.compute + self.link_forward + self.link_backward
        )

    @property
    def in_turn(self) -> float:
        """Seconds of a step in which the resources work one after another."""
        return sum(self.resources.values())


@dataclass(frozen=True)
class Exchange:
    """The exchange of one step between the processes of a divided table; made by `exchange`.

    Attributes:
        forward_bytes: bytes that a process sends to look up rows: their ids and the rows.
        backward_bytes: bytes that a process sends for the gradients of its batch.
        forward_s, backward_s: seconds of both exchanges.
    """

    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0


def exchange(
    ranks: int, ids: float, unique_rows: float, dim: int, *, bytes_per_s: float, latency_s: float, is_ahead: bool
) -> Exchange:
    """Return the exchange of one step between `ranks` processes (W) that own a W-th of the rows each.

    ``forward = a + U (W - 1) / W 4 d / b``, and ``2 a + 8 U / b`` more unless the ids were exchanged before the step;
    ``backward = 2 a + N (W - 1) / W (4 d + 8) / b``: gradients travel for each of the N ids, rows for each of the U
    unique ones, all with d float32 values. a: `latency_s`, b: `bytes_per_s`. One process exchanges nothing.

    Args:
        ranks: number of processes. ids, unique_rows: of the batch of one process. dim: weights of a row.
        bytes_per_s: rate at which each process sends. latency_s: seconds of a collective without data.
        is_ahead: the ids of a step are exchanged before it.

    >>> found = exchange(4, 1000, 600, 16, bytes_per_s=1e6, latency_s=0.001, is_ahead=True)
    >>> found.forward_bytes, found.backward_bytes, round(found.forward_s, 4), round(found.backward_s, 4)
    (33600.0, 54000.0, 0.0298, 0.056)
    """
    if ranks == 1:
        return Exchange()
    away = (ranks - 1) / ranks
    id_bytes, row_bytes, gradient_bytes = 8 * unique_rows, unique_rows * away * 4 * dim, ids * away * (4 * dim + 8)
    ids_s = 0.0 if is_ahead else 2 * latency_s + id_bytes / bytes_per_s
    return Exchange(
        forward_bytes=id_bytes + row_bytes,
        backward_bytes=gradient_bytes,
        forward_s=ids_s + latency_s + row_bytes / bytes_per_s,
        backward_s=2 * latency_s + gradient_bytes / bytes_per_s,
    )


def step_times(
    *,
    reads: float,
    written_bytes: float,
    moved_bytes: float,
    read_iops: float,
    write_bytes_per_s: float,
    memory_bytes_per_s: float,
    read_bytes: float = 0.0,
    read_bytes_per_s: float | None = None,
    compute_s: float = 0.0,
    exchanged: Exchange | None = None,
) -> StepTimes:
    """Return the time that one step takes of each resource of a machine.

    Args:
        reads: reads from disk. written_bytes: bytes written to disk, with compaction. moved_bytes: `memory_bytes`.
        read_iops: random reads a second. write_bytes_per_s, memory_bytes_per_s: bandwidths.
        read_bytes: bytes of the reads. read_bytes_per_s: bandwidth of large reads; None: unknown, so not a limit.
        compute_s: seconds of the model's own work.
        exchanged: the exchange with other processes; None: there are none.

    >>> times = step_times(reads=9_000, written_bytes=12e6, moved_bytes=64e6, read_iops=90_000,
    ...                    write_bytes_per_s=2e9, memory_bytes_per_s=20e9)
    >>> times.binds, round(times.together, 4), round(1 / times.in_turn, 2)
    ('disk', 0.106, 9.16)
    """
    link = exchanged or Exchange()
    return StepTimes(
        disk_reads=max(reads / read_iops, read_bytes / (read_bytes_per_s or math.inf)),
        disk_writes=written_bytes / write_bytes_per_s,
        memory=moved_bytes / memory_bytes_per_s,
        compute=compute_s,
        link_forward=link.forward_s,
        link_backward=link.backward_s,
    )
