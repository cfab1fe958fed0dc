"""Failover: whether a request that lost its worker resumes on another worker.

A worker may fail because of the request that it ran. Such a *poison* request takes down every
worker that it reaches. A single loss does not distinguish it from a bystander, so three rules
apply:

1. After its first loss, a request resumes on any worker with capacity. It resumes on the lost
   worker only if no other worker remains.
2. A request is a *suspect* if it loses a second worker before it has added a token. Its output is a
   function of seed and positions, so a poison request breaks the next worker at the same position.
   A bystander has probably advanced. A suspect never runs on the last worker, and neither does a
   retry of a suspect that was given up.
3. A request fails after `most_resumes` resumptions, whatever it has produced.

An orderly departure of a worker is not a loss, so a long stream survives any number of restarts. A
poison request takes down at most 1 + `most_resumes` workers, and never the last of three or more.
With two workers it may take down both, because otherwise no bystander could resume after a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from draftgate.policies.values import immutable

MOST_RESUMES: Final = 2
"""Default number of resumptions. Two workers rarely fail in turn during one request, and three
hardly ever do. (Chosen, 2026-11-22.)"""

MOST_PREEMPTIONS: Final = 2
"""Default number of times that a request loses its upstream to one of a higher class, as many as it
may lose to failures."""


class Cause(StrEnum):
    """The way in which a request lost its worker."""

    FAILED = "failed"
    """The worker failed, or cut the stream off."""
    STALLED = "stalled"
    """The worker hung (`liveness`)."""
    PREEMPTED = "preempted"
    """A request of a higher class took its place at an upstream, so the request is not to blame."""
    LEFT = "left"
    """The worker left in order before the request ended, so the request is not to blame."""
    ADAPTER = "adapter"
    """The worker could not load the LoRA adapter, so the request is not to blame."""
    MOVED = "moved"
    """The gateway moved the request from a worker that is leaving (`policies.moves`)."""


class GivenUp(StrEnum):
    """The reason for which a request does not resume."""

    NO_WORKER = "no_worker"
    """No worker remains, or none had capacity in time."""
    LAST_WORKER = "last_worker"
    """The request is a suspect, and only one worker remains."""
    EXHAUSTED = "exhausted"
    """The request has reached its maximum number of resumptions."""
    UNABLE = "unable"
    """Workers of this kind cannot resume a request (`Capabilities.resume`), none can load its
    LoRA adapter, or the rest of an upstream's stream cannot be requested."""
    BUDGET = "budget"
    """The retry budget of upstreams is used up."""


@immutable
class Loss:
    """The loss of a request's worker.

    Attributes:
        new_tokens: number of output tokens that the worker had added, and workers after it that
            left in order.
    """

    worker_id: str
    new_tokens: int


def is_suspect(losses: Sequence[Loss]) -> bool:
    """Return whether a request with these losses, in order, may break workers."""
    return len(losses) > 1 and losses[-1].new_tokens == 0


def spares_worker(workers: int, *, suspect: bool) -> bool:
    """Return whether a request must not run, because it may break the last worker.

    Args:
        workers: number of workers that could run it now.
    """
    return suspect and workers < 2


def given_up(losses: Sequence[Loss], most_resumes: int, workers: int) -> GivenUp | None:
    """Return why a request does not resume, or None if it resumes.

    Args:
        losses: losses of the request in order, including the present loss.
        most_resumes: maximum number of resumptions.
        workers: number of workers that could run it now.
    """
    if len(losses) > most_resumes:
        return GivenUp.EXHAUSTED
    spared = spares_worker(workers, suspect=is_suspect(losses))
    return GivenUp.LAST_WORKER if spared else None
