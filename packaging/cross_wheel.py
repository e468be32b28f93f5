"""Builds the wheels of other Pythons and processors than this one: ``python packaging/cross_wheel.py dist/*.whl``.

Two wheels fit a processor: one for CPython 3.11, one for every later version (the stable ABI). The core is compiled
once for both, with Debian's cross compiler where the processor is another one (``g++-aarch64-linux-gnu``). What is not
compiled comes from the wheel that is named. ``--machine aarch64`` builds for one processor alone, ``--tests`` also
tries what was built: under Debian's Pythons, and the C++ tests; on another processor under QEMU's user mode
(``qemu-user-static``), which takes three quarters of an hour.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from check_wheel import platform_tag
from debian_python import RELEASES, DebianPython, fetch

REPOSITORY = Path(__file__).resolve().parents[1]
#: The Python a wheel is compiled for, the wheel's tags, and the Pythons it is tried with.
ABIS = {"3.11": ("cp311-cp311", ["3.11"]), "3.13": ("cp312-abi3", ["3.13", "3.14"])}
#: The tests that say whether tables of older releases open, and whether rows have the same bits: with one Python.
GOLDEN, BITS, BITS_WITH = "tests/golden", "tests/core/test_exactness.py", "3.13"
TEST_REQUIREMENTS = ["numpy", "typer", "rich", "pytest>=9", "pytest-timeout>=2.3", "hypothesis>=6.100"]


def run(command: list[str], **environment: str) -> None:
    print(f"$ {shlex.join(command)}", flush=True)
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **environment}, check=False)
    if done.returncode != 0:
        sys.exit(f"it ended with {done.returncode}: {shlex.join(command)}")


def compile_with(python: DebianPython, folder: Path, **definitions: str) -> None:
    """Builds what CMake is asked for with the compiler of a Python's processor."""
    toolchain = folder / "toolchain.cmake"
    folder.mkdir(parents=True, exist_ok=True)
    compiler = f"{python.machine}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        sys.exit(f"needs {compiler}: apt-get install g++-{python.machine.replace('_', '-')}-linux-gnu, on Debian")
    toolchain.write_text(
        "set(CMAKE_SYSTEM_NAME Linux)\n"
        f"set(CMAKE_SYSTEM_PROCESSOR {python.machine})\n"
        f"set(CMAKE_CXX_COMPILER {compiler})\n"
        f'set(CMAKE_CROSSCOMPILING_EMULATOR "{";".join(python.emulator)}")\n',
        encoding="utf-8",
    )
    tools = Path(sys.executable).parent
    given = {"CMAKE_TOOLCHAIN_FILE": toolchain, "CMAKE_MAKE_PROGRAM": tools / "ninja", **definitions}
    # A cache of another Python's build is forgotten; what is compiled of the core stays.
    options = [
        "-G",
        "Ninja",
        "-UPython*",
        "-U_Python*",
        "-UNB_*",
        *(f"-D{name}={value}" for name, value in given.items()),
    ]
    run([str(tools / "cmake"), "-S", str(REPOSITORY), "-B", str(folder), *options])
    run([str(tools / "cmake"), "--build", str(folder)])


def build_module(python: DebianPython, folder: Path) -> Path:
    """Compiles the module ``_native`` for a Python, and gives it."""
    import nanobind

    for module in folder.glob("_native.*.so"):
        module.unlink()
    compile_with(
        python,
        folder,
        CMAKE_BUILD_TYPE="Release",
        Python_EXECUTABLE=str(python.executable),
        Python_INCLUDE_DIR=str(python.include),
        nanobind_ROOT=nanobind.cmake_dir(),
    )
    return next(folder.glob("_native.*.so"))


def run_cpp_tests(python: DebianPython, folder: Path) -> None:
    """Compiles the C++ tests as `make cpp-test` does, without sanitizers, and runs them with a Python's libraries."""
    flags = {"CMAKE_BUILD_TYPE": "None", "CMAKE_CXX_FLAGS": "-O1"}
    compile_with(python, folder, **flags, BUNKBED_BUILD_PYTHON="OFF", BUNKBED_BUILD_TESTS="ON")
    emulated = {"BUNKBED_EMULATOR": shlex.join(python.emulator)}  # of the programs that the tests start
    run([*python.emulator, str(folder / "bunkbed_tests"), "--apart"], **emulated)  # QEMU gives no memory back


def assemble(wheel: Path, module: Path, tags: str, machine: str, folder: Path) -> Path:
    """The wheel with another module in it, and the tags of that one."""
    unpacked = folder / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    run([sys.executable, "-m", "wheel", "unpack", "--dest", str(unpacked), str(wheel)])
    content = next(unpacked.iterdir())
    for old in (content / "bunkbed").glob("_native.*.so"):
        old.unlink()
    shutil.copy(module, content / "bunkbed")
    info = next(content.glob("*.dist-info")) / "WHEEL"
    lines = [line for line in info.read_text(encoding="utf-8").splitlines() if line and not line.startswith("Tag:")]
    info.write_text("\n".join([*lines, f"Tag: {tags}-linux_{machine}", ""]), encoding="utf-8")
    run([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(folder), str(content)])
    made = next(folder.glob(f"*-{tags}-linux_{machine}.whl"))
    run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform_tag(made), str(made)])
    return next(folder.glob(f"*-{tags}-manylinux*_{machine}.whl"))


def try_wheel(wheel: Path, python: DebianPython, folder: Path) -> None:
    """Runs the tests of bits and of older tables with a wheel under its Python."""
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    python.install([str(wheel), *TEST_REQUIREMENTS], site)
    tests = [GOLDEN, BITS] if python.version == BITS_WITH else [GOLDEN]
    no_limits = ["--timeout", "0", "-o", "faulthandler_timeout=0"]
    run(
        [*python.command, "-m", "pytest", "-p", "no:cacheprovider", *no_limits, *tests],
        PYTHONPATH=f"{site}:{REPOSITORY}",
        PYTHONDONTWRITEBYTECODE="1",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="a wheel of this version of Bunkbed")
    parser.add_argument("--machine", choices=["x86_64", "aarch64"], action="append", help="default: both")
    parser.add_argument("--tests", action="store_true", help="run the tests of bits, of older tables and of C++")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build/wheels", help="where the wheels go")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/cross", help="for what is built")
    options = parser.parse_args()
    for machine in options.machine or ["x86_64", "aarch64"]:
        is_foreign = machine != platform.machine()
        pythons = {
            version: fetch(version, machine, options.work / f"python{version}-{machine}") for version in RELEASES
        }
        wheels = []
        for compiled_for, (tags, versions) in ABIS.items():
            folder = options.work / machine
            module = build_module(pythons[compiled_for], folder)
            wheel = assemble(options.wheel.resolve(), module, tags, machine, folder)
            options.out.mkdir(parents=True, exist_ok=True)
            wheels.append((shutil.copy(wheel, options.out), versions))
            print(f"built {wheels[-1][0]}", flush=True)
        if not options.tests:
            continue
        for wheel, versions in wheels:
            for version in versions:
                try_wheel(wheel, pythons[version], options.work / f"python{version}-{machine}")
        if is_foreign:  # `make cpp-test` runs this machine's
            run_cpp_tests(pythons["3.13"], options.work / f"{machine}-tests")


if __name__ == "__main__":
    main()
