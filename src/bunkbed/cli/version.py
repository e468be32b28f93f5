"""`bunkbed --version`, and with ``--verbose`` the facts for a bug report."""

from __future__ import annotations

import platform
from importlib import metadata

import bunkbed
from bunkbed import _native

_LEVELS = ("scalar", "avx2", "avx512")
#: Libraries that are listed with their versions, in this order.
_LIBRARIES = ("numpy", "torch", "tensorflow-cpu", "tensorflow", "keras", "pyarrow", "triton")


def version_text(verbose: bool = False) -> str:
    """Return the version; with `verbose` also lines for the build, the machine and the libraries."""
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
