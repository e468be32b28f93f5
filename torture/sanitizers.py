"""Threads of random calls on every kind of table (``csrc/stress``) under ThreadSanitizer and under the address and
undefined-behaviour sanitizers, with both I/O backends; needs a C++ compiler with these sanitizers.

``python -m torture.sanitizers [SECONDS]`` runs each combination for SECONDS and prints a table.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torture.parts import Result, Size

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = {"thread": "thread", "address": "address,undefined"}
BACKENDS = ("threads", "uring")
KINDS = ("fixed", "open", "ram", "scratch", "disk", "reader", "device", "shards", "run")
#: (bug of csrc/base/fault.h, kind that must find it)
BUGS = (
    ("scan_misses_change", "fixed"),
    ("lookup_without_lock", "fixed"),
    ("descriptor_leak", "open"),
    ("lost_write_back", "fixed"),
)
#: Total time of the long form, divided equally among the combinations.
SECONDS = 3600.0
_SKIPPED = 77
_REPORT = re.compile(r"WARNING: ThreadSanitizer|ERROR: (?:Address|Leak)Sanitizer|runtime error:")
_OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=0:exitcode=66:second_deadlock_stack=1",
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@dataclass(frozen=True)
class Run:
    """One combination and its result."""

    kind: str
    backend: str
    sanitizer: str
    status: int
    seconds: float
    calls: int
    rows: int
    wrong: int
    reports: int
    text: str  # the error

    @property
    def is_skipped(self) -> bool:
        return self.status == _SKIPPED

    @property
    def ok(self) -> bool:
        return self.is_skipped or (self.status == 0 and self.calls > 0 and self.wrong == 0 and self.reports == 0)


def _tool(name: str) -> str | None:
    """Return the path of a tool, of the virtual environment or of the system."""
    own = Path(sys.executable).with_name(name)
    return str(own) if own.exists() else shutil.which(name)


def build(sanitizer: str) -> Path | str:
    """Build the program with a sanitizer; return its path, or the error as text."""
    cmake, ninja = _tool("cmake"), _tool("ninja")
    if cmake is None:
        return "cmake is not there"
    path = ROOT / "build" / f"stress-{sanitizer}"
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    configure = [cmake, "-S", str(ROOT), "-B", str(path), *generator, "-DCMAKE_BUILD_TYPE=None"]
    configure += ["-DCMAKE_CXX_FLAGS=-O1", "-DBUNKBED_BUILD_PYTHON=OFF", "-DBUNKBED_BUILD_TESTS=ON"]
    configure += [f"-DBUNKBED_SANITIZE={SANITIZERS[sanitizer]}"]
    jobs = str(os.cpu_count() or 1)
    for command in (configure, [cmake, "--build", str(path), "--target", "bunkbed_stress", "--parallel", jobs]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return (done.stdout + done.stderr)[-1500:]
    return path / "bunkbed_stress"


def stress(program: Path, sanitizer: str, kind: str, backend: str, seconds: float, seed: int, *more: str) -> Run:
    begin = time.monotonic()
    command = [str(program), "--kind", kind, "--backend", backend, "--seconds", f"{seconds:.1f}", "--seed", str(seed)]
    try:
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=seconds + 700, env={**os.environ, **_OPTIONS}
        )
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        status, out, err = -1, "", "it hangs"
    figures = re.search(r"(\d+) calls, (\d+) rows checked, (\d+) wrong", out)
    calls, rows, wrong = (int(group) for group in figures.groups()) if figures else (0, 0, 0)
    reports = len(_REPORT.findall(err))
    lines = [line.strip() for line in out.splitlines() if "wrong:" in line or "skipped" in line]
    text = "\n".join(lines) + ("\n" + err[:1500] if reports or status not in (0, 1, _SKIPPED) else "")
    return Run(kind, backend, sanitizer, status, time.monotonic() - begin, calls, rows, wrong, reports, text.strip())


def runs(programs: dict[str, Path], seconds: float, seed: int, at_once: int) -> list[Run]:
    """Run every combination for `seconds`."""
    jobs = [(s, kind, backend) for kind in KINDS for backend in BACKENDS for s in programs]
    with ThreadPoolExecutor(at_once) as pool:
        started = [
            pool.submit(stress, programs[s], s, kind, backend, seconds, seed + number)
            for number, (s, kind, backend) in enumerate(jobs)
        ]
        return [one.result() for one in started]


def table(found: Sequence[Run]) -> list[str]:
    lines = [f"{'kind':8} {'reads':8} {'sanitizer':9} {'calls':>12} {'rows':>14} {'wrong':>6} {'reports':>7} {'s':>6}"]
    for run in found:
        figures = f"{run.calls:12,} {run.rows:14,} {run.wrong:6,} {run.reports:7,} {run.seconds:6.0f}"
        state = "" if run.ok else "  FAILED"
        rest = f"  {run.text.splitlines()[0]}" if run.is_skipped else figures + state
        lines.append(f"{run.kind:8} {run.backend:8} {run.sanitizer:9} {rest}")
    calls, rows = sum(run.calls for run in found), sum(run.rows for run in found)
    wrong, reports = sum(run.wrong for run in found), sum(run.reports for run in found)
    seconds = sum(run.seconds for run in found)
    lines.append(f"{'all':27} {calls:12,} {rows:14,} {wrong:6,} {reports:7,} {seconds:6.0f}")
    return lines


def bugs(programs: dict[str, Path]) -> Result:
    result = Result("seeded bugs of threads found", wanted=len(BUGS) * len(programs))
    for sanitizer, program in programs.items():
        for bug, kind in BUGS:
            run = stress(program, sanitizer, kind, "threads", 60.0, 1, "--fault", bug)
            result.tried += 1
            if run.status == 2 or run.ok:
                result.fail(f"{bug} was not found under {sanitizer}: {run.text}")
            else:
                result.passed += 1
    return result


def run(size: Size) -> list[Result]:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name):
        return [Result("threads under sanitizers", note="not done: it needs a C++ compiler", score=True)]
    programs: dict[str, Path] = {}
    for sanitizer in SANITIZERS:
        built = build(sanitizer)
        if isinstance(built, str):
            return [Result(f"bunkbed_stress builds under {sanitizer}", tried=1, failures=[built])]
        programs[sanitizer] = built
    combinations = len(SANITIZERS) * len(BACKENDS) * len(KINDS)
    seconds = min(size.seconds, SECONDS * size.factor)
    found = runs(programs, max(1.0, seconds * size.processes / combinations), size.seed, size.processes)
    results = []
    for sanitizer in SANITIZERS:
        result = Result(f"calls of threads under the {sanitizer} sanitizer, none wrong, no report")
        of_it = [one for one in found if one.sanitizer == sanitizer]
        for one in of_it:
            result.tried += max(1, one.calls) if not one.is_skipped else 0
            result.passed += one.calls if one.ok else 0
            if not one.ok:
                result.fail(f"{one.kind}, {one.backend}: status {one.status}: {one.text}")
        skipped = {one.backend for one in of_it if one.is_skipped}
        result.note = f"{sum(one.seconds for one in of_it):,.0f} s" + "".join(
            f"; {b} is not to be had" for b in skipped
        )
        results.append(result)
    return [*results, bugs(programs)]


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS / (len(SANITIZERS) * len(BACKENDS) * len(KINDS))
    programs = {}
    for sanitizer in SANITIZERS:
        built = build(sanitizer)
        if isinstance(built, str):
            print(built, file=sys.stderr)
            return 2
        programs[sanitizer] = built
    found = runs(programs, seconds, int(time.time()), 1)
    for one in found:
        if not one.ok:
            print(f"{one.kind}, {one.backend}, {one.sanitizer}: status {one.status}\n{one.text}\n")
    print("\n".join(table(found)))
    return 0 if all(one.ok for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
