"""Clock, memory bandwidth and matrix rate of the measured device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

MOVED_BYTES: Final = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Bytes moved to measure the bandwidth, far more than the caches hold."""

MATRIX_SIDE: Final = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the multiplied matrices, large enough for the maximum rate."""

RUNS: Final = 7
"""Number of runs. The fastest run counts, because other processes only slow a run down."""

HEAD_START_CYCLES: Final = 40_000_000
"""GPU cycles (about 20 ms) for which the GPU waits while the host enqueues work."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The maximum rates of the device, measured in the same run.

    Attributes:
        bytes_per_s: bytes read on a CPU, or bytes read and written by a copy on a GPU.
        flops_per_s: operations of a product of large matrices in the dtype of the model.
    """

    bytes_per_s: float
    flops_per_s: float


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all enqueued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_s(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds between the submission of work to an idle device and its end."""
    synchronize(device)
    started_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started_s


def device_elapsed_s(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds that a GPU takes for work, without host time.

    The GPU waits until the host has enqueued all work, as in a loop that plans ahead. If the work
    itself waits for the GPU, its host time counts.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    torch.cuda._sleep(HEAD_START_CYCLES)  # noqa: SLF001 - no public API
    begin.record()
    work()
    end.record()
    synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that CPU threads read, or that a GPU copy reads and writes."""
    size = MOVED_BYTES[device.type]
    source = torch.ones(size // 4, device=device)
    if device.type == "cpu":
        return size / min(elapsed_s(device, source.sum) for _ in range(RUNS))
    target = torch.empty_like(source)
    copies = [device_elapsed_s(device, lambda: target.copy_(source)) for _ in range(RUNS)]
    return 2 * size / min(copies)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a product of large matrices."""
    side = MATRIX_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    timed = elapsed_s if device.type == "cpu" else device_elapsed_s
    timed(device, lambda: left @ right)
    return 2 * side**3 / min(timed(device, lambda: left @ right) for _ in range(RUNS))


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the bandwidth and the matrix rate of the device."""
    return Rates(bandwidth(device), matrix_rate(device, dtype))


def release(device: torch.device) -> None:
    """Release the memory of unreferenced tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
