"""Every case of the suite: its name, what it measures, its target, and the function that does.

Functions are named by text and imported when run, so that listing the cases needs no library. A case takes a
`Settings` and gives a list of `Figure`; it runs in a process of its own (`run_case`), because thread pools,
allocators and peak memory of one would be felt in the next, and because a case that fails must not end the suite.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Outcome, Settings, judged

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """One entry of the suite.

    Args:
        name: what one types.
        function: ``"module:function"`` inside `benchmarks`.
        what: what is measured, in one line.
        target: what must hold, in words; empty where a case only informs.
        needs: modules without which it cannot run at all.
        limit_s: it is ended after this many seconds.
        quick: whether it belongs to ``--quick`` runs.
        default: whether it runs where no case is named.
        correctness: its targets hold at any size, so even a tiny run is judged.
    """

    name: str
    function: str
    what: str
    target: str = ""
    needs: tuple[str, ...] = ("torch",)
    limit_s: float = 300.0
    quick: bool = True
    default: bool = True
    correctness: bool = False

    def load(self) -> Callable[[Settings], list[Figure]]:
        module, function = self.function.split(":")
        loaded: Callable[[Settings], list[Figure]] = getattr(importlib.import_module(f"benchmarks.{module}"), function)
        return loaded

    def why_not(self) -> str:
        """What is missing, or nothing."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"needs {', '.join(absent)}" if absent else ""


RESIDENT = "4M x 64 in RAM, 65,536 Zipf(1.05) ids"
LARGER = "10M x 64 + Adam = 7.7 GB on SSD, 1 GiB memory cgroup, 65,536 Zipf(1.05) ids"

