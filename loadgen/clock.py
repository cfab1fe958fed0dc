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
    start_s = time.monotonic()
    return lambda: time.monotonic() - start_s
