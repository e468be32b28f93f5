"""Clang's thread-safety analysis of the core: who may touch a field without its lock, who must hold which lock.

``python packaging/thread_safety.py`` prints each violation and fails on the first file that has one. The attributes are
in csrc/base/mutex.h. libclang, from pip, parses the files; the system's compiler lends the headers of the language.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import clang.cindex

ROOT = Path(__file__).resolve().parents[1]
#: The kernels and their builds need a compiler's own intrinsics and have no lock; the bindings need another library's
#: headers and have no lock of their own.
LEFT_OUT = {"bindings", "kernels", "tests", "fuzz", "stress"}
#: In place of the compiler's header of intrinsics, of which the core uses two outside the kernels.
INTRINSICS = "unsigned _mm_getcsr();\nvoid _mm_setcsr(unsigned);\n"


def headers_of_the_compiler() -> str:
    compiler = os.environ.get("CXX", "c++")
    return subprocess.run(
        [compiler, "-print-file-name=include"], capture_output=True, text=True, check=True
    ).stdout.strip()


# Without the group "precise": each part of a table names its lock through a reference of its own.
def violations(path: Path, headers: str, stubs: Path) -> list[str]:
    """What the analysis, or the parser, says of one file."""
    arguments = ["-x", "c++", "-std=c++20", f"-I{ROOT / 'csrc'}"]
    arguments += ["-Wthread-safety-analysis", "-Wthread-safety-attributes"]
    arguments += ["-isystem", str(stubs), "-isystem", headers]
    unit = clang.cindex.Index.create().parse(str(path), args=arguments)
    return [str(found) for found in unit.diagnostics if found.severity >= clang.cindex.Diagnostic.Warning]


def files() -> list[Path]:
    paths = sorted((ROOT / "csrc").rglob("*.cc"))
    return [path for path in paths if path.relative_to(ROOT / "csrc").parts[0] not in LEFT_OUT]


def main() -> int:
    headers = headers_of_the_compiler()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        (Path(folder) / "xmmintrin.h").write_text(INTRINSICS)
        named = [Path(name).resolve() for name in sys.argv[1:]] or files()
        found = [
            line for lines in pool.map(lambda path: violations(path, headers, Path(folder)), named) for line in lines
        ]
    for line in dict.fromkeys(found):
        print(line)
    print(f"{len(named)} files, {len(set(found))} violations of the rules of locks")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
