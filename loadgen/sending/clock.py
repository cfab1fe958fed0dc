"""The clock of a run: seconds since its start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Returns the seconds since the run started; never goes back."""


def start_clock() -> Clock:
    """Return a clock that starts now.

    It reads the monotonic clock, not the event loop's: uvloop's stands still within an iteration.
    """
    return clock_from(time.monotonic())


def clock_from(start_s: float) -> Clock:
    """Return a clock that starts at an instant of the monotonic clock; before it, it is negative.

    All processes of a machine read the same monotonic clock (Linux: CLOCK_MONOTONIC, seconds since
    boot; macOS alike), so their clocks from one instant agree.
    """
    return lambda: time.monotonic() - start_s
