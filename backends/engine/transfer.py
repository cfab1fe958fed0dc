"""Asynchronous copies between a host and its GPU.

A copy is asynchronous only from and to pinned memory. torch caches pinned memory, and reuses it
after the copies that use it have ended. On a CPU these functions copy synchronously or not at all.
"""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from main memory to a device without waiting."""
    if device.type != "cuda":
        return tensor
    if not tensor.numel():
        return torch.empty_like(tensor, device=device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to main memory.

    The copy from a GPU is asynchronous. Wait for a later event before you read it.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    return host_memory(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)


def host_memory(
    shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate main memory that the device can copy from and to asynchronously."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def new_event(device: torch.device) -> torch.cuda.Event:
    """Return a new event of a device's current stream, for waiting and timing."""
    if device.type == "cuda":
        return torch.cuda.Event(enable_timing=True)
    return cast("torch.cuda.Event", _HostEvent())


class _HostEvent:
    """Replaces a CUDA event on a CPU, which has completed all work when a call returns."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: _HostEvent) -> float:
        return 1e3 * (end_event._at_s - self._at_s)
