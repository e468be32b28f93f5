"""Everything that a machine with a device is borrowed for, by one command: ``python benchmarks/device_run.py``.

1. Builds the extension into src/bunkbed where Python cannot import it: needs cmake, a C++20 compiler and nanobind.
2. Checks: rows have the same bits with every device cache (`benchmarks.device.check`), which kernels were chosen; on
   CUDA where compute-sanitizer is installed, 1,000 steps of the same small case under it.
3. Measures: `benchmarks.device.experiment`, with what time is left.

Under 8 minutes from the end of the build on. Takes no network and of Python no more than torch and NumPy. A part that
fails is said and the next ones still run, each in a process of its own; the command then ends with an error. What it
does not know goes on to `benchmarks.device.experiment` (``--tiny``, ``--out``, ``--zipf``, ...).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Of everything after the build, less a margin for what starts and ends processes; the least that measuring makes sense
#: with; and the most that the sanitizer, under which a step takes a hundred times as long, may take of it.
SECONDS, LEAST_SECONDS, SANITIZER_SECONDS = 460, 120, 120
#: What compute-sanitizer ends with where it found something; nothing of ours does.
FOUND = 86


def run(*command: str, timeout: float | None = None) -> int:
    """The exit status of a command in the checkout, printed first; 124 where it took longer than `timeout`."""
    print("$ " + " ".join(command), flush=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A session of its own: when the sanitizer is killed, its child processes must not run on during the measurements.
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def build() -> None:
    """Puts the extension where the checkout finds it; leaves with what to install where it cannot."""
    native = [sys.executable, "-c", "import bunkbed._native, torch, numpy"]
    if run(*native) == 0:
        return
    missing = [] if shutil.which("cmake") else ["cmake"]
    missing += [name for name in ("nanobind", "torch", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"the extension is not in {ROOT / 'src' / 'bunkbed'} and building it needs {', '.join(missing)}: "
            f"{Path(sys.executable).name} -m pip install {' '.join(missing)}, or bring the _native*.so of this Python"
        )
    folder = ROOT / "build" / "device"
    arguments = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), *arguments],
        ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1), "--target", "_native"],
    ):
        if run(*command) != 0:
            sys.exit("the extension could not be built: see above")
    for made in folder.rglob("_native*.so"):
        shutil.copy2(made, ROOT / "src" / "bunkbed")
    if run(*native) != 0:
        sys.exit("the extension was built, and cannot be imported: see above")


def check(device: list[str]) -> list[str]:
    """What went wrong."""
    module = [sys.executable, "-m", "benchmarks.device.check", *device]
    failures = [] if run(*module) == 0 else ["the check"]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not installed: nothing was run under it")
        return failures
    status = run(sanitizer, "--error-exitcode", str(FOUND), *module, "--steps", "1000", timeout=SANITIZER_SECONDS)
    if status == FOUND:
        failures.append("compute-sanitizer found errors")
    elif status:  # it may not know this driver, or take too long: no verdict
        print(f"compute-sanitizer did not finish its 1,000 steps: status {status}")
    return failures


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        prog="benchmarks/device_run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", default="", help="as torch names it; default: an accelerator, else cpu")
    known, others = options.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs in a session of its own is ended too
    device = ["--device", known.device] if known.device else []
    build()
    started = time.monotonic()
    failures = check(device)
    left = max(LEAST_SECONDS, SECONDS - (time.monotonic() - started))
    measure = [sys.executable, "-m", "benchmarks.device.experiment", "--minutes", f"{left / 60:.2f}", *device, *others]
    if run(*measure) != 0:
        failures.append("measuring")
    if failures:
        sys.exit("failed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
