"""Waiting for an answer for a bounded time, without blaming others for a stall of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final

LATE_S: Final = 0.005
"""A timer that fires so much too late says that the event loop was held up: 5 ms is the most that
any callback may take here."""


class Wait(Enum):
    """How a wait ended."""

    ANSWERED = auto()
    TIMED_OUT = auto()
    HELD_UP = auto()
    """The event loop stood still meanwhile, so the answer may lie in a socket unread."""


async def wait_for_answer(
    call: asyncio.Task[Any], deadline_s: float, clock: Callable[[], float]
) -> Wait:
    """Wait for a call, which goes on in any case, also if the waiting is cancelled.

    If the loop is held up during the wait, the call gets as long again, once: twice in a row is not
    the other side's fault either.

    Args:
        clock: seconds that never go back, and go on while the event loop stands still.
    """
    for _ in range(2):
        begin_s = clock()
        await asyncio.wait({call}, timeout=deadline_s)
        if call.done():
            return Wait.ANSWERED
        if clock() - begin_s < deadline_s + LATE_S:
            return Wait.TIMED_OUT
    return Wait.HELD_UP
