"""The output that `bunkbed plan` and `Table.explain` share: times by resource as bars, rates, speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing rich takes 0.1 s, which a training script does not need
    from rich.table import Table as Grid

    from bunkbed.machine.rates import Machine

WIDTH = 80
_BAR = 20


def facts_grid() -> Grid:
    """Return a grid of two columns: a dim label, and the fact."""
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    return grid


def times_grid(rows: Sequence[tuple[str, float, str]], binds: str, *, title: str = "one step") -> Grid:
    """Return a grid of (``"resource"`` or ``"resource, part"``, seconds, note) with bars; `binds` is highlighted."""
    from rich.table import Table as Grid

    longest = max((seconds for _, seconds, _ in rows), default=0.0)
    grid = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    grid.add_column(title, no_wrap=True)
    grid.add_column("ms", justify="right", no_wrap=True)
    grid.add_column("", width=_BAR, no_wrap=True)
    grid.add_column("for", style="dim", no_wrap=True)
    for name, seconds, what in rows:
        is_binding = name.partition(",")[0] == binds
        bar = "━" * max(1, round(_BAR * seconds / longest)) if seconds else ""
        style = "bold yellow" if is_binding else "cyan"
        grid.add_row(f"[b]{name}[/]" if is_binding else name, milliseconds(seconds), f"[{style}]{bar}[/]", what)
    return grid


def milliseconds(seconds: float) -> str:
    """Return seconds as text in milliseconds.
    >>> milliseconds(0.1057), milliseconds(2e-5), milliseconds(0)
    ('105.7', '0.020', '0')
    """
    if not seconds:
        return "0"
    return f"{seconds * 1e3:,.1f}" if seconds >= 1e-3 else f"{seconds * 1e3:.3f}"


def speed(value: float) -> str:
    """Return a speed as text with at least three digits.
    >>> speed(8.77777), speed(23), speed(12_345.6)
    ('8.78', '23.0', '12,346')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def decimal_bytes(num_bytes: float) -> str:
    """Return bytes as text in decimal units, as drive makers use them.

    >>> decimal_bytes(6.8e12), decimal_bytes(5e8), decimal_bytes(0)
    ('6.8 TB', '0.5 GB', '0 GB')
    """
    if num_bytes >= 1e14:
        return f"{num_bytes / 1e12:,.0f} TB"
    if num_bytes >= 1e12:
        return f"{num_bytes / 1e12:.1f} TB"
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes else "0 GB"


def read_paths(records: Mapping[str, float], read_bytes: float, wanted_bytes: float) -> str:
    """Return by which access paths records were read, and the bytes read, also by compaction, for their bytes.

    Requires: `records` has one at least.

    >>> read_paths({"single reads": 5, "merged reads": 35, "sweep": 60}, 3000, 2000)
    '60% sweep, 35% merged reads, 5% single reads; 1.5 x the wanted bytes'
    """
    total = sum(records.values())
    most_first = sorted(((number, path) for path, number in records.items() if number), reverse=True)
    shares = ", ".join(f"{number / total:.0%} {path}" for number, path in most_first)
    return f"{shares}; {read_bytes / wanted_bytes:.1f} x the wanted bytes"


def rates(machine: Machine) -> str:
    """Return the known rates of a machine, in one line."""
    parts = []
    if machine.memory_bytes_per_s:
        parts.append(f"memory {machine.memory_bytes_per_s / 1e9:,.1f} GB/s")
    if machine.read_iops:
        parts.append(f"{machine.read_iops:,.0f} random reads/s")
    both = (("reads", machine.read_bytes_per_s), ("writes", machine.write_bytes_per_s))
    sequential = [f"{name} {rate / 1e9:,.2f}" for name, rate in both if rate]
    if sequential:
        parts.append(f"{', '.join(sequential)} GB/s")
    return ", ".join(parts)
