"""Whether a request goes on that has lost its worker.

A worker may be lost because of what it ran: a *poison* request takes down each one that it comes
to. One loss does not tell it from a bystander, so

1. one loss is taken for the worker's own fault: the request goes on wherever there is room, and
   only if nobody else is there with the worker that was lost;
2. who loses a second worker before that has added a token is *suspect*. An output is a function of
   seed and positions, so what breaks workers meets the next one at the same place, while a
   bystander has most likely come further. A suspect goes to no worker that is the last one;
3. after `most_resumes` it is given up, whatever it has said in between.

A worker that goes away in order is no loss: a long stream outlives any number of restarts. So a
poison request takes 1 + `most_resumes` workers at most, and never the last of three or more.
Of two it may take both: else no bystander could go on where the second is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MOST_RESUMES: Final = 2
"""Of a request, unless it is set otherwise. Workers that break one after the other under the same
request are an accident once in a while, three hardly ever. (Chosen, 2026-11-22.)"""


class Cause(StrEnum):
    """How a request lost its worker."""

    FAILED = "failed"
    """It broke, or cut the stream off."""
    STALLED = "stalled"
    """It made no progress any more (`policies.resilience.liveness`)."""
    LEFT = "left"
    """It went away in order, before the request had ended. No loss that tells of the request."""


class GivenUp(StrEnum):
    """Why a request does not go on."""

    NO_WORKER = "no_worker"
    """None is left, or none had room in time."""
    LAST_WORKER = "last_worker"
    """It is suspect, and only one is left."""
    EXHAUSTED = "exhausted"
    """It went on as often as it may."""
    UNABLE = "unable"
    """Workers of this kind cannot go on where another one stopped (`Capabilities.resume`)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that was lost under a request.

    Attributes:
        worker_id: which.
        new_tokens: of the output that it had added.
    """

    worker_id: str
    new_tokens: int


def given_up(losses: Sequence[Loss], most_resumes: int, workers: int) -> GivenUp | None:
    """Return why a request does not go on, or None if it does.

    Args:
        losses: of this request, in turn; the last one has just been.
        most_resumes: how often it may go on.
        workers: that could be sent something now.
    """
    if len(losses) > most_resumes:
        return GivenUp.EXHAUSTED
    is_suspect = len(losses) > 1 and losses[-1].new_tokens == 0
    return GivenUp.LAST_WORKER if is_suspect and workers < 2 else None
