"""What tells a host, and a process on it, from others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def host() -> str:
    """Return what tells this host from others of the same name; the name alone where nothing else can be seen."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{os.uname().nodename} {boot}"


def started(process: int) -> str:
    """Return when a process of this host started, in ticks; empty if it has ended or cannot be seen."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # See proc(5): the name, in parentheses, may have any character. Then come state (field 3) ... start (22).
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
