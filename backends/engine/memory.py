"""Measures the memory that a KV cache may take."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

CPU_SHARE: Final = 0.5
"""Share of available CPU memory that the workers of a process take for KV caches.

Other programs and the page cache share the rest. A cache occupies a page of memory only after its
first use.
"""

_CGROUP: Final = Path("/sys/fs/cgroup")


def measured_kv_bytes(
    device: torch.device, utilization: float, num_workers: int, spare_bytes: int = 0
) -> int:
    """Return the bytes that a KV cache may take after the weights are loaded.

    Args:
        device: the device of the cache.
        utilization: share of a GPU's memory that the worker may take in total.
        num_workers: workers that share a CPU's memory and load at the same time.
        spare_bytes: bytes of a GPU's memory to leave free.
    """
    if device.type != "cuda":
        return int(CPU_SHARE * available_bytes() / num_workers)
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch caches now counts as used, because the largest step will need it again.
    return max(0, int(utilization * total) - (total - free) - spare_bytes)


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Call `run` on a GPU and return its peak memory in bytes. torch keeps that memory cached."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def available_bytes() -> int:
    """Return the available bytes of main memory within the limit of the control group."""
    return min(_machine_available(), _group_available())


def _machine_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # systems other than Linux: half of the physical memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _group_available() -> int:
    """Return the free bytes within the container's limit, or 2^62 without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
