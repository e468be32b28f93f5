"""`plan`: predict the training speed of a table on a machine, the limiting resource, and the effect of changes.

The formulas are in `machine.limits`, the rates of the machine in `machine.rates`. The core gives the number of frames
of a budget. No table is created.

A table may be divided over W processes (ranks). A hash gives each rank 1/W of the rows of every popularity, and each
rank looks up and updates its rows for the batches of all ranks. So a rank is planned as a table of 1/W of the rows,
with a step of W batches; its host's disk and memory do this for each of the host's ranks, and the link is added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bunkbed import _native
from bunkbed.core.budget import parse_bytes
from bunkbed.core.optim import Adam, Optimizer, RowwiseAdagrad
from bunkbed.machine import limits
from bunkbed.machine.rates import LARGE_READ_BYTES, Machine
from bunkbed.machine.read_paths import DEFAULT_GAP, Reads, expected_reads
from bunkbed.table.definition import Definition
from bunkbed.window import MAX_BATCHES

DEFAULT_LOOKAHEAD = 32
#: Assumed seconds of a collective without data, and bytes a second that each of a host's ranks sends to the others.
DEFAULT_LATENCY_S = 0.22e-3
LOCAL_BYTES_PER_S = 1.2e9
MAX_RANKS = 1 << 20
_DAY_S = 86_400


@dataclass(frozen=True)
class Question:
    """The arguments of a plan; see `plan` for the fields."""

    rows: int
    dim: int
    batch: int
    zipf: float = 1.05
    optimizer: Optimizer = field(default_factory=Adam)
    dtype: str = "float32"
    ram: int = 1 << 30
    lookahead: int = DEFAULT_LOOKAHEAD
    compute_s: float = 0.0
    ranks: int = 1
    ranks_per_host: int = 1
    link_bytes_per_s: float | None = None
    latency_s: float = DEFAULT_LATENCY_S

    @property
    def stored(self) -> int:
        """Rows of a rank."""
        return -(-self.rows // self.ranks)

    @property
    def rank_ram(self) -> int:
        """Bytes of RAM of a rank."""
        return self.ram // self.ranks_per_host

    @property
    def rank_bytes_per_s(self) -> float:
        """Bytes a second that a rank sends; the ranks of a host share its link."""
        return LOCAL_BYTES_PER_S if self.link_bytes_per_s is None else self.link_bytes_per_s / self.ranks_per_host


@dataclass(frozen=True)
class Plan:
    """A prediction for the steady state: every row is stored, the cache is full, compaction is running.

    With several ranks, rows, reads and bytes are those of one rank; `times` are those of its host.

    Attributes:
        question: the arguments.
        machine: the rates of the machine.
        record_bytes: weights and optimizer state of a row.
        unique_rows, misses, evicted_rows: rows of a step, that all ranks want of this one. Every missed row is stored,
            and every evicted row is dirty.
        exchanged: bytes that a rank sends in a step; zeros for one rank.
        fits_batch: False when the cache is smaller than the unique rows of a step. Then the lookup reads the rows that
            the last step did not leave in the cache, and the update reads those that the lookup did not leave there.
        reads, read_bytes: reads of a step, and their bytes: neighbouring records share a read (`machine.read_paths`).
        read_path: by which most missed rows are read: ``"single reads"``, ``"merged reads"`` or ``"sweep"``; None where
            none is missed.
        minimum_ram: bytes of the smallest budget that has room for the rows; of a host, with several ranks.
        asked_ram: the budget that was asked for. Where it is below `minimum_ram`, the plan is for that.
        frames, frames_bytes, directory_bytes, buffers_bytes, window_bytes: the use of the RAM.
        window: coming batches whose ids are held; fewer than `lookahead` if they would take too much of the cache.
        disk_bytes: size of the log, with dead records.
        segments: maximum number of the log's files. A reader keeps a descriptor open for each. All writers of a
            process together use at most a quarter of its soft RLIMIT_NOFILE.
        write_amplification: bytes written for each byte of an evicted record.
        written_bytes: bytes written in a step, with compaction.
        times: seconds of a step for each resource.
    """

    question: Question
    machine: Machine
    record_bytes: int
    unique_rows: float
    misses: float
    evicted_rows: float
    fits_batch: bool
    reads: float
    read_bytes: float
    read_path: str | None
    minimum_ram: int
    asked_ram: int
    frames: int
    frames_bytes: int
    directory_bytes: int
    buffers_bytes: int
    window: int
    window_bytes: int
    disk_bytes: int
    segments: int
    write_amplification: float
    written_bytes: float
    exchanged: limits.Exchange
    times: limits.StepTimes

    @property
    def hit_rate(self) -> float:
        """Fraction of the unique rows of a step that are in RAM."""
        return max(0.0, 1 - self.misses / self.unique_rows)

    @property
    def step_s(self) -> float:
        """Seconds of a step: with lookahead the maximum over the resources, without it their sum."""
        return self.times.together if self.question.lookahead else self.times.in_turn

    @property
    def steps_per_s(self) -> float:
        """Maximum steps a second."""
        return 1 / self.step_s if self.step_s else math.inf

    @property
    def binds(self) -> str:
        """The resource that takes the most time: ``"disk"``, ``"memory"``, ``"model"`` or ``"link"``."""
        return self.times.binds

    @property
    def written_bytes_per_day(self) -> float:
        """Bytes that a host writes in a day of training at this speed, without commits."""
        written = self.written_bytes * self.question.ranks_per_host
        return written * self.steps_per_s * _DAY_S if written else 0.0

    def days_to_write(self, num_bytes: float) -> float:
        """Return the days of training at this speed until `num_bytes` are written."""
        return num_bytes / self.written_bytes_per_day if self.written_bytes_per_day else math.inf


def plan(
    rows: int,
    dim: int,
    batch: int,
    *,
    machine: Machine,
    zipf: float = 1.05,
    optimizer: Optimizer | None = None,
    dtype: str = "float32",
    ram: float | str = "1GiB",
    lookahead: int = DEFAULT_LOOKAHEAD,
    compute_s: float = 0.0,
    ranks: int = 1,
    ranks_per_host: int | None = None,
    link: float | str | None = None,
    latency_s: float = DEFAULT_LATENCY_S,
) -> Plan:
    """Predict a table's training speed on a machine.

    With `ranks` above 1 the plan is for a table whose rows are divided over that many processes. These figures are
    computed from a cost model; no link between processes is measured.

    Args:
        rows: rows of the table; the plan assumes that all are stored.
        dim: weights of a row.
        batch: ids of a step, with duplicates; with several ranks, of each rank.
        machine: `bunkbed.machine.measure()`, or a `Machine` with given rates. Without `Machine.read_bytes_per_s` the
            disk reads 16 KiB in the time of one more read.
        zipf: exponent of the ids' popularity; 0: all rows are equally popular.
        optimizer: default ``Adam()``.
        dtype: dtype of the stored weights.
        ram: the budget, as in `bunkbed.create`; with several ranks, of a host, whose ranks get equal parts. Where it
            has no room for the rows, the plan is for the smallest that has: `Plan.minimum_ram`.
        lookahead: coming batches whose ids are known, as with `bunkbed.torch.lookahead`, at most 32. 0: none; reads,
            writes and the model's work do not overlap.
        compute_s: seconds of the model's own work in a step.
        ranks: number of processes, at most `MAX_RANKS`.
        ranks_per_host: number of processes of a host, which share its RAM, disk, memory bandwidth and link. Default:
            all, without `link`; 1, with it.
        link: rate of the link of a host, in bytes a second or as `parse_rate` reads it. None: all ranks are on one
            host, and each sends at `LOCAL_BYTES_PER_S`, an assumption.
        latency_s: seconds of a collective without data; its default is an assumption too.

    >>> laptop = Machine(memory_bytes_per_s=20e9, read_iops=90_000, write_bytes_per_s=2e9)
    >>> found = plan(10_000_000, 64, 65_536, ram="640MiB", machine=laptop)
    >>> found.binds, round(found.unique_rows), found.record_bytes
    ('disk', 26072, 768)
    >>> found.read_path, plan(100_000, 64, 65_536, zipf=0, ram="32MiB", machine=laptop).read_path
    ('single reads', 'sweep')
    >>> cluster = plan(10_000_000, 64, 65_536, ram="160MiB", machine=laptop, ranks=4, link="10Gbit")
    >>> cluster.binds, cluster.question.stored, round(cluster.exchanged.backward_bytes)
    ('disk', 2500000, 12976128)

    Raises:
        ValueError: an argument out of range; a machine without a rate that the plan needs.
    """
    question = Question(
        rows=rows,
        dim=dim,
        batch=batch,
        zipf=zipf,
        optimizer=Adam() if optimizer is None else optimizer,
        dtype=dtype,
        ram=parse_bytes(ram),
        lookahead=lookahead,
        compute_s=compute_s,
        ranks=ranks,
        ranks_per_host=(ranks if link is None else 1) if ranks_per_host is None else ranks_per_host,
        link_bytes_per_s=parse_rate(link) if isinstance(link, str) else link,
        latency_s=latency_s,
    )
    return answer(question, machine)


def parse_rate(text: str) -> float:
    """Return the bytes a second of a link's rate in bits or bytes, such as ``"10Gbit"``, ``"1.25GB"`` or ``"1GiB/s"``.

    >>> parse_rate("10Gbit"), parse_rate("1.25GB")
    (1250000000.0, 1250000000.0)

    Raises:
        ValueError: no such rate. ``"10Gb"`` is none, because it may mean bits or bytes.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kMGT]?)bit|([kMGT]i?)?B)(?:/s)?\s*", text)
    if match is None:
        raise ValueError(f"cannot read the rate {text!r}; write bits or bytes a second, like '10Gbit' or '1.25GB'")
    number, bits, unit = match.groups()
    if bits is None:
        return float(parse_bytes(f"{number}{unit or ''}B"))
    return float(number) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[bits] / 8


