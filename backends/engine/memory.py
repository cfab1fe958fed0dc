"""Decides how much memory a KV cache takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from draftgate.backends.worker_config import WorkerConfig

CPU_SHARE: Final = 0.5
"""Share of available CPU memory that the workers of a process take for KV caches.

Other programs and the page cache share the rest. A cache occupies a page of memory only after its
first use.
"""

_CGROUP: Final = Path("/sys/fs/cgroup")


def kv_cache_bytes(
    device: torch.device, config: WorkerConfig, weight_bytes: int, step_bytes: int
) -> int:
    """Return the bytes of a KV cache after the weights are loaded.

    Args:
        device: the device of the cache.
        config: the settings of its worker. Without `kv_bytes`, the cache takes free memory. The
            workers of a CPU share it and load at the same time.
        weight_bytes, step_bytes: as in `gpu_kv_bytes`.
    """
    if config.kv_bytes is not None:
        return int(config.memory_share * config.kv_bytes)
    if device.type != "cuda":
        share = CPU_SHARE * config.memory_share / config.num_workers
        return int(share * available_bytes())
    free, total = torch.cuda.mem_get_info(device)
    utilization, share = config.gpu_memory_utilization, config.memory_share
    return gpu_kv_bytes(free, total, utilization, share, weight_bytes, step_bytes)


def gpu_kv_bytes(
    free: int,
    total: int,
    utilization: float,
    memory_share: float,
    weight_bytes: int,
    step_bytes: int,
) -> int:
    """Return the bytes of a GPU that a KV cache may take.

    Args:
        free, total: free bytes and all bytes of the GPU.
        utilization: share of the GPU's memory that its workers may take in total.
        memory_share: the worker's share of that memory.
        weight_bytes: bytes of the worker's weights.
        step_bytes: peak memory of its largest step. CUDA graphs need the same amount again.
    """
    used = total - free
    if memory_share < 1.0:
        # Other models use memory too, or will. Memory that torch caches counts as the worker's,
        # because the largest step will need it again.
        used = weight_bytes + step_bytes
    allowed = int(memory_share * utilization * total) - used - step_bytes
    return max(0, min(allowed, free - step_bytes))


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
