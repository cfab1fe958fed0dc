"""What the launcher says of its workers, one line whenever something changes. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from draftgate.gateway.launch.words import WorkerStatus


class State(StrEnum):
    """Where a worker is in its life."""

    WAITING = "waits for Ray"
    LOADING = "loading"
    READY = "ready, not in the pool"
    JOINED = "joined"
    RESTARTING = "restarting"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"


OVER: Final = frozenset({State.FAILED, State.LOST, State.STOPPED})
"""States that nothing comes after: it never could start, Ray gave it up, it was asked to end."""


def state_of(status: WorkerStatus) -> State:
    """Return what a worker's own words come to."""
    notice = status.notice
    if notice.failure and not status.again:
        return State.FAILED
    if not notice.url:
        return State.LOADING
    return State.JOINED if notice.joined else State.READY


def line_of(name: str, state: State, status: WorkerStatus | None, reason: str = "") -> str:
    """Return the line about a worker.

    Args:
        status: its last words; None if it has not spoken yet.
        reason: why it ended; what it said itself goes before.
    """
    words = [f"{name:12} {state.value:22}"]
    if status is not None:
        reason = status.notice.failure or reason
        words.append(status.notice.url or status.host)
        if status.gpus:
            words.append("GPU " + ",".join(status.gpus))
        if status.again and state not in OVER:
            words.append("(restarted)")
    if reason and state in OVER:
        words.append(f"({reason})")
    return " ".join(words).rstrip()