CASES = (
    Case("adam", "cases.ram.resident:adam", f"Adam step, {RESIDENT}", ">= 6x torch SparseAdam"),
    Case("adagrad", "cases.ram.resident:adagrad", f"Adagrad step, {RESIDENT}", ">= 4x FBGEMM"),
    Case(
        "rowwise-adagrad", "cases.ram.resident:rowwise_adagrad", f"row-wise Adagrad step, {RESIDENT}", ">= 1.5x FBGEMM"
    ),
    Case("sgd", "cases.ram.resident:sgd", f"SGD step, {RESIDENT}", ">= 1.8x FBGEMM"),
    Case(
        "step-phases",
        "cases.ram.step_phases:step_phases",
        f"phases of an Adam step with 1 and 2 threads, and the least time that memory allows for each, {RESIDENT}",
    ),
    Case(
        "dense-adam",
        "cases.ram.resident:dense_adam",
        "Adam step compared with dense Adam in torch and Keras/TensorFlow, 1M x 64",
    ),
    Case("lookup", "cases.ram.resident:lookup", f"lookup, {RESIDENT}", ">= 1.4x the faster of torch and FBGEMM"),
    Case("bags", "cases.ram.pooled:bags", f"mean-pooled bags of 20 ids, {RESIDENT}", ">= 2x FBGEMM, >= 1.7x torch"),
    Case(
        "small-lookup", "cases.ram.small:small_lookup", "lookup of 64 ids, 4M x 64 in RAM", "<= 10 us over nn.Embedding"
    ),
    Case(
        "many-tables",
        "cases.ram.many:many_tables",
        "Adagrad step of 26 tables of 100,000 x 16 in RAM, one id each, batches of 256 and 2,048",
        ">= 3x and >= 2.5x FBGEMM",
    ),
    Case("small-adam", "cases.ram.small:small_adam", "Adam step of 64 ids, 4M x 64 in RAM", ">= 2x torch SparseAdam"),
    Case(
        "device-planner",
        "device.planner:device_planner",
        "a device cache's plans on one core: 65,536 Zipf(1.05) ids over 4M and 40M rows, 5 % and 20 % cached",
        ">= 30M ids/s, dedupe included",
        (),
    ),
    Case(
        "larger-than-memory",
        "cases.disk.larger_than_memory:larger_than_memory",
        f"Adam step compared with np.memmap, {LARGER}",
        "<= 120 ms; fewer misses with lookahead; <= 1.1x the best static cache's; >= 92 % of the limit",
        limit_s=600,
    ),
    Case(
        "with-a-model",
        "cases.disk.larger_than_memory:beside_a_model",
        f"lookahead with a two-thread matrix product as the model's work, {LARGER}",
        "step <= 1.1x max(work alone, disk alone)",
        limit_s=600,
    ),
    Case(
        "key-value-stores",
        "cases.disk.larger_than_memory:key_value_stores",
        f"Adam step in steady state compared with RocksDB and LMDB, {LARGER}",
        ">= 5x both",
        limit_s=900,
        quick=False,
    ),
    Case(
        "read-cost",
        "cases.disk.read_cost:read_cost",
        "a matrix product during reads by io_uring and by threads; processor time of a read",
        "io_uring only where the model gains >= 10 % by it",
    ),
    Case(
        "access-paths",
        "cases.disk.access_paths:access_paths",
        "1M rows, a tenth in RAM: steps of uniform batches of .1 to 25 % of the rows against the device's least time",
        "<= 1.3x for 25 %",
        limit_s=1200,
    ),
    Case(
        "window",
        "cases.disk.window:window",
        "rows missed with a window of 32 batches, a cache of 4 batches' unique rows, Zipf(1.05)",
        "<= 0.75 of LRU's and within 5 % of Belady's at staging depth 1",
    ),
    Case(
        "policy",
        "cases.disk.policy:policy",
        "rows missed without lookahead on ids that stay, move and scan, caches of 1, 8 and 30 % of the rows",
        "<= 1.1x the best static cache's on Zipf(1.05), 8 %",
        (),
        limit_s=900,
        quick=False,
    ),
    Case(
        "growth",
        "cases.growth:growth",
        "Adam step by table size, 10^6 to 10^9 rows, the same unique rows a step, all touched rows in RAM",
        "grows <= 15 %",
    ),
    Case(
        "commit-stall",
        "cases.commits:commit_stall",
        "steps during a commit: 1 % dirty of 10M x 64 + Adam on SSD, and a cache of 1 GiB dirty all over",
        "p99 of the stall <= 50 ms and <= 100 ms",
        limit_s=900,
    ),
    Case(
        "commit-throughput",
        "cases.commits:commit_throughput",
        "a commit every 1,000 steps compared with a table without durability, disk-bound and in RAM; bytes written",
        ">= 95 %",
        limit_s=900,
    ),
    Case(
        "disk-limit",
        "cases.disk_limit:disk_limit",
        "training within disk=, with commits, compared with no limit",
        "",
        (),
    ),
    Case(
        "opening",
        "cases.durability:opening",
        "opening a table of 10^6, 10^7 and 10^8 rows, page cache dropped",
        "10^8 rows in <= 3 s",
        (),
        limit_s=900,
    ),
    Case(
        "checking",
        "cases.durability:checking",
        "bb.check and bb.copy compared with plain reading of the same files",
        "",
        (),
    ),
    Case(
        "keras-fit",
        "cases.training.keras_fit:fit",
        "a step of Keras's fit, Adam, 10M x 64 in RAM, 8,192 Zipf(1.05) ids",
        ">= 20x keras.layers.Embedding",
        ("torch", "keras", "tensorflow"),
        limit_s=900,
    ),
    Case(
        "keras-layer",
        "cases.training.keras_fit:layer",
        "lookup and Adam step through bunkbed.keras compared with bunkbed.torch, 4M x 64 in RAM, 8,192 Zipf(1.05) ids",
        "<= 1.3x, less what a step without a layer takes",
        ("torch", "keras", "tensorflow"),
    ),
    Case(
        "keras-memory",
        "cases.training.keras_fit:memory",
        "resident memory over 10,000 steps of bunkbed.keras, in a graph and eagerly",
        "grows <= 20 MiB from step 100",
        ("torch", "keras", "tensorflow"),
        limit_s=900,
        correctness=True,
    ),
    Case(
        "keras-bounded",
        "cases.training.keras_bounded:bounded",
        "a table of 6 GiB trained, saved, loaded and exported in Keras, memory cgroup of 1.5 GiB",
        "peak within the limit",
        ("keras", "tensorflow", "pyarrow"),
        limit_s=600,
    ),
    Case(
        "device",
        "device.experiment:device",
        "matrix factorisation with a device cache compared with nn.Embedding resident and on the CPU",
        "the same bits; with an accelerator, 5 % cached: >= 1x resident, >= 10x CPU, 70 % of the link; 4x rows <= 1.1x",
        limit_s=600,
        correctness=True,
    ),
    Case(
        "rows-in-out",
        "cases.rows_in_out:rows_in_out",
        "import and export of every format compared with other writers, all synced; an import in a memory cgroup",
        ">= .5x numpy.save and each format's library",
        ("pyarrow",),
        limit_s=600,
    ),
    Case(
        "exactness",
        "cases.exactness:exactness",
        "rows after training, bit for bit",
        "identical",
        (),
        limit_s=1500,
        correctness=True,
    ),
    Case(
        "optimizers",
        "cases.optimizers:optimizers",
        "weights compared with torch's optimizers",
        "<= 1e-6",
        correctness=True,
    ),
    Case(
        "bounded-memory",
        "cases.bounded_memory:bounded_memory",
        'a table of 4 GiB trained within ram="256MiB", memory cgroup of 600 MiB',
        "peak within the budget",
        correctness=True,
    ),
    Case(
        "huge",
        "cases.huge:huge",
        "a table of 10^10 rows: creating it, a million random rows trained in 512 MiB",
        "created in < 100 ms with < 1 MiB; within the budget",
        (),
    ),
    Case(
        "stream",
        "cases.training.stream:stream",
        "`bunkbed train --stream` of 200M interactions by 20M users, cgroup of 2 GiB (half an hour, 18 GB of disk)",
        "within the limit",
        ("torch", "pyarrow", "duckdb", "rich", "matplotlib"),
        limit_s=7200,
        default=False,
        correctness=True,
    ),
    Case(
        "train-speed",
        "cases.training.quality_cases:training_speed",
        "`bunkbed train` of both MovieLens-1M recipes compared with the same model in plain torch with SparseAdam",
        ">= 1.5x the pairs/s",
        ("torch", "pyarrow", "rich"),
    ),
    Case(
        "block-quality",
        "cases.training.block_quality:quality",
        "MF-BPR on planted data, blocks of `bunkbed.BlockOrder` against a uniform shuffle, 20 seeds (5 minutes)",
        needs=(),
        limit_s=1500,
        default=False,
    ),
    Case(
        "full-ranking",
        "cases.training.full_ranking:full_ranking",
        "evaluations that rank all items for all users, Gowalla and 40,000 x 54,000 made up, against the bare product",
        "<= 1.5x the float32 product",
        ("torch", "pyarrow", "duckdb"),
        limit_s=900,
    ),
    Case(
        "train-order",
        "cases.training.quality_cases:orders",
        "Gowalla and MovieLens-1M beyond their RAM, by blocks and in uniform order (an hour)",
        "auto: <= 3x and <= 4x of all in RAM, >= 98 % of the quality; uniform: <= 30x and <= 15x",
        ("torch", "pyarrow", "duckdb"),
        limit_s=7200,
        default=False,
    ),
    Case(
        "quality-bfloat16",
        "cases.training.quality_cases:bfloat16",
        "MovieLens-1M GMF with bfloat16 rows and row-wise Adagrad compared with float32 and Adam (5 minutes)",
        "HR@10 within .005; a third of the record bytes",
        ("torch", "pyarrow"),
        limit_s=1500,
        quick=False,
    ),
    Case(
        "quality-movielens",
        "cases.training.quality_cases:movielens",
        "MovieLens-1M GMF trained within a quarter of its records' bytes and all in RAM (10 minutes)",
        "HR@10 >= .70; identical",
        ("torch", "pyarrow"),
        limit_s=1500,
        default=False,
    ),
    Case(
        "quality-neumf",
        "cases.training.quality_cases:movielens_neumf",
        "MovieLens-1M NeuMF trained within a quarter of its records' bytes and all in RAM (20 minutes)",
        "HR@10 >= .69; identical",
        ("torch", "pyarrow"),
        limit_s=3000,
        default=False,
    ),
    Case(
        "quality-gowalla",
        "cases.training.quality_cases:gowalla",
        "Gowalla MF-BPR trained within a quarter of its records' bytes and all in RAM (10 minutes)",
        "Recall@20 >= .16; identical",
        ("torch", "pyarrow"),
        limit_s=1500,
        default=False,
    ),
)


