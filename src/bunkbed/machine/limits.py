"""What a training step must cost: formulas, and nothing that reads a clock or a disk.

1. Which rows a step wants. Ids follow a Zipf law: the row of rank k (1 is the hottest) is drawn with probability
   ``p_k = k**-s / sum(j**-s)``, so a step of N ids wants it with probability ``q_k = 1 - (1 - p_k)**N``, and
   ``U = sum(q_k)`` unique rows. Ranks are put into buckets that grow with the rank: a table of 10^12 rows costs
   some hundreds of numbers.
2. Which of them are not in RAM. A row wanted at random instants stays for a while after it was last wanted; the
   cache is in balance when the expected number of rows that stay equals its frames (Che, Tung and Wang 2002).
   See `cache`.
3. What that costs: ``disk = misses / IOPS + bytes written / write bandwidth``,
   ``memory = (N e + U (2 r + g)) / memory bandwidth``; the larger of these and of the model's own work is the step,
   when all go on at once.

Always misses of *unique* rows: hit rates of 84 to 98 % of the accesses coexist with 12 to 55 % of the rows missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

_HEAD = 256  # ranks that have a bucket of their own
_GROWTH = 1.04  # of the buckets after them; their width costs about 1e-4 of a figure
# The core's largest count, what a use adds, what a row starts with that was evicted lately.
GCLOCK_MAX, GCLOCK_HIT, GCLOCK_RETURN = 127, 32, 16


@dataclass(frozen=True)
class Popularity:
    """Rows grouped by how often a step wants them.

    Attributes:
        rows: float64[B], rows of each bucket; hottest first.
        share: float64[B], the part of all ids that goes to one row of the bucket.
    """

    rows: Numbers
    share: Numbers

    def wanted(self, ids: int) -> Numbers:
        """float64[B]: the probability that a step of so many ids wants one given row of the bucket."""
        return np.asarray(-np.expm1(ids * np.log1p(-np.minimum(self.share, 1 - 1e-16))))

    def unique_rows(self, ids: int) -> float:
        """Unique rows a step of so many ids wants, expected.

        >>> round(zipf(10_000_000, 1.05).unique_rows(65_536))
        26072
        >>> zipf(2, 0.0).unique_rows(2)  # the second id is the first again in one case of two
        1.5
        """
        return float(self.rows @ self.wanted(ids))


def zipf(num_rows: int, exponent: float) -> Popularity:
    """Popularity by Zipf's law; exponent 0 is uniform.

    Raises:
        ValueError: no rows, or an exponent that is negative or no number.
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
        # The sum over a bucket's ranks is the integral between the half ranks around it, to a few 1e-6 here.
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
    """A cache of rows in the long run, all rows stored: which rows it misses, and what it writes.

    Made by `cache`.

    Attributes:
        popularity: of the rows.
        ids: of a step.
        missed: float64[B], the probability that a row is not in the cache when a step wants it; also the part of the
            time in which it is not there.
    """

    popularity: Popularity
    ids: int
    missed: Numbers

    @property
    def misses(self) -> float:
        """Rows a step wants and does not find."""
        return float(self.popularity.rows @ (self.popularity.wanted(self.ids) * self.missed))

    @property
    def hit_rate(self) -> float:
        """Part of the unique rows of a step that it finds."""
        return 1 - self.misses / self.popularity.unique_rows(self.ids)

    def write_amplification(self, live: float) -> float:
        """Records written for each one evicted, where compaction lets all rows' records be this part of the log.

        A row's record in the log lives until the row is wanted again. The log is taken as a ring: after T steps its
        oldest records go, and those alive are written once more. ``T`` times all records written in a step is the
        log's size, which is all rows' records, those in RAM included, divided by `live`. (For rows that are evicted
        with equal probability and hardly ever in RAM this is the known ``1 / (1 - u)`` with ``live = (1 - u) /
        -ln(u)``; compacting the emptiest segment first differs little.)

        >>> round(cache(zipf(100_000, 0.0), 1024, 40_000).write_amplification(0.65), 2)
        1.11

        Raises:
            ValueError: not between 0 and 1.
        """
        if not 0 < live < 1:
            raise ValueError(f"the live part must lie between 0 and 1, got {live}")
        rows, wanted = self.popularity.rows, self.popularity.wanted(self.ids)
        evicted = wanted * self.missed
        if not float(rows @ evicted) > 0:
            return 1.0
        log_rest = np.log1p(-np.minimum(wanted, _ALWAYS))

        def written(steps: float) -> float:  # 1 - P(alive after so many steps) is the chance of not being moved again
            return float(rows @ (evicted / -np.expm1(steps * log_rest)))

        size = float(rows.sum()) / live
        return written(_solve(lambda steps: steps * written(steps), size)) / float(rows @ evicted)


