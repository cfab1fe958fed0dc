"""Threads for work that would hold the event loop too long, such as parsing and tokenising.

Asyncio's own executor has up to 32 threads. The allocator keeps memory for the thread that frees
it, so each thread would keep the memory of the longest prompt. That is 20 MB for 200,000 characters
(glibc 2.36, 2026-11-21). A few dedicated threads bound the memory. Prompts also do not wait for
name resolution and disk access, which run in asyncio's threads.

The work of a cancelled task, such as that of a client that has left, never starts if it still waits
for a thread. Running work stops where it calls `stop_if_abandoned`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from threading import Event
from typing import Final, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

MOST_THREADS: Final = 4
"""Maximum number of threads. Each tokenises about 2.5 MB per second (AMD EPYC Zen 4, 2026-11-21).
More threads than cores would not help, because the work is computation."""

THREADS: Final = min(MOST_THREADS, os.cpu_count() or 1)

_pool: Final = ThreadPoolExecutor(THREADS, "offload")

_abandoned: Final[ContextVar[Event | None]] = ContextVar("abandoned", default=None)


class Abandoned(Exception):
    """The task that awaited this work was cancelled, so no caller sees this exception."""


async def offload(
    work: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs
) -> Result:
    """Return the result of work in a thread, with the context variables of this task."""
    context, abandoned = copy_context(), Event()
    context.run(_abandoned.set, abandoned)
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_pool, lambda: context.run(work, *arguments, **named))
    except asyncio.CancelledError:
        abandoned.set()
        raise


def stop_if_abandoned() -> None:
    """Raise `Abandoned` in work whose task has been cancelled.

    Call this function between the parts of long work.
    """
    abandoned = _abandoned.get()
    if abandoned is not None and abandoned.is_set():
        raise Abandoned
