"""Tensors on their way between a host and its GPU, without the one waiting for the other.

A copy is asynchronous only from and to pinned memory; torch keeps what it pinned and hands it out
again once the copies that use it are done. On a CPU everything here is a plain copy, or none.
"""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of main memory on a device; enqueued, not waited for."""
    if device.type != "cuda":
        return tensor
    if not tensor.numel():
        return torch.empty_like(tensor, device=device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in main memory. On a GPU it may be read behind a `Mark` that came after."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return host_memory(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)


def host_memory(
    shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return main memory which the device copies from and to by itself; contents undefined."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def new_event(device: torch.device) -> torch.cuda.Event:
    """Return an event of a device's current stream for waiting and timing, not recorded yet."""
    if device.type == "cuda":
        return torch.cuda.Event(enable_timing=True)
    return cast("torch.cuda.Event", _HostEvent())


class _HostEvent:
    """Stands in for a CUDA event on a CPU, whose work is done when the call returns."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: _HostEvent) -> float:
        return 1e3 * (end_event._at_s - self._at_s)
