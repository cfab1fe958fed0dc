"""The longest callbacks of an asyncio event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

_RUN: Final = "_run"


@dataclass
class LongestTurn:
    """The longest callback so far.

    Attributes:
        seconds: its duration, including pauses of the thread by the system.
        cpu_s: the longest CPU time of a callback.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def longest_turn() -> Iterator[LongestTurn]:
    """Measure the callbacks of asyncio's own event loop while the context lasts.

    uvloop runs the same callbacks, but in C, where they cannot be timed.
    """
    found, run = LongestTurn(), getattr(asyncio.Handle, _RUN)

    def timed(handle: asyncio.Handle) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        run(handle)
        found.cpu_s = max(found.cpu_s, time.thread_time() - began_cpu_s)
        found.seconds = max(found.seconds, time.perf_counter() - began_s)

    setattr(asyncio.Handle, _RUN, timed)
    try:
        yield found
    finally:
        setattr(asyncio.Handle, _RUN, run)
