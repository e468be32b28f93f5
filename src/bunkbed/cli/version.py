"""`bunkbed --version`, and with ``--verbose`` what a report of a defect needs."""

from __future__ import annotations

import platform
from importlib import metadata

import bunkbed
from bunkbed import _native

_LEVELS = ("scalar", "avx2", "avx512")
#: What a table is used with, in the order in which it is told.
_LIBRARIES = ("numpy", "torch", "tensorflow-cpu", "tensorflow", "keras", "pyarrow", "triton")


def version_text(verbose: bool = False) -> str:
    """The version; with `verbose` also the build, the machine and the libraries, a line each."""
    text = f"bunkbed {bunkbed.__version__}"
    if not verbose:
        return text
    build = _native.build()
    allowed = ", ".join(level for level in _LEVELS if _native.simd_supported(level))
    reads = "io_uring" if _native.io() == "uring" else "threads"
    system = f"{platform.system()} {platform.release()}, {platform.machine()}, {' '.join(platform.libc_ver())}"
    lines = [
        text,
        f"built by        {build['compiler']}",
        f"tables          format {build['format']}",
        f"kernels         {_native.simd()} (this processor has {allowed})",
        f"threads            {bunkbed.get_num_threads()}",
        f"reads           by {reads}",
        f"Python          {platform.python_version()} ({platform.python_implementation()})",
        f"system          {system}",
    ]
    for library in _LIBRARIES:
        try:
            lines.append(f"{library:15} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    return "\n".join(lines)
