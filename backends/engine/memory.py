"""Decides how much memory a KV cache takes, and returns unused memory to the system."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import torch

from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.worker_config import WorkerConfig

CPU_SHARE: Final = 0.25
CPU_MOST_BYTES: Final = 2 << 30
"""Largest share of the available memory, and largest size, of the KV caches of a process on a CPU.

The machine also serves other programs. The prefix cache fills a KV cache in time, however few
requests run. Two gigabytes hold 93,000 tokens of SmolLM2-135M or 65,000 of Llama-3.2-1B in
bfloat16, hours of chats at the speed of a CPU. (Chosen by that reasoning, 2026-11-29.)
"""

RELEASE_EVERY_S: Final = 30.0
"""Interval at which a worker returns unused memory, in seconds. (Chosen. It takes at most
milliseconds.)"""

KEEP_PREFIXES_S: Final = 300.0
"""Least time for which a worker on a CPU keeps an unused prefix, in seconds, so that the next
message of a chat finds it. (Chosen: as long as other servers for laptops keep a model.)"""

_CGROUP: Final = Path("/sys/fs/cgroup")


def kv_cache_bytes(
    device: torch.device, config: WorkerConfig, weight_bytes: int, step_bytes: int
) -> int:
    """Return the bytes of a KV cache after the weights are loaded.

    Args:
        device: the device of the cache.
        config: the settings of its worker. Without `kv_bytes`, the cache takes free memory. The
            workers of a CPU load at the same time and share `CPU_SHARE` of it, at most
            `CPU_MOST_BYTES`.
        weight_bytes, step_bytes: as in `gpu_kv_bytes`.
    """
    if config.kv_bytes is not None:
        return int(config.memory_share * config.kv_bytes)
    if device.type != "cuda":
        most = min(CPU_SHARE * available_bytes(), CPU_MOST_BYTES)
        return int(most * config.memory_share / config.num_workers)
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


class UnusedMemory:
    """Returns the memory that a CPU worker no longer uses to the system.

    These are the pages of free KV blocks, prefixes that no request has used for `KEEP_PREFIXES_S`,
    and free memory in the heap. The worker calls `release` between two steps and while it is idle.
    """

    def __init__(
        self, blocks: KvBlocks, pool: KvPool, *, expires: bool, now_s: float | None = None
    ) -> None:
        """Release the memory that loading has used.

        Args:
            blocks, pool: the KV blocks and their memory.
            expires: whether unused prefixes expire.
            now_s: the time on the worker's clock, or None for that of `time.monotonic`.
        """
        now_s = time.monotonic() if now_s is None else now_s
        self._blocks = blocks
        self._pool = pool
        self._expires = expires
        self._expire_at_s = now_s + KEEP_PREFIXES_S
        self._release_at_s = now_s
        self._used = True
        self.release(now_s)

    def note_step(self) -> None:
        """Note that a step has used memory."""
        self._used = True

    def due_in_s(self, now_s: float) -> float | None:
        """Return the seconds until there may be memory to release, or None if there is none."""
        if self._used:
            return max(0.0, self._release_at_s - now_s)
        if self._expires and self._blocks.num_unused:
            return max(0.0, self._expire_at_s - now_s)
        return None

    def release(self, now_s: float) -> None:
        """Return unused memory, if it is due."""
        if self.due_in_s(now_s) != 0.0:
            return
        if self._expires and now_s >= self._expire_at_s:
            self._blocks.expire_unused()
            self._expire_at_s = now_s + KEEP_PREFIXES_S
        self._pool.release(self._blocks.free_runs())
        _trim_heap()
        self._release_at_s = now_s + RELEASE_EVERY_S
        self._used = False


def _trim_heap() -> None:
    """Return the free pages of glibc's heap. Other allocators return them by themselves."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], object] | None:
    trim: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
