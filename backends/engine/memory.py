"""Measure the memory that a KV cache may take."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

CPU_SHARE: Final = 0.5
"""Share of available memory that the workers of a process take for KV caches on a CPU. The rest is
for other programs and the page cache. Pages are only touched when they are used."""

_CGROUP: Final = Path("/sys/fs/cgroup")


def measured_kv_bytes(
    device: torch.device, utilization: float, num_workers: int, spare_bytes: int = 0
) -> int:
    """Return the bytes that a KV cache may take once weights and activations are in memory.

    Args:
        device: of the cache.
        utilization: share of a GPU's memory that the worker may take in total.
        num_workers: workers that share a CPU's memory and load at the same time.
        spare_bytes: bytes of a GPU's memory to leave free.
    """
    if device.type != "cuda":
        return int(CPU_SHARE * available_bytes() / num_workers)
    free, total = torch.cuda.mem_get_info(device)
    # The largest step will need the memory again that torch caches now.
    return max(0, int(utilization * total) - (total - free) - spare_bytes)


def taken_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Call `run` on a GPU and return its peak memory in bytes. torch keeps that memory cached."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def available_bytes() -> int:
    """Return the available bytes of main memory, within the limit of the control group."""
    return min(_machine_available(), _group_available())


def _machine_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux: half of the physical memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _group_available() -> int:
    """Return the bytes left within the container's limit; a huge number without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
