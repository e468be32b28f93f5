"""What the device, its link and this machine allow, measured; and the least a step can take by these rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.device.sides import Device, Loss, Sample, Tables
from benchmarks.harness import common


@dataclass
class Limits:
    """Rates of this machine; None: not measured, or there is no such thing."""

    up: float | None = None  # bytes a second to the device, from pinned memory
    down: float | None = None
    memory: float = 0.0  # bytes a second of device memory, read and written
    read_iops: float | None = None  # of the disk, 4 KiB
    write: float | None = None
    compute_s: dict[int, float] | None = None  # by dim: forward and backward of the model behind the rows

    def formula(self, sample: Sample, tables: Tables, ids: int) -> tuple[float, str]:
        """(the least seconds a step can take when everything overlaps, which limit that is)."""
        row, element = tables.record_bytes, tables.dim * 4
        parts = {
            "memory": (ids * element + sample.unique * (2 * row + element)) / self.memory,
            "compute": (self.compute_s or {}).get(tables.dim, 0.0),
        }
        if self.up:
            parts["link"] = sample.loaded_bytes / self.up
        if tables.place == "SSD" and self.read_iops and self.write:
            parts["disk"] = sample.read_records / self.read_iops + sample.written_bytes / self.write
        bound = max(parts, key=lambda name: parts[name])
        return parts[bound], bound

    def lines(self) -> list[str]:
        """For people."""

        def rate(value: float | None) -> str:
            return "none" if not value else f"{value / 1e9:.3g} GB/s"

        lines = [f"link: {rate(self.up)} up, {rate(self.down)} down (pinned); device memory: {rate(self.memory)}"]
        if self.compute_s:
            of = ", ".join(f"dim {dim} {seconds * 1e3:.3g} ms" for dim, seconds in self.compute_s.items())
            lines.append(f"the model without its rows: {of}")
        return lines


def best_rate(device: Device, call: Callable[[], Any], num_bytes: int, *, seconds: float = 0.2) -> float:
    """Bytes a second of the fastest of several calls, each waited for."""
    call()
    device.synchronize()
    best, started = 0.0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        call_started = time.perf_counter()
        call()
        device.synchronize()
        best = max(best, num_bytes / (time.perf_counter() - call_started))
    return best


def measure(device: Device, dims: tuple[int, ...], batch: int, *, num_bytes: int = 128 << 20) -> Limits:
    """The device's rates; those of a disk come later, from the files of a table on it (`measure_disk`)."""
    limits = Limits()
    on_device = torch.zeros(num_bytes // 4, device=device.torch)
    other = torch.empty_like(on_device)
    limits.memory = best_rate(device, lambda: other.copy_(on_device), 2 * num_bytes)
    if device.is_accelerator:
        host = torch.zeros(num_bytes // 4, pin_memory=device.torch.type in ("cuda", "xpu"))
        limits.up = best_rate(device, lambda: on_device.copy_(host, non_blocking=True), num_bytes)
        limits.down = best_rate(device, lambda: host.copy_(on_device, non_blocking=True), num_bytes)
    limits.compute_s = {dim: compute(device, dim, batch) for dim in dims}
    return limits


def compute(device: Device, dim: int, batch: int, *, rounds: int = 5, steps: int = 10) -> float:
    """Seconds of the model's forward and backward on rows that are there."""
    loss = Loss(device, batch)
    users, products = (torch.full((batch, dim), 0.1, device=device.torch, requires_grad=True) for _ in range(2))

    def step() -> None:
        users.grad = products.grad = None
        loss(users, products).backward()

    times = []
    for _ in range(rounds):
        step()
        device.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        device.synchronize()
        times.append((time.perf_counter() - started) / steps)
    return statistics.median(times)


def measure_disk(limits: Limits, tables: Tables, *, seconds: float = 1.0, num_bytes: int = 256 << 20) -> str:
    """Adds the rates of the disk under the tables; returns a line for people."""
    try:
        files = [file for folder in tables.folders for file in common.segment_files(folder)]
        limits.read_iops = common.random_read_iops(files, seconds=seconds)
        limits.write = common.sequential_write_bandwidth(tables.folders[0].parent, num_bytes=num_bytes)
    except OSError as error:
        return f"disk: not measured: {error}"
    return f"disk: {limits.read_iops:,.0f} random reads a second, {limits.write / 1e9:.3g} GB/s written"
