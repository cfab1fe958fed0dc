"""How much memory the KV cache may take: measured, unless it is stated."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

CPU_SHARE: Final = 0.5
"""Of the memory that is available on a CPU, what the workers of a process take for KV caches: a
machine has other programs and a page cache, too. Pages are only touched once they are used."""

_CGROUP: Final = Path("/sys/fs/cgroup")


def measured_kv_bytes(
    device: torch.device, utilization: float, num_workers: int, spare_bytes: int = 0
) -> int:
    """Return the bytes a KV cache may take now, weights and activations being in memory already.

    Args:
        device: where the cache will lie.
        utilization: share of a GPU's memory which everything together may take.
        num_workers: workers that share a CPU's memory, and load at the same time.
        spare_bytes: of a GPU's memory, what is still to be taken by others.
    """
    if device.type != "cuda":
        return int(CPU_SHARE * available_bytes() / num_workers)
    free, total = torch.cuda.mem_get_info(device)
    # What torch holds but does not use now was needed by the largest step, and will be again.
    return max(0, int(utilization * total) - (total - free) - spare_bytes)


def taken_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Run something on a GPU and return the most memory it had at once; torch keeps hold of it."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def available_bytes() -> int:
    """Return the main memory that may be taken: of the machine, and of the control group."""
    return min(_machine_available(), _group_available())


def _machine_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux: half of what is built in
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _group_available() -> int:
    """Return what the container's limit leaves; without a limit, more than any machine has."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
