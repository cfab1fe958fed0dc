"""The clock of a run: seconds since its start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Returns the seconds since the start of the run. It never goes back."""


def start_clock(start_s: float | None = None) -> Clock:
    """Return a clock that starts now, or at an instant of the monotonic clock.

    Before that instant it is negative. It reads the monotonic clock and not the event loop's, since
    uvloop's does not advance within an iteration. All processes of a machine share the monotonic
    clock (Linux: CLOCK_MONOTONIC, seconds since boot; macOS alike), so their clocks agree.
    """
    origin_s = time.monotonic() if start_s is None else start_s
    return lambda: time.monotonic() - origin_s