def cache(popularity: Popularity, ids: int, frames: float, *, policy: str = "gclock", window: int = 0) -> Cache:
    """What a cache that holds `frames` rows misses in the long run.

    Args:
        popularity: of the rows, all of them stored.
        ids: of a step.
        frames: rows the cache holds.
        policy: who goes when room is needed.
            ``"static"``: nobody: the hottest rows stay for ever. The best that can be done without knowing what comes.
            ``"lru"``: the row that was not wanted for longest (Che's approximation).
            ``"gclock"``: the core's: a hand goes round, lowers each row's count by 1 (raised by 32 by each step that
            wants the row after the first, to at most 127) and takes the first at zero; a row that was evicted lately
            starts with 16. A row's stay is a Markov chain over rounds of the hand.
            ``"window"``: the ids of the next `window` steps are known: rows they need stay, the one needed last
            goes first, and beyond the window the hottest stay. The best that can be done with a window.
            ``"planner"``: the core's with a window: rows the window needs stay, among the rest ``"gclock"``.
        window: steps known ahead, for the last two.

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
    # Not there: the row was not wanted within the last so many steps.
    steps = _solve(lambda s: float(rows @ -np.expm1(s * log_rest)), frames)
    return np.asarray(np.exp(steps * log_rest))


def _gclock(rows: Numbers, wanted: Numbers, frames: float, window: int) -> Numbers:
    rate = -np.log1p(-wanted)

    def missed(round_steps: float) -> Numbers:
        # It stays for so many steps, then waits 1 / wanted of them to be wanted again.
        new, back = (wanted * round_steps * stay for stay in rounds_stayed(rate * round_steps))
        return _missed(rows, wanted, new, back, frames)

    return missed(_solve(lambda s: float(rows @ (1 - missed(s))), frames))


def _missed(rows: Numbers, wanted: Numbers, new: Numbers, back: Numbers, frames: float) -> Numbers:
    """The part of the uses that find a row gone, which had `new` uses beside the first, or `back` where it had a ghost.

    A ghost stands until another takes its place: there are as many places as frames and as many evictions as misses.
    """
    missed = np.asarray(1 / (1 + new))
    for _ in range(6):
        evicted = float(rows @ (wanted * missed)) / frames  # a step, for each place
        ghost = wanted / (wanted + evicted)
        missed = np.asarray(1 / (1 + new + ghost * (back - new)))
    return missed


def _window(rows: Numbers, wanted: Numbers, frames: float, window: int) -> Numbers:
    """The interval between two uses of a row is kept if it is short; a hot row is kept through long ones too."""
    log_rest = np.log1p(-wanted)

    def kept(steps: float) -> Numbers:  # frames that intervals of at most `steps` take: wanted * E[gap; gap <= steps]
        return np.asarray(1 - np.exp(steps * log_rest) * (1 + wanted * steps))

    if float(rows @ kept(window)) > frames:
        steps = _solve(lambda s: float(rows @ kept(s)), frames)
        return np.asarray(np.exp(steps * log_rest))
    # What the window does not need takes the rest. Holding a row through its long intervals too costs
    # 1 - kept(window) and saves wanted * (1 - wanted)**window: the hottest rows save most for each frame.
    short = kept(window)
    short_of_room = _without_hottest(rows * (1 - short), frames - float(rows @ short))
    return np.asarray(short_of_room * np.exp(window * log_rest))


def _planner(rows: Numbers, wanted: Numbers, frames: float, window: int) -> Numbers:
    """What the window needs stays; among the rest the hand goes round and lowers counts."""
    log_rest = np.log1p(-wanted)
    short = 1 - np.exp(window * log_rest) * (1 + wanted * window)  # frames of intervals within the window, as above
    if float(rows @ short) > frames * 15 / 16:  # next to nothing else is left: who is needed last goes
        return _window(rows, wanted, frames, window)
    alone = np.exp(window * log_rest)  # no use follows within the window: the row is exposed to the hand

    def missed_and_uses(round_steps: float) -> tuple[Numbers, Numbers]:
        rate = -log_rest * round_steps
        new, back = (rate * stay for stay in rounds_stayed(rate, alone))
        found = _missed(rows, wanted * alone, new, back, frames)
        return alone * found, 1 / found - 1

    def resident(round_steps: float) -> float:
        # Exposed until the hand takes it; a use that comes before is known `window` steps earlier.
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
_ALWAYS = 1 - 1e-12  # a row that every step wants, for logarithms


def _without_hottest(sizes: Numbers, room: float) -> Numbers:
    """The part of each bucket that finds no room, when the hottest come first."""
    held = np.clip(room - (np.cumsum(sizes) - sizes), 0, sizes)
    return np.asarray(1 - np.divide(held, sizes, out=np.ones_like(sizes), where=sizes > 0))


def _solve(grows: Callable[[float], float], value: float) -> float:
    """The positive x with grows(x) = value."""
    low, high = 0.0, 1.0
    while grows(high) < value and high < 1e15:
        low, high = high, 2 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if grows(middle) > value else (middle, high)
    return (low + high) / 2


def rounds_stayed(uses: Numbers, alone: Numbers | float = 1.0) -> tuple[Numbers, Numbers]:
    """Rounds of the hand for which GCLOCK keeps a row, counting only the time in which the hand may lower its count.

    Args:
        uses: float64[B], how often in such a round a use comes, on average.
        alone: float64[B], the probability that no further use follows each one under the protection of a window;
            1 without a window: uses come in runs of a geometric length.

    Returns:
        For rows that start with 0, and for those that start with `GCLOCK_RETURN`, for they were evicted lately. The
        use that brings a row in adds nothing; each later one adds `GCLOCK_HIT`.

    Let D(c) be the rounds until a row whose count is c after a visit of the hand first has c - 1 (for c = 0: goes).
    With k uses until the next visit, compound Poisson, the count becomes min(max, c + k hit) - 1. So
    ``D(c) P(0) = 1 + sum over j > c of P(at least (j - c + 1) / hit) D(j)``: from the top down, all terms positive.

    >>> rounds_stayed(np.array([0.0, 0.5 / GCLOCK_HIT, 1.0 / GCLOCK_HIT]))[0].round(1)  # never wanted: one round
    array([1. , 2. , 8.6])
    """
    uses = np.minimum(uses, 5.0)  # beyond, for ever
    alone = np.clip(np.broadcast_to(np.asarray(alone, np.float64), uses.shape), 1e-12, 1.0)
    most = -(-GCLOCK_MAX // GCLOCK_HIT)
    run = [alone * (1 - alone) ** k for k in range(most + 1)]  # [k]: k + 1 uses in a run
    chance = [np.exp(-uses)]  # of k uses in a round (Panjer 1981)
    for k in range(1, most + 1):
        chance.append(uses / k * sum((j * run[j - 1] * chance[k - j] for j in range(1, k + 1)), np.zeros_like(uses)))
    at_least = [np.ones_like(uses)]
    for k in range(most):
        at_least.append(np.maximum(0.0, at_least[-1] - chance[k]))
    # above[c]: D(c) + D(c + 1) + ... up to the top.
    above = [np.zeros_like(uses)] * (GCLOCK_MAX + 1)
    for count in range(GCLOCK_MAX - 1, -1, -1):
        ends = [min(GCLOCK_MAX, count + 1)] + [min(GCLOCK_MAX, count + k * GCLOCK_HIT) for k in range(1, most + 1)]
        further = sum(
            (at_least[k] * (above[ends[k - 1]] - above[ends[k]]) for k in range(1, most + 1)), np.zeros_like(uses)
        )
        above[count] = above[count + 1] + (1 + further) / chance[0]

    def stayed(start: int) -> Numbers:
        # It starts with this and the further uses of its first run: D(c) is passed where that is c or more.
        rounds = above[0] - above[start + 1]
        for k in range(1, most + 1):
            low, high = (min(GCLOCK_MAX, start + 1 + (k - less) * GCLOCK_HIT) for less in (1, 0))
            rounds = rounds + (above[low] - above[high]) * (1 - alone) ** k
        return np.asarray(rounds)

    return stayed(0), stayed(GCLOCK_RETURN)


# ---- Costs


def memory_bytes(ids: float, unique_rows: float, dim: int, record_bytes: float) -> float:
    """Bytes a step moves through memory at least: what a lookup returns, records read and written, gradient sums.

    ``N e + U (2 r + g)``; e and g are a float32 row.
    """
    row = 4 * dim
    return ids * row + unique_rows * (2 * record_bytes + row)


@dataclass(frozen=True)
class StepTimes:
    """Seconds each resource needs for one step. 0: it is not needed."""

    disk_reads: float
    disk_writes: float
    memory: float
    compute: float = 0.0

    @property
    def resources(self) -> dict[str, float]:
        """Seconds by resource; reads and writes share the disk."""
        return {"disk": self.disk_reads + self.disk_writes, "memory": self.memory, "model": self.compute}

    @property
    def binds(self) -> str:
        """The resource that needs most.

        >>> StepTimes(disk_reads=0.1, disk_writes=0.01, memory=0.004).binds
        'disk'
        """
        return max(self.resources, key=lambda name: self.resources[name])

    @property
    def together(self) -> float:
        """Seconds of a step in which all go on at once: no step is shorter."""
        return max(self.resources.values())

    @property
    def in_turn(self) -> float:
        """Seconds of a step in which each waits for the others."""
        return sum(self.resources.values())


def step_times(
    *,
    reads: float,
    written_bytes: float,
    moved_bytes: float,
    read_iops: float,
    write_bytes_per_s: float,
    memory_bytes_per_s: float,
    compute_s: float = 0.0,
) -> StepTimes:
    """What one step costs each resource of a machine.

    Args:
        reads: rows read from disk. written_bytes: to disk, compaction included. moved_bytes: see `memory_bytes`.
        read_iops: random reads a second. write_bytes_per_s, memory_bytes_per_s: bandwidths.
        compute_s: seconds of the model's own work.

    >>> times = step_times(reads=9_000, written_bytes=12e6, moved_bytes=64e6, read_iops=90_000,
    ...                    write_bytes_per_s=2e9, memory_bytes_per_s=20e9)
    >>> times.binds, round(times.together, 4), round(1 / times.in_turn, 2)
    ('disk', 0.106, 9.16)
    """
    return StepTimes(
        disk_reads=reads / read_iops,
        disk_writes=written_bytes / write_bytes_per_s,
        memory=moved_bytes / memory_bytes_per_s,
        compute=compute_s,
    )
