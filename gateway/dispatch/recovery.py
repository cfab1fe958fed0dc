"""What prompts need after the loss of a worker: the cause, a record, and whether others serve."""

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
from draftgate.gateway.dispatch.hold import Hold
from draftgate.gateway.dispatch.run import Resume
from draftgate.gateway.fleet import Fleet
from draftgate.policies.resilience.failover import Cause, Loss
from draftgate.policies.values import replace

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


def add_loss(losses: list[Loss], worker_id: str, cause: Cause, new_tokens: int) -> None:
    """Add a loss, or the tokens of a worker that is not to blame to the loss before."""
    if cause not in {Cause.LEFT, Cause.ADAPTER}:
        losses.append(Loss(worker_id, new_tokens))
    elif losses:
        losses[-1] = replace(losses[-1], new_tokens=losses[-1].new_tokens + new_tokens)


def resume_of(index: int, lost: Hold, hold: Hold, error: BackendFailed) -> Resume:
    """Return the continuation of a prompt with a hold, after the loss of another one."""
    numerics = hold.numerics_class
    return Resume(
        index,
        source=lost.worker.worker_id,
        sink=hold.worker.worker_id,
        cause=cause_of(error),
        reason=str(error),
        kept_tokens=sum(len(choice.output_ids) for choice in hold.request.resumed),
        same_numerics_class=numerics is not None and numerics == lost.numerics_class,
    )
