"""The clock of a run, in seconds since its start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Returns the seconds since the start of the run, which never decrease."""


def start_clock(start_s: float | None = None) -> Clock:
    """Return a clock that starts now, or at a given time of the monotonic clock.

    The clock is negative before its start. It reads the monotonic clock and not the event loop's,
    because uvloop's does not advance within an iteration. All processes of a machine share the
    monotonic clock, so their clocks agree. Linux provides it as CLOCK_MONOTONIC, in seconds since
    boot, and macOS has an equivalent.
    """
    origin_s = time.monotonic() if start_s is None else start_s
    return lambda: time.monotonic() - origin_s