def find(names: Sequence[str], *, quick: bool) -> list[Case]:
    """The named cases, or all.

    Raises:
        KeyError: no such case.
    """
    known = {case.name: case for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KeyError(f"no case {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names] or [case for case in CASES if case.default and (case.quick or not quick)]


def run_here(case: Case, settings: Settings) -> Outcome:
    """Runs a case in this process."""
    function = case.load()
    start = time.perf_counter()
    figures = judged(function(settings), tiny=settings.tiny and not case.correctness)
    seconds = time.perf_counter() - start
    flags = {"tiny": " --tiny", "quick": " --quick", "full": ""}[settings.size]
    return Outcome(
        case=case.name,
        figures=figures,
        machine=common.machine(settings.dir if settings.dir.exists() else Path.cwd()),
        command=f"python -m benchmarks {case.name}{flags}",
        revision=revision(),
        size=settings.size,
        seconds=seconds,
    )


def run_case(case: Case, settings: Settings, arguments: Sequence[str]) -> Outcome:
    """Runs a case in a process of its own, which prints as it goes; `arguments` are the options to pass on."""
    if why_not := case.why_not():
        return Outcome(case.name, size=settings.size, skipped=why_not)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "benchmarks", case.name, "--outcome", str(answer), *arguments]
        start, busy, own = time.perf_counter(), common.busy_seconds(), children_seconds()
        # A group of its own: a case that hangs is ended with its children.
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(timeout=case.limit_s)
        except subprocess.TimeoutExpired:
            failed = f"ended after {case.limit_s:.0f} s"
        except BaseException:
            end(process)
            raise
        else:
            if code == 0:
                outcome = Outcome.from_json(json.loads(answer.read_text()))
                others = common.busy_seconds() - busy - (children_seconds() - own)
                return replace(outcome, others=max(0.0, others / (time.perf_counter() - start)))
            failed = f"exit status {code}"
        end(process)
        return Outcome(case.name, size=settings.size, seconds=time.perf_counter() - start, failed=failed)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a case that still runs, and its processes: asked first, so that it removes its files and memory limits."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            return


def children_seconds() -> float:
    """Processor seconds of the processes this one has waited for, and of those they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def revision() -> str:
    """The commit of the working tree, with a mark where it was changed."""
    try:
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")
