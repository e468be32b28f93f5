"""Coverage-guided fuzzing of every parser, under the address and undefined-behaviour sanitizers; needs clang and CMake.

The targets are in ``csrc/fuzz``; each starts with inputs from real tables.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import bunkbed as bb
from bunkbed import _native
from torture.parts import Result, Size, folder

ROOT = Path(__file__).resolve().parents[1]
#: target -> (executions of the long form, longest input)
TARGETS = {
    "manifest": (7_000_000, 2048),
    "segment": (4_000_000, 12288),
    "table": (15_000, 10240),
    "directory": (200_000, 40960),
}
MENDINGS = (0, 1, 2 + 1, 8, 16, 8 + 16, 1 + 2 + 4 + 8 + 16)


def compiler() -> str | None:
    names = ["clang++", *(f"clang++-{version}" for version in range(22, 13, -1))]
    return next((found for name in names if (found := shutil.which(name))), None)


def build(clang: str, folder_: Path) -> str | None:
    """Build the fuzzers; return the error, or None."""
    cmake, ninja = shutil.which("cmake") or "cmake", shutil.which("ninja")
    generator = ["-G", "Ninja"] if ninja else []
    configure = [cmake, "-S", str(ROOT), "-B", str(folder_), *generator, f"-DCMAKE_CXX_COMPILER={clang}"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", "-DBUNKBED_BUILD_PYTHON=OFF", "-DBUNKBED_BUILD_FUZZERS=ON"]
    commands = [configure, [cmake, "--build", str(folder_), "--parallel", str(os.cpu_count() or 1)]]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return (done.stdout + done.stderr)[-1500:]
    return None


_seeding = threading.Lock()  # the setting of checkpoints is process-wide


def seeds(target: str, path: Path) -> None:
    """Write seed inputs for the target, from tables of several kinds."""
    path.mkdir(parents=True)
    optimizers = [
        bb.SGD(lr=0.1),
        bb.Adam(lr=0.1),
        bb.RowwiseAdagrad(lr=0.1),
        bb.Adagrad(lr=0.1, state_dtype="bfloat16"),
    ]
    for number, optimizer in enumerate(optimizers):
        with folder() as root:
            table_path = root / "t"
            with bb.create(
                table_path, dim=3 + number, num_rows=40 if number % 2 else None, optimizer=optimizer, ram="1MiB"
            ) as table:
                _native.set_index_snapshots(1, in_line=True)
                table.update(np.arange(5 + number), np.ones((5 + number, 3 + number), np.float32))
                table.commit(keep="kept" if number == 1 else None, meta={"step": number})
                _native.set_index_snapshots()
                directory = max(table_path.glob("directory-*")).read_bytes()
            manifest = (table_path / "manifest-0000000000000001").read_bytes()
            segment = (table_path / "segment-0000000000000001").read_bytes()
        for mending in MENDINGS:
            if target == "manifest":
                data = bytes([mending]) + manifest
            elif target == "segment":
                data = bytes([mending]) + segment
            elif target == "directory":
                data = bytes([mending]) + directory
            else:
                data = bytes([mending]) + struct.pack("<H", len(manifest)) + manifest + segment
            (path / f"{number}-{mending}").write_bytes(data)


def fuzz(target: str, binary: Path, runs: int, longest: int, seconds: float, seed: int) -> Result:
    result = Result(f"fuzz executions without a crash: {target}")
    with folder() as root:
        with _seeding:
            seeds(target, root / "seeds")
        (root / "found").mkdir()
        limits = [
            f"-runs={runs}",
            f"-max_total_time={max(1, int(seconds))}",
            f"-max_len={longest}",
            f"-seed={seed + 1}",
        ]
        rest = ["-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1", f"-artifact_prefix={root}/crash-"]
        done = subprocess.run(
            [str(binary), *limits, *rest, str(root / "found"), str(root / "seeds")], capture_output=True, text=True
        )
        print(f"        ... fuzz {target}: over", file=sys.stderr, flush=True)
        executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
        result.tried = int(executed.group(1)) if executed else 1
        result.passed = result.tried
        if done.returncode == 0 and result.tried < runs:
            result.note = f"stopped by the limit of seconds; {runs:,} wanted; "
        coverage = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
        if coverage:
            result.note += f"coverage {coverage[-1][0]} edges, {coverage[-1][1]} features"
        if done.returncode != 0:
            result.passed -= 1
            inputs = [p.read_bytes().hex() for p in root.glob("crash-*")]
            result.fail(done.stderr[-1200:] + "\ninput: " + (inputs[0][:400] if inputs else ""))
    return result


def run(size: Size) -> list[Result]:
    clang = compiler()
    if clang is None:
        return [Result("fuzzing", note="not done: it needs clang (apt install clang libfuzzer-14-dev)", score=True)]
    binaries = ROOT / "build" / "fuzz"
    if wrong := build(clang, binaries):
        return [Result("the fuzzers build", tried=1, failures=[wrong])]
    # As many targets at once as there are processors; each target uses one.
    with ThreadPoolExecutor(size.processes) as pool:
        rounds = -(-len(TARGETS) // size.processes)
        jobs = [
            pool.submit(
                fuzz, target, binaries / f"fuzz_{target}", size.of(runs), longest, size.seconds / rounds, size.seed
            )
            for target, (runs, longest) in TARGETS.items()
        ]
        return [job.result() for job in jobs]
