"""Threads for work that would hold the event loop too long, such as parsing and tokenising.

Asyncio's own executor has up to 32 threads. The allocator keeps memory for the thread that frees
it, so each thread would keep the memory of the longest prompt. That is 20 MB for 200,000 characters
(glibc 2.36, 2026-11-21). A few dedicated threads bound the memory. Prompts also do not wait for
name resolution and disk access, which run in asyncio's threads.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Final, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

MOST_THREADS: Final = 4
"""Maximum number of threads. Each tokenises about 2.5 MB per second (AMD EPYC Zen 4, 2026-11-21).
More threads than cores would not help, because the work is computation."""

THREADS: Final = min(MOST_THREADS, os.cpu_count() or 1)

_pool: Final = ThreadPoolExecutor(THREADS, "offload")


async def offload(
    work: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs
) -> Result:
    """Return the result of work in a thread, with the context variables of this task."""
    run = copy_context().run
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool, lambda: run(work, *arguments, **named))
