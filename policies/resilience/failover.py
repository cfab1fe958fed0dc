"""Whether a request that lost its worker is resumed on another one.

A worker may fail because of what it ran: a *poison* request takes down every worker it reaches. One
loss does not distinguish it from a bystander, so

1. the first loss is taken for the worker's own fault: the request resumes on any worker with
   capacity, and on the lost one only if there is no other;
2. a request that loses a second worker before it has added a token is *suspect*. Output is a
   function of seed and positions, so a poison request breaks the next worker at the same place,
   while a bystander has probably advanced. A suspect never goes to the last worker;
3. after `most_resumes` a request is given up, whatever it has produced.

A worker that leaves in order is not a loss: a long stream outlives any number of restarts. So a
poison request takes at most 1 + `most_resumes` workers, and never the last of three or more. Of
two it may take both: otherwise no bystander could resume once one of them is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MOST_RESUMES: Final = 2
"""Default number of resumptions. Two workers that fail in turn under one request are a rare
accident, three hardly ever. (Chosen, 2026-11-22.)"""


class Cause(StrEnum):
    """How a request lost its worker."""

    FAILED = "failed"
    """The worker failed, or cut the stream off."""
    STALLED = "stalled"
    """The worker made no more progress (`liveness`)."""
    LEFT = "left"
    """The worker left in order before the request ended; says nothing about the request."""


class GivenUp(StrEnum):
    """Why a request is not resumed."""

    NO_WORKER = "no_worker"
    """No worker is left, or none had capacity in time."""
    LAST_WORKER = "last_worker"
    """The request is suspect, and only one worker is left."""
    EXHAUSTED = "exhausted"
    """It was resumed as often as allowed."""
    UNABLE = "unable"
    """Workers of this kind cannot resume a request (`Capabilities.resume`)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that was lost under a request.

    Attributes:
        new_tokens: output tokens that the worker had added.
    """

    worker_id: str
    new_tokens: int


def given_up(losses: Sequence[Loss], most_resumes: int, workers: int) -> GivenUp | None:
    """Return why a request is not resumed, or None if it is.

    Args:
        losses: of this request in order, the present one last.
        most_resumes: how often it may be resumed.
        workers: number of workers that could take it now.
    """
    if len(losses) > most_resumes:
        return GivenUp.EXHAUSTED
    is_suspect = len(losses) > 1 and losses[-1].new_tokens == 0
    return GivenUp.LAST_WORKER if is_suspect and workers < 2 else None
