"""What a prompt needs to know after the loss of its worker: why, and whether another one serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from draftgate.backends.errors import (
    AdapterFailed,
    BackendFailed,
    StreamMoved,
    WorkerLeft,
    WorkerStalled,
)
from draftgate.gateway.fleet import Fleet
from draftgate.policies.resilience.failover import Cause

RECOVERY_S: Final = 15.0
"""The longest wait of a prompt while no worker is available, in seconds.

A broken link is reopened within 5 s, and a process restarts a few seconds later. (Chosen, not
tuned, 2026-11-22.)"""

_CHECK_INTERVAL_S: Final = 0.1
"""Interval of checks during that wait, which is too short to notice in a stopped stream."""


async def wait_for(fleet: Fleet, ready: Callable[[], bool]) -> bool:
    """Wait for a condition while workers may join a fleet.

    Returns:
        Whether the condition became true in time.
    """
    for _ in range(round(RECOVERY_S / _CHECK_INTERVAL_S)):
        if ready() or not fleet.may_grow:
            break
        await asyncio.sleep(_CHECK_INTERVAL_S)
    return ready()


def cause_of(error: BackendFailed) -> Cause:
    """Return the cause of a loss."""
    if isinstance(error, StreamMoved):
        return Cause.MOVED
    if isinstance(error, WorkerLeft):
        return Cause.LEFT
    if isinstance(error, AdapterFailed):
        return Cause.ADAPTER
    return Cause.STALLED if isinstance(error, WorkerStalled) else Cause.FAILED
