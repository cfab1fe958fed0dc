"""Threads for work that would hold the event loop too long: parsing, tokenising, rendering.

Asyncio's own executor has up to 32 threads. The allocator keeps the memory that a thread frees for
that thread, so each thread would end up with the memory of the longest prompt (20 MB for 200,000
characters, glibc 2.36, 2026-11-21). A few threads of their own bound this. Prompts also do not wait
for name lookups and disk access, which run in asyncio's threads.
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
"""At most one thread per core, since the work is computing. Each tokenises some 2.5 MB per second
(AMD EPYC Zen 4, 2026-11-21)."""

THREADS: Final = min(MOST_THREADS, os.cpu_count() or 1)

_pool: Final = ThreadPoolExecutor(THREADS, "offload")


async def offload(
    work: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs
) -> Result:
    """Run work in a thread, with the context variables of this task, and return its result."""
    run = copy_context().run
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool, lambda: run(work, *arguments, **named))