def answer(question: Question, machine: Machine) -> Plan:
    """Return the plan for the arguments in `question`."""
    _check(question)
    spec = Definition(question.dim, question.rows, question.optimizer, dtype=question.dtype).spec()
    here = question.ranks_per_host
    needed = here * int(spec.minimum_ram(question.stored, True))
    asked_ram = question.ram
    question = replace(question, ram=max(asked_ram, needed))
    use = spec.memory_use(question.stored, question.rank_ram, max(512, machine.read_unit), True)
    of_batch = limits.zipf(question.rows, question.zipf)
    popularity = limits.Popularity(of_batch.rows / question.ranks, of_batch.share)
    ids = question.batch * question.ranks
    unique = popularity.unique_rows(ids)
    frames = min(int(use["frames"]), question.stored)
    fits_batch = frames >= unique
    window, window_bytes = 0, 0
    if question.lookahead and fits_batch and frames < question.stored:
        window, window_bytes = _window(question, popularity, frames)
        frames -= -(-window_bytes // int(use["frame_bytes"]))
        cache = limits.cache(popularity, ids, frames, policy="planner", window=window)
    else:
        cache = limits.cache(popularity, ids, frames)
    missed = misses = cache.misses
    if not fits_batch:  # the last step left `frames` of its rows; the lookup leaves as many of this step's
        missed = unique - frames / unique * float(popularity.rows @ popularity.wanted(ids) ** 2)
        misses = missed + unique - frames
    evicted = cache.misses if fits_batch else unique
    amplification = cache.write_amplification(_native.TARGET_LIVE) * use["stored_bytes"] / use["record_bytes"]
    written = evicted * use["record_bytes"] * amplification
    read_iops = _rate(machine.read_iops, misses, "random reads a second (read_iops)")
    reads = _reads(question, machine, missed, int(use["stored_bytes"]))
    # The core reads such a batch in pieces of one region of the log each: twice, but as densely.
    passes = misses / missed if missed else 1.0
    exchanged = limits.exchange(
        question.ranks,
        question.batch,
        of_batch.unique_rows(question.batch),
        question.dim,
        bytes_per_s=question.rank_bytes_per_s,
        latency_s=question.latency_s,
        is_ahead=question.lookahead > 0,
    )
    return Plan(
        question=question,
        machine=machine,
        record_bytes=int(use["record_bytes"]),
        unique_rows=unique,
        misses=misses,
        evicted_rows=evicted,
        fits_batch=fits_batch,
        reads=passes * reads.reads,
        read_bytes=passes * reads.read_bytes,
        read_path=reads.path,
        minimum_ram=needed,
        asked_ram=asked_ram,
        frames=frames,
        frames_bytes=frames * int(use["frame_bytes"]),
        directory_bytes=int(use["directory_bytes"]),
        buffers_bytes=int(use["fixed_bytes"]),
        window=window,
        window_bytes=window_bytes,
        disk_bytes=int(question.stored * use["stored_bytes"] / _native.TARGET_LIVE),
        segments=int(use["most_segments"]),
        write_amplification=amplification,
        written_bytes=written,
        exchanged=exchanged,
        times=limits.step_times(
            reads=here * passes * reads.reads,
            read_bytes=here * passes * reads.read_bytes,
            # Without it, the bandwidth at which the core's default gap is right.
            read_bytes_per_s=machine.read_bytes_per_s or read_iops * DEFAULT_GAP,
            written_bytes=here * written,
            moved_bytes=here * limits.memory_bytes(question.batch, unique, question.dim, use["record_bytes"]),
            read_iops=read_iops,
            write_bytes_per_s=_rate(machine.write_bytes_per_s, written, "write bandwidth (write_bytes_per_s)"),
            memory_bytes_per_s=_rate(machine.memory_bytes_per_s, 1, "memory bandwidth (memory_bytes_per_s)"),
            compute_s=question.compute_s,
            exchanged=exchanged,
        ),
    )


def _reads(question: Question, machine: Machine, wanted: float, stored_bytes: int) -> Reads:
    """Return the expected reads of `wanted` records of the log, whose records are `_native.TARGET_LIVE` live."""
    largest = max(stored_bytes + machine.read_unit, question.rank_ram // 256)  # an eighth of the memory for reads
    return expected_reads(
        wanted,
        question.stored / _native.TARGET_LIVE,
        stored_bytes,
        gap_bytes=DEFAULT_GAP if machine.read_gap is None else machine.read_gap,
        read_unit=machine.read_unit,
        largest_bytes=min(LARGE_READ_BYTES, largest),
    )


def changes(base: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) for each possible change of the question, one at a time.

    With several ranks, "all in RAM" is left out: the core states that RAM for whole tables only.
    """
    question = base.question
    spec = Definition(question.dim, question.rows, question.optimizer, dtype=question.dtype).spec()
    wanted = int(spec.wanted_ram(True))
    other = {}
    if question.ranks > 1:
        if base.misses:
            other["twice the RAM"] = replace(question, ram=2 * question.ram)
    elif question.ram < wanted:
        if 2 * question.ram < wanted:
            other["twice the RAM"] = replace(question, ram=2 * question.ram)
        other["all in RAM"] = replace(question, ram=wanted)
    if question.dtype == "float32":
        other["bfloat16 rows"] = replace(question, dtype="bfloat16")
    if question.optimizer.slots and not isinstance(question.optimizer, RowwiseAdagrad):
        other["row-wise Adagrad"] = replace(question, optimizer=RowwiseAdagrad())
        if question.dtype == "float32":
            other["both of these"] = replace(question, optimizer=RowwiseAdagrad(), dtype="bfloat16")
    if question.lookahead:
        other["without lookahead"] = replace(question, lookahead=0)
    else:
        other[f"lookahead of {DEFAULT_LOOKAHEAD}"] = replace(question, lookahead=DEFAULT_LOOKAHEAD)
    for name, changed in other.items():
        yield name, answer(changed, base.machine)


def _window(question: Question, popularity: limits.Popularity, frames: int) -> tuple[int, int]:
    """Return how many of the lookahead's batches the core would hold in its window, and their estimated bytes."""
    ids = question.batch * question.ranks
    unique = popularity.unique_rows(ids)
    # More batches have no use: a row that is wanted only after them would be evicted before.
    batches = min(question.lookahead, max(4, int(4 * frames / unique)))
    while True:
        # A hash table of the distinct rows, with room to grow; for each batch its rows and their frames.
        distinct = popularity.unique_rows(batches * ids)
        row_bytes = 4 if question.rows < 2**32 else 8
        taken = int(1.5 * 8 * distinct + 1.1 * (row_bytes + 4) * batches * unique)
        if taken <= question.rank_ram // 10 or batches <= 3:
            return batches, min(taken, question.rank_ram // 4)
        batches -= 1


def _check(question: Question) -> None:
    for name, value, least, most in (
        ("rows", question.rows, 1, 2**63 - 1),
        ("batch", question.batch, 1, 2**40),
        ("lookahead", question.lookahead, 0, MAX_BATCHES),
        ("ranks", question.ranks, 1, MAX_RANKS),
        ("ranks_per_host", question.ranks_per_host, 1, MAX_RANKS),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
        if value > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")
    if not (question.compute_s >= 0 and math.isfinite(question.compute_s)):
        raise ValueError(f"compute_s must be at least 0 seconds, got {question.compute_s}")
    if question.ranks % question.ranks_per_host:
        raise ValueError(
            f"ranks must be a multiple of ranks_per_host, got ranks={question.ranks} and "
            f"ranks_per_host={question.ranks_per_host}"
        )
    if question.rows < question.ranks:
        raise ValueError(f"rows must be at least ranks, got rows={question.rows} and ranks={question.ranks}")
    link = question.link_bytes_per_s
    if link is None and question.ranks > question.ranks_per_host:
        hosts = question.ranks // question.ranks_per_host
        raise ValueError(f"link is needed: {question.ranks} ranks are on {hosts} hosts; give its rate, like '10Gbit'")
    if link is not None and not (link > 0 and math.isfinite(link)):
        raise ValueError(f"link must be above 0 bytes a second, got {link}")
    if not (question.latency_s >= 0 and math.isfinite(question.latency_s)):
        raise ValueError(f"latency_s must be at least 0 seconds, got {question.latency_s}")


def _rate(rate: float | None, needed: float, what: str) -> float:
    if rate is None:
        if needed:
            raise ValueError(f"the machine's {what} is unknown; measure it with bunkbed.machine.measure()")
        return math.inf
    if not rate > 0:
        raise ValueError(f"the machine's {what} must be above 0, got {rate}")
    return rate
